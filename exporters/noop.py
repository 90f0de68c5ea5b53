"""Removal of nodes that change nothing: each rule says when a value may stand in for another."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["STOP_GRADIENT", "constant_of", "remove_noops"]

STOP_GRADIENT = "onnxremat.stop_gradient"
"""metadata_props key of an Identity that no gradient passes."""
_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})


def remove_noops(model: ir.Model, protected: Collection[str]) -> None:
    """Bypasses no-op nodes and merges chains of views and of transposes, in place, until nothing changes.

    Args:
        model: a graph whose values have shapes where known.
        protected: initializers whose values may change from step to step: never taken for constants.
    """
    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            if node.graph is None:
                continue
            if node.op_type == "CastLike":
                _cast_like_to_cast(node)
                continue
            if node.op_type == "Reshape":
                _drop_allowzero(node, protected)
            stand_in = _stand_in(node, protected)
            if stand_in is not None:
                _bypass(node, stand_in)
                changed = True
            elif node.op_type in _VIEWS:
                changed |= _merge_views(model, node)
            elif node.op_type == "Transpose":
                changed |= _merge_transposes(node)


def _bypass(node: ir.Node, stand_in: ir.Value) -> None:
    out = node.outputs[0]
    ir.convenience.replace_all_uses_with(out, stand_in, replace_graph_outputs=True)
    if node.graph is not None:
        node.graph.remove(node, safe=True)


def _stand_in(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    rule = _RULES.get(node.op_type)
    if rule is None or node.domain not in ("", "ai.onnx") or not node.inputs or STOP_GRADIENT in node.metadata_props:
        return None
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        return None
    return rule(node, protected)


def _same_type(a: ir.Value | None, b: ir.Value | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.dtype is not None
        and a.dtype == b.dtype
        and a.shape is not None
        and a.shape.is_static()
        and a.shape == b.shape
    )


def constant_of(value: ir.Value | None, protected: Collection[str]) -> np.ndarray[Any, Any] | None:
    """The value of a constant, or None for what is computed, fed or trained."""
    if value is None or value.name in protected or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def _identity(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    return node.inputs[0]


def _cast(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    source = node.inputs[0]
    return source if source is not None and source.dtype is not None and source.dtype == node.attributes["to"].value else None


def _shape_only(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    """Expand, Reshape, Squeeze and their kin copy values in order: with equal shapes, nothing happens."""
    return node.inputs[0] if _same_type(node.inputs[0], node.outputs[0]) else None


def _slice(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    steps = constant_of(node.inputs[4], protected) if len(node.inputs) > 4 and node.inputs[4] is not None else np.ones(1)
    if steps is None or (steps < 0).any():
        return None
    return _shape_only(node, protected)


def _pad(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    """Equal shapes do not suffice: pads of 1 and -1 shift."""
    pads = constant_of(node.inputs[1], protected) if len(node.inputs) > 1 else None
    return node.inputs[0] if pads is not None and not pads.any() else None


def _transpose(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    perm = node.attributes.get_ints("perm")
    return node.inputs[0] if perm is not None and list(perm) == sorted(perm) else None


def _neutral(element: float, sides: tuple[int, ...]) -> Callable[[ir.Node, Collection[str]], ir.Value | None]:
    """x op c = x for a constant c of one neutral element; ``sides`` are the operand positions that c may take."""

    def rule(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
        for side in sides:
            other = node.inputs[1 - side]
            array = constant_of(node.inputs[side], protected)
            if array is not None and array.size and _same_type(other, node.outputs[0]) and (array == element).all():
                return other
        return None

    return rule


def _where(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    condition = constant_of(node.inputs[0], protected)
    if condition is None or not condition.size or not (condition.all() or not condition.any()):
        return None
    chosen = node.inputs[1] if condition.all() else node.inputs[2]
    return chosen if _same_type(chosen, node.outputs[0]) else None


def _dropout(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    """A Dropout is alive only where training_mode says so (opset 12 and later)."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is not None:
        array = constant_of(mode, protected)
        if array is None or bool(array):
            return None
    return node.inputs[0]


def _pool(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    """A window of one cell, moved by one cell."""
    if any(k != 1 for name in ("kernel_shape", "strides") for k in node.attributes.get_ints(name, (1,))):
        return None
    return _shape_only(node, protected)


def _single(node: ir.Node, protected: Collection[str]) -> ir.Value | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


_RULES: dict[str, Callable[[ir.Node, Collection[str]], ir.Value | None]] = {
    "Identity": _identity,
    "Cast": _cast,
    "Expand": _shape_only,
    "Reshape": _shape_only,
    "Flatten": _shape_only,
    "Squeeze": _shape_only,
    "Unsqueeze": _shape_only,
    "Pad": _pad,
    "Tile": _shape_only,
    "Slice": _slice,
    "Transpose": _transpose,
    "Mul": _neutral(1.0, (0, 1)),
    "Div": _neutral(1.0, (1,)),
    "Add": _neutral(0.0, (0, 1)),
    "Sub": _neutral(0.0, (1,)),
    "Where": _where,
    "Dropout": _dropout,
    "AveragePool": _pool,
    "MaxPool": _pool,
    "Concat": _single,
    "Sum": _single,
    "Max": _single,
    "Min": _single,
}


def _cast_like_to_cast(node: ir.Node) -> None:
    """CastLike keeps a second tensor alive for its dtype alone, and ORT inlines it late."""
    like = node.inputs[1]
    if like is None or like.dtype is None or node.graph is None:
        return
    cast = ir.Node("", "Cast", [node.inputs[0]], [ir.AttrInt64("to", int(like.dtype))], name=node.name)
    _replace(node, cast)


def _drop_allowzero(node: ir.Node, protected: Collection[str]) -> None:
    """Without a zero among the target dimensions the attribute says nothing."""
    target = constant_of(node.inputs[1], protected)
    if target is not None and (target != 0).all():
        node.attributes.pop("allowzero", None)


def _replace(node: ir.Node, new: ir.Node) -> None:
    """Puts ``new`` (one output) in the place of ``node``, keeping the output's name, type and the node's metadata."""
    graph, out = node.graph, node.outputs[0]
    assert graph is not None
    new.metadata_props.update(node.metadata_props)
    name, shape, dtype = out.name, out.shape, out.dtype
    fresh = new.outputs[0]
    fresh.shape = shape
    if dtype is not None:
        fresh.dtype = dtype
    fresh.metadata_props.update(out.metadata_props)
    graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(out, fresh, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    fresh.name = name


def _merge_views(model: ir.Model, node: ir.Node) -> bool:
    """Reshape after Reshape reads from the first one's input; a chain of views becomes one Reshape."""
    source = node.inputs[0]
    inner = source.producer() if source is not None else None
    out = node.outputs[0]
    if inner is None or inner.op_type not in _VIEWS or source is None or out.shape is None or not out.shape.is_static():
        return False
    if len(source.uses()) > 1 or source.is_graph_output():
        return False
    name = f"{out.name}.shape"
    target = model.graph.initializers.get(name)
    if target is None:
        tensor = ir.tensor(np.array(out.shape.numpy(), np.int64), name=name)
        target = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(ir.DataType.INT64), const_value=tensor)
        model.graph.register_initializer(target)
    _replace(node, ir.Node("", "Reshape", [inner.inputs[0], target], name=node.name))
    if inner.graph is not None:
        inner.graph.remove(inner, safe=True)
    return True


def _merge_transposes(node: ir.Node) -> bool:
    source = node.inputs[0]
    inner = source.producer() if source is not None else None
    if inner is None or inner.op_type != "Transpose" or source is None or len(source.uses()) > 1 or source.is_graph_output():
        return False
    if "perm" not in inner.attributes or "perm" not in node.attributes:
        return False
    first, second = inner.attributes["perm"].as_ints(), node.attributes["perm"].as_ints()
    _replace(node, ir.Node("", "Transpose", [inner.inputs[0]], [ir.AttrInt64s("perm", [first[i] for i in second])], name=node.name))
    if inner.graph is not None:
        inner.graph.remove(inner, safe=True)
    return True
