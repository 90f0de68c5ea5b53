"""VJPs of normalization and dropout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..graph import Expr
from ..ops import MS
from .context import Context
from .registry import joint_vjp
from .rules_conv import channel_sum


@joint_vjp("BatchNormalization")
def _batch_normalization(c: Context) -> Sequence[Expr | None]:
    g, x, scale = c.g[0], c.x0, c.x1
    if g is None:
        raise c.refuse("a gradient flows into its running statistics only")
    channel = (1, x.shape[1]) + (1,) * (x.rank - 2)
    if not int(c.attr("training_mode", 0)):
        factor = c.op("Pow", c.input(4) + float(c.attr("epsilon", 1e-5)), -0.5)
        dx = g * (scale * factor).reshape(channel) if c.wants(0) else None
        dscale = channel_sum(g * (x - c.input(3).reshape(channel))) * factor if c.wants(1) else None
        if c.wants(3) or c.wants(4):
            raise c.refuse("its running statistics are to be trained; freeze them")
        return [dx, dscale, channel_sum(g) if c.wants(2) else None]
    raise c.refuse("its training form should have been normalized to BatchNormInternal before")


@joint_vjp("BatchNormInternal", domain=MS)
def _batch_norm_internal(c: Context) -> Sequence[Expr | None]:
    if any(g is not None for g in c.g[1:]):
        raise c.refuse("the loss depends on its running statistics; use the normalized output instead")
    g, x, scale = c.g[0], c.x0, c.x1
    saved_mean, saved_inv_std = (c.op.wrap(v) for v in c.node.outputs[3:5])
    return c.op.node(
        "BatchNormalizationGrad",
        *(g, x, scale, saved_mean, saved_inv_std),
        domain=MS,
        outputs=3,
        like=[x, scale, scale],
        epsilon=float(c.attr("epsilon", 1e-5)),
    )


@joint_vjp("LayerNormalization")
def _layer_normalization(c: Context) -> Sequence[Expr | None]:
    # com.microsoft.LayerNormalizationGrad would need four times its input as workspace.
    g, x, scale = c.g[0], c.x0, c.x1
    if g is None or any(other is not None for other in c.g[1:]):
        raise c.refuse("the loss depends on its mean or deviation; compute them with ReduceMean")
    axis = int(c.attr("axis", -1)) % x.rank
    axes = list(range(axis, x.rank))
    dbias = g.sum(range(axis)).reshape(c.input(2).shape) if c.wants(2) else None
    if not c.wants(0) and not c.wants(1):
        return [None, None, dbias]
    statistics = [*x.shape[:axis], *[1] * len(axes)]
    stash = ir.DataType(int(c.attr("stash_type", 1)))
    mean = c.saved(1, statistics, stash, "layernorm_mean").cast(x.dtype)
    inv_std = c.saved(2, statistics, stash, "layernorm_inv_std").cast(x.dtype)
    normal = (x - mean) * inv_std
    dscale = (g * normal).sum(range(axis)).reshape(scale.shape) if c.wants(1) else None
    if not c.wants(0):
        return [None, dscale, dbias]
    h = g * scale

    def mean_of(value: Expr) -> Expr:
        return c.op("ReduceMean", value, np.asarray(axes, np.int64), keepdims=1)

    return [(h - mean_of(h) - normal * mean_of(h * normal)) * inv_std, dscale, dbias]


@joint_vjp("Dropout")
def _dropout(c: Context) -> Sequence[Expr | None]:
    g = c.g[0]
    assert g is not None
    if not c.has(2) or not bool(c.const(2)):
        return [g]
    kept = c.saved(1, c.x0.shape, ir.DataType.BOOL, "dropout_mask")
    return c.op.node("DropoutGrad", g, kept, c.x[1], c.input(2), domain=MS, like=[c.x0])
