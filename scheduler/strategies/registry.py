"""The registry of strategies, and what each is given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import StrategyError
from ..evaluate import evaluate
from ..problem import Problem
from ..reduce import Reduced, reduce_problem

__all__ = ["Context", "Progress", "Strategy", "get_strategy", "register", "strategies"]


@dataclass(frozen=True, slots=True)
class Progress:
    """A message while solving: the strategy, its best seconds within the budget (None before the first), and the wall time spent."""

    strategy: str
    seconds: float | None
    elapsed: float


@dataclass
class Context:
    """What a strategy works on, and where it leaves what it finds.

    Attributes:
        problem: the checked problem.
        budget: bytes, resident ones included.
        deadline: ``time.monotonic()`` at which to stop; a strategy may return later only by the time of one short step.
        seed: source of chance.
        progress: told of every new best plan.
        best: the best sequence of problem ops within the budget so far.
        lowest: the sequence with the lowest peak so far.
    """

    problem: Problem
    budget: int
    deadline: float
    seed: int = 0
    progress: Callable[[Progress], None] | None = None
    strategy: str = ""
    started: float = field(default_factory=time.monotonic)
    best: list[int] | None = None
    best_seconds: float = float("inf")
    lowest: list[int] | None = None
    lowest_peak: int = 1 << 62

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._reduced: Reduced | None = None

    @property
    def reduced(self) -> Reduced:
        """The problem with its views merged."""
        if self._reduced is None:
            self._reduced = reduce_problem(self.problem)
        return self._reduced

    @property
    def left(self) -> float:
        """Seconds of wall time left."""
        return self.deadline - time.monotonic()

    def offer(self, sequence: Sequence[int]) -> bool:
        """Judge a sequence of reduced ops by the simulator and keep it where it is the best; returns whether it is within the budget."""
        return self.offer_ops(self.reduced.expand(sequence))

    def offer_ops(self, sequence: list[int]) -> bool:
        """The same for a sequence of problem ops; raises PlanError where it cannot run, which is a fault of the strategy."""
        found = evaluate(self.problem, sequence)
        if found.peak_bytes < self.lowest_peak:
            self.lowest, self.lowest_peak = sequence, found.peak_bytes
        if found.peak_bytes > self.budget:
            return False
        if found.seconds < self.best_seconds:
            self.best, self.best_seconds = sequence, found.seconds
            if self.progress is not None:
                self.progress(Progress(self.strategy, found.seconds, time.monotonic() - self.started))
        return True

    def offer_all(self, sequences: Iterable[Sequence[int]]) -> None:
        """Offer each of several sequences of reduced ops."""
        for sequence in sequences:
            self.offer(sequence)


Strategy = Callable[[Context], None]
_REGISTRY: dict[str, Strategy] = {}


def register(name: str) -> Callable[[Strategy], Strategy]:
    """Register a strategy under a name: a function that offers what it finds to its context."""

    def enter(strategy: Strategy) -> Strategy:
        if name in _REGISTRY:
            raise StrategyError(f"strategy {name!r} is registered twice")
        _REGISTRY[name] = strategy
        return strategy

    return enter


def strategies() -> tuple[str, ...]:
    """The names of all strategies, sorted."""
    return tuple(sorted(_REGISTRY))


def get_strategy(name: str) -> Strategy:
    """The strategy of that name; raises StrategyError, naming the known ones."""
    try:
        return _REGISTRY[name]
    except KeyError:
        raise StrategyError(f"unknown strategy {name!r}; known: {', '.join(strategies())}") from None
