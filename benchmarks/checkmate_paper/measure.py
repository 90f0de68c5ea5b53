"""What each strategy reaches on one network: sequences, their costs and peaks, at any batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.checkmate_paper.networks import CAPACITY, ScaledProblem, forward_cost
from onnxremat.scheduler import Context, Infeasible, Problem, StrategyError, bytes_floor, evaluate, solve
from onnxremat.scheduler.strategies import get_strategy

__all__ = ["BASELINES", "PLANNED", "Curve", "curves", "largest_batch", "search_largest_batch"]

#: The paper's baselines, each at articulation points and linearised; what they propose does not depend on a budget.
BASELINES = ("keep_all", "chen_sqrt_ap", "chen_sqrt_linear", "chen_greedy_ap", "chen_greedy_linear", "griewank_ap", "griewank_linear")
#: Strategies that plan for a budget: the paper's rounded relaxation, its program, and ours.
PLANNED = ("checkmate_lp", "checkmate_ilp", "auto")


@dataclass
class _Recorder(Context):
    """A context that keeps whatever a strategy proposes."""

    proposed: dict[tuple[int, ...], tuple[int, float]] = field(default_factory=dict)

    def offer_ops(self, sequence: list[int]) -> bool:
        """Judge a sequence and remember it."""
        found = evaluate(self.problem, sequence)
        self.proposed[tuple(sequence)] = (found.peak_bytes, found.seconds)
        return super().offer_ops(sequence)


@dataclass
class Curve:
    """What a strategy came to.

    Attributes:
        points: (budget in bytes, cost relative to the unscheduled step) where there is a plan, by rising budget.
        proposed: sequences of ops, each with its cost at the batch of the curve.
        seconds: wall time.
        refused: why it did not work on the problem, or empty.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    proposed: list[tuple[int, ...]] = field(default_factory=list)
    seconds: float = 0.0
    refused: str = ""


def curves(problem: Problem, strategies: Iterable[str], budgets: Sequence[int], time_limit: float) -> dict[str, Curve]:
    """The curve of every strategy over budgets (bytes), with at most ``time_limit`` seconds for a plan."""
    return {name: _baseline(problem, name, time_limit) if name in BASELINES else _planned(problem, name, budgets, time_limit) for name in strategies}


def _baseline(problem: Problem, name: str, time_limit: float) -> Curve:
    started = time.monotonic()
    recorder = _Recorder(problem, 1 << 62, started + time_limit, strategy=name)
    get_strategy(name)(recorder)
    base = evaluate(problem, range(len(problem.ops))).seconds
    curve = Curve(seconds=0.0)
    # What is best for some budget.
    for sequence, (peak, cost) in sorted(recorder.proposed.items(), key=lambda item: item[1]):
        if not curve.points or cost / base < curve.points[-1][1]:
            curve.points.append((peak, cost / base))
            curve.proposed.append(sequence)
    curve.seconds = time.monotonic() - started
    return curve


def _planned(problem: Problem, name: str, budgets: Sequence[int], time_limit: float) -> Curve:
    started, curve = time.monotonic(), Curve()
    for budget in sorted(budgets):
        try:
            plan = solve(problem, budget, name, time_limit, bound_seconds=_bound_seconds(name, time_limit))
        except Infeasible:
            continue
        except StrategyError as error:
            curve.refused = str(error)
            break
        curve.points.append((budget, plan.seconds / plan.seconds_unscheduled))
        curve.proposed.append(plan.sequence)
    curve.seconds = time.monotonic() - started
    return curve


def _bound_seconds(strategy: str, time_limit: float) -> float:
    """Ours stops where its bound says so; the others leave their time to the search."""
    return min(5.0, time_limit / 4) if strategy == "auto" else 0.0


def largest_batch(scaled: ScaledProblem, sequence: Sequence[int], most: int = 1 << 14) -> int:
    """The largest batch at which a sequence stays within the capacity and one extra forward pass; 0 where there is none."""

    def fits(batch: int) -> bool:
        problem = scaled.at(batch)
        found = evaluate(problem, sequence)
        return found.peak_bytes <= CAPACITY and found.seconds <= _allowed(problem)

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _allowed(problem: Problem) -> float:
    """One extra forward pass, and what sums of floats round."""
    return (sum(op.seconds for op in problem.ops) + forward_cost(problem)) * (1 + 1e-9)


def search_largest_batch(
    scaled: ScaledProblem, strategy: str, start: Sequence[Sequence[int]], time_limit: float, tolerance: float
) -> tuple[int, int]:
    """The largest batch that a strategy plans for.

    Args:
        scaled: the network.
        strategy: its name.
        start: sequences to start from.
        time_limit: seconds for a plan.
        tolerance: relative difference of two batches at which the search ends.

    Returns:
        The batch, and the largest one for which the working set of every op fits: no plan exists beyond it.
    """
    low = max((largest_batch(scaled, sequence) for sequence in start), default=0)
    bound, above = low, 1 << 15
    while above - bound > 1:
        middle = (bound + above) // 2
        bound, above = (middle, above) if bytes_floor(scaled.at(middle)) <= CAPACITY else (bound, middle)
    high = bound + 1
    while high - low > max(1, int(tolerance * low)):
        # Closer to what is known: the bound is loose.
        batch = min(high - 1, max(low + 1, (2 * low + high) // 3, int(low * (1 + tolerance))))
        problem = scaled.at(batch)
        allowed = _allowed(problem)
        try:
            plan = solve(problem, CAPACITY, strategy, time_limit, bound_seconds=_bound_seconds(strategy, time_limit))
        except Infeasible:
            high = batch
            continue
        if plan.seconds <= allowed:
            low = max(batch, largest_batch(scaled, plan.sequence))
        else:
            high = batch
    return low, bound
