"""All strategies on one problem, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .errors import Infeasible, StrategyError
from .plan import Plan
from .problem import Problem
from .solve import lower_bound, solve
from .strategies import Progress, distinct_strategies, get_strategy

__all__ = ["Outcome", "compare"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy came to.

    Attributes:
        strategy: its name.
        plan: its plan within the budget, or None.
        minimum_budget_bytes: where it has none, the smallest budget for which it found one; None where it refused.
        reason: where it has no plan, why, in one line; empty otherwise.
        solve_seconds: wall time.
    """

    strategy: str
    plan: Plan | None
    minimum_budget_bytes: int | None
    reason: str
    solve_seconds: float


def compare(
    problem: Problem,
    budget_bytes: int,
    strategies: Sequence[str] | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    bound_seconds: float = 10.0,
    work_limit: int | None = None,
) -> list[Outcome]:
    """Run strategies one after another on the same problem and budget.

    Args:
        problem: the step.
        budget_bytes: bytes, resident ones included.
        strategies: their names; None is each of the registry once, without those that are a part of another.
        time_limit: wall seconds for each of them.
        seed: source of chance.
        progress: told of every improvement of each.
        bound_seconds: wall seconds for a proof, within one time limit; the best lower bound is given to every plan.
        work_limit: moves of local search, see ``solve``.

    Returns:
        An outcome for each, plans first, the fastest first; of equal ones, in the order of their names.

    Raises:
        ProblemError: the problem is not well formed.
        StrategyError: a name is unknown.
    """
    names = distinct_strategies() if strategies is None else tuple(strategies)
    for name in names:
        get_strategy(name)
    outcomes = []
    for name in names:
        started = time.monotonic()
        plan, smallest, reason = None, None, ""
        try:
            # The default strategy stops where its bound says so; the others leave their time to the search.
            plan = solve(problem, budget_bytes, name, time_limit, seed, progress, bound_seconds if name == "auto" else 0.0, None, work_limit)
        except Infeasible as error:
            smallest, reason = error.minimum_budget_bytes, str(error)
        except StrategyError as error:
            reason = str(error)
        outcomes.append(Outcome(name, plan, smallest, reason, time.monotonic() - started))
    plans = [o.plan for o in outcomes if o.plan is not None]
    bound = max((p.seconds_lower_bound for p in plans), default=0.0)
    fastest = min((p.seconds for p in plans), default=0.0)
    if fastest > bound * (1 + 1e-9) and not any(p.strategy == "auto" for p in plans):
        bound = max(bound, lower_bound(problem, budget_bytes, min(bound_seconds, time_limit)))
    # A bound above a validated plan can only be a solver's rounding; it is not claimed.
    bound = min(bound, fastest)
    outcomes = [replace(o, plan=o.plan and replace(o.plan, seconds_lower_bound=bound)) for o in outcomes]
    return sorted(outcomes, key=lambda o: (o.plan is None, o.plan.seconds if o.plan else 0.0, o.strategy))
