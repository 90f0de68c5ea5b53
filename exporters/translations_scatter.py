"""Scattering as torch has it: sources larger than the index, means, places whose old value does not count, masks of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnxscript import opset20 as op

from .symbols import Value, constant, dims, dtype_of, ints

__all__ = ["SCATTER"]

_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def _used_part(source: Value, index: Value) -> Value:
    """The leading part of a source, which is all that torch reads where the index is smaller; ONNX wants equal shapes."""
    size = dims(index)
    if dims(source) == size:
        return source
    axes = range(len(size))
    return op.Slice(source, ints(*(0 for _ in axes)), ints(*size), ints(*axes))


def _scatter(data: Value, axis: int, index: Value, source: Value, reduction: str) -> Value:
    """ScatterElements of a source that has the shape of the index."""
    if dims(index):
        return op.ScatterElements(data, index, source, axis=axis, reduction=reduction)
    one = ints(1)  # torch takes a scalar for a vector of one element
    wide = (op.Reshape(x, one) for x in (data, index, source))
    return op.Reshape(op.ScatterElements(*wide, axis=0, reduction=reduction), ints())


def scatter_source(data: Value, dim: int, index: Value, src: Value) -> Value:
    """aten.scatter.src."""
    return _scatter(data, dim, index, _used_part(src, index), "none")


def scatter_add(data: Value, dim: int, index: Value, src: Value) -> Value:
    """aten.scatter_add."""
    return _scatter(data, dim, index, _used_part(src, index), "add")


def scatter_reduce(data: Value, dim: int, index: Value, src: Value, reduce: str, include_self: bool = True) -> Value:
    """aten.scatter_reduce: a sum, product, mean, maximum or minimum of the values at one place, with the old one or without it."""
    dtype, shape = dtype_of(data), dims(data)
    if not include_self:
        limits = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else np.iinfo(dtype)
        neutral = {"prod": 1, "amax": limits.min, "amin": limits.max}.get(reduce, 0)
        data = _scatter(data, dim, index, constant(np.full(dims(index), neutral, dtype)), "none")
    result = _scatter(data, dim, index, _used_part(src, index), _REDUCTIONS[reduce])
    if reduce != "mean":
        return result
    counts = constant(np.ones(shape, dtype))
    zeros, ones = (constant(np.full(dims(index), n, dtype)) for n in (0, 1))
    if not include_self:
        counts = _scatter(counts, dim, index, zeros, "none")
    return op.Div(result, _scatter(counts, dim, index, ones, "add"))


def masked_scatter(data: Value, mask: Value, source: Value) -> Value:
    """aten.masked_scatter: the n-th true place takes the n-th value of the source, found by counting, so that every shape is static."""
    shape = dims(data)
    size, available = math.prod(shape), math.prod(dims(source))
    chosen = op.Expand(mask, ints(*shape))
    number = op.CumSum(op.Cast(op.Reshape(chosen, ints(size)), to=7), constant(np.array(0, np.int64)))
    index = op.Clip(op.Sub(number, ints(1)), constant(np.array(0, np.int64)), constant(np.array(available - 1, np.int64)))
    values = op.Gather(op.Reshape(source, ints(available)), index)
    return op.Where(chosen, op.Reshape(values, ints(*shape)), data)


def _replaced(data: Value, places: np.ndarray[Any, Any], source: Value) -> Value:
    """``data`` with the elements of ``source`` at these places of the flat tensor."""
    shape, count = dims(data), math.prod(dims(data))
    flat = op.Reshape(data, ints(count)), ints(*places.reshape(-1)), op.Reshape(source, ints(places.size))
    return op.Reshape(op.ScatterElements(*flat, axis=0), ints(*shape))


def diagonal_scatter(data: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """aten.diagonal_scatter, of which a write into a diagonal is made."""
    places = np.arange(math.prod(dims(data))).reshape(dims(data))
    return _replaced(data, places.diagonal(offset, dim1, dim2), src)


_ATEN = torch.ops.aten
#: aten overload -> function that emits its ONNX form.
SCATTER: dict[Callable[..., Any], Callable[..., Any]] = {
    _ATEN.scatter.src: scatter_source,
    _ATEN.scatter_add.default: scatter_add,
    _ATEN.scatter_reduce.two: scatter_reduce,
    _ATEN.masked_scatter.default: masked_scatter,
    _ATEN.diagonal_scatter.default: diagonal_scatter,
}
