"""How aten operators with training semantics become ONNX: the custom translation table of the exporter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset20 as op

from .errors import ExportError
from .symbols import Value, constant, dims, dtype_of, ints
from .translations_experts import expert_translations
from .translations_math import MATH
from .translations_scatter import SCATTER

__all__ = ["MASKED", "translation_table"]

MASKED = float(np.finfo(np.float32).min) / 2
"""Added to masked attention scores: exp underflows to exactly 0, and unlike -inf a fully masked row gives no NaN."""


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """aten overload -> function that emits its ONNX form (torch.onnx's ``custom_translation_table``)."""
    aten = torch.ops.aten
    return {
        aten._native_batch_norm_legit_functional.default: batch_norm_training,
        aten._native_batch_norm_legit.no_stats: batch_norm_no_stats,
        aten.native_dropout.default: native_dropout,
        aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
        aten.linear.default: linear,
        aten.gelu.default: gelu,
        aten.rrelu_with_noise_functional.default: rrelu,
        aten.uniform.default: uniform,
        aten.kthvalue.default: kth_value,
        aten.median.dim: median,
        aten.median.default: median_of_all,
        **MATH,
        **SCATTER,
        **expert_translations(),
    }


def _live_dropout(x: Value, p: float) -> tuple[Value, Value]:
    """An active Dropout without a seed: two layers never share a mask (hazard R7)."""
    if not 0.0 <= p < 1.0:
        raise ExportError("dropout", f"p={p} leaves nothing to train", "use 0 <= p < 1")
    y, mask = op.Dropout(x, constant(np.array(p, np.float32)), constant(np.array(True)))
    return y, mask


def native_dropout(x: Value, p: float, train: bool | None = True) -> tuple[Value, Value]:
    """aten.native_dropout: (output, mask)."""
    if train is False or p == 0.0:
        return op.Identity(x), constant(np.ones(dims(x), np.bool_))
    return _live_dropout(x, p)


def batch_norm_training(
    x: Value, weight: Value, bias: Value, running_mean: Value, running_var: Value, training: bool, momentum: float, eps: float
) -> tuple[Value, ...]:
    """Training-mode batch normalization: (y, save_mean, save_rstd, new running_mean, new running_var).

    ONNX keeps the biased batch variance in running_var, torch the unbiased one.  With n values per channel, f = n/(n-1) and torch's
    momentum m, feeding old/f gives ``f ((1-m) old/f + m biased) = (1-m) old + m unbiased``.  Nothing reads running_var after the node:
    ORT's kernel writes the new statistics over the ones it is fed.
    """
    if not training:
        y = op.BatchNormalization(x, *_affine(x, weight, bias), running_mean, running_var, epsilon=eps)
        return y, running_mean, running_var, op.Identity(running_mean), op.Identity(running_var)
    n = math.prod(dims(x)) // dims(x)[1]
    if n < 2:
        raise ExportError("BatchNorm in training mode", "one value per channel has no variance", "use a larger batch")
    scale, shift = _affine(x, weight, bias)
    dtype = dtype_of(running_var)
    fed = op.Mul(running_var, constant(np.array((n - 1) / n, dtype)))
    y, mean, var = op.BatchNormalization(x, scale, shift, running_mean, fed, epsilon=eps, momentum=1.0 - momentum, training_mode=1)
    return y, mean, var, mean, op.Mul(var, constant(np.array(n / (n - 1), dtype)))


def batch_norm_no_stats(x: Value, weight: Value, bias: Value, training: bool, momentum: float, eps: float) -> tuple[Value, ...]:
    """Batch statistics always, nothing tracked (``track_running_stats=False``).

    ONNX wants running statistics all the same: constants of this node's own, which momentum 1 leaves as they are even where a kernel
    overwrites its inputs.
    """
    channels = dims(x)[1]
    scale, shift = _affine(x, weight, bias)
    y, mean, var = op.BatchNormalization(
        x,
        scale,
        shift,
        constant(np.zeros(channels, dtype_of(x))),
        constant(np.ones(channels, dtype_of(x))),
        epsilon=eps,
        momentum=1.0,
        training_mode=1,
    )
    return y, mean, var


def _affine(x: Value, weight: Value, bias: Value) -> tuple[Value, Value]:
    channels, dtype = dims(x)[1], dtype_of(x)
    scale = constant(np.ones(channels, dtype)) if weight is None else weight
    shift = constant(np.zeros(channels, dtype)) if bias is None else bias
    return scale, shift


def gelu(x: Value, approximate: str = "none") -> Value:
    """aten.gelu as one Gelu node (opset 20)."""
    return op.Gelu(x, approximate=approximate)


def rrelu(x: Value, noise: Value, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> tuple[Value, Value]:
    """aten.rrelu: a slope drawn for each negative value in training, the mean slope otherwise; (output, slopes)."""
    one = constant(np.array(1, dtype_of(x)))
    if not training:
        return op.LeakyRelu(x, alpha=(lower + upper) / 2), one
    slopes = op.Where(op.Less(x, constant(np.array(0, dtype_of(x)))), op.RandomUniformLike(x, low=lower, high=upper), one)
    return op.Mul(x, slopes), slopes


def uniform(x: Value, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Value:
    """aten.uniform: numbers drawn between two limits, of the shape and dtype of x."""
    return op.RandomUniformLike(x, low=float(low), high=float(high))


def kth_value(x: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    """aten.kthvalue: the k-th smallest along an axis, and where it stands."""
    axis = dim % max(1, len(dims(x)))
    found = op.TopK(x, ints(k), axis=axis, largest=0)
    return tuple(_kth(part, k, axis, keepdim) for part in found)


def median(x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """aten.median along an axis: the lower of the two middle values."""
    return kth_value(x, (dims(x)[dim] + 1) // 2, dim, keepdim)


def median_of_all(x: Value) -> Value:
    """aten.median of all values: the lower of the two middle ones."""
    count = math.prod(dims(x))
    k = (count + 1) // 2
    smallest, _ = op.TopK(op.Reshape(x, ints(count)), ints(k), largest=0)
    return op.Gather(smallest, constant(np.array(k - 1, np.int64)))


def _kth(smallest: Value, k: int, axis: int, keepdim: bool) -> Value:
    last = op.Slice(smallest, ints(k - 1), ints(k), ints(axis))
    return last if keepdim else op.Squeeze(last, ints(axis))


def linear(x: Value, weight: Value, bias: Value = None) -> Value:
    """aten.linear as one Gemm on the flattened batch: no transposed copy of the weight, no separate bias Add.

    Shapes: x (..., in), weight (out, in), bias (out,) -> (..., out).
    """
    shape, features = dims(x), dims(weight)
    rows = math.prod(shape[:-1])
    flat = x if len(shape) == 2 else op.Reshape(x, ints(rows, shape[-1]))
    y = op.Gemm(flat, weight, transB=1) if bias is None else op.Gemm(flat, weight, bias, transB=1)
    return y if len(shape) == 2 else op.Reshape(y, ints(*shape[:-1], features[0]))


def scaled_dot_product_attention(
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Attention in plain operators: softmax(scale Q K^T + mask), live dropout, times V.

    Shapes: query (..., L, E), key (..., S, E), value (..., S, Ev) -> (..., L, Ev).  A causal mask is one additive constant.  Of a
    boolean mask, a row without a single True gives zeros, as torch's; where the mask is constant, folding removes that factor.
    """
    dtype = dtype_of(query)
    if np.finfo(dtype).bits < 32:
        raise ExportError("scaled_dot_product_attention", f"{dtype} masks would overflow", "train in float32")
    q_shape, k_shape = dims(query), dims(key)
    if enable_gqa and len(q_shape) == 4 and q_shape[1] != k_shape[1]:
        key, value = (_repeat_heads(t, q_shape[1]) for t in (key, value))
    length, source = q_shape[-2], k_shape[-2]
    factor = 1.0 / math.sqrt(q_shape[-1]) if scale is None else scale
    if factor != 1.0:
        query = op.Mul(query, constant(np.array(factor, dtype)))
    rank = len(k_shape)
    scores = op.MatMul(query, op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2]))
    live_rows = None
    if is_causal:
        mask = np.where(np.tril(np.ones((length, source), np.bool_)), 0.0, MASKED)
        scores = op.Add(scores, constant(mask.astype(dtype)))
    if attn_mask is not None:
        if ir.DataType(attn_mask.dtype) == ir.DataType.BOOL:
            zero, masked = constant(np.array(0, dtype)), constant(np.array(MASKED, dtype))
            scores = op.Add(scores, op.Where(attn_mask, zero, masked))
            present = op.Cast(attn_mask, to=int(ir.DataType.from_numpy(dtype)))
            live_rows = op.ReduceMax(present, ints(-1), keepdims=1)
        else:
            scores = op.Add(scores, attn_mask)
    weights = op.Softmax(scores, axis=-1)
    if dropout_p:
        weights, _ = _live_dropout(weights, dropout_p)
    y = op.MatMul(weights, value)
    return y if live_rows is None else op.Mul(y, live_rows)


def _repeat_heads(x: Value, heads: int) -> Value:
    batch, groups, length, width = dims(x)
    wide = op.Expand(op.Unsqueeze(x, ints(2)), ints(batch, groups, heads // groups, length, width))
    return op.Reshape(wide, ints(batch, heads, length, width))
