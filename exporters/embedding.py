"""``padding_idx`` of an embedding: a row of the table that torch never trains, which ONNX's Gather cannot say."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import fx

from .forward_graph import PADDING_INDEX

__all__ = ["mark_padding_rows", "padding_row"]


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
