"""GroupNormalization in operators that every opset has alike."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from .errors import ExportError
from .places import place_of

__all__ = ["write_out_group_normalizations"]


def write_out_group_normalizations(model: ir.Model, per_channel: bool) -> None:
    """Every node becomes an InstanceNormalization of its groups, in place.

    Scale and bias are one per group up to opset 20, where ONNX calls the operator deprecated, and one per channel (``per_channel``) since 21.

    Raises:
        ExportError: where the rank of a normalized tensor is unknown.
    """
    for node in list(model.graph):
        if node.op_type != "GroupNormalization" or node.domain not in ("", "ai.onnx"):
            continue
        x, scale, bias = node.inputs
        if x is None or x.shape is None:
            raise ExportError(f"GroupNormalization {node.name}{place_of(node)}", "the rank of its input is unknown", "export it with static shapes")
        op = tape.Tape()
        groups, rank = node.attributes["num_groups"].as_int(), len(x.shape)

        def constant(array: np.ndarray[tuple[int], np.dtype[np.generic]], op: tape.Tape = op) -> ir.Value:
            return op.op("Constant", [], {"value": ir.tensor(array)})

        dtype = x.dtype.numpy() if x.dtype is not None else np.dtype(np.float32)
        grouped = op.op("Reshape", [x, constant(np.array([0, groups, -1]))])
        epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        affine = [constant(np.ones(groups, dtype)), constant(np.zeros(groups, dtype))] if per_channel else [scale, bias]
        result = op.op("Reshape", [op.op("InstanceNormalization", [grouped, *affine], epsilon), op.op("Shape", [x])])
        if per_channel:
            channels = constant(np.array([-1] + [1] * (rank - 2)))
            result = op.op("Mul", [result, op.op("Reshape", [scale, channels])])
            result = op.op("Add", [result, op.op("Reshape", [bias, channels])])
        for i, made in enumerate(op.nodes):
            made.name = f"{node.name or node.outputs[0].name}.{i}"
            for value in made.outputs:
                value.name = f"{made.name}_output"
        model.graph.insert_before(node, op.nodes)
        out, name = node.outputs[0], node.outputs[0].name
        result.type, result.shape = out.type, out.shape
        ir.convenience.replace_all_uses_with(out, result, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        result.name = name
