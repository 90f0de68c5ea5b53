"""Adding rows at indices that may repeat.

ONNX Runtime 1.19.2 runs ``ScatterND(reduction="add")`` on several threads without care for repeated indices and loses updates;
``com.microsoft.GatherGrad`` adds in an order that changes from run to run.  ``ScatterElements`` is exact and repeatable, so everything is done by it.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .builder import Expr


def add_rows(data: Expr, indices: Expr, rows: Expr) -> Expr:
    """``data`` of shape (V, ...) with ``rows`` of shape (*I, ...) added at ``indices`` of shape I; negative indices count from the end."""
    count, width = math.prod(indices.shape), math.prod(data.shape[1:])
    spread = indices.cast(ir.DataType.INT64).reshape([count, 1]).expand([count, width])
    added = data.op(
        "ScatterElements", data.reshape([data.shape[0], width]), spread, rows.reshape([count, width]), axis=0, reduction="add"
    )
    return added.reshape(data.shape)


def add_nd(data: Expr, indices: Expr, updates: Expr) -> Expr:
    """``data`` with ``updates`` added where the last axis of ``indices`` points, as ScatterND has it."""
    depth = indices.shape[-1]
    lead, rest = data.shape[:depth], data.shape[depth:]
    strides = np.asarray([math.prod(lead[i + 1 :]) for i in range(depth)], np.int64)
    # ONNX's integer Mod has the sign of the divisor, which makes negative indices positive.
    positive = data.op("Mod", indices.cast(ir.DataType.INT64), np.asarray(lead, np.int64))
    linear = (positive * data.op.const(strides)).sum([indices.rank - 1])
    flat = data.reshape([math.prod(lead), *rest])
    return add_rows(flat, linear, updates).reshape(data.shape)
