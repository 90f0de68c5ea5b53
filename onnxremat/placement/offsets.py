"""Offline offset assignment: with all lifetimes known, where to put each buffer so that the whole needs the least memory.

This is dynamic storage allocation.  Placements are *canonical*: every buffer lies at 0 or on top of another that lives together with it, as
in Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023).  The search here branches
locally: a buffer that no neighbour fits under either lies at the lowest offset that is free for it, or on top of a neighbour that is still to
be placed.  Neighbours are buffers that live together; what lives at one moment is a clique of them, and only maximal cliques count.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import OnnxRematError
from ..scheduler import Problem
from .native import load_library
from .simulate import Buffer, buffer_lifetimes, rounded

__all__ = ["Offsets", "OverlappingBuffers", "assign_offsets", "check_offsets", "live_bytes", "step_buffers"]

FOUND, FAILED, CUT = 1, 0, -1
_NEVER = 1 << 60
#: Nodes of a first dive; later ones follow the restarts of Luby, Sinclair and Zuckerman (1993).
_NODES = 1000
#: How much the room that is left in a clique counts, against how low it is filled, how much chance does, relative to the
#: capacity, and how far it moves buffers in an order, relative to their number.
_WEIGHTS, _NOISE, _SHUFFLE = (1, 2), (0.1, 0.05, 0.02), 0.01
#: Share of the time that goes to the target itself before capacities above it are tried, and the part of it at which that ends.
_BOUND_SHARE, _STEP = 0.5, 2048


class OverlappingBuffers(OnnxRematError):
    """A placement in which two buffers that live together share memory, or one lies outside."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """A placement.

    Attributes:
        offsets: one for each buffer, in bytes.
        bytes: the memory that it takes.
        live_bytes: the most bytes alive at one time, which no placement can go below.
        proven_bytes: bytes below which there is proven to be no placement; at least ``live_bytes``.
        seconds: wall time of the search.
    """

    offsets: tuple[int, ...]
    bytes: int
    live_bytes: int
    proven_bytes: int
    seconds: float


def step_buffers(problem: Problem, sequence: Sequence[int]) -> list[Buffer]:
    """What a sequence of runs needs in the arena: its buffers and the workspace of every run, in granules."""
    workspace = ((k, problem.ops[op].workspace_bytes) for k, op in enumerate(sequence))
    needed = [*buffer_lifetimes(problem, sequence), *(Buffer(k, k, size) for k, size in workspace if size)]
    return [Buffer(b.first, min(b.last, len(sequence)), rounded(b.bytes)) for b in needed]


def live_bytes(buffers: Sequence[Buffer]) -> int:
    """The most bytes alive at one time."""
    live = peak = 0
    for _, change in sorted([*((b.first, b.bytes) for b in buffers), *((b.last + 1, -b.bytes) for b in buffers)]):
        live += change
        peak = max(peak, live)
    return peak


def check_offsets(buffers: Sequence[Buffer], offsets: Sequence[int], capacity: int) -> None:
    """Raise OverlappingBuffers unless every buffer lies within the capacity and apart from those that it lives together with.

    Apart from the search on purpose: a sweep over time that keeps what is alive.
    """
    if len(offsets) != len(buffers):
        raise OverlappingBuffers(f"{len(offsets)} offsets for {len(buffers)} buffers")
    alive: dict[int, None] = {}
    for number in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        low, high = offsets[number], offsets[number] + buffers[number].bytes
        if low < 0 or high > capacity:
            raise OverlappingBuffers(f"buffer {number} lies at [{low}, {high}), outside of {capacity} bytes")
        for other in [i for i in alive if buffers[i].last < buffers[number].first]:
            del alive[other]
        for other in alive:
            if low < offsets[other] + buffers[other].bytes and offsets[other] < high:
                raise OverlappingBuffers(f"buffers {other} and {number} live together and share memory at {max(low, offsets[other])}")
        alive[number] = None


@dataclass(frozen=True)
class Cliques:
    """Buffers and when they live, as the search sees it.

    Attributes:
        count: number of maximal cliques.
        begin: int32, per buffer the first clique that it is in.
        end: int32, per buffer the one after the last.
        size: int64, bytes.
        near: per buffer, those that it lives together with.
        load: int64, per clique the bytes of all its buffers.
    """

    count: int
    begin: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    size: npt.NDArray[np.int64]
    near: list[list[int]]
    load: npt.NDArray[np.int64]

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Cliques:
        """The cliques: one is complete when a buffer dies after another was born."""
        begin, end = np.zeros(len(buffers), np.int32), np.zeros(len(buffers), np.int32)
        moments = [(b.first, 1, i) for i, b in enumerate(buffers)] + [(b.last + 1, 0, i) for i, b in enumerate(buffers)]
        number, born = 0, False
        for _, birth, i in sorted(moments):
            if birth:
                begin[i], born = number, True
            else:
                number, born = number + born, False
                end[i] = number
        size = np.array([b.bytes for b in buffers], np.int64)
        near = [[j for j in np.flatnonzero((begin < end[i]) & (begin[i] < end)).tolist() if j != i] for i in range(len(buffers))]
        load = np.zeros(number, np.int64)
        for i in range(len(buffers)):
            load[begin[i] : end[i]] += size[i]
        return cls(number, begin, end, size, near, load)


#: (capacity, order, weight, noise per clique, nodes) -> how the dive ended, the offsets where it found them, and the nodes that it took.
Dive = Callable[[int, Sequence[int], int, Sequence[int], int], tuple[int, list[int], int]]


def assign_offsets(buffers: Sequence[Buffer], target: int | None = None, seconds: float = 30.0, seed: int = 0) -> Offsets:
    """Place buffers in as little memory as the time allows.

    Args:
        buffers: sizes are not rounded; where offsets have to be multiples of something, sizes should be too.
        target: bytes at which the search ends; None is the most bytes alive, which nothing goes below.
        seconds: wall seconds at which it ends too.
        seed: source of chance.

    Returns:
        The best placement found, checked.
    """
    started = time.monotonic()
    deadline = started + seconds
    # Empty buffers lie anywhere.
    solid = [i for i, b in enumerate(buffers) if b.bytes > 0]
    cliques = Cliques.of([buffers[i] for i in solid])
    bound = live_bytes(buffers)
    target = bound if target is None else max(target, bound)
    orders = _orders(cliques)
    best = min((first_fit(cliques, order) for order in orders), key=lambda found: _height(cliques, found))
    library = compiled()
    dive = twin_dive(cliques) if library is None else native_dive(library, cliques)
    # Bisection between what was not reached, which is proven only where the search ended by itself, and what was.
    low, capacity, proven, until = target - 1, target, bound, started + seconds * _BOUND_SHARE
    while (high := _height(cliques, best)) > max(target, low + max(1, bound // _STEP)) and time.monotonic() < deadline:
        verdict, found = _search(cliques, dive, capacity, orders, until, seed)
        if verdict == FOUND:
            best = found
        else:
            low = capacity
            if verdict == FAILED:
                proven = max(proven, capacity + 1)
        capacity = (low + _height(cliques, best)) // 2
        until = (time.monotonic() + deadline) / 2
    offsets = [0] * len(buffers)
    for i, offset in zip(solid, best, strict=True):
        offsets[i] = offset
    check_offsets(buffers, offsets, high)
    return Offsets(tuple(offsets), high, bound, proven, time.monotonic() - started)


def _height(cliques: Cliques, offsets: Sequence[int]) -> int:
    return max((o + s for o, s in zip(offsets, cliques.size.tolist(), strict=True)), default=0)


def _orders(cliques: Cliques) -> list[list[int]]:
    """Orders in which buffers are preferred: by the fullest clique, the moments, the area and the size, largest first."""
    width = cliques.end - cliques.begin
    full = np.array([cliques.load[a:b].max() for a, b in zip(cliques.begin, cliques.end, strict=True)], np.int64)
    area = width * cliques.size
    keys = ((full, width, area), (full, area, width), (width, area, full), (area, width, full), (cliques.size, width, full))
    return [np.lexsort([-key for key in reversed(by)]).tolist() for by in keys]


def _luby(k: int) -> int:
    """1 1 2 1 1 2 4 ...: the k-th restart, k from 1."""
    while k & (k + 1):
        k -= (1 << (k.bit_length() - 1)) - 1
    return (k + 1) // 2


def _search(cliques: Cliques, dive: Dive, capacity: int, orders: Sequence[list[int]], until: float, seed: int) -> tuple[int, list[int]]:
    """Dives with restarts until one ends or the time is up."""
    rng = random.Random(seed)
    for k in count():
        order, lap = list(orders[k % len(orders)]), k // len(orders)
        if lap:
            factor = {b: rng.gauss(0.0, _SHUFFLE * len(order)) + at for at, b in enumerate(order)}
            order.sort(key=lambda b: factor[b])
        amplitude = _NOISE[lap % len(_NOISE)] * capacity if k else 0.0
        noise = [int(amplitude * rng.random()) for _ in range(cliques.count)]
        verdict, found, _ = dive(capacity, order, _WEIGHTS[k % len(_WEIGHTS)], noise, _NODES * _luby(lap + 1))
        if verdict != CUT or time.monotonic() > until:
            return verdict, found
    raise AssertionError("count() does not end")


def first_fit(cliques: Cliques, order: Sequence[int]) -> list[int]:
    """Each buffer in turn at the lowest offset where it fits."""
    offsets = [-1] * len(order)
    size = cliques.size.tolist()
    for b in order:
        at = 0
        for low, high in sorted((offsets[c], offsets[c] + size[c]) for c in cliques.near[b] if offsets[c] >= 0):
            if low - at >= size[b]:
                break
            at = max(at, high)
        offsets[b] = at
    return offsets


class _Twin:
    """One dive in Python; the compiled one makes the same decisions.

    ``least`` is the lowest offset that what is placed leaves free for a buffer; a buffer that is *held* will lie on top of a neighbour which
    is still to be placed.
    """

    def __init__(self, cliques: Cliques, capacity: int, order: Sequence[int], weight: int, noise: Sequence[int], limit: int) -> None:
        self.cliques, self.capacity, self.weight, self.noise, self.limit = cliques, capacity, weight, noise, limit
        self.begin, self.end, self.size = cliques.begin.tolist(), cliques.end.tolist(), cliques.size.tolist()
        self.rank = {b: at for at, b in enumerate(order)}
        self.least, self.offset = [0] * len(order), [0] * len(order)
        self.bound: list[int] = [0] * len(order)
        self.placed, self.held = [False] * len(order), [False] * len(order)
        self.trail: list[tuple[int, int, bool]] = []
        self.nodes = 0

    def undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            b, self.least[b], self.held[b] = self.trail.pop()

    def note(self, b: int, least: int, held: bool) -> None:
        self.trail.append((b, self.least[b], self.held[b]))
        self.least[b], self.held[b] = least, held

    def lowest_top(self, b: int) -> tuple[int, int]:
        """The least (bound on the) top of a neighbour that is left, and which."""
        tops = [(self.bound[c] + self.size[c], c) for c in self.cliques.near[b] if not self.placed[c]]
        return min(tops, key=lambda top: top[0], default=(_NEVER, -1))

    def set_bounds(self, left: Sequence[int]) -> None:
        """Per buffer the lowest offset that it may get: what is held lies on a neighbour, which is not held or lies on another."""
        for b in left:
            self.bound[b] = _NEVER if self.held[b] else self.least[b]
        changed = True
        while changed:
            changed = False
            for b in left:
                if self.held[b] and (found := max(self.least[b], self.lowest_top(b)[0])) < self.bound[b]:
                    self.bound[b], changed = found, True

    def loads(self, left: Sequence[int]) -> dict[int, tuple[int, int]] | None:
        """Clique -> (bytes left to place, lowest bound), or None where one can't hold them.

        A machine that works off jobs as they are released: whatever starts at a bound or later takes its bytes from there on.
        """
        found: dict[int, tuple[int, int]] = {}
        for b in reversed(left):
            for k in range(self.begin[b], self.end[b]):
                load = found.get(k, (0, 0))[0] + self.size[b]
                if load > self.capacity - self.bound[b]:
                    return None
                found[k] = (load, self.bound[b])
        return found

    def choose(self, left: Sequence[int], loads: dict[int, tuple[int, int]]) -> int:
        """The lowest buffer of a clique that is low and has little room to waste, or one that might fit under it."""

        def score(k: int) -> int:
            load, base = loads[k]
            return base + self.weight * (self.capacity - base - load) + self.noise[k]

        tight = min(sorted(k for k in loads if loads[k][0]), key=score)
        members = [b for b in left if self.begin[b] <= tight < self.end[b]]
        b = min((c for c in members if self.bound[c] == self.bound[members[0]]), key=lambda c: self.rank[c])
        while True:
            top, under = self.lowest_top(b)
            if under < 0 or (not self.held[b] and top > self.least[b]):
                return b
            b = under

    def parts(self, left: Sequence[int]) -> list[list[int]]:
        """What is left, cut where no buffer crosses; the smallest part first."""
        found: list[list[int]] = []
        reach = -1
        for b in sorted(left, key=lambda c: self.begin[c]):
            if self.begin[b] >= reach:
                found.append([])
            found[-1].append(b)
            reach = max(reach, self.end[b])
        at = {b: i for i, b in enumerate(left)}
        return sorted((sorted(part, key=lambda b: at[b]) for part in found), key=len)

    def dive(self, left: list[int]) -> int:
        mark = len(self.trail)
        while True:
            self.nodes += 1
            if self.nodes > self.limit:
                return CUT
            self.set_bounds(left)
            left.sort(key=lambda b: self.bound[b])
            loads = self.loads(left)
            if loads is None:
                break
            if len(left) == 1:
                self.offset[left[0]], self.placed[left[0]] = self.bound[left[0]], True
                return FOUND
            parts = self.parts(left)
            if len(parts) > 1:
                verdict = next((v for v in (self.dive(part) for part in parts) if v != FOUND), FOUND)
                if verdict != FAILED:
                    return verdict
                for b in left:
                    self.placed[b] = False
                break
            b = self.choose(left, loads)
            here, top = len(self.trail), self.least[b] + self.size[b]
            self.placed[b], self.offset[b] = True, self.least[b]
            for c in self.cliques.near[b]:
                if not self.placed[c] and self.least[c] < top:
                    self.note(c, top, False)
            verdict = self.dive([c for c in left if c != b])
            if verdict != FAILED:
                return verdict
            self.undo(here)
            self.placed[b] = False
            self.note(b, self.least[b], True)
        self.undo(mark)
        return FAILED


def twin_dive(cliques: Cliques) -> Dive:
    """Dives in Python."""

    def dive(capacity: int, order: Sequence[int], weight: int, noise: Sequence[int], limit: int) -> tuple[int, list[int], int]:
        twin = _Twin(cliques, capacity, order, weight, noise, limit)
        depth = sys.getrecursionlimit()
        sys.setrecursionlimit(max(depth, 8 * len(order) + 1000))
        try:
            return twin.dive(list(order)), twin.offset, twin.nodes
        finally:
            sys.setrecursionlimit(depth)

    return dive


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled dive, or None where the package was installed without one."""
    library = load_library("_offsets")
    if library is not None:
        array, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        library.offsets_dive.restype = ctypes.c_int
        library.offsets_dive.argtypes = [number, number, *[array] * 7, whole, whole, whole, array, array, array]
    return library


def native_dive(library: ctypes.CDLL, cliques: Cliques) -> Dive:
    """Dives in C, over flat copies."""
    buffers = len(cliques.near)
    # One more, so that even an empty array has an address.
    start = np.cumsum([0, *map(len, cliques.near)], dtype=np.int32)
    near = np.array([*(c for row in cliques.near for c in row), 0], np.int32)

    def dive(capacity: int, order: Sequence[int], weight: int, noise: Sequence[int], limit: int) -> tuple[int, list[int], int]:
        left, rank = np.array(order, np.int32), np.empty(buffers, np.int32)
        rank[left] = np.arange(buffers, dtype=np.int32)
        chance, offset, nodes = np.array([*noise, 0], np.int64), np.zeros(buffers, np.int64), np.zeros(1, np.int64)
        arrays: list[npt.NDArray[Any]] = [cliques.begin, cliques.end, cliques.size, start, near, rank, chance]
        pointers = [a.ctypes.data for a in arrays]
        answers = [a.ctypes.data for a in (left, offset, nodes)]
        verdict = library.offsets_dive(buffers, cliques.count, *pointers, capacity, weight, limit, *answers)
        if verdict not in (FOUND, FAILED, CUT):
            raise MemoryError("no memory for the search for offsets")
        return verdict, offset.tolist(), int(nodes[0])

    return dive
