"""The VJP of sampling between the entries of a map."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..graph import Expr
from .context import Context
from .registry import joint_vjp
from .rules_elementwise import mask
from .rules_indexing import zeros


@dataclass(frozen=True)
class Coordinate:
    """Where along one axis each point is sampled.

    Attributes:
        at: in entries of the axis, inside of it unless the padding is zeros; shape (N, points).
        slope: of ``at`` with respect to the grid's number.
        size: of the axis.
    """

    at: Expr
    slope: Expr | float
    size: int


def _coordinate(c: Context, numbers: Expr, size: int) -> Coordinate:
    """From [-1, 1] to entries, clipped or reflected into the map as torch does."""
    align, mode = bool(c.attr("align_corners", 0)), c.attr("padding_mode", "zeros")
    scale = (size - 1) / 2 if align else size / 2
    at, slope = (numbers + 1.0) * scale + (0.0 if align else -0.5), scale
    if mode == "zeros":
        return Coordinate(at, slope, size)
    direction: Expr | None = None
    if mode == "reflection":
        low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
        if span == 0:
            return Coordinate(at * 0.0, 0.0, size)
        offset = at - low
        distance = c.op("Abs", offset)
        turns = c.op("Floor", distance / span)
        rest = distance - turns * span
        odd = turns - c.op("Floor", turns * 0.5) * 2.0
        at = rest + odd * (span - rest * 2.0) + low
        direction = (1.0 - odd * 2.0) * (mask(c.op("Less", offset, 0.0), at.dtype) * -2.0 + 1.0)
    inside = mask(c.op("And", c.op("Greater", at, 0.0), c.op("Less", at, size - 1.0)), at.dtype)
    clipped = c.op("Clip", at, c.op.const(0.0, at.dtype), c.op.const(size - 1.0, at.dtype))
    return Coordinate(clipped, inside * slope if direction is None else inside * direction * slope, size)


@joint_vjp("GridSample")
def _grid_sample(c: Context) -> Sequence[Expr | None]:
    g, x, grid = c.g[0], c.x0, c.x1
    assert g is not None
    method = c.attr("mode", "linear")
    if method not in ("linear", "bilinear", "nearest"):
        raise c.refuse(f"mode '{method}' has no rule; use linear")
    batch, channels, sizes = x.shape[0], x.shape[1], x.shape[2:]
    points = math.prod(g.shape[2:])
    flat = grid.reshape([batch, points, len(sizes)])
    # The grid's numbers are in the order x, y, z: the last axis of the map comes first.
    columns = c.op.node("Split", flat, axis=2, num_outputs=len(sizes), outputs=len(sizes))
    where = [_coordinate(c, column.reshape([batch, points]), n) for column, n in zip(columns[::-1], sizes, strict=True)]
    rows = g.reshape([batch, channels, points])
    nearest = method == "nearest"
    lows = [c.op("Round" if nearest else "Floor", w.at) for w in where]
    highs = [w.at - low for w, low in zip(where, lows, strict=True)]
    dx = zeros(c, (batch, channels, math.prod(sizes)), g.dtype) if c.wants(0) else None
    slopes: list[Expr | None] = [None] * len(sizes)
    for corner in itertools.product((0,) if nearest else (0, 1), repeat=len(sizes)):
        weights = [high if bit else 1.0 - high for bit, high in zip(corner, highs, strict=True)]
        index, valid = _corner(c, where, lows, corner)
        spread = index.reshape([batch, 1, points]).expand([batch, channels, points])
        if dx is not None:
            weight = valid if nearest else _product([valid, *weights])
            dx = c.op("ScatterElements", dx, spread, rows * weight.reshape([batch, 1, points]), axis=2, reduction="add")
        if c.wants(1) and not nearest:
            values = c.op("GatherElements", x.reshape([batch, channels, math.prod(sizes)]), spread, axis=2)
            effect = (rows * values).sum([1]) * valid
            for k, bit in enumerate(corner):
                part = _product([effect, *weights[:k], *weights[k + 1 :]])
                part = part if bit else -part
                previous = slopes[k]
                slopes[k] = part if previous is None else previous + part
    found = [s * w.slope for s, w in zip(slopes, where, strict=True) if s is not None]
    dgrid = None
    if found:
        wide = [s.reshape([batch, points, 1]) for s in found[::-1]]
        dgrid = c.op("Concat", *wide, axis=2).reshape(grid.shape)
    return [None if dx is None else dx.reshape(x.shape), dgrid]


def _corner(c: Context, where: Sequence[Coordinate], lows: Sequence[Expr], corner: Sequence[int]) -> tuple[Expr, Expr]:
    """The flat index of one corner of each point's cell, and whether it lies on the map (1 or 0)."""
    index: Expr | None = None
    valid: Expr | None = None
    for coordinate, low, bit in zip(where, lows, corner, strict=True):
        at = low + float(bit) if bit else low
        inside = c.op("And", c.op("GreaterOrEqual", at, 0.0), c.op("LessOrEqual", at, coordinate.size - 1.0))
        valid = inside if valid is None else c.op("And", valid, inside)
        held = c.op("Clip", at, c.op.const(0.0, at.dtype), c.op.const(coordinate.size - 1.0, at.dtype)).cast(ir.DataType.INT64)
        index = held if index is None else index * coordinate.size + held
    assert index is not None and valid is not None
    return index, mask(valid, lows[0].dtype)


def _product(factors: Sequence[Expr]) -> Expr:
    result = factors[0]
    for factor in factors[1:]:
        result = result * factor
    return result
