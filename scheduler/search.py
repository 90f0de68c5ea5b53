"""Local search on the sequence of runs, after FastSA (Shen et al., NeurIPS 2023): rounds of simulated annealing on two lanes.

A round anneals two sequences at once, each on a core of its own where the annealer is compiled: one from a start of the portfolio, from
hot, the other from the best sequence so far, from less hot.  The lanes meet at the end of a round.  What they find is a function of the
seed and of the work, however many cores there are.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .annealer import Annealer, make_annealer
from .reduce import Reduced

__all__ = ["Round", "Search", "rounds"]

# Temperatures relative to the cost of the base order: those of the lane that explores, those of the lane that refines, and their end.
_EXPLORE, _REFINE, _COLD = (3e-3, 1e-2, 5e-3, 3e-3), (1e-3, 3e-3, 3e-4, 1e-3), 1e-6
# Moves per chunk, after which the time is looked at and progress is told.
_CHUNK_COMPILED, _CHUNK_TWIN = 25_000, 50
_POLL_SECONDS = 0.1
# The Python twin makes fewer moves, so that its rounds end as well.
_TWIN_SHARE = 1 / 128


@dataclass(frozen=True, slots=True)
class Round:
    """A round: moves of each lane, and the temperature that each starts at."""

    moves: int
    explore: float
    refine: float


def rounds(moves: int, count: int) -> list[Round]:
    """Rounds of growing length that make ``moves`` moves on each lane together.

    Args:
        moves: of each lane.
        count: number of reduced ops; a first round of 600 moves for each shows early what can be reached.
    """
    out: list[Round] = []
    length = max(20_000, 600 * count)
    for k in itertools.count():
        if moves <= 0:
            return out
        # A remainder shorter than half a round joins the last one.
        step = moves if moves < 1.5 * length else length
        out.append(Round(step, _EXPLORE[k % len(_EXPLORE)], _REFINE[k % len(_REFINE)]))
        moves -= step
        length = int(length * 1.6)
    return out


@dataclass
class _Lane:
    annealer: Annealer
    best: tuple[float, int] = (float("inf"), 1 << 62)
    error: BaseException | None = None


@dataclass
class Search:
    """A search on one problem and budget.

    Attributes:
        reduced: the problem.
        budget: bytes, resident ones included.
        deadline: ``time.monotonic()`` at which to stop.
        seed: source of chance.
        floor: cost below which no sequence can be; the search stops there.
        tell: called now and then with the cost of the best sequence within the budget so far, None where there is none.
        aim: while over the budget, make most moves at the peak: for a first sequence within it.
    """

    reduced: Reduced
    budget: int
    deadline: float
    seed: int
    floor: float = 0.0
    tell: Callable[[float | None], None] = lambda seconds: None
    aim: bool = False
    _lanes: list[_Lane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lanes = [_Lane(make_annealer(self.reduced)) for _ in range(2)]
        self.scale = max(sum(self.reduced.cost), 1e-300)
        self.count = 0

    @property
    def compiled(self) -> bool:
        """Whether the compiled annealer is at work."""
        return self._lanes[0].annealer.compiled

    def run(self, step: Round, explore: Sequence[int], refine: Sequence[int]) -> list[list[int]]:
        """Anneal both sequences for a round, or until the deadline.

        Args:
            step: the round.
            explore: where the first lane starts, reduced ops.
            refine: where the second one does.

        Returns:
            The best sequence of each lane.

        Raises:
            KeyboardInterrupt: the lanes have stopped; :meth:`found` has what they came to.
        """
        moves = step.moves if self.compiled else max(200, int(step.moves * _TWIN_SHARE))
        jobs = []
        for lane, start, heat in zip(self._lanes, (explore, refine), (step.explore, step.refine), strict=True):
            self.count += 1
            lane.annealer.load(start, (self.seed * 1_000_003 + self.count) & 0xFFFFFFFFFFFF)
            lane.best = lane.annealer.best()
            jobs.append((lane, moves, heat))
        stop = threading.Event()
        if not self.compiled:
            for job in jobs:
                self._anneal(*job, stop)
                self.tell(self._within())
        else:
            threads = [threading.Thread(target=self._anneal, args=(*job, stop), daemon=True) for job in jobs]
            try:
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    for thread in threads:
                        thread.join(_POLL_SECONDS)
                    self.tell(self._within())
            finally:
                stop.set()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
        for lane in self._lanes:
            if lane.error is not None:
                raise lane.error
        return self.found()

    def found(self) -> list[list[int]]:
        """The best sequence of each lane so far."""
        return [lane.annealer.sequence() for lane in self._lanes]

    def _within(self) -> float | None:
        return min((lane.best[0] for lane in self._lanes if lane.best[1] <= self.budget), default=None)

    def _anneal(self, lane: _Lane, moves: int, heat: float, stop: threading.Event) -> None:
        """Do the moves of a round in chunks, as if they were one."""
        chunk = _CHUNK_COMPILED if self.compiled else _CHUNK_TWIN
        chunks = max(1, -(-moves // chunk))
        try:
            for k in range(chunks):
                if stop.is_set() or time.monotonic() > self.deadline:
                    return
                hot, cold = (self.scale * heat * (_COLD / heat) ** (i / chunks) for i in (k, k + 1))
                lane.annealer.run(moves * (k + 1) // chunks - moves * k // chunks, self.budget, hot, cold, self.floor, self.aim)
                lane.best = lane.annealer.best()
                if lane.best[1] <= self.budget and lane.best[0] <= self.floor:
                    return
        except MemoryError as error:
            lane.error = error
