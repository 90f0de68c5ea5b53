"""Mixtures of experts: products of groups of rows whose sizes depend on data, and the counts that they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnxscript import opset20 as op

from .errors import ExportError
from .symbols import Value, constant, dims, dtype_of, ints

__all__ = ["expert_translations"]


def grouped_product(input: Value, weight: Value, offs: Value) -> Value:
    """Rows (S, K), sorted by expert, times the weight (E, K, N) of each one's expert; ``offs`` (E,) is where each group of rows ends.

    ONNX has no products of groups whose sizes depend on data: every expert sees all rows, and those of others are masked, which costs E
    times the operations.  Rows beyond the last group give zeros.
    """
    (rows, _), (experts, _, _) = dims(input), dims(weight)
    places = constant(np.arange(rows, dtype=np.int64))
    ends = op.Cast(offs, to=7)
    ends_before = op.Concat(ints(0), op.Slice(ends, ints(0), ints(experts - 1), ints(0)), axis=0)
    zero = constant(np.array(0, dtype_of(input)))
    parts = []
    for e in range(experts):
        own = op.And(op.GreaterOrEqual(places, op.Gather(ends_before, ints(e))), op.Less(places, op.Gather(ends, ints(e))))
        product = op.MatMul(input, op.Gather(weight, constant(np.array(e, np.int64)), axis=0))
        parts.append(op.Where(op.Unsqueeze(own, ints(1)), product, zero))
    return op.Sum(*parts)


def histogram(x: Value, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Value:
    """aten.histc over given limits, both inclusive."""
    if min >= max:
        raise ExportError("histc", "limits taken from the data have no static form", "give min and max")
    dtype = dtype_of(x)
    values = op.Reshape(x, ints(-1, 1))
    low, high = constant(np.array(min, dtype)), constant(np.array(max, dtype))
    width = constant(np.array(bins / (max - min), dtype))
    places = op.Min(op.Floor(op.Mul(op.Sub(values, low), width)), constant(np.array(bins - 1, dtype)))
    hit = op.And(op.Equal(places, constant(np.arange(bins).astype(dtype))), op.LessOrEqual(values, high))
    return op.ReduceSum(op.Cast(hit, to=int(x.dtype)), ints(0), keepdims=0)


def expert_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator -> function that emits its ONNX form; ``transformers`` registers one of its own when it is imported."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.aten.histc.default: histogram}
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        table[torch.ops.transformers.grouped_mm_fallback.default] = grouped_product
    return table
