"""detach in ONNX: an Identity that is marked, and hidden from every pass that would take it for a no-op."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import torch

from .noop import STOP_GRADIENT

__all__ = ["remove_idle_detaches", "shield_detaches", "unshield_detaches"]

_DOMAIN = "onnxremat.marker"
_DETACHES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default, torch.ops.aten.detach_copy.default})


def shield_detaches(model: ir.Model) -> None:
    """Marks the Identity of every aten.detach and moves it to a domain that no folding knows."""
    for node in model.graph:
        origin = node.meta.get("node")
        if node.op_type == "Identity" and origin is not None and origin.target in _DETACHES:
            node.metadata_props[STOP_GRADIENT] = "1"
            node.domain = _DOMAIN
            model.graph.opset_imports[_DOMAIN] = 1


def unshield_detaches(model: ir.Model) -> None:
    """Back to plain Identity nodes, still marked."""
    for node in model.graph:
        if node.domain == _DOMAIN:
            node.domain = ""
    model.graph.opset_imports.pop(_DOMAIN, None)


def remove_idle_detaches(model: ir.Model, trainable: Collection[str]) -> None:
    """Bypasses marked Identities that no gradient could reach anyway: nothing trainable is behind them."""
    live: set[ir.Value] = {value for name, value in model.graph.initializers.items() if name in trainable}
    for node in list(model.graph):
        reached = any(value in live for value in node.inputs if value is not None)
        if STOP_GRADIENT in node.metadata_props:
            if not reached and node.inputs[0] is not None:
                ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0], replace_graph_outputs=True)
                model.graph.remove(node, safe=True)
        elif reached:
            live.update(value for value in node.outputs if value.dtype is None or value.dtype.is_floating_point())
