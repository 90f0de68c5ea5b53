"""A bound that rises with the time given: the programs of :mod:`.relaxation` for many paths, and more time for those that promise most.

Linear relaxations with few stages often bind more than those with many: half of an input, held over two stages, makes a whole output
there.  Integer programs with one to four stages are small, and where memory lies along a chain they alone often meet the optimum.  So
work goes in rounds: each lets in programs with more stages, and gives twice the time of the one before to those with the best bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .reduce import Reduced
from .relaxation import StageProgram, memory_paths, rounded_up

__all__ = ["Prover", "best_bound"]

# Numbers of stages of the programs that each round lets in.
_STAGES = ((1,), (2, 3), (4, 6), (9, 14), (20, 32), (52, 80))
# Variables beyond which a relaxation takes longer than it is worth, and those beyond which an integer program does.
_VARIABLES, _INTEGER_VARIABLES = 120_000, 60_000
# Share of the room that the storages left out of a large problem take together, and the size of problem from which they are left out.
_IGNORED, _LARGE = 0.01, 750
# The first rounds are limited by work, in nodes of an integer program, the others by seconds, which double with each round.
_FIRST, _NODES, _SECONDS = 2, 20, 2.0
# How many of the programs known from earlier rounds get more time in each.
_CHOSEN = 4
# Relative distance at which a bound meets a plan: what is taken off for the solver's rounding, and a little.
_ENOUGH = 4e-6


@dataclass
class _Entry:
    """A program under work: the best bound it has given, and whether more time may raise it."""

    program: StageProgram
    bound: float = 0.0
    open: bool = True


@dataclass
class Prover:
    """Proves bounds for one problem and budget; what is given up for lack of time goes on at the next call.

    Attributes:
        reduced: the problem.
        budget: bytes, resident ones included.
        bound: seconds below which no sequence stays, as far as proven; it never falls.
        done: whether nothing is left that could raise it.
        sequences: solutions of integer programs, with the bound that each program gave: see :attr:`.relaxation.Answer.sequence`.
    """

    reduced: Reduced
    budget: int
    bound: float = 0.0
    done: bool = False
    sequences: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    _entries: list[_Entry] = field(default_factory=list)
    _fresh: list[list[int]] = field(default_factory=list)
    _todo: list[_Entry] = field(default_factory=list)
    _round: int = -1

    def work(
        self,
        seconds: float,
        enough: Callable[[], float] = lambda: math.inf,
        tell: Callable[[float], None] = lambda bound: None,
        clock: Callable[[], float] = time.monotonic,
        first: bool = False,
    ) -> float:
        """Raise the bound for a while.

        Args:
            seconds: by the clock; the solver's last step may take a little longer.
            enough: the cost of the best plan known: a bound that meets it ends the work.
            tell: called with every better bound.
            clock: tells seconds.
            first: end after the first rounds, whose outcome does not depend on the time they take.

        Returns:
            The bound.

        Raises:
            StrategyError: scipy is not installed.
        """
        end = clock() + seconds
        while not self.done and not (first and self.begun):
            left = end - clock()
            if left <= 0.02:
                break
            before = self.bound
            self._step(left)
            if self.bound > before:
                tell(self.bound)
            if self.bound >= enough() * (1 - _ENOUGH):
                self.done = True
        return self.bound

    @property
    def begun(self) -> bool:
        """Whether the first rounds, which are limited by work rather than by time, are over."""
        return self._round >= _FIRST or self.done

    def _step(self, left: float) -> None:
        """One relaxation or one integer program, within ``left`` seconds, or the choice of the next ones."""
        limit = _SECONDS * 2 ** (self._round - _FIRST) if self.begun else math.inf
        if self._fresh:
            size = self.reduced.count + len(self.reduced.size)
            path = self._fresh.pop(0)
            program = StageProgram(self.reduced, self.budget, path, _IGNORED if size > _LARGE else 0.0)
            entry = _Entry(program)
            if program.size <= _VARIABLES:
                self._solve(entry, min(left, 2 * limit), False)
                entry.open = program.size <= _INTEGER_VARIABLES
                self._entries.append(entry)
                # What comes new has its first try in this round.
                self._todo.append(entry)
        elif self._todo:
            self._todo.sort(key=lambda e: -e.bound)
            entry = self._todo.pop(0)
            if entry.open:
                self._solve(entry, min(left, limit), True)
        else:
            self._next_round()

    def _solve(self, entry: _Entry, limit: float, whole: bool) -> None:
        answer = entry.program.solve(limit, whole, None if self.begun else _NODES)
        if whole:
            entry.open = not answer.final
        # That no plan exists is for others to prove.
        if math.isfinite(answer.bound):
            entry.bound = max(entry.bound, answer.bound)
            self.bound = max(self.bound, rounded_up(self.reduced, answer.bound))
        if answer.sequence is not None:
            self.sequences.append((entry.bound, answer.sequence))

    def _next_round(self) -> None:
        self._round += 1
        known = sorted((e for e in self._entries if e.open), key=lambda e: -e.bound)
        self._todo = known[:_CHOSEN]
        if self._round < len(_STAGES):
            seen: list[list[int]] = []
            for stages in _STAGES[self._round]:
                for path in memory_paths(self.reduced, stages):
                    # A shorter path than asked for is the whole one, and comes again for every larger number.
                    if path not in seen and (len(path) == stages or stages == _first_at_least(len(path))):
                        seen.append(path)
            self._fresh = seen
        elif not self._todo:
            self.done = True


def _first_at_least(length: int) -> int:
    """The first number of stages tried that takes in a whole path of this length."""
    return next((k for group in _STAGES for k in group if k >= length), 0)


def best_bound(reduced: Reduced, budget: int, seconds: float, enough: float = math.inf) -> float:
    """The best bound that is proven within ``seconds`` of wall time; 0 where none.

    Args:
        reduced: the problem.
        budget: bytes, resident ones included.
        seconds: wall time.
        enough: the cost of a plan: a bound that meets it ends the work.
    """
    return Prover(reduced, budget).work(seconds, lambda: enough)
