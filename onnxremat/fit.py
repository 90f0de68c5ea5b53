"""Plan -> its place in the runtime's memory: the arena, or fixed offsets with a smaller arena beside, within a budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from .errors import OnnxRematError
from .placement import GRANULE, MOVES, UNLIMITED, ArenaExhausted, Placement, bookkeeping_bytes, capacity_within, compact, place, place_fixed
from .scheduler import Lowered, Plan, PlanError, Problem, lower, plan_from_sequence

#: Room that the separate optimizer needs for the slices it works on.
OPTIMIZER_BYTES = 4 * 2**20
#: Room in the arena for what the placement does not model: scratch below the resolution of the probe, scalars.
_ARENA_SLACK_BYTES, _ARENA_SLACK_SHARE = 2**20, 0.0025
#: The share of the time limit that the choice of what gets an offset of its own, and where, may take; seconds at least and at most.
_FIXED_SHARE, _FIXED_SECONDS = 1 / 60, (0.5, 5.0)
#: Share of the time limit for the smallest arena of a plan; rounds of moving runs for it, and moves of each.
_SQUEEZE_SHARE, _ROUNDS, _ROUND_MOVES = 1 / 3, 10, 3000
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
        fixed: where the arena alone does not suffice, tensors may have offsets of their own (``onnxremat.placement.fixed``).
        portable: other programs make the arena: the placement must not hinge on where that one ends, since they allocate a little otherwise.
    """

    strategy: str = "auto"
    time_limit: float = 60.0
    seed: int = 0
    work_limit: int | None = None
    fixed: bool = False
    portable: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan that fits, with its place in memory; ``arena_bytes`` is the capacity of the arena."""

    plan: Plan
    placement: Placement
    arena_bytes: int
    peak_bytes: int
    peak_unscheduled_bytes: int = 0


def schedule_unscheduled(problem: Problem) -> Scheduled:
    """The base order in the smallest arena that holds it."""
    return fit_arena_alone(problem, plan_from_sequence(problem, range(len(problem.ops)), UNLIMITED))


def needed_budget(problem: Problem, capacity: int, block_bytes: int = 0) -> int:
    """The smallest budget within which an arena of this capacity, or of the smallest one that is made, is a hard limit.

    ``block_bytes`` are those of tensors at fixed offsets, beside it.
    """
    capacity = max(capacity, OPTIMIZER_BYTES)
    held = problem.resident_bytes + block_bytes
    return max(held + capacity + bookkeeping_bytes(capacity) + 2 * GRANULE, problem.optimizer_peak_bytes)


def slack(arena_bytes: int) -> int:
    """Room, in bytes, in an arena beyond what is placed in so many."""
    return _ARENA_SLACK_BYTES + int(_ARENA_SLACK_SHARE * arena_bytes)


def _peak_at(problem: Problem, placement: Placement, capacity: int | None = None) -> int:
    """The step's peak in an arena of this capacity, or of the smallest sensible one."""
    capacity = placement.arena_bytes + slack(placement.arena_bytes) if capacity is None else capacity
    held = problem.resident_bytes + placement.block_bytes
    return max(held + placement.arena_bytes + bookkeeping_bytes(capacity), problem.optimizer_peak_bytes)


def needed(problem: Problem, scheduled: Scheduled) -> int:
    """The smallest budget, in bytes, within which a plan with this placement is a hard limit."""
    return needed_budget(problem, scheduled.arena_bytes, scheduled.placement.block_bytes)


def _least(problem: Problem, plan: Plan, search: Search) -> Scheduled:
    """A plan in the smallest arena that holds it, or with a block beside a smaller one where that takes less."""
    alone = fit_arena_alone(problem, plan)
    beside = fit_with_block(problem, plan, UNLIMITED, search) if search.fixed else None
    return alone if beside is None else min(alone, beside, key=lambda found: needed(problem, found))


def fit_arena_alone(problem: Problem, plan: Plan) -> Scheduled:
    """A plan in the smallest arena that holds it without a block beside, whatever the budget."""
    fitting = _fit_arena(problem, plan, UNLIMITED)
    assert fitting is not None, "an arena of twice the size holds any schedule"
    return fitting


def lowered(problem: Problem, plan: Plan) -> Lowered:
    """A plan with its swaps as ops, as the CPU's runtime has them."""
    form = lower(problem, plan.steps)
    if form is None:
        raise OnnxRematError("the plan swaps tensors in a way that can't be placed: this is a fault of the planner, please report it")
    return form


def squeezed(problem: Problem, plan: Plan, search: Search) -> Scheduled:
    """A plan in the smallest arena that is met while its runs are moved.

    The work is counted in moves and not in seconds, as far as the time limit allows: what is named as the smallest budget must be found again.
    """
    best = _least(problem, plan, search)
    deadline = time.monotonic() + _SQUEEZE_SHARE * search.time_limit
    for k in range(_ROUNDS):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        plan = compacted(problem, plan, UNLIMITED, plan.peak_bytes, 0, left, search.seed + k, moves=_ROUND_MOVES)
        best = min(best, fit_arena_alone(problem, plan), key=lambda found: needed(problem, found))
    return replace(best, plan=replace(best.plan, strategy=search.strategy))


def compacted(
    problem: Problem, plan: Plan, limit: int, most: int, room: int, seconds: float, seed: int, capacity: int = UNLIMITED, moves: int = MOVES
) -> Plan:
    """The plan with its runs and transfers moved so that the arena gets smaller, towards ``room`` bytes; live bytes stay within ``most``."""
    form = lowered(problem, plan)
    steps = form.plan_steps(compact(form.problem, form.sequence, most, room, seconds, seed, moves, capacity))
    try:
        moved = plan_from_sequence(problem, steps, limit, plan.strategy)
    except PlanError:
        return plan  # moved swaps mean something else than what was placed
    return plan if lower(problem, steps) is None else replace(moved, solve_seconds=plan.solve_seconds)


def fit(problem: Problem, plan: Plan, budget: int, search: Search) -> Scheduled | None:
    """The plan within the budget, or None.

    An arena alone comes first, since every user of an artifact can have one; a block beside it where that does not suffice.
    """
    alone = _fit_arena(problem, plan, budget, search.portable)
    if alone is not None or not search.fixed or plan.peak_bytes > budget:
        return alone
    beside = fit_with_block(problem, plan, budget, search)
    return beside if beside is not None and needed(problem, beside) <= budget else None


def _arena_beside(fill: int) -> int:
    """The capacity of an arena beside a block that is to be filled with so many bytes."""
    return max(fill + slack(fill), OPTIMIZER_BYTES)


def fit_with_block(problem: Problem, plan: Plan, budget: int, search: Search) -> Scheduled | None:
    """The plan with fixed offsets for large tensors and the arena for the rest, whether within the budget or not.

    None where no arena holds the rest.  The block is there whole from the beginning, so block, capacity and bookkeeping together are a hard limit.
    """
    form = lowered(problem, plan)
    target = budget - problem.resident_bytes - 2 * GRANULE if budget < UNLIMITED else 0
    shortest, longest = _FIXED_SECONDS
    seconds = max(shortest, min(longest, _FIXED_SHARE * search.time_limit))
    try:
        placement, capacity = place_fixed(form.problem, form.sequence, _arena_beside, target, seconds, search.seed)
    except ArenaExhausted:
        return None
    return Scheduled(replace(plan, budget_bytes=budget), placement, capacity, _peak_at(problem, placement, capacity))


def _fit_arena(problem: Problem, plan: Plan, budget: int, portable: bool = False) -> Scheduled | None:
    """The plan in the smallest arena that holds it, or None where that exceeds the budget.

    A larger arena can place buffers worse, so the capacity is part of the simulation; capacity and bookkeeping together stay within the
    budget, which makes it a hard limit.
    """
    largest = capacity_within(budget - problem.resident_bytes)
    form = lowered(problem, plan)
    wanted = place(form.problem, form.sequence, UNLIMITED).arena_bytes
    smallest = max(wanted + slack(wanted), OPTIMIZER_BYTES)
    if largest < (smallest if portable else OPTIMIZER_BYTES):
        return None
    # The largest one is tried in any case: its end may keep buffers from where an endless arena would have put them.
    for capacity in dict.fromkeys(min(int(smallest * (1 + share)), largest) for share in _CAPACITIES):
        try:
            placement = place(form.problem, form.sequence, capacity)
        except ArenaExhausted:
            continue
        peak = _peak_at(problem, placement, capacity)
        hinges = portable and placement.arena_bytes > wanted
        if placement.arena_bytes + slack(placement.arena_bytes) <= capacity and peak <= budget and not hinges:
            return Scheduled(replace(plan, budget_bytes=budget), placement, capacity, peak)
    return None
