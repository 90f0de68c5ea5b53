"""The VJP of sampling between the entries of a map.

Along each axis a point is made of some entries, its taps; over all axes, of the products of their weights.
"""

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

#: Of cubic convolution, as torch and ONNX Runtime choose it (Keys 1981, equation 4).
_CUBIC = -0.75


@dataclass(frozen=True)
class Tap:
    """One entry of an axis that each point is made of; expressions have the shape (N, points).

    Attributes:
        index: of the entry, a whole number as a float, held within the axis.
        valid: whether it lies on the map, where the padding is zeros.
        weight: its share of the point; None where there is no other.
        slope: of the weight with respect to where the point lies; a number is 1 or -1.
    """

    index: Expr
    valid: Expr | None
    weight: Expr | None = None
    slope: Expr | float | None = None


@dataclass(frozen=True)
class Axis:
    """One axis of the map.

    Attributes:
        taps: what a point is made of.
        rate: derivative of where it lies, in entries, with respect to the grid's number.
    """

    taps: list[Tap]
    rate: Expr | float


@joint_vjp("GridSample")
def _grid_sample(c: Context) -> Sequence[Expr | None]:
    g, x, grid = c.g[0], c.x0, c.x1
    assert g is not None
    batch, channels, sizes = x.shape[0], x.shape[1], x.shape[2:]
    points = math.prod(g.shape[2:])
    flat = grid.reshape([batch, points, len(sizes)])
    # The grid's numbers are in the order x, y, z: the last axis of the map comes first.
    columns = c.op.node("Split", flat, axis=2, num_outputs=len(sizes), outputs=len(sizes))
    axes = [_axis(c, column.reshape([batch, points]), n) for column, n in zip(columns[::-1], sizes, strict=True)]
    rows = g.reshape([batch, channels, points])
    dx = zeros(c, (batch, channels, math.prod(sizes)), g.dtype) if c.wants(0) else None
    slopes: list[Expr | None] = [None] * len(sizes)
    for taps in itertools.product(*(axis.taps for axis in axes)):
        index, valid = _flat_index(taps, sizes), _all_valid(c, taps)
        weights = [tap.weight for tap in taps]
        spread = index.reshape([batch, 1, points]).expand([batch, channels, points])
        if dx is not None:
            weight = _product([valid, *weights])
            share = rows if weight is None else rows * weight.reshape([batch, 1, points])
            dx = c.op("ScatterElements", dx, spread, share, axis=2, reduction="add")
        if c.wants(1) and taps[0].slope is not None:
            values = c.op("GatherElements", x.reshape([batch, channels, math.prod(sizes)]), spread, axis=2)
            effect = (rows * values).sum([1])
            for k, tap in enumerate(taps):
                part = _product([effect, valid, *weights[:k], *weights[k + 1 :], None if isinstance(tap.slope, float) else tap.slope])
                assert part is not None
                part = -part if isinstance(tap.slope, float) and tap.slope < 0 else part
                previous = slopes[k]
                slopes[k] = part if previous is None else previous + part
    dgrid = None
    found = [(s * axis.rate).reshape([batch, points, 1]) for s, axis in zip(slopes[::-1], axes[::-1], strict=True) if s is not None]
    if found:
        dgrid = c.op("Concat", *found, axis=2).reshape(grid.shape)
    return [None if dx is None else dx.reshape(x.shape), dgrid]


def _axis(c: Context, numbers: Expr, size: int) -> Axis:
    """Of so many entries: what the grid's numbers in [-1, 1] say."""
    align, method, padding = bool(c.attr("align_corners", 0)), c.attr("mode", "linear"), c.attr("padding_mode", "zeros")
    scale = (size - 1) / 2 if align else size / 2
    at = (numbers + 1.0) * scale + (0.0 if align else -0.5)
    if method in ("cubic", "bicubic"):
        # Each entry is clipped or reflected by itself.
        low = c.op("Floor", at)
        weighted = zip(range(-1, 3), _cubic_weights(at - low), strict=True)
        return Axis([_tap(c, low + float(k), size, padding, align, *pair) for k, pair in weighted], scale)
    if method not in ("linear", "bilinear", "nearest"):
        raise c.refuse(f"mode '{method}' has no rule; use linear or cubic")
    rate: Expr | float = scale
    if padding != "zeros":
        at, inner = _within(c, at, size, padding, align)
        rate = inner * scale
    if method == "nearest":
        return Axis([_tap(c, c.op("Round", at), size)], rate)
    low = c.op("Floor", at)
    high = at - low
    return Axis([_tap(c, low, size, weight=1.0 - high, slope=-1.0), _tap(c, low + 1.0, size, weight=high, slope=1.0)], rate)


def _tap(
    c: Context,
    at: Expr,
    size: int,
    padding: str = "zeros",
    align: bool = False,
    weight: Expr | None = None,
    slope: Expr | float | None = None,
) -> Tap:
    """The entry at whole numbers, some of which may lie beyond the axis."""
    if padding != "zeros":
        return Tap(_within(c, at, size, padding, align)[0], None, weight, slope)
    inside = c.op("And", c.op("GreaterOrEqual", at, 0.0), c.op("LessOrEqual", at, size - 1.0))
    return Tap(_clipped(c, at, size), inside, weight, slope)


def _within(c: Context, at: Expr, size: int, padding: str, align: bool) -> tuple[Expr, Expr]:
    """Clipped or reflected into the axis as torch does, and the derivative of that."""
    direction: Expr | None = None
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
        if span == 0:
            return at * 0.0, at * 0.0
        offset = at - low
        distance = c.op("Abs", offset)
        turns = c.op("Floor", distance / span)
        rest = distance - turns * span
        odd = turns - c.op("Floor", turns * 0.5) * 2.0
        at = rest + odd * (span - rest * 2.0) + low
        direction = (1.0 - odd * 2.0) * (mask(c.op("Less", offset, 0.0), at.dtype) * -2.0 + 1.0)
    inside = mask(c.op("And", c.op("Greater", at, 0.0), c.op("Less", at, size - 1.0)), at.dtype)
    return _clipped(c, at, size), inside if direction is None else inside * direction


def _clipped(c: Context, at: Expr, size: int) -> Expr:
    return c.op("Clip", at, c.op.const(0.0, at.dtype), c.op.const(size - 1.0, at.dtype))


def _cubic_weights(t: Expr) -> list[tuple[Expr, Expr]]:
    """Weights of the entries at -1, 0, 1 and 2 for a point at ``t`` in [0, 1), with their derivatives (Keys 1981, equation 3)."""
    a = _CUBIC

    def near(d: Expr) -> tuple[Expr, Expr]:  # at most 1 away
        return (d * (a + 2) - (a + 3)) * d * d + 1.0, (d * (3 * (a + 2)) - 2 * (a + 3)) * d

    def far(d: Expr) -> tuple[Expr, Expr]:  # 1 to 2 away
        return ((d * a - 5 * a) * d + 8 * a) * d - 4 * a, (d * (3 * a) - 10 * a) * d + 8 * a

    def before(weight: Expr, slope: Expr) -> tuple[Expr, Expr]:  # the distance falls as t grows
        return weight, -slope

    return [far(t + 1.0), near(t), before(*near(1.0 - t)), before(*far(2.0 - t))]


def _flat_index(taps: Sequence[Tap], sizes: Sequence[int]) -> Expr:
    index = taps[0].index.cast(ir.DataType.INT64)
    for tap, size in zip(taps[1:], sizes[1:], strict=True):
        index = index * size + tap.index.cast(ir.DataType.INT64)
    return index


def _all_valid(c: Context, taps: Sequence[Tap]) -> Expr | None:
    """Whether every tap lies on the map (1 or 0); None where all do."""
    valid: Expr | None = None
    for tap in taps:
        if tap.valid is not None:
            valid = tap.valid if valid is None else c.op("And", valid, tap.valid)
    return None if valid is None else mask(valid, taps[0].index.dtype)


def _product(factors: Sequence[Expr | None]) -> Expr | None:
    """Of those that there are."""
    result: Expr | None = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else result * factor
    return result
