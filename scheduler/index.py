"""Lookups derived from a problem: storages behind views, readers, ops that must run, writers of each version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .problem import Problem

__all__ = ["Index", "build_index"]


@dataclass(frozen=True, slots=True)
class Index:
    """Lookups by tensor or op index.

    Attributes:
        root: per tensor, the tensor that owns its storage (itself unless it is a view).
        persistent: per tensor, whether that storage is there before the step.
        first_views: per op, pairs (view, tensor from whose instance its first run takes the storage).
        again_views: per op, the same for a recompute.
        own: per op, its outputs with a storage of their own.
        readers: per tensor, the ops that read it (on their first run or on a recompute), ascending.
        first_reads: per op, the tensors that its first run reads, without repetition; what is there before the step is left out
            (a view of it that an op makes is not).
        again_reads: per op, the same for a recompute.
        first_old: per op, the written persistent roots whose old version its first run reads.
        again_old: per op, the same for a recompute.
        written: per op, the persistent roots whose value it replaces.
        required: per op, whether it must run for its own sake (pinned, an output, a side effect, or nobody reads it).
        must_run: per op, whether every valid sequence runs it.
    """

    root: tuple[int, ...]
    persistent: tuple[bool, ...]
    first_views: tuple[tuple[tuple[int, int], ...], ...]
    again_views: tuple[tuple[tuple[int, int], ...], ...]
    own: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    first_reads: tuple[tuple[int, ...], ...]
    again_reads: tuple[tuple[int, ...], ...]
    first_old: tuple[tuple[int, ...], ...]
    again_old: tuple[tuple[int, ...], ...]
    written: tuple[tuple[int, ...], ...]
    required: tuple[bool, ...]
    must_run: tuple[bool, ...]


def _unique(values: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def build_index(problem: Problem) -> Index:
    """Build the lookups of a problem that :func:`check_problem` accepts."""
    ops, tensors = problem.ops, problem.tensors
    root: list[int] = []
    for t in range(len(tensors)):
        r = t
        while tensors[r].alias_of >= 0:
            r = tensors[r].alias_of
        root.append(r)
    persistent = [tensors[r].producer < 0 for r in root]

    def views(outputs: tuple[int, ...], reads: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        pairs = []
        for t in outputs:
            source = tensors[t].alias_of
            if source < 0:
                continue
            while source in outputs and tensors[source].alias_of >= 0:
                source = tensors[source].alias_of
            if source not in reads and source not in outputs:
                # A view may name the root of a chain while the op reads another view of the same storage.
                source = next(u for u in reads if root[u] == root[t])
            pairs.append((t, source))
        return tuple(pairs)

    readers: list[dict[int, None]] = [{} for _ in tensors]
    for i, op in enumerate(ops):
        for t in (*op.inputs, *(op.recompute_inputs or ())):
            readers[t][i] = None

    # A writer reads the old version itself at the moment it replaces it, which is no conflict.
    writers: dict[int, set[int]] = {}
    for i, op in enumerate(ops):
        for t in op.writes:
            writers.setdefault(root[t], set()).add(i)

    def live_reads(reads: tuple[int, ...]) -> tuple[int, ...]:
        return _unique([t for t in reads if tensors[t].producer >= 0])

    def old_reads(i: int, reads: tuple[int, ...]) -> tuple[int, ...]:
        return _unique([root[t] for t in reads if writers.get(root[t], set()) - {i}])

    again = [op.inputs if op.recompute_inputs is None else op.recompute_inputs for op in ops]
    required = [bool(op.pinned or op.writes or any(tensors[t].output for t in op.outputs) or not any(readers[t] for t in op.outputs)) for op in ops]
    must_run = list(required)
    for i in range(len(ops) - 1, -1, -1):
        if must_run[i]:
            for t in ops[i].inputs:
                if tensors[t].producer >= 0:
                    must_run[tensors[t].producer] = True
    return Index(
        root=tuple(root),
        persistent=tuple(persistent),
        first_views=tuple(views(op.outputs, op.inputs) for op in ops),
        again_views=tuple(views(op.outputs, reads) for op, reads in zip(ops, again, strict=True)),
        own=tuple(tuple(t for t in op.outputs if tensors[t].alias_of < 0) for op in ops),
        readers=tuple(tuple(r) for r in readers),
        first_reads=tuple(live_reads(op.inputs) for op in ops),
        again_reads=tuple(live_reads(reads) for reads in again),
        first_old=tuple(old_reads(i, op.inputs) for i, op in enumerate(ops)),
        again_old=tuple(old_reads(i, reads) for i, reads in enumerate(again)),
        written=tuple(_unique([root[t] for t in op.writes]) for op in ops),
        required=tuple(required),
        must_run=tuple(must_run),
    )
