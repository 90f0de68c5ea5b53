"""Proven floors: bytes below which no plan exists, seconds below which none can be."""

from __future__ import annotations

import math

from .problem import Problem
from .swap import swappable

__all__ = ["bytes_floor", "inplace_credit", "seconds_floor"]

# Storages that exist once, largest first, beyond which the rest are left out: a floor is to be found at once.
_AWAITED = 1000


def seconds_floor(problem: Problem) -> float:
    """Seconds that every valid sequence takes: each op that must run, once."""
    return math.fsum(op.seconds for op, needed in zip(problem.ops, problem.index.must_run, strict=True) if needed)


def bytes_floor(problem: Problem) -> int:
    """Bytes that every plan needs, in any order and with any recomputes, and with swaps where the problem has a channel.

    It is the largest of: what an op that must run needs at its first run, the outputs, the optimizer's peak.  While an op runs, the storages
    that it reads and writes are all there, and its workspace; of an in-place pair one buffer may serve both.  So are those that can't be
    made again and that a reader still awaits (see :func:`_awaited`), unless they may be away meanwhile.
    """
    index, tensors = problem.index, problem.tensors
    floor = 0
    awaited = _awaited(problem)
    for o, op in enumerate(problem.ops):
        if not index.must_run[o]:
            continue
        reads = {index.root[t] for t in index.first_reads[o] if not index.persistent[t]}
        size = sum(tensors[r].bytes for r in reads) + sum(tensors[t].bytes for t in index.own[o])
        size += sum(tensors[r].bytes for r in awaited[o] if r not in reads)
        floor = max(floor, size + op.workspace_bytes - inplace_credit(problem, o))
    held = {index.root[t] for t, tensor in enumerate(tensors) if tensor.output and not index.persistent[t]}
    floor = max(floor, sum(tensors[r].bytes for r in held))
    return max(problem.resident_bytes + floor, problem.optimizer_peak_bytes)


def _awaited(problem: Problem) -> list[list[int]]:
    """Per op, the storages that are there at its first run in every valid sequence, because they exist once and are read later.

    A pinned op runs once, so what it writes stays until the last of its readers' first runs.  An op that depends on the pinned one, and that
    a reader depends on, first runs in between.
    """
    index, ops = problem.index, problem.ops
    # Sets of ops as bits: those whose first run comes before (after) that of an op in every sequence.
    before = [0] * len(ops)
    after = [0] * len(ops)
    for o in range(len(ops)):
        for p in {problem.tensors[t].producer for t in index.first_reads[o]}:
            before[o] |= before[p] | 1 << p
    for o in range(len(ops) - 1, -1, -1):
        for p in {problem.tensors[t].producer for t in index.first_reads[o]}:
            after[p] |= after[o] | 1 << o
    readers: dict[int, int] = {}
    for o in range(len(ops)):
        if index.must_run[o]:
            for t in index.first_reads[o]:
                readers[index.root[t]] = readers.get(index.root[t], 0) | before[o]
    away = swappable(problem) if problem.transfer is not None else {}
    once = [t for o, op in enumerate(ops) if op.pinned for t in index.own[o] if problem.tensors[t].bytes and t not in away]
    once.sort(key=lambda t: -problem.tensors[t].bytes)
    found: list[list[int]] = [[] for _ in ops]
    for t in once[:_AWAITED]:
        between = after[problem.tensors[t].producer] & readers.get(t, 0)
        while between:
            lowest = between & -between
            found[lowest.bit_length() - 1].append(t)
            between ^= lowest
    return found


def inplace_credit(problem: Problem, o: int) -> int:
    """The most that in-place pairs of an op can save: each output at most once."""
    index, tensors = problem.index, problem.tensors
    targets = {b for a, b in problem.ops[o].inplace if tensors[index.root[a]].bytes == tensors[b].bytes}
    return sum(tensors[b].bytes for b in targets)
