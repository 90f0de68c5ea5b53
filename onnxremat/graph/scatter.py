"""Combining rows at indices that may repeat.

ONNX Runtime 1.19.2 runs ``ScatterND`` with a reduction on several threads without care for repeated indices and loses updates;
``com.microsoft.GatherGrad`` adds in an order that changes from run to run.  ``ScatterElements`` is exact and repeatable, so everything is done by it.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .builder import Expr


def scatter_rows(data: Expr, indices: Expr, rows: Expr, reduction: str) -> Expr:
    """``data`` of shape (V, ...) with ``rows`` of shape (*I, ...) combined at ``indices`` of shape I; negative indices count from the end."""
    count, width = math.prod(indices.shape), math.prod(data.shape[1:])
    spread = indices.cast(ir.DataType.INT64).reshape([count, 1]).expand([count, width])
    made = data.op("ScatterElements", data.reshape([data.shape[0], width]), spread, rows.reshape([count, width]), axis=0, reduction=reduction)
    return made.reshape(data.shape)


def add_rows(data: Expr, indices: Expr, rows: Expr) -> Expr:
    """``data`` of shape (V, ...) with ``rows`` of shape (*I, ...) added at ``indices`` of shape I; negative indices count from the end."""
    return scatter_rows(data, indices, rows, "add")


def scatter_nd(data: Expr, indices: Expr, updates: Expr, reduction: str, batch_dims: int = 0) -> Expr:
    """``data`` with ``updates`` combined where the last axis of ``indices`` points, as ScatterND has it.

    With ``batch_dims`` b, the first b axes of all three go together, as GatherND has it.
    """
    depth = indices.shape[-1]
    batch, lead, rest = data.shape[:batch_dims], data.shape[batch_dims : batch_dims + depth], data.shape[batch_dims + depth :]
    strides = np.asarray([math.prod(lead[i + 1 :]) for i in range(depth)], np.int64)
    # ONNX's integer Mod has the sign of the divisor, which makes negative indices positive.
    positive = data.op("Mod", indices.cast(ir.DataType.INT64), np.asarray(lead, np.int64))
    linear = (positive * data.op.const(strides)).sum([indices.rank - 1])
    if batch:
        first = np.arange(math.prod(batch), dtype=np.int64) * math.prod(lead)
        linear = linear + data.op.const(first.reshape([*batch, *[1] * (linear.rank - batch_dims)]))
    flat = data.reshape([math.prod(batch) * math.prod(lead), *rest])
    return scatter_rows(flat, linear, updates, reduction).reshape(data.shape)


def add_nd(data: Expr, indices: Expr, updates: Expr, batch_dims: int = 0) -> Expr:
    """``data`` with ``updates`` added where the last axis of ``indices`` points; see ``scatter_nd``."""
    return scatter_nd(data, indices, updates, "add", batch_dims)
