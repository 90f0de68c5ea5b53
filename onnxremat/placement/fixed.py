"""Offsets of their own for the large tensors of a schedule, in one block beside the runtime's arena.

ONNX Runtime writes an output of a graph to where its caller wants it.  So a tensor that is bound as a further output of the step lies at an
offset that is known beforehand, and a block of such tensors needs hardly more than what is alive in it at one time, where best-fit fragments.

The scratch memory of kernels, small buffers and outputs can't be bound: they stay in the arena, which has a capacity of its own.  While it has
no scratch it would lie idle, so it takes in tensors that live then, its *guests*, best-fit as before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..emit import SMALL_BYTES
from ..scheduler import Problem
from .offsets import assign_offsets
from .simulate import UNLIMITED, ArenaExhausted, Buffer, Placement, Scratch, bookkeeping_bytes, buffer_lifetimes, place_buffers, rounded, scratch_of

__all__ = ["place_fixed"]

#: How far the arena is filled: to the least that holds what can't be bound, or to a share of the live bytes.
_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
#: Which tensors become guests first, of those alive when the block is fullest.
_ORDERS: tuple[Callable[[Buffer], float], ...] = (
    lambda b: (b.last - b.first + 1) * b.bytes,
    lambda b: (b.last - b.first + 1) / rounded(b.bytes),
    lambda b: b.last - b.first,
)
#: How much chance changes an order from the second round on (the spread of a logarithm), and the number of rounds.
_NOISE, _ROUNDS = 1.0, 3
#: Share of the time that goes to the offsets.
_OFFSETS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Split:
    """Which buffers are in the block, the most bytes alive there, and the arena with the others."""

    in_block: list[bool]
    load: int
    arena: Placement
    capacity: int

    @property
    def bytes(self) -> int:
        return self.load + self.capacity + bookkeeping_bytes(self.capacity)


def place_fixed(
    problem: Problem,
    sequence: Sequence[int],
    capacity_for: Callable[[int], int],
    target: int = 0,
    seconds: float = 5.0,
    seed: int = 0,
) -> tuple[Placement, int]:
    """Place a sequence of runs in a block with fixed offsets and an arena beside it.

    Args:
        problem: the problem; swaps are ops of it (``scheduler.lower``).
        sequence: a valid sequence of runs.
        capacity_for: the capacity that an arena gets which is to be filled with so many bytes.
        target: bytes of block, arena and its tables at which the search ends.
        seconds: wall seconds at which it ends too; some choice of guests is always tried.
        seed: source of chance.

    Returns:
        The best placement found, its offsets checked, and the capacity of its arena.

    Raises:
        ArenaExhausted: no arena that was tried holds what can't be bound.
    """
    deadline = time.monotonic() + seconds * (1 - _OFFSETS_SHARE)
    scratch = scratch_of(problem, sequence)
    buffers = buffer_lifetimes(problem, sequence)
    live_bytes = place_buffers(buffers, scratch, UNLIMITED).live_bytes
    bindable = [b.bytes > SMALL_BYTES and b.last < len(sequence) for b in buffers]
    least = place_buffers(_outside(buffers, bindable), scratch, UNLIMITED).arena_bytes
    best: _Split | None = None
    for fill, key in _choices(buffers, sorted({max(least, int(share * live_bytes)) for share in _SHARES}), random.Random(seed)):
        try:
            found = _take_in(buffers, scratch, bindable, fill, capacity_for(fill), key, deadline)
        except ArenaExhausted:
            continue
        if best is None or found.bytes < best.bytes:
            best = found
        if best.bytes <= target or time.monotonic() > deadline:
            break
    if best is None:
        raise ArenaExhausted(f"no arena of a share of {live_bytes} bytes holds the small buffers and scratch of the step")
    fixed = [b for b, inside in zip(buffers, best.in_block, strict=True) if inside]
    sizes = [Buffer(b.first, b.last, rounded(b.bytes)) for b in fixed]
    found_offsets = assign_offsets(sizes, seconds=seconds * _OFFSETS_SHARE, seed=seed)
    offsets = {value: offset for b, offset in zip(fixed, found_offsets.offsets, strict=True) for value in b.values}
    return replace(best.arena, live_bytes=live_bytes, block_bytes=found_offsets.bytes, offsets=offsets), best.capacity


def _choices(buffers: Sequence[Buffer], fills: Sequence[int], chance: random.Random) -> Iterator[tuple[int, list[float]]]:
    """How far to fill the arena, and the buffers' keys by which guests are chosen: each combination, then again with noise."""
    noise = 0.0
    for _ in range(_ROUNDS):
        for fill in fills:
            for order in _ORDERS:
                yield fill, [order(b) * chance.lognormvariate(0, noise) for b in buffers]
        noise = _NOISE


def _outside(buffers: Sequence[Buffer], in_block: Sequence[bool]) -> list[Buffer]:
    return [b for b, inside in zip(buffers, in_block, strict=True) if not inside]


def _take_in(
    buffers: Sequence[Buffer],
    scratch: Sequence[Scratch],
    bindable: Sequence[bool],
    fill: int,
    capacity: int,
    key: Sequence[float],
    deadline: float,
) -> _Split:
    """Fill the arena with guests, always one of those alive where the block is fullest, until none of them fits or time is up.

    Raises:
        ArenaExhausted: it holds more than ``fill`` bytes without guests already.
    """

    def arena_without(in_block: Sequence[bool]) -> Placement:
        placed = place_buffers(_outside(buffers, in_block), scratch, capacity)
        if placed.arena_bytes > fill:
            raise ArenaExhausted(f"{placed.arena_bytes} bytes of {fill} are needed")
        return placed

    in_block = list(bindable)
    arena = arena_without(in_block)
    load = np.zeros(len(scratch), np.int64)
    for b in (b for b, inside in zip(buffers, in_block, strict=True) if inside):
        load[b.first : b.last + 1] += rounded(b.bytes)
    refused = {i for i, b in enumerate(buffers) if rounded(b.bytes) > fill}
    while True:
        fullest = int(load.argmax())
        candidates = [i for i, b in enumerate(buffers) if in_block[i] and i not in refused and b.first <= fullest <= b.last]
        for i in sorted(candidates, key=key.__getitem__) if time.monotonic() < deadline else ():
            in_block[i] = False
            try:
                arena = arena_without(in_block)
            except ArenaExhausted:
                in_block[i] = True
                refused.add(i)
                continue
            load[buffers[i].first : buffers[i].last + 1] -= rounded(buffers[i].bytes)
            break
        else:
            return _Split(in_block, int(load.max(initial=0)), arena, capacity)
