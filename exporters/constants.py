"""Constants of an exported graph: one initializer per distinct value."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from .noop import constant_of

__all__ = ["fold_gather_elements", "narrow_constants", "separate_statistics", "share_constants"]


def share_constants(model: ir.Model, protected: Collection[str]) -> None:
    """Merges equal constants, in place: a causal mask per layer would be resident once per layer.

    Parameters, buffers and state (``protected``) are left alone, equal or not, and so are running statistics of a BatchNormalization,
    which a kernel may overwrite (onnxruntime#29790).
    """
    first: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if constant_of(value, protected) is None or value.const_value is None or value.is_graph_output():
            continue
        if any(user.op_type == "BatchNormalization" for user, _ in value.uses()):
            continue
        tensor = value.const_value
        key = (tensor.dtype, tuple(int(d) for d in tensor.shape.numpy()), tensor.tobytes())
        kept = first.setdefault(key, value)
        if kept is not value:
            ir.convenience.replace_all_uses_with(value, kept)
            del graph.initializers[name]


def separate_statistics(model: ir.Model) -> None:
    """Gives every training BatchNormalization that is fed constant statistics constants of its own, in place: a kernel writes over them."""
    graph = model.graph
    for node in graph:
        if node.op_type != "BatchNormalization" or not node.attributes.get_int("training_mode", 0):
            continue
        for position in (3, 4):
            value = node.inputs[position]
            if value is None or value.const_value is None or len(value.uses()) < 2:
                continue
            name = f"{node.name}.scratch_{'mean' if position == 3 else 'var'}"
            tensor = ir.tensor(value.const_value.numpy().copy(), name=name)
            own = ir.Value(name=name, shape=value.shape, type=value.type, const_value=tensor)
            graph.register_initializer(own)
            node.replace_input_with(position, own)


def fold_gather_elements(model: ir.Model, protected: Collection[str]) -> None:
    """GatherElements of constants becomes a constant, in place: onnx's reference evaluator fails on it beyond 32 rows."""
    for node in list(model.graph):
        if node.op_type != "GatherElements" or node.outputs[0].is_graph_output():
            continue
        data, indices = (constant_of(value, protected) for value in node.inputs)
        if data is None or indices is None:
            continue
        name = str(node.outputs[0].name)
        axis = node.attributes.get_int("axis", 0)
        tensor = ir.tensor(np.take_along_axis(data, np.where(indices < 0, indices + data.shape[axis], indices), axis), name=name)
        ir.convenience.replace_all_uses_with(node.outputs[0], constant := ir.Value(name=name, const_value=tensor))
        constant.shape, constant.type = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        model.graph.remove(node, safe=True)
        model.graph.register_initializer(constant)


def narrow_constants(model: ir.Model, protected: Collection[str]) -> None:
    """Shrinks axes along which a constant repeats to 1 where the other operand restores them by broadcasting, in place.

    A mask that an exporter expanded over the batch is resident once per sample otherwise.
    """
    for node in model.graph:
        if node.op_type not in ("Add", "Sub", "Mul", "Div"):
            continue
        for position, value in enumerate(node.inputs):
            other, array = node.inputs[1 - position], constant_of(value, protected)
            if array is None or array.size < 2 or other is None or other.shape is None or not other.shape.is_static():
                continue
            full, small = tuple(other.shape.numpy()), array
            for axis in range(array.ndim):
                offset = len(full) - array.ndim + axis
                restored = offset >= 0 and full[offset] == array.shape[axis]
                first = small.take([0], axis)
                if array.shape[axis] > 1 and restored and (small == first).all():
                    small = first
            if small.size == array.size:
                continue
            name = f"{node.name}.narrow_{position}"
            tensor = ir.tensor(np.ascontiguousarray(small), name=name)
            own = ir.Value(name=name, shape=ir.Shape(small.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
            model.graph.register_initializer(own)
            node.replace_input_with(position, own)
