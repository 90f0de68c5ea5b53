"""Undoing fragmentation: runs are moved where no data depends on it, which costs no time.

Hill climbing over moves of single runs.  The inner loop is compiled where the package was built with a compiler (``_arena.c``); the Python
twin makes the same moves, some tens a second where the compiled one makes some thousands.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..emit import SMALL_BYTES
from ..ops import traits
from ..scheduler import PlanError, Problem, evaluate
from .native import load_library
from .simulate import UNLIMITED, place

#: Moves that are tried at most where the caller does not say.
MOVES = 200_000
#: How far moves go.
_REACH = (3, 15, 60)
_MASK = (1 << 64) - 1
#: Moves between two looks at the clock, compiled and not.
_COMPILED_CHUNK, _CHUNK = 500, 5

Moves = Callable[[list[int], int, int], tuple[list[int], int, int]]


def compact(
    problem: Problem,
    sequence: Sequence[int],
    live_limit: int,
    arena_limit: int,
    seconds: float,
    seed: int = 0,
    moves: int = MOVES,
    capacity: int = UNLIMITED,
) -> list[int]:
    """Reorder a sequence so that its buffers need a smaller arena.

    Args:
        problem: the problem.
        sequence: a valid sequence of runs.
        live_limit: peak of live bytes that must not be exceeded (resident bytes included).
        arena_limit: arena bytes at which the search ends.
        seconds: wall seconds at which it ends too.
        seed: source of chance.
        moves: moves that are tried at most.
        capacity: bytes of the arena; best-fit places buffers otherwise where its end is near.

    Returns:
        A sequence of the same runs (so of the same time) that is valid and whose arena is no larger.
    """
    library = compiled()
    chunk = _CHUNK if library is None else _COMPILED_CHUNK
    search = (
        twin_moves(problem, live_limit, arena_limit, capacity)
        if library is None
        else native_moves(library, problem, live_limit, arena_limit, capacity)
    )
    best, state = list(sequence), seed & _MASK
    deadline = time.monotonic() + seconds
    for done in range(0, moves, chunk):
        best, size, state = search(best, min(chunk, moves - done), state)
        if size <= arena_limit or time.monotonic() > deadline:
            break
    return best


def twin_moves(problem: Problem, live_limit: int, arena_limit: int, capacity: int = UNLIMITED) -> Moves:
    """The moves in Python: from a sequence, a number of moves and the state of chance to a sequence, its arena's bytes and the state after."""

    def size_of(sequence: Sequence[int]) -> int | None:
        try:
            if evaluate(problem, sequence).profile.max(initial=0) > live_limit:
                return None
        except PlanError:
            return None
        return place(problem, sequence, capacity, overflow=True).arena_bytes

    def search(best: list[int], moves: int, state: int) -> tuple[list[int], int, int]:
        smallest = place(problem, best, capacity, overflow=True).arena_bytes

        def below(bound: int) -> int:
            # splitmix64
            nonlocal state
            state = (state + 0x9E3779B97F4A7C15) & _MASK
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
            return (((z ^ (z >> 31)) >> 33) * bound) >> 31

        for _ in range(moves):
            if smallest <= arena_limit:
                break
            source, distance = below(len(best)), 1 + below(_REACH[below(len(_REACH))])
            target = source + distance if below(2) else source - distance
            target = max(0, min(len(best) - 1, target))
            if source == target:
                continue
            trial = best[:source] + best[source + 1 :]
            trial.insert(target, best[source])
            size = size_of(trial)
            if size is not None and size <= smallest:
                best, smallest = trial, size
        return best, smallest, state

    return search


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled inner loop, or None where the package was installed without one."""
    library = load_library("_arena")
    if library is None:
        return None
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.arena_compact.restype = whole
    library.arena_compact.argtypes = [pointer, number, pointer, whole, whole, whole, whole, pointer, number, pointer]
    return library


class _Table(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("v", ctypes.c_void_p)]


_TABLES: tuple[str, ...] = ("first_reads", "again_reads", "first_old", "again_old", "first_views", "again_views")
_TABLES += ("outputs", "own", "written", "inplace")


class _Problem(ctypes.Structure):
    _fields_ = [
        *[("ops", ctypes.c_int), ("tensors", ctypes.c_int), ("resident", ctypes.c_int64), ("small", ctypes.c_int64)],
        *[(name, _Table) for name in _TABLES],
        *[(name, ctypes.c_void_p) for name in ("bytes", "workspace", "alias", "persistent", "output", "optional", "early")],
    ]


def native_moves(library: ctypes.CDLL, problem: Problem, live_limit: int, arena_limit: int, capacity: int = UNLIMITED) -> Moves:
    """The moves in C, over flat copies of the problem."""
    ops, tensors, index = problem.ops, problem.tensors, problem.index
    kept: list[npt.NDArray[Any]] = []

    def flat(values: Iterable[int], dtype: type) -> int:
        # One more, so that even an empty array has an address.
        kept.append(np.array([*values, 0], dtype=dtype))
        return kept[-1].ctypes.data

    def table(rows: Iterable[Iterable[int]]) -> _Table:
        lists = [list(row) for row in rows]
        starts = np.cumsum([0, *map(len, lists)])
        return _Table(flat(starts.tolist(), np.int32), flat(chain.from_iterable(lists), np.int32))

    optional = {op.outputs[i] for op in ops for i in traits(op.op_type).optional_outputs if i < len(op.outputs)}
    tables = {
        **{name: table(getattr(index, name)) for name in ("first_reads", "again_reads", "first_old", "again_old", "own", "written")},
        **{name: table(chain.from_iterable(row) for row in getattr(index, name)) for name in ("first_views", "again_views")},
        "outputs": table(op.outputs for op in ops),
        "inplace": table(chain.from_iterable(op.inplace) for op in ops),
    }
    described = _Problem(
        ops=len(ops),
        tensors=len(tensors),
        resident=problem.resident_bytes,
        small=SMALL_BYTES,
        **tables,
        bytes=flat((t.bytes for t in tensors), np.int64),
        workspace=flat((op.workspace_bytes for op in ops), np.int64),
        alias=flat((t.alias_of for t in tensors), np.int32),
        persistent=flat((t.producer < 0 for t in tensors), np.uint8),
        output=flat((t.output for t in tensors), np.uint8),
        optional=flat((t in optional for t in range(len(tensors))), np.uint8),
        early=flat((traits(op.op_type).scratch_first for op in ops), np.uint8),
    )
    reach = np.array(_REACH, dtype=np.int32)

    def search(best: list[int], moves: int, state: int) -> tuple[list[int], int, int]:
        sequence, chance = np.array(best, dtype=np.int32), np.array([state], dtype=np.uint64)
        smallest = library.arena_compact(
            ctypes.byref(described),
            len(best),
            sequence.ctypes.data,
            live_limit,
            arena_limit,
            capacity,
            moves,
            reach.ctypes.data,
            len(reach),
            chance.ctypes.data,
        )
        if smallest < 0:
            raise MemoryError("no memory for the simulation of the arena")
        return sequence.tolist(), int(smallest), int(chance[0])

    # The tables point into these arrays.
    search.__dict__["arrays"] = kept
    return search
