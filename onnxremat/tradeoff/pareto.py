"""Time against budget, from the unscheduled step's peak down to the smallest budget found, for several strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import BudgetInfeasible, OnnxRematError
from ..fit import Scheduled, Search, needed, schedule_unscheduled
from ..schedule import schedule, schedule_smallest
from ..scheduler import Problem
from ..units import format_bytes

__all__ = ["Curve", "Pareto", "Point", "pareto"]


@dataclass(frozen=True, slots=True)
class Point:
    """The fastest plan found within a budget.

    Attributes:
        budget_bytes: the budget, everything a step holds.
        peak_bytes: the plan's predicted peak, placed in the runtime's arena.
        seconds: the plan's predicted time.
        overhead: share of the unscheduled step's time that it takes beyond it.
        seconds_lower_bound: proven for any plan within the budget.
        recomputed_ops: runs beyond the first of an op.
        swapped_tensors: tensors that are swapped out at some time.
    """

    budget_bytes: int
    peak_bytes: int
    seconds: float
    overhead: float
    seconds_lower_bound: float
    recomputed_ops: int
    swapped_tensors: int = 0


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of a strategy, largest budget first; ``reason`` says why there are none below the last, or none at all."""

    strategy: str
    points: tuple[Point, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pareto:
    """The curves of a step.

    Attributes:
        name: of the problem.
        peak_unscheduled_bytes: the budget that the unscheduled step needs: 100 %.
        resident_bytes: of it, what is held during the whole step.
        seconds_unscheduled: of the unscheduled step.
        unit: of times.
        curves: one for each strategy.
    """

    name: str
    peak_unscheduled_bytes: int
    resident_bytes: int
    seconds_unscheduled: float
    unit: str
    curves: tuple[Curve, ...]


def pareto(problem: Problem, strategies: Sequence[str], count: int, search: Search, say: Callable[[str], None] = lambda message: None) -> Pareto:
    """The curves of some strategies.

    Args:
        problem: the step.
        strategies: their names.
        count: budgets from 100 % to the smallest one found, both included, at equal distances; at least 2.
        search: how to plan, each point; the strategy in it is that of the search for the smallest budget.
        say: told of progress.
    """
    unscheduled = schedule_unscheduled(problem)
    full = needed(problem, unscheduled)
    say("searching for the smallest budget")
    tight = schedule_smallest(problem, search)
    least = min(tight.plan.budget_bytes, full)
    budgets = sorted({full - (full - least) * i // (count - 1) for i in range(count)}, reverse=True)
    curves = []
    for number, strategy in enumerate(strategies, 1):
        say(f"{strategy} ({number} of {len(strategies)}): {len(budgets)} budgets from {format_bytes(full)} to {format_bytes(least)}")
        known = [_point(tight, least)] if strategy == search.strategy else []
        curves.append(_curve(problem, strategy, budgets, search, known))
    seconds = unscheduled.plan.seconds
    return Pareto(problem.name, full, problem.resident_bytes, seconds, problem.unit, tuple(curves))


def _curve(problem: Problem, strategy: str, budgets: Sequence[int], search: Search, known: Sequence[Point]) -> Curve:
    found: dict[int, Point] = {p.budget_bytes: p for p in known}
    reason = ""
    for budget in budgets:
        if budget in found:
            continue
        try:
            found[budget] = _point(schedule(problem, budget, replace(search, strategy=strategy)), budget)
        except BudgetInfeasible as error:
            reason = f"no plan found below {format_bytes(error.minimum_budget_bytes)}"
            if strategy != search.strategy:
                break  # other strategies say at once what they can't
        except OnnxRematError as error:
            reason = " ".join(str(error).split())
            break
    # What fits a smaller budget fits a larger one too.
    points: list[Point] = []
    for budget in sorted(found):
        point = found[budget]
        if points and points[-1].seconds < point.seconds:
            point = replace(points[-1], budget_bytes=budget, seconds_lower_bound=point.seconds_lower_bound)
        points.append(replace(point, seconds_lower_bound=min(point.seconds_lower_bound, point.seconds)))
    return Curve(strategy, tuple(reversed(points)), "" if points and points[0].budget_bytes == min(budgets) else reason)


def _point(found: Scheduled, budget: int) -> Point:
    plan = found.plan
    overhead = plan.seconds / plan.seconds_unscheduled - 1 if plan.seconds_unscheduled else 0.0
    return Point(budget, found.peak_bytes, plan.seconds, overhead, plan.seconds_lower_bound, plan.recomputed_ops, plan.swapped_tensors)
