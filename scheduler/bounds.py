"""Proven floors: bytes below which no plan exists, seconds below which none can be."""

from __future__ import annotations

import math

from .problem import Problem

__all__ = ["bytes_floor", "inplace_credit", "seconds_floor"]


def seconds_floor(problem: Problem) -> float:
    """Seconds that every valid sequence takes: each op that must run, once."""
    return math.fsum(op.seconds for op, needed in zip(problem.ops, problem.index.must_run, strict=True) if needed)


def bytes_floor(problem: Problem) -> int:
    """Bytes that every plan without swap needs: the largest working set of an op that must run, the outputs, the optimizer's peak.

    While an op runs, the storages that it reads and writes are all there, and its workspace; of an in-place pair one buffer may serve both.
    """
    index, tensors = problem.index, problem.tensors
    floor = 0
    for o, op in enumerate(problem.ops):
        if not index.must_run[o]:
            continue
        reads = {index.root[t] for t in index.first_reads[o] if not index.persistent[t]}
        size = sum(tensors[r].bytes for r in reads) + sum(tensors[t].bytes for t in index.own[o])
        floor = max(floor, size + op.workspace_bytes - inplace_credit(problem, o))
    held = {index.root[t] for t, tensor in enumerate(tensors) if tensor.output and not index.persistent[t]}
    floor = max(floor, sum(tensors[r].bytes for r in held))
    return max(problem.resident_bytes + floor, problem.optimizer_peak_bytes)


def inplace_credit(problem: Problem, o: int) -> int:
    """The most that in-place pairs of an op can save: each output at most once."""
    index, tensors = problem.index, problem.tensors
    targets = {b for a, b in problem.ops[o].inplace if tensors[index.root[a]].bytes == tensors[b].bytes}
    return sum(tensors[b].bytes for b in targets)
