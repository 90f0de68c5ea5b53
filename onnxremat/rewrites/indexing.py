"""Operators that pick, place or crop by numbers that are constants."""

from __future__ import annotations

import numpy as np

from ..autodiff.context import Context
from ..graph import Expr
from ..graph.scatter import scatter_nd
from .registry import rewrite


@rewrite("Compress")
def _compress(c: Context) -> Expr:
    """What a constant condition picks is a Gather."""
    if c.x1.value.const_value is None:
        raise c.refuse("its condition is not a constant, so the shape of its output depends on data; multiply by the condition instead")
    flat = "axis" not in c.node.attributes
    x = c.x0.reshape([-1]) if flat else c.x0
    return c.op("Gather", x, np.flatnonzero(c.const(1)).astype(np.int64), axis=0 if flat else int(c.attr("axis")))


@rewrite("ScatterND", has_rule=True)
def _scatter_nd(c: Context) -> Expr | None:
    """ScatterND that combines values loses some at repeated indices (see ``onnxremat.graph.scatter``)."""
    reduction = c.attr("reduction", "none")
    return None if reduction == "none" else scatter_nd(c.x0, c.x1, c.input(2), reduction)


@rewrite("CenterCropPad")
def _center_crop_pad(c: Context) -> Expr:
    """Crops what is too long and pads with zeros what is too short, the odd entry at the end."""
    x = c.x0
    axes = [int(a) % x.rank for a in c.attr("axes", list(range(x.rank)))]
    starts, ends = [0] * x.rank, list(x.shape)
    begin, after = [0] * x.rank, [0] * x.rank
    for axis, wanted in zip(axes, c.const(1).tolist(), strict=True):
        missing = wanted - x.shape[axis]
        if missing < 0:
            starts[axis] = -missing // 2
            ends[axis] = starts[axis] + wanted
        else:
            begin[axis], after[axis] = missing // 2, missing - missing // 2
    if starts != [0] * x.rank or tuple(ends) != x.shape:
        x = x.slice(starts, ends, list(range(x.rank)))
    if any(begin) or any(after):
        x = c.op("Pad", x, np.asarray([*begin, *after], np.int64), c.op.const(0, x.dtype))
    return x
