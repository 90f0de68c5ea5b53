"""VJPs of normalizations other than batch and layer normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..graph import Expr
from .context import Context
from .registry import joint_vjp, vjp


def mean(x: Expr, axes: Sequence[int]) -> Expr:
    """The mean over axes, which stay as 1."""
    return x.op("ReduceMean", x, np.asarray(list(axes), np.int64), keepdims=1)


@joint_vjp("InstanceNormalization")
def _instance_normalization(c: Context) -> Sequence[Expr | None]:
    # y = s n + b with n = (x - mean) / sqrt(var + epsilon): dx = s / std (g - mean(g) - n mean(g n)). The kernel keeps no statistics.
    g, x, scale = c.g[0], c.x0, c.x1
    assert g is not None
    spatial = list(range(2, x.rank))
    rest = [0, *spatial]
    dbias = g.sum(rest) if c.wants(2) else None
    if not c.wants(0) and not c.wants(1):
        return [None, None, dbias]
    centred = x - mean(x, spatial)
    inv_std = c.op("Reciprocal", c.op("Sqrt", mean(centred * centred, spatial) + float(c.attr("epsilon", 1e-5))))
    normal = centred * inv_std
    dscale = (g * normal).sum(rest) if c.wants(1) else None
    if not c.wants(0):
        return [None, dscale, dbias]
    factor = inv_std * scale.reshape([1, x.shape[1], *[1] * len(spatial)])
    return [(g - mean(g, spatial) - normal * mean(g * normal, spatial)) * factor, dscale, dbias]


@joint_vjp("SimplifiedLayerNormalization")
def _simplified_layer_normalization(c: Context) -> Sequence[Expr | None]:
    # y = s n with n = x / sqrt(mean(x^2) + epsilon), h = g s: dx = (h - n mean(h n)) / rms (Zhang and Sennrich 2019, RMSNorm).
    g, x, scale = c.g[0], c.x0, c.x1
    if g is None or any(other is not None for other in c.g[1:]):
        raise c.refuse("the loss depends on its deviation; compute it with ReduceMean")
    axis = int(c.attr("axis", -1)) % x.rank
    axes = list(range(axis, x.rank))
    stash = ir.DataType(int(c.attr("stash_type", 1)))
    inv_rms = c.saved(1, [*x.shape[:axis], *[1] * len(axes)], stash, "rmsnorm_inv_rms").cast(x.dtype)
    normal = x * inv_rms
    dscale = (g * normal).sum(range(axis)).reshape(scale.shape) if c.wants(1) else None
    if not c.wants(0):
        return [None, dscale]
    h = g * scale
    return [(h - normal * mean(h * normal, axes)) * inv_rms, dscale]


def _lrn(c: Context, g: Expr) -> Expr:
    # y = x s^-beta, s = bias + alpha / size * sum of x^2 over a window of channels; each x_j is in the windows that contain it.
    x, size = c.x0, int(c.attr("size"))
    alpha, beta, bias = float(c.attr("alpha", 1e-4)), float(c.attr("beta", 0.75)), float(c.attr("bias", 1.0))
    below, above = (size - 1) // 2, size - 1 - (size - 1) // 2
    rows = [x.shape[0], 1, x.shape[1], math.prod(x.shape[2:])]

    def window_mean(value: Expr, before: int, after: int) -> Expr:
        pooled = c.op("AveragePool", value.reshape(rows), kernel_shape=[size, 1], pads=[before, 0, after, 0], strides=[1, 1], count_include_pad=1)
        return pooled.reshape(x.shape)

    s = window_mean(x * x, below, above) * alpha + bias
    power = c.op("Pow", s, -beta)
    return g * power - x * (window_mean(g * x * power / s, above, below) * (2 * alpha * beta))


vjp("LRN", _lrn)


def _lp_normalization(c: Context, g: Expr) -> Expr:
    # y = x / |x|_p: dx = (g - |x|_p' sum(g y)) / |x|_p, where the norm's slope |x|_p' is y for p = 2 and sign(x) for p = 1.
    x, y, axis = c.x0, c.y, np.asarray([int(c.attr("axis", -1)) % c.x0.rank], np.int64)
    first = int(c.attr("p", 2)) == 1
    norm = c.op("ReduceL1" if first else "ReduceL2", x, axis, keepdims=1)
    slope = c.op("Sign", x) if first else y
    # The kernel gives zeros for zeros: nothing flows back there.
    nonzero = c.op("Greater", norm, 0.0).cast(x.dtype)
    safe = norm + (1.0 - nonzero)
    return (g - slope * (g * y).sum(axis.tolist(), keepdims=True)) * (nonzero / safe)


vjp("LpNormalization", _lp_normalization)
