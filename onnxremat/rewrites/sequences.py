"""Sequences whose length and positions are known: their readers take the tensors themselves."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..autodiff.context import Context
from ..autodiff.registry import refused
from ..graph import Expr
from .registry import rewrite

_SPLIT_OF = "onnxremat.split_of"

refused(
    "SequenceConstruct SequenceInsert SequenceErase SplitToSequence",
    "its sequence is read in a way that depends on data; use tensors, stacked or split",
)


@rewrite("SequenceAt")
def _sequence_at(c: Context) -> Expr:
    elements = _elements(c, c.node.inputs[0])
    position = int(c.const(1).reshape(()))
    if not -len(elements) <= position < len(elements):
        raise c.refuse(f"it takes element {position} of a sequence of {len(elements)}")
    return elements[position]


@rewrite("SequenceLength", has_rule=True)
def _sequence_length(c: Context) -> Expr:
    return c.op.const(len(_elements(c, c.node.inputs[0])), ir.DataType.INT64)


@rewrite("ConcatFromSequence")
def _concat_from_sequence(c: Context) -> Expr:
    elements, axis = _elements(c, c.node.inputs[0]), int(c.attr("axis"))
    if not elements:
        raise c.refuse("its sequence is empty")
    if int(c.attr("new_axis", 0)):
        elements = [c.op("Unsqueeze", e, np.asarray([axis % (e.rank + 1)], np.int64)) for e in elements]
    return c.op("Concat", *elements, axis=axis)


def _elements(c: Context, value: ir.Value | None) -> list[Expr]:
    """The tensors of a sequence, by the operators that made it."""
    node = value.producer() if value is not None else None
    if node is None or node.domain not in ("", "ai.onnx"):
        raise c.refuse("its sequence comes from outside of the graph; pass tensors")
    if node.op_type == "SequenceEmpty":
        return []
    if node.op_type == "Identity":
        return _elements(c, node.inputs[0])
    if node.op_type == "SequenceConstruct":
        return [c.op.wrap(v) for v in node.inputs if v is not None]
    if node.op_type == "SplitToSequence":
        return _split(c, node)
    if node.op_type in ("SequenceInsert", "SequenceErase"):
        elements = _elements(c, node.inputs[0])
        index = 2 if node.op_type == "SequenceInsert" else 1
        given = node.inputs[index] if len(node.inputs) > index else None
        if node.op_type == "SequenceInsert":
            tensor = node.inputs[1]
            assert tensor is not None
            position = len(elements) if given is None else _position(c, given, len(elements))
            return [*elements[:position], c.op.wrap(tensor), *elements[position:]]
        position = len(elements) - 1 if given is None else _position(c, given, len(elements))
        return [*elements[:position], *elements[position + 1 :]]
    raise c.refuse(f"its sequence is made by {node.op_type}, whose elements are not known")


def _position(c: Context, value: ir.Value, length: int) -> int:
    if value.const_value is None:
        raise c.refuse(f"the position '{value.name}' in its sequence is not a constant")
    position = int(value.const_value.numpy().reshape(()))
    return position + length if position < 0 else position


def _split(c: Context, node: ir.Node) -> list[Expr]:
    """The parts of a SplitToSequence, by one Split that all readers of the sequence share."""
    source = node.inputs[0]
    assert source is not None and node.name
    x = c.op.wrap(source)
    axis = (node.attributes["axis"].as_int() if "axis" in node.attributes else 0) % x.rank
    sizes, dropped = _sizes(c, node, x.shape[axis], axis)
    shared = next((use.node for use in source.uses() if use.node.metadata_props.get(_SPLIT_OF) == node.name), None)
    if shared is None:
        before, c.op.before = c.op.before, node
        c.op.metadata = {**node.metadata_props, _SPLIT_OF: node.name}
        names = [c.op.fresh(f"{node.name}_part") for _ in sizes]
        made = c.op.node("Split", x, np.asarray(sizes, np.int64), axis=axis, outputs=names)
        shared = made[0].value.producer()
        c.op.before, c.op.metadata = before, dict(c.node.metadata_props)
        assert shared is not None
    parts = [c.op.wrap(v) for v in shared.outputs]
    return [c.op("Squeeze", part, np.asarray([axis], np.int64)) for part in parts] if dropped else parts


def _sizes(c: Context, node: ir.Node, length: int, axis: int) -> tuple[list[int], bool]:
    """The sizes of the parts along the axis, and whether it is dropped."""
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None:
        keep = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
        return [1] * length, not keep
    if given.const_value is None:
        raise c.refuse(f"the sizes '{given.name}' of the parts of its sequence are not constants")
    numbers = given.const_value.numpy()
    if numbers.ndim:
        return [int(n) for n in numbers], False
    size = int(numbers)
    return [min(size, length - start) for start in range(0, length, size)], False
