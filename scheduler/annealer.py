"""The annealer that local search runs on: compiled where the package was built with a compiler, the Python twin elsewhere.

The compiled one is a shared library beside this module without a dependency of its own; it is loaded when the first annealer is made.
Both make the same moves for the same seed, so a plan does not depend on which one found it, only the number of moves within a time limit
does: the twin does some thousands a second where the compiled one does a million.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .reduce import Reduced
from .twin import SPREAD, Twin, swappable

__all__ = ["Annealer", "Compiled", "library", "make_annealer"]


class Annealer(Protocol):
    """A sequence of reduced ops under simulated annealing, with the best one met."""

    compiled: bool

    def load(self, sequence: Sequence[int], seed: int) -> None:
        """Start from a valid sequence, which becomes the best one, with chance seeded anew."""

    def run(self, moves: int, budget: int, hot: float, cold: float, floor: float, aim: bool = False) -> None:
        """Do a number of moves.

        Args:
            moves: how many.
            budget: bytes, resident ones included.
            hot: temperature of the first move, in the unit of the costs.
            cold: temperature of the last one; it falls geometrically in between.
            floor: stop when the best sequence within the budget takes no more than this.
            aim: while over the budget, make most moves at the peak.
        """

    def restart(self) -> None:
        """Go back to the best sequence."""

    def best(self) -> tuple[float, int]:
        """Cost and peak bytes of the best sequence: the cheapest within the budget, or the one of the lowest peak."""

    def sequence(self) -> list[int]:
        """The best sequence."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled annealer, or None, with a RuntimeWarning that says what is lost, where the package was installed without one."""
    here = Path(__file__).parent
    path = next((path for suffix in EXTENSION_SUFFIXES if (path := here / f"_annealer{suffix}").exists()), None)
    try:
        if path is None:
            raise OSError("the package was installed without it")
        found = ctypes.CDLL(str(path))
    except OSError as error:
        lost = "auto searches about 200 times fewer sequences a second, and its plans cost more on large problems"
        warnings.warn(f"no compiled annealer ({error}): {lost}; install a C compiler and onnxremat again", RuntimeWarning, stacklevel=3)
        return None
    pointer, whole, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    found.annealer_new.restype = pointer
    found.annealer_new.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, whole, *[pointer] * 7]
    found.annealer_free.argtypes = [pointer]
    found.annealer_free.restype = None
    found.annealer_load.argtypes = [pointer, pointer, ctypes.c_int, ctypes.c_uint64]
    found.annealer_run.argtypes = [pointer, whole, whole, number, number, number, ctypes.c_int]
    found.annealer_restart.argtypes = [pointer]
    found.annealer_best.argtypes = [pointer, pointer]
    found.annealer_best.restype = number
    found.annealer_length.argtypes = [pointer]
    found.annealer_sequence.argtypes = [pointer, pointer]
    return found


def _ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    # One more, so that even an empty array has an address.
    return np.array([*values, 0], dtype=np.int32)


class Compiled:
    """The annealer in C."""

    compiled = True

    def __init__(self, lib: ctypes.CDLL, reduced: Reduced) -> None:
        n, m = reduced.count, len(reduced.size)
        self._lib = lib
        tables: tuple[Sequence[Sequence[int]], ...] = (
            reduced.reads,
            reduced.again,
            reduced.outs,
            reduced.killers_first,
            reduced.killers_again,
            [list(pairs) for pairs in reduced.takeover],
        )
        starts = [_ints([0, *np.cumsum([len(row) for row in table], dtype=np.int64).tolist()]) for table in tables]
        values = [_ints([v for row in table for v in row]) for table in tables]
        flags = [*reduced.rerun, *reduced.movable, *(swappable(reduced, o) for o in range(n)), *reduced.held, False]
        arrays: list[npt.NDArray[Any]] = [
            np.array([*reduced.cost, 0.0], dtype=np.float64),
            np.array([*reduced.workspace, 0], dtype=np.int64),
            np.array([*reduced.size, 0], dtype=np.int64),
            _ints(reduced.producer),
            np.array(flags, dtype=np.uint8),
            np.array([a.ctypes.data for a in starts], dtype=np.uintp),
            np.array([a.ctypes.data for a in values], dtype=np.uintp),
        ]
        self._state: int | None = lib.annealer_new(n, m, SPREAD, reduced.resident, *[a.ctypes.data for a in arrays])
        self._check(self._state is not None)

    def __del__(self) -> None:
        if getattr(self, "_state", None) is not None:
            self._lib.annealer_free(self._state)

    @staticmethod
    def _check(done: int) -> None:
        if not done:
            raise MemoryError("the annealer got no memory; close other programs, or plan with strategy chen_greedy")

    def load(self, sequence: Sequence[int], seed: int) -> None:
        array = _ints(sequence)
        self._check(self._lib.annealer_load(self._state, array.ctypes.data, len(sequence), seed))

    def run(self, moves: int, budget: int, hot: float, cold: float, floor: float, aim: bool = False) -> None:
        self._check(self._lib.annealer_run(self._state, moves, budget, hot, cold, floor, aim))

    def restart(self) -> None:
        self._check(self._lib.annealer_restart(self._state))

    def best(self) -> tuple[float, int]:
        peak = ctypes.c_int64()
        seconds = float(self._lib.annealer_best(self._state, ctypes.byref(peak)))
        return seconds, peak.value

    def sequence(self) -> list[int]:
        array = np.empty(self._lib.annealer_length(self._state), dtype=np.int32)
        count = self._lib.annealer_sequence(self._state, array.ctypes.data)
        return [int(o) for o in array[:count]]


def make_annealer(reduced: Reduced) -> Annealer:
    """An annealer for a reduced problem, compiled where that is possible."""
    lib = library()
    return Twin(reduced) if lib is None else Compiled(lib, reduced)
