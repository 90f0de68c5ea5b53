"""The ``plan`` command: schedules a problem file, an artifact or an ONNX training graph, with one strategy or with all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .api import known_strategy, parse_budget, parse_specs
from .costs.transfer import Swap, swap_channel
from .errors import BudgetInfeasible, OnnxRematError, UsageError
from .foreign import problem_from_file
from .progress import planning_messages
from .scheduler import Infeasible, Outcome, Plan, Problem, compare, evaluate, smallest_plan, solve
from .units import format_bytes

__all__ = ["ALL", "Planned", "plan_file"]

#: The strategy name that stands for each of them.
ALL = "all"


@dataclass(frozen=True)
class Planned:
    """What the command found.

    Attributes:
        problem: the problem of the file.
        budget_bytes: the budget in bytes.
        plan: the best plan, or None where no strategy found one.
        outcomes: one per strategy where all were asked for, best first.
    """

    problem: Problem
    budget_bytes: int
    plan: Plan | None
    outcomes: tuple[Outcome, ...] = ()

    @property
    def unit(self) -> str:
        """Unit of times, short."""
        return "s" if self.problem.unit == "seconds" else self.problem.unit

    def infeasible(self) -> BudgetInfeasible:
        """The error that says that no strategy found a plan; where all refused, what the first said."""
        found = [o for o in self.outcomes if o.minimum_budget_bytes is not None]
        if not found:
            raise OnnxRematError(self.outcomes[0].reason)
        best = min(found, key=lambda o: (o.minimum_budget_bytes, o.strategy))
        return BudgetInfeasible(best.reason, best.minimum_budget_bytes or 0)

    def figures(self) -> dict[str, Any]:
        """The figures of the best plan for ``--json``; bytes, and seconds or the problem's own unit of time."""
        plan = self.plan
        if plan is None:
            return {"budget_bytes": self.budget_bytes, "strategies": [_row(o) for o in self.outcomes]}
        result = {
            "problem": self.problem.name,
            "unit": self.problem.unit,
            "budget_bytes": self.budget_bytes,
            "peak_unscheduled_bytes": plan.peak_unscheduled_bytes,
            "seconds_unscheduled": plan.seconds_unscheduled,
            **_plan_figures(plan),
            "strategy": plan.strategy,
            "solve_seconds": plan.solve_seconds,
            "swapped_tensors": plan.swapped_tensors,
            "feasible": True,
        }
        return result | ({"strategies": [_row(o) for o in self.outcomes]} if self.outcomes else {})

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of each line that is shown; the plan's lines only where there is one."""
        rows = [("problem", f"{self.problem.name}: {len(self.problem.ops)} ops"), ("budget", format_bytes(self.budget_bytes))]
        plan = self.plan
        if plan is None:
            return rows
        peak = f"{format_bytes(plan.peak_bytes)} (unscheduled {format_bytes(plan.peak_unscheduled_bytes)})"
        return [
            *rows,
            ("peak", peak),
            ("time", f"{plan.seconds:.6g} {self.unit} ({_overhead(plan):+.2%})"),
            ("proven gap", f"at most {plan.gap:.2%}"),
            ("recomputed ops", f"{plan.recomputed_ops} ({plan.strategy}, {plan.solve_seconds:.1f} s)"),
            *([("swapped tensors", str(plan.swapped_tensors))] if self.problem.transfer is not None else []),
        ]

    def table(self) -> list[str]:
        """The lines of the comparison, with a heading; empty where one strategy was asked for."""
        if not self.outcomes:
            return []
        width = max(len(o.strategy) for o in self.outcomes)
        heading = ("time", "overhead", "gap", "peak", "of peak", "solved in")
        lines = [f"{'strategy':<{width}}" + "".join(f"{name:>13}" for name in heading)]
        for o in self.outcomes:
            took = f"{o.solve_seconds:.1f} s"
            if o.plan is None:
                wants = "refused" if o.minimum_budget_bytes is None else f"needs {format_bytes(o.minimum_budget_bytes)}"
                lines.append(f"{o.strategy:<{width}}{wants:>65}{took:>13}")
                continue
            p = o.plan
            share = p.peak_bytes / p.peak_unscheduled_bytes if p.peak_unscheduled_bytes else 1.0
            cells = (f"{p.seconds:.6g}", f"{_overhead(p):+.3%}", f"{p.gap:.3%}", format_bytes(p.peak_bytes), f"{share:.1%}", took)
            lines.append(f"{o.strategy:<{width}}" + "".join(f"{cell:>13}" for cell in cells))
        return lines + [f"{o.strategy}: {o.reason.removeprefix(o.strategy + ': ')}" for o in self.outcomes if o.plan is None]


def plan_file(
    path: Path,
    inputs: Sequence[str] = (),
    budget: str | None = None,
    strategy: str = "auto",
    time_limit: float = 60.0,
    seed: int = 0,
    say: Callable[[str], None] = lambda message: None,
    work_limit: int | None = None,
    swap: Swap | None = None,
) -> Planned:
    """Plan a file.

    Args:
        path: a problem, a plain instance, an artifact folder or an ONNX training graph.
        inputs: pins of open dimensions, ``NAME=SHAPE[:DTYPE]``.
        budget: a size, a percentage of the unscheduled peak, or ``min`` for the smallest found; None is 100 %.
        strategy: a name, or ``all``.
        time_limit: wall seconds, for each strategy.
        seed: source of chance.
        say: told of progress.
        work_limit: moves of local search; None for as many as are worth it.
        swap: the channel; left out, or "none", it is the problem's own.

    Returns:
        What was found; with ``all``, there may be no plan in it.

    Raises:
        BudgetInfeasible: the strategy found no plan within the budget.
        UsageError, OnnxRematError: the options or the file are at fault.
    """
    if strategy != ALL:
        known_strategy(strategy)
    problem = problem_from_file(path, parse_specs(inputs))
    if swap is not None and swap.kind != "none":
        if problem.unit != "seconds":
            raise UsageError(f"--swap needs a problem in seconds; this one counts in '{problem.unit}'")
        problem = replace(problem, transfer=swap_channel(swap))
    unscheduled = evaluate(problem, range(len(problem.ops)))
    wanted = parse_budget(budget, None)
    peak = unscheduled.peak_bytes
    tightest = smallest_plan(problem, time_limit, seed) if wanted.smallest else None
    size = wanted.resolve(problem.resident_bytes, peak) if tightest is None else tightest.peak_bytes
    tell = planning_messages(unscheduled.seconds, "s" if problem.unit == "seconds" else problem.unit, say)
    if strategy == ALL:
        outcomes = tuple(compare(problem, size, time_limit=time_limit, seed=seed, progress=tell, work_limit=work_limit))
        return Planned(problem, size, outcomes[0].plan, outcomes)
    hint = None if tightest is None or tightest.swapped_tensors else tightest.sequence
    try:
        return Planned(problem, size, solve(problem, size, strategy, time_limit, seed, tell, hint=hint, work_limit=work_limit))
    except Infeasible as error:
        if tightest is not None and strategy == "auto":
            return Planned(problem, size, replace(tightest, strategy=strategy))  # the search did not come upon it again
        raise BudgetInfeasible(str(error), error.minimum_budget_bytes) from error


def _overhead(plan: Plan) -> float:
    return plan.seconds / plan.seconds_unscheduled - 1 if plan.seconds_unscheduled else 0.0


def _plan_figures(plan: Plan) -> dict[str, Any]:
    return {
        "peak_predicted_bytes": plan.peak_bytes,
        "seconds_predicted": plan.seconds,
        "seconds_lower_bound": plan.seconds_lower_bound,
        "gap": plan.gap if plan.gap < float("inf") else None,
        "recomputed_ops": plan.recomputed_ops,
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    row = {"strategy": outcome.strategy, "feasible": outcome.plan is not None, "solve_seconds": outcome.solve_seconds}
    if outcome.plan is None:
        return row | {"minimum_budget_bytes": outcome.minimum_budget_bytes, "reason": outcome.reason}
    return row | _plan_figures(outcome.plan)
