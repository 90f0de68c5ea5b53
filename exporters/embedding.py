"""What an embedding says and ONNX's Gather cannot: ``padding_idx``, a row that torch never trains, and that indices don't count from the end."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import fx

from .forward_graph import PADDING_INDEX

__all__ = ["looked_up_inputs", "mark_padding_rows", "padding_row"]

#: Operators that move all of the indices and leave them what they are; of parts (columns of a table's own) nothing is said.
_MOVES = ("Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def padding_row(node: fx.Node) -> int | None:
    """The row of an ``aten.embedding`` that gets no gradient from this look-up (non-negative), or None."""
    if node.target is not torch.ops.aten.embedding.default or len(node.args) < 3:
        return None
    row = node.args[2]
    return row if isinstance(row, int) and row >= 0 else None


def mark_padding_rows(model: ir.Model) -> None:
    """Writes the padding row of each embedding into its Gather's metadata, where the gradient's rule reads it."""
    for node in model.graph:
        origin = node.meta.get("node")
        if node.op_type == "Gather" and isinstance(origin, fx.Node) and (row := padding_row(origin)) is not None:
            node.metadata_props[PADDING_INDEX] = str(row)


def looked_up_inputs(model: ir.Model) -> dict[int, int]:
    """Number of an integer graph input -> rows of the smallest table in which an ``aten.embedding`` looks all of it up."""
    numbers = {value: i for i, value in enumerate(model.graph.inputs) if value.dtype is not None and value.dtype.is_integer()}
    found: dict[int, int] = {}
    for node in model.graph:
        origin = node.meta.get("node")
        if node.op_type != "Gather" or not isinstance(origin, fx.Node) or origin.target is not torch.ops.aten.embedding.default:
            continue
        table, indices = node.inputs
        while indices is not None and (moved := indices.producer()) is not None and moved.op_type in _MOVES:
            indices = moved.inputs[0]
        if table is not None and table.shape is not None and indices in numbers:
            rows = int(table.shape.numpy()[0])
            found[numbers[indices]] = min(rows, found.get(numbers[indices], rows))
    return found
