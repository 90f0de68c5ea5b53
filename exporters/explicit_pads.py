"""``auto_pad`` becomes explicit ``pads``: ORT's ConvGrad ignores auto_pad, silently."""

from __future__ import annotations

import onnx_ir as ir

from .errors import ExportError

__all__ = ["make_pads_explicit"]

_PADDED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})


def make_pads_explicit(model: ir.Model) -> None:
    """Rewrites ``auto_pad`` of convolutions and pools from static shapes, in place, and gives every one a ``pads`` attribute.

    Raises:
        ExportError: for a ConvTranspose with ``auto_pad=SAME_*``, or where shapes are unknown.
    """
    for node in model.graph:
        if node.op_type not in _PADDED or node.domain not in ("", "ai.onnx"):
            continue
        mode = node.attributes.get_string("auto_pad", "NOTSET")
        node.attributes.pop("auto_pad", None)
        if mode == "NOTSET" and "pads" in node.attributes:
            continue
        same = mode in ("SAME_UPPER", "SAME_LOWER")
        pads = _same(node, upper=mode == "SAME_UPPER") if same else [0] * (2 * _spatial(node))
        node.attributes["pads"] = ir.AttrInt64s("pads", pads)


def _shape(node: ir.Node, value: ir.Value | None) -> list[int]:
    if value is None or value.shape is None or not value.shape.is_static():
        raise ExportError(f"{node.op_type} {node.name}", "its padding needs static shapes", "give static input shapes")
    return [int(d) for d in value.shape.numpy()]


def _spatial(node: ir.Node) -> int:
    return len(_shape(node, node.inputs[0])) - 2


def _same(node: ir.Node, upper: bool) -> list[int]:
    """SAME: output = ceil(input / stride); the odd cell goes to the end (upper) or the beginning."""
    if node.op_type == "ConvTranspose":
        raise ExportError(f"ConvTranspose {node.name}", "auto_pad=SAME has no unique explicit form", "export it with explicit pads")
    image = _shape(node, node.inputs[0])[2:]
    kernel = node.attributes.get_ints("kernel_shape") or _shape(node, node.inputs[1])[2:]
    strides = node.attributes.get_ints("strides") or [1] * len(image)
    dilations = node.attributes.get_ints("dilations") or [1] * len(image)
    begin, end = [], []
    for size, k, stride, dilation in zip(image, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + dilation * (k - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if upper else large)
        end.append(large if upper else small)
    return begin + end
