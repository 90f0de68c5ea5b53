"""Problem and budget -> a plan that fits when the runtime's arena has placed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .errors import BudgetInfeasible, OnnxRematError
from .placement import GRANULE, UNLIMITED, ArenaExhausted, Placement, bookkeeping_bytes, capacity_within, compact, place
from .progress import Interruption
from .scheduler import (
    Infeasible,
    Lowered,
    Plan,
    PlanError,
    Problem,
    Progress,
    lower,
    lower_bound,
    plan_from_sequence,
    smallest_plan,
    solve,
)
from .units import format_bytes

#: Room that the separate optimizer needs for the slices it works on.
OPTIMIZER_BYTES = 4 * 2**20
#: Room in the arena for what the placement does not model: scratch below the resolution of the probe, scalars.
_ARENA_SLACK_BYTES, _ARENA_SLACK_SHARE = 2**20, 0.0025
#: Share of the arena that live bytes are planned into at first: a perfect packing is rarely found.
_LIVE_SHARE = 0.985
#: Seconds that moving runs for a better placement may take.
_COMPACT_SECONDS = 10.0
_REPLANS = 8
#: Of the time that is left for planning, what a repetition counts on at least: one in less finds poor plans.
_LEAST_SECONDS = 6.0
#: Seconds that the proof of a lower bound may take.
_BOUND_SECONDS = 10.0
#: Capacities tried for one plan, relative to what it takes in an endless arena: a larger one may place buffers better or worse.
_CAPACITIES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Search:
    """How to plan.

    Attributes:
        strategy: scheduling strategy.
        time_limit: seconds that planning may take.
        seed: source of chance.
        work_limit: moves of each local search; None for as many as are worth it.
    """

    strategy: str = "auto"
    time_limit: float = 60.0
    seed: int = 0
    work_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan that fits, with its place in memory."""

    plan: Plan
    placement: Placement
    arena_bytes: int
    peak_bytes: int
    peak_unscheduled_bytes: int = 0


def schedule_unscheduled(problem: Problem) -> Scheduled:
    """The base order in the smallest arena that holds it."""
    fitting = _fit(problem, plan_from_sequence(problem, range(len(problem.ops)), UNLIMITED), UNLIMITED)
    assert fitting is not None, "an arena of twice the size holds any schedule"
    return fitting


def needed_budget(problem: Problem, capacity: int) -> int:
    """The smallest budget within which an arena of this capacity, or of the smallest one that is made, is a hard limit."""
    capacity = max(capacity, OPTIMIZER_BYTES)
    return max(problem.resident_bytes + capacity + bookkeeping_bytes(capacity) + 2 * GRANULE, problem.optimizer_peak_bytes)


def _slack(arena_bytes: int) -> int:
    return _ARENA_SLACK_BYTES + int(_ARENA_SLACK_SHARE * arena_bytes)


def _peak_at(problem: Problem, placement: Placement, capacity: int | None = None) -> int:
    """The step's peak in an arena of this capacity, or of the smallest sensible one."""
    capacity = placement.arena_bytes + _slack(placement.arena_bytes) if capacity is None else capacity
    return max(problem.resident_bytes + placement.arena_bytes + bookkeeping_bytes(capacity), problem.optimizer_peak_bytes)


def schedule(
    problem: Problem,
    budget: int,
    search: Search,
    progress: Callable[[Progress], None] = lambda _: None,
    interruption: Interruption | None = None,
) -> Scheduled:
    """The fastest plan found whose buffers, placed by the runtime's arena, stay within the budget.

    Planning counts live bytes; the arena needs more where it fragments.  So runs are moved until the placement fits, and where that does
    not suffice, planning is repeated with a tighter limit.  After an interruption, what was found by then is made to fit.

    Args:
        problem: the step.
        budget: bytes, resident ones included.
        search: how to plan.
        progress: told of the best plan of each search; the time is that of all of them together.
        interruption: where it is looked for; None for nowhere.

    Raises:
        BudgetInfeasible: no plan was found.
        KeyboardInterrupt: interrupted before there was a plan.
    """
    interruption = interruption or Interruption()
    unscheduled = plan_from_sequence(problem, range(len(problem.ops)), UNLIMITED, search.strategy)
    if search.strategy in ("auto", "keep_all"):
        fitting = _fit(problem, unscheduled, budget)
        if fitting is not None:
            return fitting
    floor = problem.resident_bytes
    capacity = capacity_within(budget - floor)
    room = capacity - _slack(capacity)
    # The optimizer's phase may be the larger one; it does not depend on the plan.
    first = limit = max(floor + int(_LIVE_SHARE * room), min(budget, problem.optimizer_peak_bytes))
    smallest, proven, last = UNLIMITED, 0, False
    hint: tuple[int, ...] | None = None
    begin = time.monotonic()
    deadline = begin + search.time_limit

    def tell(found: Progress) -> None:
        interruption.check()
        now = time.monotonic()
        progress(replace(found, elapsed=now - begin, left=max(0.0, deadline - now)))

    for _ in range(_REPLANS):
        left = max(_LEAST_SECONDS, 0.0 if interruption.asked else deadline - time.monotonic())
        plan = _solve(problem, limit, search, left / 3, hint, tell)
        interruption.settle()
        if isinstance(plan, Infeasible):
            if limit == first:
                proven = plan.lower_bound_bytes
            if plan.minimum_budget_bytes < floor + room:
                limit, last = plan.minimum_budget_bytes, True  # found on the way to the error; nothing tighter is
                plan = _solve(problem, limit, search, left / 3, progress=tell)
            else:
                smallest = min(smallest, _smallest_peak(problem, plan.minimum_budget_bytes, search))
        if isinstance(plan, Infeasible):
            break
        most = max(plan.peak_bytes, floor + room)
        plan = _compacted(problem, plan, max(limit, most), most, room, min(left / 4, _COMPACT_SECONDS), search.seed, capacity)
        fitting = _fit(problem, plan, budget)
        if fitting is not None:
            bound = lower_bound(problem, budget, 0.0 if interruption.asked else min(_BOUND_SECONDS, search.time_limit))
            # What exceeds a plan that runs can only be the solver's rounding.
            return replace(fitting, plan=replace(fitting.plan, seconds_lower_bound=min(bound, plan.seconds)))
        hint = None if plan.swapped_tensors else plan.sequence
        form = _lowered(problem, plan)
        arena_bytes = place(form.problem, form.sequence, UNLIMITED).arena_bytes
        smallest = min(smallest, needed_budget(problem, arena_bytes + _slack(arena_bytes)))
        if last or (time.monotonic() > deadline and not interruption.asked):
            break
        needed = place(form.problem, form.sequence, max(0, capacity), overflow=True).arena_bytes
        limit = min(limit - max(1, room // 64), floor + (plan.peak_bytes - floor) * room // max(1, needed))
    raise _infeasible(problem, budget, max(smallest, budget + 1), proven)


def schedule_smallest(
    problem: Problem,
    search: Search,
    progress: Callable[[Progress], None] = lambda _: None,
    interruption: Interruption | None = None,
) -> Scheduled:
    """The fastest plan found within the smallest budget found; the plan's budget is what it needs."""
    plain = schedule_unscheduled(problem)
    tight = min((plain, _tightest(problem, search)), key=lambda s: needed_budget(problem, s.arena_bytes))
    budget = needed_budget(problem, tight.arena_bytes)
    if tight is plain:
        return replace(plain, plan=replace(plain.plan, budget_bytes=budget, strategy=search.strategy))
    try:
        found = schedule(problem, budget, search, progress, interruption)
    except BudgetInfeasible:
        found = tight
    needed = min(budget, needed_budget(problem, found.arena_bytes))
    return replace(found, plan=replace(found.plan, budget_bytes=needed))


def _tightest(problem: Problem, search: Search) -> Scheduled:
    """The plan of the fewest live bytes found, placed in the smallest arena that holds it."""
    plan = smallest_plan(problem, search.time_limit / 3, search.seed)
    sequence = compact(problem, plan.sequence, plan.peak_bytes, 0, min(search.time_limit / 4, _COMPACT_SECONDS), search.seed)
    fitting = _fit(problem, plan_from_sequence(problem, sequence, UNLIMITED, search.strategy), UNLIMITED)
    assert fitting is not None, "an arena of twice the size holds any schedule"
    return fitting


def _lowered(problem: Problem, plan: Plan) -> Lowered:
    """The plan with its swaps as ops, as the runtime has them."""
    form = lower(problem, plan.steps)
    if form is None:
        raise OnnxRematError("the plan swaps tensors in a way that can't be placed: this is a fault of the planner, please report it")
    return form


def _compacted(problem: Problem, plan: Plan, limit: int, most: int, room: int, seconds: float, seed: int, capacity: int = UNLIMITED) -> Plan:
    """The plan with its runs and transfers moved so that the arena gets smaller, towards ``room`` bytes; live bytes stay within ``most``."""
    form = _lowered(problem, plan)
    steps = form.plan_steps(compact(form.problem, form.sequence, most, room, seconds, seed, capacity=capacity))
    try:
        moved = plan_from_sequence(problem, steps, limit, plan.strategy)
    except PlanError:
        return plan  # moved swaps mean something else than what was placed
    return plan if lower(problem, steps) is None else replace(moved, solve_seconds=plan.solve_seconds)


def _solve(
    problem: Problem,
    limit: int,
    search: Search,
    seconds: float,
    hint: Sequence[int] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Plan | Infeasible:
    try:
        return solve(problem, limit, search.strategy, seconds, search.seed, progress, bound_seconds=0, hint=hint, work_limit=search.work_limit)
    except Infeasible as error:
        return error
    except ValueError as error:
        raise OnnxRematError(str(error)) from error


def _fit(problem: Problem, plan: Plan, budget: int) -> Scheduled | None:
    """The plan in the smallest arena that holds it, or None where that exceeds the budget.

    A larger arena can place buffers worse, so the capacity is part of the simulation; capacity and bookkeeping together stay within the
    budget, which makes it a hard limit.
    """
    largest = capacity_within(budget - problem.resident_bytes)
    form = _lowered(problem, plan)
    wanted = place(form.problem, form.sequence, UNLIMITED).arena_bytes
    smallest = max(wanted + _slack(wanted), OPTIMIZER_BYTES)
    if largest < OPTIMIZER_BYTES:
        return None
    # The largest one is tried in any case: its end may keep buffers from where an endless arena would have put them.
    for capacity in dict.fromkeys(min(int(smallest * (1 + share)), largest) for share in _CAPACITIES):
        try:
            placement = place(form.problem, form.sequence, capacity)
        except ArenaExhausted:
            continue
        peak = _peak_at(problem, placement, capacity)
        if placement.arena_bytes + _slack(placement.arena_bytes) <= capacity and peak <= budget:
            return Scheduled(replace(plan, budget_bytes=budget), placement, capacity, peak)
    return None


def _smallest_peak(problem: Problem, limit: int, search: Search) -> int:
    """The budget that the tightest plan found needs when it is placed."""
    plan = _solve(problem, limit, search, search.time_limit / 4)
    if isinstance(plan, Infeasible):
        return UNLIMITED
    form = _lowered(problem, _compacted(problem, plan, UNLIMITED, plan.peak_bytes, 0, _COMPACT_SECONDS, search.seed))
    arena_bytes = place(form.problem, form.sequence, UNLIMITED).arena_bytes
    return needed_budget(problem, arena_bytes + 2 * _slack(arena_bytes))


def _infeasible(problem: Problem, budget: int, minimum: int, floor: int) -> BudgetInfeasible:
    proof = f"; no plan can take less than {format_bytes(floor)}" if floor > budget else ""
    return BudgetInfeasible(
        f"a step of {problem.name} was not brought below {format_bytes(minimum)}, and the budget is {format_bytes(budget)}{proof}: "
        f"raise --budget to {minimum}B, or make the batch smaller",
        minimum,
    )
