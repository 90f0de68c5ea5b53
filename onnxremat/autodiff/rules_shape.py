"""VJPs of operators that only move data: reshaping, permuting, slicing, joining, padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph import Expr
from .context import Context, inverse
from .registry import joint_vjp, vjp

for _name in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
    vjp(_name, lambda c, g: g.reshape(c.x0.shape))

vjp("Expand", lambda c, g: g, None)  # the engine undoes the broadcast
vjp("Transpose", lambda c, g: g.transpose(inverse(c.attr("perm", list(range(c.x0.rank))[::-1]))))


@joint_vjp("Concat")
def _concat(c: Context) -> Sequence[Expr | None]:
    g = c.g[0]
    assert g is not None
    axis = int(c.attr("axis")) % g.rank
    grads: list[Expr | None] = []
    start = 0
    for i in range(len(c.x)):
        end = start + c.input(i).shape[axis]
        grads.append(g.slice([start], [end], [axis]) if c.wants(i) else None)
        start = end
    return grads


@joint_vjp("Split")
def _split(c: Context) -> Sequence[Expr | None]:
    axis = int(c.attr("axis", 0)) % c.x0.rank
    parts = [
        grad if grad is not None else c.op.const(0.0, c.x0.dtype).expand(c.op.wrap(value).shape)
        for grad, value in zip(c.g, c.node.outputs, strict=True)
    ]
    return [c.op("Concat", *parts, axis=axis)]


def _pad_with_zeros(c: Context, g: Expr, begin: Sequence[int], end: Sequence[int]) -> Expr:
    if not any(begin) and not any(end):
        return g
    return c.op("Pad", g, np.asarray([*begin, *end], np.int64), c.op.const(0, g.dtype))


def _slice(c: Context, g: Expr) -> Expr:
    shape = c.x0.shape
    starts, ends = c.const(1).tolist(), c.const(2).tolist()
    axes = [int(a) % len(shape) for a in c.const(3).tolist()] if c.has(3) else list(range(len(starts)))
    steps = c.const(4).tolist() if c.has(4) else [1] * len(starts)
    begin, end = [0] * len(shape), [0] * len(shape)
    for axis, start, stop, step in zip(axes, starts, ends, steps, strict=True):
        taken = range(*slice(start, stop, step).indices(shape[axis]))
        if step not in (1, -1) and len(taken) > 1:
            g = _dilate(c, g, axis, abs(step))
        if step < 0:
            g = g.slice([-1], [-(2**31)], [axis], [-1])
        if len(taken):
            low, high = min(taken), max(taken)
            begin[axis], end[axis] = low, shape[axis] - 1 - high
        else:
            end[axis] = shape[axis]
    return _pad_with_zeros(c, g, begin, end)


def _dilate(c: Context, g: Expr, axis: int, step: int) -> Expr:
    """Put step - 1 zeros between the entries along an axis."""
    shape = list(g.shape)
    wide = g.reshape([*shape[: axis + 1], 1, *shape[axis + 1 :]])
    rank = len(shape) + 1
    end = [0] * rank
    end[axis + 1] = step - 1
    padded = _pad_with_zeros(c, wide, [0] * rank, end)
    joined = padded.reshape([*shape[:axis], shape[axis] * step, *shape[axis + 1 :]])
    return joined.slice([0], [(shape[axis] - 1) * step + 1], [axis])


vjp("Slice", _slice, None, None, None, None)


def _pad(c: Context, g: Expr) -> Expr:
    g, begin, end = _unpadded(c, g)
    # A negative pad crops: what was cropped has a zero gradient.
    return _pad_with_zeros(c, g, [max(0, -p) for p in begin], [max(0, -p) for p in end])


def _pad_value(c: Context, g: Expr) -> Expr:
    # What the value filled is all but what came from the input.
    kept, _, _ = _unpadded(c, g)
    return (g.sum(range(g.rank)) - kept.sum(range(g.rank))).reshape(c.input(2).shape)


def _unpadded(c: Context, g: Expr) -> tuple[Expr, list[int], list[int]]:
    """The part of a padded tensor's gradient that belongs to the input, and the pads of every axis."""
    if c.attr("mode", "constant") != "constant":
        raise c.refuse(f"Pad in mode '{c.attr('mode')}' has no rule yet; pad with constants")
    pads = c.const(1).tolist()
    shape = c.x0.shape
    axes = [int(a) % len(shape) for a in c.const(3).tolist()] if c.has(3) else list(range(len(shape)))
    begin, end = [0] * len(shape), [0] * len(shape)
    for i, axis in enumerate(axes):
        begin[axis], end[axis] = int(pads[i]), int(pads[len(axes) + i])
    starts = [max(0, p) for p in begin]
    ends = [n - max(0, p) for n, p in zip(g.shape, end, strict=True)]
    return g.slice(starts, ends, list(range(len(shape)))), begin, end


vjp("Pad", _pad, None, _pad_value, None)


def _tile(c: Context, g: Expr) -> Expr:
    repeats, shape = c.const(1).tolist(), c.x0.shape
    split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    return g.reshape(split).sum(range(0, len(split), 2))


vjp("Tile", _tile, None)
