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


def _pads(c: Context) -> tuple[list[int], list[int]]:
    """The pads of every axis, before and after; a negative one crops."""
    pads = c.const(1).tolist()
    rank = c.x0.rank
    axes = [int(a) % rank for a in c.const(3).tolist()] if c.has(3) else list(range(rank))
    begin, end = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        begin[axis], end[axis] = int(pads[i]), int(pads[len(axes) + i])
    return begin, end


def _pad(c: Context, g: Expr) -> Expr:
    begin, end = _pads(c)
    if c.attr("mode", "constant") != "constant":
        for axis, size in enumerate(c.x0.shape):
            g = _fold(c, g, axis, _source(c, size, begin[axis], end[axis]), size)
        return g
    # What was cropped has a zero gradient.
    return _pad_with_zeros(c, _unpadded(g, begin, end), [max(0, -p) for p in begin], [max(0, -p) for p in end])


def _pad_value(c: Context, g: Expr) -> Expr:
    # What the value filled is all but what came from the input.
    if c.attr("mode", "constant") != "constant":
        return c.op.const(0.0, g.dtype).expand(c.input(2).shape)
    kept = _unpadded(g, *_pads(c))
    return (g.sum(range(g.rank)) - kept.sum(range(g.rank))).reshape(c.input(2).shape)


def _unpadded(g: Expr, begin: Sequence[int], end: Sequence[int]) -> Expr:
    """The part of a padded tensor's gradient that belongs to the input."""
    return g.slice([max(0, p) for p in begin], [n - max(0, p) for n, p in zip(g.shape, end, strict=True)], list(range(g.rank)))


def _source(c: Context, size: int, begin: int, end: int) -> list[int]:
    """Which entry of the input each entry of the padded axis shows: cropped first, then padded."""
    kept = np.arange(size)[max(0, -begin) : size - max(0, -end)]
    mode, widest = c.attr("mode"), max(begin, end, 0)
    if widest > {"reflect": len(kept) - 1, "wrap": len(kept)}.get(mode, widest):
        raise c.refuse(f"mode '{mode}' with a pad of {widest} on {len(kept)} entries reads beyond them in ONNX Runtime; pad in several steps")
    found: list[int] = np.pad(kept, (max(0, begin), max(0, end)), mode=mode).tolist()
    return found


def _fold(c: Context, g: Expr, axis: int, source: Sequence[int], size: int) -> Expr:
    """The adjoint of ``y[j] = x[source[j]]`` along an axis: each run of consecutive, reversed or equal sources is one slice to add."""
    if list(source) == list(range(size)):
        return g
    total: Expr | None = None
    start = 0
    while start < len(source):
        stop = start + 1
        step = source[stop] - source[start] if stop < len(source) else 1
        while step in (-1, 0, 1) and stop < len(source) and source[stop] - source[stop - 1] == step:
            stop += 1
        if stop - start == 1:
            step = 1
        piece = g.slice([start], [stop], [axis])
        if step == 0:
            piece = piece.sum([axis], keepdims=True)
        elif step < 0:
            piece = piece.slice([-1], [-(2**31)], [axis], [-1])
        begin, end = [0] * g.rank, [0] * g.rank
        begin[axis] = min(source[start], source[stop - 1])
        end[axis] = size - begin[axis] - piece.shape[axis]
        placed = _pad_with_zeros(c, piece, begin, end)
        total = placed if total is None else total + placed
        start = stop
    return total if total is not None else c.op.const(0.0, g.dtype).expand(c.x0.shape)


vjp("Pad", _pad, None, _pad_value, None)


def _tile(c: Context, g: Expr) -> Expr:
    repeats, shape = c.const(1).tolist(), c.x0.shape
    split = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    return g.reshape(split).sum(range(0, len(split), 2))


vjp("Tile", _tile, None)


def _depth_axes(c: Context, crd: bool) -> tuple[list[int], list[int]]:
    """How DepthToSpace splits its input (N, C b b, H, W) before it permutes: the sizes, and the permutation to (N, C, H, b, W, b)."""
    n, depth, height, width = c.x0.shape
    b = int(c.attr("blocksize"))
    channels = depth // (b * b)
    return ([n, channels, b, b, height, width], [0, 1, 4, 2, 5, 3]) if crd else ([n, b, b, channels, height, width], [0, 3, 4, 1, 5, 2])


def _depth_to_space(c: Context, g: Expr) -> Expr:
    split, perm = _depth_axes(c, c.attr("mode", "DCR") == "CRD")
    return g.reshape([split[a] for a in perm]).transpose(inverse(perm)).reshape(c.x0.shape)


def _space_to_depth(c: Context, g: Expr) -> Expr:
    return c.op("DepthToSpace", g, blocksize=int(c.attr("blocksize")), mode="DCR")


vjp("DepthToSpace", _depth_to_space)
vjp("SpaceToDepth", _space_to_depth)
