"""Functions of torch that its exporter has no form for, or one that loses an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset20 as op

from .errors import ExportError
from .symbols import Value, constant, dims, dtype_of, ints

__all__ = ["MATH"]


def _shifted(x: Value, axis: int, by: int, first: Value) -> Value:
    """``x`` moved up along an axis; what moves in at the beginning is ``first``, of ``by`` elements along it."""
    return op.Concat(first, op.Slice(x, ints(0), ints(-by), ints(axis)), axis=axis)


def cumulative_product(x: Value, dim: int, dtype: int | None = None) -> Value:
    """aten.cumprod, by doubling (Hillis and Steele 1986): log2(n) products of whole tensors, exact where factors are zero."""
    shape, kind = dims(x), dtype_of(x)
    if dtype is not None and dtype >= 0:
        x, kind = op.Cast(x, to=dtype), ir.DataType(dtype).numpy()
    axis, by = dim % max(1, len(shape)), 1
    while shape and by < shape[axis]:
        ones = constant(np.ones([by if a == axis else d for a, d in enumerate(shape)], kind))
        x = op.Mul(x, _shifted(x, axis, by, ones))
        by *= 2
    return op.Identity(x)


def cumulative_maximum(x: Value, dim: int) -> tuple[Value, Value]:
    """aten.cummax: the largest so far and the last place where it stands."""
    return _cumulative_extremum(x, dim, op.GreaterOrEqual)


def cumulative_minimum(x: Value, dim: int) -> tuple[Value, Value]:
    """aten.cummin: the smallest so far and the last place where it stands."""
    return _cumulative_extremum(x, dim, op.LessOrEqual)


def _cumulative_extremum(x: Value, dim: int, wins: Callable[[Value, Value], Value]) -> tuple[Value, Value]:
    """By doubling, on places: the gradient then goes where the extremum stands."""
    shape = dims(x)
    if not shape:
        return op.Identity(x), constant(np.array(0, np.int64))
    axis, by = dim % len(shape), 1
    length = shape[axis]
    places = np.arange(length, dtype=np.int64).reshape([length if a == axis else 1 for a in range(len(shape))])
    index = constant(np.ascontiguousarray(np.broadcast_to(places, shape)))
    while by < length:
        earlier = _shifted(index, axis, by, op.Slice(index, ints(0), ints(by), ints(axis)))
        later_wins = wins(op.GatherElements(x, index, axis=axis), op.GatherElements(x, earlier, axis=axis))
        index = op.Where(later_wins, index, earlier)
        by *= 2
    return op.GatherElements(x, index, axis=axis), index


def distances(x1: Value, x2: Value, p: float, compute_mode: int | None = None) -> Value:
    """aten._cdist_forward: p-norms of all differences, (..., P, M) and (..., R, M) -> (..., P, R), by way of (..., P, R, M)."""
    return _norm(op.Sub(op.Unsqueeze(x1, ints(-2)), op.Unsqueeze(x2, ints(-3))), p, dtype_of(x1))


def pair_distances(x: Value, p: float = 2.0) -> Value:
    """aten._pdist_forward: p-norms of the differences of all pairs of rows, (N, M) -> (N (N - 1) / 2,)."""
    first, second = np.triu_indices(dims(x)[0], 1)
    return _norm(op.Sub(op.Gather(x, ints(*first)), op.Gather(x, ints(*second))), p, dtype_of(x))


def _norm(x: Value, p: float, dtype: np.dtype[Any]) -> Value:
    """The p-norm over the last axis, of gradient 0 where it is 0."""
    axis = ints(-1)
    if p == 2:
        return op.ReduceL2(x, axis, keepdims=0)
    if p == 1:
        return op.ReduceL1(x, axis, keepdims=0)
    if math.isinf(p):
        return op.ReduceMax(op.Abs(x), axis, keepdims=0)
    zero = constant(np.array(0, dtype))
    if p == 0:
        return op.ReduceSum(op.Cast(op.Not(op.Equal(x, zero)), to=int(ir.DataType.from_numpy(dtype))), axis, keepdims=0)
    # Where a difference is 0 its power has slope 0 for p > 1 and none below; a sum of 0 has no root with a slope.
    size = op.Abs(x)
    nothing = op.Equal(size, zero)
    powers = op.Where(nothing, zero, op.Pow(op.Where(nothing, constant(np.array(1, dtype)), size), constant(np.array(p, dtype))))
    total = op.ReduceSum(powers, axis, keepdims=0)
    alike = op.Equal(total, zero)
    root = op.Pow(op.Where(alike, constant(np.array(1, dtype)), total), constant(np.array(1 / p, dtype)))
    return op.Where(alike, zero, root)


def average_pool_2d(
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """aten.avg_pool2d: (N, C, H, W) or (C, H, W)."""
    return _average_pool(x, 2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def average_pool_3d(
    x: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """aten.avg_pool3d: (N, C, D, H, W) or (C, D, H, W)."""
    return _average_pool(x, 3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _average_pool(
    x: Value, rank: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool, count_pads: bool, divisor: int | None
) -> Value:
    if divisor is not None and ceil:
        raise ExportError("avg_pool", "divisor_override with ceil_mode has no ONNX form", "set ceil_mode=False, and pad its input")

    def each(values: Sequence[int]) -> list[int]:
        return [int(v) for v in (list(values) * rank if len(values) == 1 else values)]

    alone = len(dims(x)) == rank + 1
    y = op.AveragePool(
        op.Unsqueeze(x, ints(0)) if alone else x,
        kernel_shape=each(kernel),
        strides=each(stride or kernel),
        pads=each(padding) * 2,
        ceil_mode=int(ceil),
        count_include_pad=int(count_pads or divisor is not None),
    )
    y = op.Squeeze(y, ints(0)) if alone else y
    return y if divisor is None else op.Mul(y, constant(np.array(math.prod(each(kernel)) / divisor, dtype_of(x))))


def search_sorted(
    sorted_sequence: Value, x: Value, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Value = None
) -> Value:
    """aten.searchsorted: how many of a sequence are below each value, or up to it (``right``); counted, not searched."""
    if sorter is not None:
        raise ExportError("searchsorted", "its sorter has no ONNX form", "gather by the sorter first")
    below = op.LessOrEqual if right or side == "right" else op.Less
    sequence = sorted_sequence if len(dims(sorted_sequence)) == 1 else op.Unsqueeze(sorted_sequence, ints(-2))
    found = below(sequence, op.Unsqueeze(x, ints(-1)))
    return op.ReduceSum(op.Cast(found, to=6 if out_int32 else 7), ints(-1), keepdims=0)


def repeat_interleave(x: Value, repeats: Value, dim: int | None = None, output_size: int | None = None) -> Value:
    """aten.repeat_interleave with a tensor of repeats: element j of the output is the one before whose end j lies."""
    if output_size is None:
        raise ExportError("repeat_interleave", "the number of its elements depends on data", "give output_size")
    count = math.prod(dims(x)) if dim is None else dims(x)[dim]
    if dim is None:
        x, dim = op.Reshape(x, ints(count)), 0
    each = op.Expand(op.Cast(op.Reshape(repeats, ints(-1)), to=7), ints(count))
    ends = op.CumSum(each, constant(np.array(0, np.int64)))
    places = constant(np.arange(output_size, dtype=np.int64).reshape(-1, 1))
    before = op.ReduceSum(op.Cast(op.LessOrEqual(op.Unsqueeze(ends, ints(0)), places), to=7), ints(1), keepdims=0)
    return op.Gather(x, before, axis=dim)


_ATEN = torch.ops.aten
#: aten overload -> function that emits its ONNX form.
MATH: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.cumprod.default: cumulative_product,
    _ATEN.cummax.default: cumulative_maximum,
    _ATEN.cummin.default: cumulative_minimum,
    _ATEN._cdist_forward.default: distances,
    _ATEN._pdist_forward.default: pair_distances,
    _ATEN.avg_pool2d.default: average_pool_2d,
    _ATEN.avg_pool3d.default: average_pool_3d,
    _ATEN.searchsorted.Tensor: search_sorted,
    _ATEN.repeat_interleave.self_Tensor: repeat_interleave,
}
