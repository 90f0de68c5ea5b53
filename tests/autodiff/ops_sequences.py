"""Rows of sequences whose length and positions are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxremat.graph import Expr, GraphBuilder
from tests.autodiff.support import Row, normal


def add_sequence(op: GraphBuilder, op_type: str, *operands: Any, **attributes: Any) -> ir.Value:
    """A node whose output is a sequence of floats."""
    values = [o.value if isinstance(o, Expr) else op.const(o).value if isinstance(o, np.ndarray) else o for o in operands]
    node = ir.Node("", op_type, values, ir.convenience.convert_attributes(attributes), num_outputs=1, name=op.fresh(op_type))
    (output,) = node.outputs
    output.name = op.fresh("sequence")
    first = operands[0] if operands else None
    if isinstance(first, ir.Value):
        output.type = first.type
    else:
        dtype = first.dtype if isinstance(first, Expr) else ir.DataType(attributes["dtype"])
        output.type = ir.SequenceType(ir.TensorType(dtype))
    op.graph.append(node)
    return output


def _at(op: GraphBuilder, sequence: ir.Value, position: int, shape: Sequence[int], dtype: ir.DataType) -> Expr:
    return op.node("SequenceAt", sequence, np.asarray(position), like=[(shape, dtype)])[0]


def _joined(op: GraphBuilder, sequence: ir.Value, shape: Sequence[int], dtype: ir.DataType, **attributes: Any) -> Expr:
    return op.node("ConcatFromSequence", sequence, like=[(shape, dtype)], **attributes)[0]


def _split_in_two(op: GraphBuilder, x: Sequence[Any]) -> list[Expr]:
    parts = add_sequence(op, "SplitToSequence", x[0], np.asarray([2, 3]), axis=1)
    return [_at(op, parts, 1, (2, 3), x[0].dtype), _at(op, parts, -2, (2, 2), x[0].dtype)]


def _split_evenly(op: GraphBuilder, x: Sequence[Any]) -> list[Expr]:
    parts = add_sequence(op, "SplitToSequence", x[0], np.asarray(2), axis=-1)
    return [_at(op, parts, 2, (2, 1), x[0].dtype), _at(op, parts, 0, (2, 2), x[0].dtype)]


def _unstack(op: GraphBuilder, x: Sequence[Any]) -> list[Expr]:
    parts = add_sequence(op, "SplitToSequence", x[0], axis=0, keepdims=0)
    return [_at(op, parts, 1, (3,), x[0].dtype), _joined(op, parts, (3, 2), x[0].dtype, axis=1, new_axis=1)]


def _edited(op: GraphBuilder, x: Sequence[Any]) -> list[Expr]:
    first = add_sequence(op, "SequenceConstruct", x[0], x[1])
    second = add_sequence(op, "SequenceInsert", first, x[2], np.asarray(-1))
    third = add_sequence(op, "SequenceErase", add_sequence(op, "SequenceInsert", second, x[0]), np.asarray(0))
    return [_joined(op, third, (3, 3), x[0].dtype, axis=0)]


def _appended(op: GraphBuilder, x: Sequence[Any]) -> list[Expr]:
    sequence = add_sequence(op, "SequenceEmpty", dtype=int(x[0].dtype))
    for value in (*x, x[0]):
        sequence = add_sequence(op, "SequenceInsert", sequence, value)
    length = op.node("SequenceLength", sequence, like=[((), ir.DataType.INT64)])[0]
    return [_joined(op, add_sequence(op, "SequenceErase", sequence), (2, 3), x[0].dtype, axis=-2) * length.cast(x[0].dtype)]


ROWS = [
    Row("SequenceAt", [normal(2, 5)], lambda x: [x[:, 2:], x[:, :2]], note="of a split", build=_split_in_two, normalized=True),
    Row("SequenceAt", [normal(2, 5)], lambda x: [x[:, 4:], x[:, :2]], note="of an even split", build=_split_evenly, normalized=True),
    Row("SplitToSequence", [normal(2, 3)], lambda x: [x[1], x.T], note="of rows", build=_unstack, normalized=True),
    Row(
        "SequenceConstruct",
        [normal(1, 3), normal(1, 3), normal(1, 3)],
        lambda a, b, c: torch.cat([c, b, a]),
        note="edited",
        build=_edited,
        normalized=True,
    ),
    Row("SequenceInsert", [normal(1, 3), normal(1, 3)], lambda a, b: torch.cat([a, b]) * 3, note="grown", build=_appended, normalized=True),
]
