"""VJPs of operators that pick by index."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph import Expr
from ..graph.scatter import add_nd, add_rows
from .context import Context, inverse
from .registry import not_differentiable, vjp


def zeros(c: Context, shape: tuple[int, ...], dtype: ir.DataType) -> Expr:
    return c.op("ConstantOfShape", np.asarray(shape, np.int64), value=ir.tensor(np.zeros(1, dtype.numpy())))


def _gather(c: Context, g: Expr) -> Expr:
    shape, indices = c.x0.shape, c.x1
    axis = int(c.attr("axis", 0)) % len(shape)
    if indices.value.const_value is not None and indices.value.const_value.size == 1:
        start = int(c.const(1).reshape(())) % shape[axis]
        kept = g.reshape([*shape[:axis], 1, *shape[axis + 1 :]])
        pads = [0] * (2 * len(shape))
        pads[axis], pads[len(shape) + axis] = start, shape[axis] - 1 - start
        return c.op("Pad", kept, np.asarray(pads, np.int64), c.op.const(0, g.dtype)) if any(pads) else kept
    # Bring the gathered axis to the front, where whole rows are added.
    picked = g.rank - len(shape) + 1
    order = [*range(axis, axis + picked), *range(axis), *range(axis + picked, g.rank)]
    moved = [axis, *range(axis), *range(axis + 1, len(shape))]
    rows = g.transpose(order)
    target = tuple(shape[a] for a in moved)
    return add_rows(zeros(c, target, g.dtype), indices, rows).transpose(inverse(moved))


def _gather_elements(c: Context, g: Expr) -> Expr:
    return c.op("ScatterElements", zeros(c, c.x0.shape, g.dtype), c.x1, g, axis=int(c.attr("axis", 0)), reduction="add")


def _gather_nd(c: Context, g: Expr) -> Expr:
    if int(c.attr("batch_dims", 0)):
        raise c.refuse("GatherND with batch_dims has no rule yet")
    return add_nd(zeros(c, c.x0.shape, g.dtype), c.x1, g)


vjp("Gather", _gather, None)
vjp("GatherElements", _gather_elements, None)
vjp("GatherND", _gather_nd, None)


def _scatter_elements_data(c: Context, g: Expr) -> Expr:
    if c.attr("reduction", "none") == "add":
        return g
    if c.attr("reduction", "none") != "none":
        raise c.refuse(f"reduction '{c.attr('reduction')}' has no rule yet")
    updates = c.input(2)
    return c.op("ScatterElements", g, c.x1, zeros(c, updates.shape, g.dtype), axis=int(c.attr("axis", 0)))


def _scatter_elements_updates(c: Context, g: Expr) -> Expr:
    return c.op("GatherElements", g, c.x1, axis=int(c.attr("axis", 0)))


vjp("ScatterElements", _scatter_elements_data, None, _scatter_elements_updates)


def _scatter_nd_data(c: Context, g: Expr) -> Expr:
    if c.attr("reduction", "none") == "add":
        return g
    if c.attr("reduction", "none") != "none":
        raise c.refuse(f"reduction '{c.attr('reduction')}' has no rule yet")
    return c.op("ScatterND", g, c.x1, zeros(c, c.input(2).shape, g.dtype))


vjp("ScatterND", _scatter_nd_data, None, lambda c, g: c.op("GatherND", g, c.x1))
vjp("Trilu", lambda c, g: c.op("Trilu", g, *([c.input(1)] if c.has(1) else []), upper=c.attr("upper", 1)), None)
not_differentiable("Unique NonMaxSuppression")
