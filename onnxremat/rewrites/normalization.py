"""Normalizations as compositions of those that have kernels and rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..autodiff.context import Context
from ..autodiff.rules_normalization import mean
from ..graph import Expr
from ..ops import MS
from .registry import rewrite


@rewrite("GroupNormalization")
def _group_normalization(c: Context) -> Expr:
    """InstanceNormalization over groups; scale and bias are one per group (up to opset 20) or one per channel."""
    x, scale, bias, groups = c.x0, c.x1, c.input(2), int(c.attr("num_groups"))
    grouped = x.reshape([x.shape[0], groups, int(np.prod(x.shape[1:])) // groups])
    epsilon = float(c.attr("epsilon", 1e-5))
    if scale.shape == (groups,):
        return c.op("InstanceNormalization", grouped, scale, bias, epsilon=epsilon).reshape(x.shape)
    one, zero = np.ones(groups, x.dtype.numpy()), np.zeros(groups, x.dtype.numpy())
    normal = c.op("InstanceNormalization", grouped, one, zero, epsilon=epsilon).reshape(x.shape)
    channel = [1, x.shape[1], *[1] * (x.rank - 2)]
    return normal * scale.reshape(channel) + bias.reshape(channel)


@rewrite("MeanVarianceNormalization")
def _mean_variance_normalization(c: Context) -> Expr:
    """(x - mean) / (std + 1e-9), as ONNX defines it."""
    axes = [a % c.x0.rank for a in c.attr("axes", [0, 2, 3])]
    centred = c.x0 - mean(c.x0, axes)
    return centred / (c.op("Sqrt", mean(centred * centred, axes)) + 1e-9)


def layer_normalization(c: Context, x: Expr, scale: Expr, bias: Expr | None, epsilon: float, simplified: bool = False, axis: int = -1) -> Expr:
    """Layer normalization from ``axis`` on, or the simplified one (by the root mean square alone)."""
    if simplified:
        return c.op.node("SimplifiedLayerNormalization", x, scale, like=[x], axis=axis, epsilon=epsilon, stash_type=1)[0]
    return c.op("LayerNormalization", x, scale, *([bias] if bias is not None else []), axis=axis, epsilon=epsilon)


def used(c: Context, index: int) -> bool:
    """Whether anything reads an output."""
    outputs = c.node.outputs
    return index < len(outputs) and bool(outputs[index].uses() or outputs[index].is_graph_output())


def _statistics(c: Context, x: Expr, axis: int, epsilon: float, simplified: bool = False) -> tuple[Expr | None, Expr]:
    """Mean and inverse deviation that a layer normalization returns beside its output."""
    axes = list(range(axis % x.rank, x.rank))
    centre = None if simplified else mean(x, axes)
    centred = x if centre is None else x - centre
    return centre, c.op("Reciprocal", c.op("Sqrt", mean(centred * centred, axes) + epsilon))


@rewrite("LayerNormalization SimplifiedLayerNormalization", has_rule=True)
def _read_statistics(c: Context) -> Sequence[Expr | None] | None:
    """Statistics that the model itself reads are computed apart, so that a gradient flows through them."""
    if not used(c, 1) and not used(c, 2):
        return None
    simplified = c.node.op_type == "SimplifiedLayerNormalization"
    axis, epsilon = int(c.attr("axis", -1)), float(c.attr("epsilon", 1e-5))
    y = layer_normalization(c, c.x0, c.x1, c.input(2) if c.has(2) else None, epsilon, simplified, axis)
    stash = ir.DataType(int(c.attr("stash_type", 1)))
    centre, inv_std = _statistics(c, c.x0.cast(stash), axis, epsilon, simplified)
    return [y, inv_std] if simplified else [y, centre, inv_std]


@rewrite("SkipLayerNormalization SkipSimplifiedLayerNormalization", domain=MS)
def _skip_layer_normalization(c: Context) -> Sequence[Expr | None]:
    """Layer normalization of input + skip + bias, the sum being an output too."""
    simplified = c.node.op_type == "SkipSimplifiedLayerNormalization"
    beta, bias = (None, 3) if simplified else (3, 4)
    epsilon = float(c.attr("epsilon", 1e-12 if not simplified else 1e-5))
    total = c.x0 + c.x1
    if c.has(bias):
        total = total + c.input(bias)
    shift = c.input(beta) if beta is not None and c.has(beta) else None
    y = layer_normalization(c, total, c.input(2), shift, epsilon, simplified)
    centre = inv_std = None
    if used(c, 1) or used(c, 2):
        centre, inv_std = _statistics(c, total, -1, epsilon, simplified)
    return [y, centre, inv_std, total]


@rewrite("EmbedLayerNormalization", domain=MS)
def _embed_layer_normalization(c: Context) -> Sequence[Expr | None]:
    """Word, position and segment embeddings, summed and normalized; the mask's lengths are integers."""
    ids = c.x0
    total = c.op("Gather", c.input(2), ids)
    positions = c.op("Gather", c.input(3), c.input(8)) if c.has(8) else c.input(3).slice([0], [ids.shape[1]], [0])
    total = total + positions
    if c.has(4) and c.has(1):
        total = total + c.op("Gather", c.input(4), c.x1)
    y = layer_normalization(c, total, c.input(5), c.input(6), float(c.attr("epsilon", 1e-12)))
    lengths: Expr | None = None
    if used(c, 1):
        if c.has(7) and int(c.attr("mask_index_type", 1)):
            lengths = c.input(7).cast(ir.DataType.INT32).sum([1])
        else:
            lengths = c.op.const(np.zeros(ids.shape[0], np.int32))
    return [y, lengths, total]
