"""From a problem and a budget to a plan: run a strategy, judge what it found, or say why there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from .bounds import bytes_floor, seconds_floor
from .errors import Infeasible, PlanError
from .evaluate import evaluate
from .plan import Plan, Step
from .problem import Problem, is_duration
from .proof import Proof
from .prover import Prover, best_bound
from .reduce import reduce_problem
from .strategies.registry import Context, Progress, Strategy, get_strategy
from .swap_search import STRATEGIES, SwapSearch
from .validate import validate

__all__ = ["lower_bound", "minimum_budget", "plan_from_sequence", "smallest_plan", "solve"]

# The least time limit at which a proof is worth its process, and how often one is looked at.
_PROOF_SECONDS, _POLL_SECONDS = 1.0, 0.05
# Share of the time that recompute alone has where tensors may be swapped as well.
_ALONE = 0.5


def solve(
    problem: Problem,
    budget_bytes: int,
    strategy: str = "auto",
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    bound_seconds: float = 10.0,
    hint: Sequence[int] | None = None,
    work_limit: int | None = None,
) -> Plan:
    """Plan a training step within a budget.

    Args:
        problem: the step.
        budget_bytes: bytes for everything that the step holds, resident ones included.
        strategy: a name from :func:`strategies`.
        time_limit: wall seconds; the best plan found by then is returned. Zero still tries the cheapest answers.
        seed: source of chance; the answer is a function of it as long as the time limit does not cut the search short.
        progress: told of every improvement, and now and then of the time left.
        bound_seconds: processor seconds, at most half the time limit, for the proof of a bound, in a process beside the search for all
            but small problems; 0 leaves the trivial bound.
        hint: a valid sequence of ops that ``auto`` starts from as well, such as the plan for another budget.
        work_limit: moves of ``auto``'s local search on each of its two lanes, one lane a core; None for as many as are worth it.  The plan
            is a function of seed and work limit, on any machine, where the time limit does not cut it short.

    Returns:
        A plan that the simulator evaluated and the validator accepted. On KeyboardInterrupt (Ctrl-C) it is the best one found by then.

    Raises:
        ProblemError: the problem is not well formed.
        StrategyError: the strategy does not exist or cannot work on this problem.
        Infeasible: no plan was found; says the smallest feasible budget found and the proven floor.
        KeyboardInterrupt: interrupted before there was a plan.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int):
        raise PlanError(f"budget must be a number of bytes, not {budget_bytes!r}")
    if not is_duration(time_limit):
        raise PlanError(f"time limit must be a finite number of seconds, zero or more, not {time_limit!r}")
    if work_limit is not None and (isinstance(work_limit, bool) or not isinstance(work_limit, int) or work_limit < 0):
        raise PlanError(f"work limit must be a number of moves, zero or more, not {work_limit!r}")
    run = get_strategy(strategy)
    problem.check()
    if problem.transfer is not None and strategy in STRATEGIES:
        return _solve_swapping(problem, budget_bytes, strategy, time_limit, seed, progress, bound_seconds, hint, work_limit)
    started = time.monotonic()
    floor = bytes_floor(problem)
    context = Context(problem, budget_bytes, started + time_limit, seed, progress, strategy, started)
    context.bound = seconds_floor(problem)
    context.hint, context.work_limit = hint, work_limit
    if budget_bytes >= floor:
        try:
            _run(context, run, bound_seconds, time_limit)
        except KeyboardInterrupt:
            if context.best is None:
                raise
    if context.best is None:
        if strategy == "auto" and budget_bytes >= floor:
            # Searching for the smallest budget may still meet one that is small enough.
            _lower(context, floor)
        if context.best is None:
            smallest = context.lowest_peak if strategy != "auto" and context.lowest is not None else 1 << 62
            if smallest == 1 << 62:
                spare = Context(problem, floor, time.monotonic() + max(1.0, min(20.0, context.left)), seed)
                spare.lowest, spare.lowest_peak = context.lowest, context.lowest_peak
                smallest = _lower(spare, floor)
            raise Infeasible(smallest, floor, strategy, budget_bytes)
    bound = min(context.bound, context.best_seconds)
    return plan_from_sequence(problem, context.best, budget_bytes, strategy, bound, time.monotonic() - started)


def _run(context: Context, strategy: Strategy, bound_seconds: float, time_limit: float) -> None:
    """Run a strategy with a proof beside it, and let that one finish in the time left."""
    base = evaluate(context.problem, range(len(context.problem.ops)))
    context.proof_seconds = min(bound_seconds, time_limit / 2) if time_limit >= _PROOF_SECONDS and base.peak_bytes > context.budget else 0.0
    try:
        strategy(context)
        context.prove_beside()
        while context.proof is not None and not context.proof.done and not context.proven_optimal and context.left > 0:
            if context.best is None:
                # What is left of the time is for finding one.
                return
            time.sleep(_POLL_SECONDS)
            context.tell(None)
    finally:
        if context.proof is not None:
            context.proof.stop()
            context.raise_bound(context.proof.bound)


def _solve_swapping(
    problem: Problem,
    budget_bytes: int,
    strategy: str,
    time_limit: float,
    seed: int,
    progress: Callable[[Progress], None] | None,
    bound_seconds: float,
    hint: Sequence[int] | None,
    work_limit: int | None,
) -> Plan:
    """The same with a channel: the best of recompute alone, swap alone and both."""
    started = time.monotonic()
    deadline = started + time_limit
    floor, least = bytes_floor(problem), seconds_floor(problem)
    reserve = min(bound_seconds, time_limit / 3)

    def tell(seconds: float) -> None:
        if progress is not None:
            now = time.monotonic()
            progress(Progress(strategy, seconds, now - started, least, max(0.0, deadline - now)))

    search = SwapSearch(problem, budget_bytes, deadline - reserve, seed, tell)
    search.offer([Step("run", o) for o in range(len(problem.ops))])
    smallest, interrupted = 1 << 62, False
    try:
        if strategy == "auto" and search.best is None and budget_bytes >= floor:
            try:
                alone = solve(replace(problem, transfer=None), budget_bytes, strategy, _ALONE * search.left, seed, progress, 0, hint, work_limit)
                search.offer(alone.steps)
            except Infeasible as error:
                smallest = error.minimum_budget_bytes
        if search.best_seconds > least and budget_bytes >= floor:
            search.run() if strategy == "auto" else search.swap_alone()
        if search.best is None:
            low = _lowest_swapping(problem, strategy, max(floor, budget_bytes), max(1.0, min(20.0, search.left)), seed)
            smallest = min(smallest, low.lowest_peak)
            search.offer(low.lowest)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        interrupted = True
    if search.best is None:
        raise Infeasible(smallest, floor, strategy, budget_bytes)
    bound = least
    allowed = min(deadline - time.monotonic(), bound_seconds)
    if not interrupted and allowed > 0 and search.best_seconds > least:
        with contextlib.suppress(KeyboardInterrupt):
            bound = max(bound, best_bound(reduce_problem(problem), budget_bytes, allowed, search.best_seconds))
    return plan_from_sequence(problem, search.best, budget_bytes, strategy, min(bound, search.best_seconds), time.monotonic() - started)


def _lowest_swapping(problem: Problem, strategy: str, enough: int, seconds: float, seed: int) -> SwapSearch:
    """A search of a problem with a channel for a plan of low peak, down to ``enough`` bytes; ``swap_only`` recomputes nothing there."""
    low = SwapSearch(problem, bytes_floor(problem), time.monotonic() + seconds, seed)
    low.offer([Step("run", o) for o in range(len(problem.ops))])
    low.swap_alone()
    if strategy == "auto" and low.lowest_peak > enough:
        low.lower_peak(enough)
    return low


def plan_from_sequence(
    problem: Problem,
    sequence: Sequence[int] | Sequence[Step],
    budget_bytes: int,
    strategy: str = "given",
    seconds_lower_bound: float | None = None,
    solve_seconds: float = 0.0,
) -> Plan:
    """The plan of a sequence of op indices or steps, evaluated and validated; raises PlanError where it is not valid."""
    steps = tuple(step if isinstance(step, Step) else Step("run", step) for step in sequence)
    found = evaluate(problem, steps)
    base = evaluate(problem, range(len(problem.ops)))
    plan = Plan(
        problem_name=problem.name,
        strategy=strategy,
        budget_bytes=budget_bytes,
        steps=steps,
        peak_bytes=found.peak_bytes,
        seconds=found.seconds,
        seconds_unscheduled=base.seconds,
        seconds_lower_bound=seconds_floor(problem) if seconds_lower_bound is None else seconds_lower_bound,
        peak_unscheduled_bytes=base.peak_bytes,
        solve_seconds=solve_seconds,
    )
    validate(problem, plan)
    return plan


def minimum_budget(problem: Problem, time_limit: float = 20.0, seed: int = 0) -> int:
    """The smallest budget, in bytes, for which a plan was found within the time limit; smaller ones may exist, see ``bytes_floor``."""
    return smallest_plan(problem, time_limit, seed).peak_bytes


def smallest_plan(problem: Problem, time_limit: float = 20.0, seed: int = 0, strategy: str = "auto") -> Plan:
    """The plan of the lowest peak found within the time limit (seconds), however slow; its budget is its peak.

    Where the problem has a channel and the strategy is one that swaps, the plan may swap, and with ``swap_only`` it does nothing else.
    """
    problem.check()
    started, floor = time.monotonic(), bytes_floor(problem)
    swaps = problem.transfer is not None and strategy in STRATEGIES
    plans = []
    if strategy != "swap_only" or not swaps:
        context = Context(problem, floor, started + (time_limit / 2 if swaps else time_limit), seed)
        peak = _lower(context, floor)
        assert context.lowest is not None, "the base order is always found"
        plans.append(plan_from_sequence(problem, context.lowest, peak))
    if swaps:
        low = _lowest_swapping(problem, strategy, floor, max(0.0, started + time_limit - time.monotonic()), seed)
        plans.append(plan_from_sequence(problem, low.lowest, low.lowest_peak))
    return min(plans, key=lambda plan: plan.peak_bytes)


def _lower(context: Context, floor: int) -> int:
    """Search for a sequence of low peak; ends early when one is within the context's budget. Returns the lowest peak."""
    from .strategies.auto import lower_peak

    if context.lowest is None:
        get_strategy("keep_all")(context)
    lower_peak(context, floor)
    return context.lowest_peak


def lower_bound(problem: Problem, budget_bytes: int, time_limit: float = 10.0) -> float:
    """A proven lower bound on the time of any plan within the budget, in any order (seconds, or the problem's unit)."""
    bound = seconds_floor(problem)
    if time_limit <= 0:
        return bound
    deadline = time.monotonic() + time_limit
    proof = Proof(Prover(reduce_problem(problem), budget_bytes), time_limit)
    try:
        while not proof.done and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        proof.stop()
    return max(bound, proof.bound)
