"""ONNX Runtime's fused operators, as its EXTENDED level writes them, taken apart into those of ONNX, whose shapes and gradients are known."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .errors import ExportError

__all__ = ["unfuse"]

_PLAIN = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
_GELUS = {"Gelu": "none", "BiasGelu": "none", "FastGelu": "tanh"}
#: Activation -> its attributes, in the order of ``activation_params``.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {"Relu": (), "Sigmoid": (), "Tanh": (), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}


def unfuse(model: ir.Model) -> None:
    """FusedConv, FusedGemm, Gelu, FastGelu and BiasGelu become ONNX's operators, in place.

    Raises:
        ExportError: for an activation that is not known.
    """
    for node in list(model.graph):
        if node.domain == "com.microsoft" and node.op_type in _GELUS:
            _unfuse_gelu(model, node)
        if node.domain != "com.microsoft" or node.op_type not in _PLAIN:
            continue
        activation = node.attributes.get_string("activation", "")
        values = [attribute.as_float() for name in ("activation_alpha", "activation_beta") if (attribute := node.attributes.get(name))]
        values = list(node.attributes.get_floats("activation_params", values))
        own = {n: a for n, a in node.attributes.items() if not n.startswith("activation")}
        summand = node.inputs[3] if len(node.inputs) > 3 else None
        nodes = [ir.Node("", _PLAIN[node.op_type], node.inputs[:3], list(own.values()), name=node.name)]
        if summand is not None:
            nodes.append(ir.Node("", "Add", [nodes[-1].outputs[0], summand], name=f"{node.name}_sum"))
        if activation == "Clip":
            bounds = [_scalar(model, f"{node.name}_{i}", value) for i, value in enumerate(values)]
            nodes.append(ir.Node("", "Clip", [nodes[-1].outputs[0], *bounds], name=f"{node.name}_clip"))
        elif activation:
            if activation not in _ACTIVATIONS:
                known = ", ".join((*_ACTIVATIONS, "Clip"))
                why = f"its activation {activation} is not one of {known}"
                raise ExportError(f"{node.op_type} {node.name}", why, "give the file before it was optimized")
            attributes = [ir.AttrFloat32(name, value) for name, value in zip(_ACTIVATIONS[activation], values, strict=False)]
            nodes.append(ir.Node("", activation, [nodes[-1].outputs[0]], attributes, name=f"{node.name}_activation"))
        _put(model, node, nodes)


def _unfuse_gelu(model: ir.Model, node: ir.Node) -> None:
    """An Add of the bias where there is one, and ONNX's Gelu, exact or by tanh."""
    source, bias = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    nodes = [] if bias is None else [ir.Node("", "Add", [source, bias], name=f"{node.name}_bias")]
    biased = nodes[-1].outputs[0] if nodes else source
    nodes.append(ir.Node("", "Gelu", [biased], [ir.AttrString("approximate", _GELUS[node.op_type])], name=str(node.name)))
    _put(model, node, nodes)


def _put(model: ir.Model, node: ir.Node, nodes: list[ir.Node]) -> None:
    """Puts nodes in the place of one; the last one's output takes over its name and readers."""
    model.graph.insert_before(node, nodes)
    out, new = node.outputs[0], nodes[-1].outputs[0]
    name, new.type = out.name, out.type
    ir.convenience.replace_all_uses_with(out, new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    new.name = name


def _scalar(model: ir.Model, name: str, value: float) -> ir.Value:
    tensor = ir.tensor(np.array(value, np.float32), name=name)
    found = ir.Value(name=name, shape=ir.Shape(()), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(found)
    return found
