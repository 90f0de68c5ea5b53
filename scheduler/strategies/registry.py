"""The registry of strategies, and what each is given."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import StrategyError
from ..evaluate import evaluate
from ..problem import Problem
from ..proof import Proof
from ..prover import Prover
from ..reduce import Reduced, reduce_problem

__all__ = ["ROUNDING", "Context", "Progress", "Strategy", "distinct_strategies", "get_strategy", "register", "strategies"]

#: Relative distance of a plan from its bound that is nothing but the rounding of the solvers.
ROUNDING = 4e-6


@dataclass(frozen=True, slots=True)
class Progress:
    """A message while solving.

    Attributes:
        strategy: its name.
        seconds: time of the best plan within the budget so far, None before the first.
        elapsed: wall seconds spent.
        bound: seconds below which no plan for the budget is, as far as proven by now.
        left: wall seconds left.
    """

    strategy: str
    seconds: float | None
    elapsed: float
    bound: float = 0.0
    left: float = 0.0

    @property
    def gap(self) -> float | None:
        """How far the best plan may be from the optimum, relative; None where there is no plan or no bound."""
        return None if self.seconds is None or self.bound <= 0 else max(0.0, self.seconds / self.bound - 1)


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
        bound: seconds below which no plan for the budget is, as far as proven by now.
        prover: proves bounds in this process; what it solves may be where a strategy starts.
        proof: the same, gone on with in a process beside the strategy, whose bound is taken over as it rises.
        proof_seconds: processor seconds that this one may take; 0 where none is wanted.
        work_limit: moves of local search on each of its two lanes; None leaves their number to the strategy.
        hint: a valid sequence of problem ops to start from, whether or not it is within the budget; None for none.
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
    bound: float = 0.0
    proof: Proof | None = None
    proof_seconds: float = 0.0
    work_limit: int | None = None
    hint: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._reduced: Reduced | None = None

    @cached_property
    def prover(self) -> Prover:
        """Proves bounds for the problem and budget."""
        return Prover(self.reduced, self.budget)

    def prove_beside(self) -> None:
        """Have the proof go on in a process of its own, where one is wanted and none is at work."""
        if self.proof is None and self.proof_seconds > 0 and not self.prover.done and not self.proven_optimal:
            self.proof = Proof(self.prover, self.proof_seconds)
            self.proof.tell(self.best_seconds)

    @property
    def reduced(self) -> Reduced:
        """The problem with its views merged."""
        if self._reduced is None:
            self._reduced = reduce_problem(self.problem)
        return self._reduced

    def share(self, reduced: Reduced) -> None:
        """Take over the reduced problem of another context of the same problem."""
        self._reduced = reduced

    @property
    def proven_optimal(self) -> bool:
        """Whether no plan can be better than the best one by more than what solvers round."""
        if self.proof is not None:
            self.raise_bound(self.proof.bound)
        return self.best is not None and self.best_seconds <= self.bound * (1 + ROUNDING)

    def raise_bound(self, proven: float) -> None:
        """Take a proven bound into account; one above a plan that exists can only be a solver's rounding and is not claimed."""
        if self.bound < proven <= self.best_seconds:
            self.bound = proven
            self.tell(None)

    def tell(self, seconds: float | None) -> None:
        """Tell of the best plan so far, or of a better sequence of that many seconds that is still being worked on."""
        if self.proof is not None and self.bound < self.proof.bound <= self.best_seconds:
            self.bound = self.proof.bound
        if self.progress is not None:
            best = min(self.best_seconds, float("inf") if seconds is None else seconds)
            now = time.monotonic()
            known = None if best == float("inf") else best
            self.progress(Progress(self.strategy, known, now - self.started, self.bound, max(0.0, self.deadline - now)))

    @property
    def left(self) -> float:
        """Seconds of wall time left."""
        return self.deadline - time.monotonic()

    def offer(self, sequence: Sequence[int]) -> bool:
        """Judge a sequence of reduced ops by the simulator and keep it where it is the best; returns whether it is within the budget."""
        return self.offer_ops(self.reduced.expand(sequence))

    def offer_ops(self, sequence: Sequence[int]) -> bool:
        """The same for a sequence of problem ops; raises PlanError where it cannot run, which is a fault of the strategy."""
        found = evaluate(self.problem, sequence)
        if found.peak_bytes < self.lowest_peak:
            self.lowest, self.lowest_peak = list(sequence), found.peak_bytes
        if found.peak_bytes > self.budget:
            return False
        if found.seconds < self.best_seconds:
            self.best, self.best_seconds = list(sequence), found.seconds
            if self.proof is not None:
                self.proof.tell(found.seconds)
            self.tell(None)
        return True

    def offer_all(self, sequences: Iterable[Sequence[int]]) -> None:
        """Offer each of several sequences of reduced ops."""
        for sequence in sequences:
            self.offer(sequence)


Strategy = Callable[[Context], None]
_REGISTRY: dict[str, Strategy] = {}
_PARTS: set[str] = set()


def register(name: str, part: bool = False) -> Callable[[Strategy], Strategy]:
    """Register a strategy under a name: a function that offers what it finds to its context; ``part`` where another strategy runs it too."""

    def enter(strategy: Strategy) -> Strategy:
        if name in _REGISTRY:
            raise StrategyError(f"strategy {name!r} is registered twice")
        _REGISTRY[name] = strategy
        if part:
            _PARTS.add(name)
        return strategy

    return enter


def strategies() -> tuple[str, ...]:
    """The names of all strategies, sorted."""
    return tuple(sorted(_REGISTRY))


def distinct_strategies() -> tuple[str, ...]:
    """The names of the strategies that are not a part of another, sorted."""
    return tuple(name for name in strategies() if name not in _PARTS)


def get_strategy(name: str) -> Strategy:
    """The strategy of that name; raises StrategyError, naming the known ones."""
    try:
        return _REGISTRY[name]
    except KeyError:
        raise StrategyError(f"unknown strategy {name!r}; known: {', '.join(strategies())}") from None
