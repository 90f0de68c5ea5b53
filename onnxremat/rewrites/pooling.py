"""Poolings in forms whose kernels agree with their definition, and with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autodiff.context import Context
from ..autodiff.rules_pooling import windows
from ..graph import Expr
from .registry import rewrite


@rewrite("AveragePool", has_rule=True)
def _average_pool(c: Context) -> Expr | None:
    """With ``ceil_mode``, pads that reach to the end of the last window.

    Counted pads end where the node's own pads do, as torch has it; ONNX Runtime 1.19.2 divides the windows that reach further by the
    whole kernel, so they are scaled.
    """
    if not int(c.attr("ceil_mode", 0)):
        return None
    pool = windows(c)
    spatial = len(pool.kernel)
    counted = int(c.attr("count_include_pad", 0))
    end = c.attr("pads", [0] * 2 * spatial)[spatial:]
    reach = [
        (n - 1) * s + d * (k - 1) + 1 - b - size
        for n, s, d, k, b, size in zip(pool.count, pool.strides, pool.dilations, pool.kernel, pool.begin, pool.size, strict=True)
    ]
    if any(n > d * (k - 1) for n, d, k in zip(reach, pool.dilations, pool.kernel, strict=True)):
        raise c.refuse("with ceil_mode its last window lies beyond the input; give explicit pads")
    y = c.op(
        "AveragePool",
        c.x0,
        kernel_shape=pool.kernel,
        strides=pool.strides,
        dilations=pool.dilations,
        pads=[*pool.begin, *(max(0, n) for n in reach)],
        count_include_pad=counted,
    )
    if not counted:
        return y
    scale = np.ones((1, 1))
    for axis in range(spatial):
        scale = scale[..., None] * (pool.kernel[axis] / pool.inside(axis, high=pool.size[axis] + end[axis]))
    return y if (scale == 1).all() else y * c.op.const(scale.astype(y.dtype.numpy()))


@rewrite("MaxPool", has_rule=True)
def _max_pool(c: Context) -> Sequence[Expr | None] | None:
    """Column-major indices (``storage_order=1``) from row-major ones."""
    if not int(c.attr("storage_order", 0)):
        return None
    kept = {key: c.attr(key) for key in ("kernel_shape", "strides", "pads", "dilations", "ceil_mode") if key in c.node.attributes}
    if len(c.node.outputs) < 2 or not (c.node.outputs[1].uses() or c.node.outputs[1].is_graph_output()):
        return [c.op("MaxPool", c.x0, **kept)]
    y, at = c.op.node("MaxPool", c.x0, outputs=2, **kept)
    sizes = c.x0.shape[2:]
    plane = at.op("Div", at, math.prod(sizes))
    rest, result = at - plane * math.prod(sizes), plane * math.prod(sizes)
    for axis in range(len(sizes)):
        inner = math.prod(sizes[axis + 1 :])
        position = at.op("Div", rest, inner) if axis < len(sizes) - 1 else rest
        rest = rest - position * inner
        result = result + position * math.prod(sizes[:axis])
    return [y, result]


@rewrite("GlobalMaxPool")
def _global_max_pool(c: Context) -> Expr:
    """One window over the whole map: the first of equal maxima gets the gradient, as in torch, and its index is all that is kept."""
    if not 3 <= c.x0.rank <= 5:
        raise c.refuse(f"ONNX Runtime pools over 1 to 3 axes, not {c.x0.rank - 2}; use ReduceMax")
    return c.op("MaxPool", c.x0, kernel_shape=list(c.x0.shape[2:]), strides=[1] * (c.x0.rank - 2), pads=[0] * 2 * (c.x0.rank - 2))
