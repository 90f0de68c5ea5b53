"""Problem and budget -> a plan that fits when the runtime's arena has placed it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from .errors import BudgetInfeasible, OnnxRematError
from .fit import (
    OPTIMIZER_BYTES,
    Scheduled,
    Search,
    compacted,
    fit,
    lowered,
    needed,
    needed_budget,
    schedule_unscheduled,
    slack,
    squeezed,
)
from .placement import GRANULE, UNLIMITED, bookkeeping_bytes, capacity_within, place
from .progress import Interruption
from .scheduler import Infeasible, Plan, Problem, Progress, lower_bound, plan_from_sequence, smallest_plan, solve
from .units import format_bytes

#: Share of the arena that live bytes are planned into at first: a perfect packing is rarely found.
_LIVE_SHARE = 0.985
#: Seconds that moving runs for a better placement may take, and their share of the time limit.
_COMPACT_SECONDS, _COMPACT_SHARE = 10.0, 1 / 24
#: Shares of the time limit: of each search for a limit that suits the arena, and of the last resort where none was found.
_FIND_SHARE, _LAST_SHARE = 1 / 16, 1 / 3
#: Tries of the last resort, where the ones before missed the budget by no more than this share.
_LAST_ATTEMPTS, _NEAR = 4, 0.02
#: Share of the time left that goes to making the most of a limit.
_IMPROVE_SHARE = 0.7
#: Seconds of one search at least, and the number of searches at least: less finds poor plans, or none.
_LEAST_SECONDS, _LEAST_TRIES = 1.0, 3
#: Where limits are tried between the tightest known and the first, once the steps have met in the middle.
_BETWEEN = (0.0, 0.5, 0.25, 0.75)
#: The gain, relative, below which no better limit is looked for.
_WORTH = 1e-3
#: Seconds that the proof of a lower bound may take, and their share of the time limit.
_BOUND_SECONDS, _BOUND_SHARE = 10.0, 1 / 6


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
    if search.strategy in ("auto", "keep_all"):
        fitting = fit(problem, plan_from_sequence(problem, range(len(problem.ops)), UNLIMITED, search.strategy), budget, search)
        if fitting is not None:
            return fitting
    planning = _Planning(problem, budget, search, progress, interruption)
    if planning.find() is None and planning.without is None:
        # The unscheduled step is a plan as well.
        smallest = min(planning.smallest, needed(problem, schedule_unscheduled(problem)))
        raise _infeasible(problem, budget, max(smallest, budget + 1), max(planning.proven, needed_budget(problem, 0)))
    found = min((s for s in (planning.improve(), planning.without) if s is not None), key=lambda s: s.plan.seconds)
    bound = lower_bound(problem, budget, 0.0 if interruption.asked else planning.bound_seconds)
    # What exceeds a plan that runs can only be the solver's rounding.
    return replace(found, plan=replace(found.plan, seconds_lower_bound=min(bound, found.plan.seconds)))


class _Planning:
    """Plans under one limit on live bytes after the other, and what became of each in the arena.

    How much the arena needs beyond live bytes differs from plan to plan, and by more than a little: short searches look for a limit under
    which the placement fits, and a long one makes the most of it.

    Attributes:
        best: the fastest plan that fits; None as long as there is none.
        without: one that swaps nothing, looked for once a plan with swaps did not fit: those are harder to place, and under an ever lower limit
            they can end up slower; None where there is none.
        smallest: the smallest budget, in bytes, for which a plan is known, once none fits.
        proven: bytes that no plan can go below, as far as it was asked for.
        bound_seconds: seconds that are left for the proof of a lower bound.
    """

    def __init__(self, problem: Problem, budget: int, search: Search, progress: Callable[[Progress], None], interruption: Interruption) -> None:
        self.problem, self.budget, self.search = problem, budget, search
        self.progress, self.interruption = progress, interruption
        self.best: Scheduled | None = None
        self.without: Scheduled | None = None
        self.smallest, self.proven = UNLIMITED, 0
        self.bound_seconds = min(_BOUND_SECONDS, _BOUND_SHARE * search.time_limit)
        self.capacity = capacity_within(budget - problem.resident_bytes)
        self.room = self.capacity - slack(self.capacity)
        # The most live bytes that can be hoped for: where tensors have fixed offsets, only the arena beside them needs tables.
        beside = budget - bookkeeping_bytes(OPTIMIZER_BYTES) - 2 * GRANULE - slack(OPTIMIZER_BYTES)
        self.most = max(problem.resident_bytes + self.room, beside if search.fixed else 0)
        self._begin = time.monotonic()
        self._deadline = self._begin + search.time_limit - self.bound_seconds
        self._tries = 0
        # Limits on live bytes, resident ones included: under which the best plan fits, and the least one under which a plan did not.
        self._fits = self._misfits = UNLIMITED
        self._fastest_misfit = 0.0
        # How much more than there is the last plan took in an endless arena; whether the best plan is the last resort's.
        self._excess, self._last = 1.0, False
        # The smallest live peak known, where a search found none within its limit.
        self._tightest = 0

    @property
    def left(self) -> float:
        """Seconds left."""
        return max(0.0, self._deadline - time.monotonic())

    def find(self) -> Scheduled | None:
        """The first plan that fits; the limit is lowered in growing steps until one does, or until none is found under it."""
        floor = self.problem.resident_bytes
        # The optimizer's phase may be the larger one; it does not depend on the plan.
        first = limit = max(floor + int(_LIVE_SHARE * self.room), min(self.budget, self.problem.optimizer_peak_bytes))
        step = max(1, self.room // 32)
        shares = itertools.cycle(_BETWEEN)
        until = self._deadline - _LAST_SHARE * self.search.time_limit
        while self._tries < _LEAST_TRIES or time.monotonic() < until:
            plan = self._try(limit, self._seconds(_FIND_SHARE * self.search.time_limit))
            if self.best is not None:
                return self.best
            if isinstance(plan, Infeasible):
                self.proven = plan.lower_bound_bytes
                self._tightest = max(self._tightest, plan.minimum_budget_bytes)
                if plan.minimum_budget_bytes > self.most:
                    break
            if self.interruption.asked and self._tries >= _LEAST_TRIES:
                break
            if self._tightest and limit <= self._tightest:
                # Nothing tighter is known: chance decides what fits.
                limit = self._tightest + int(next(shares) * max(0, first - self._tightest))
            else:
                limit, step = max(self._tightest, min(limit - step, floor + int((limit - floor) / self._excess))), 2 * step
        return self._last_resort()

    def improve(self) -> Scheduled | None:
        """The best plan, after longer searches under its limit, or between it and the least limit that led to no placement."""
        # The last resort is far slower than need be: after it some searches are worth more than the clock.
        least = self._tries + (_LEAST_TRIES if self._last else 0)
        narrow = self._fits
        self._widen()
        while self.best is not None and (self.left > _LEAST_SECONDS or self._tries < least) and not self.interruption.asked:
            above = self._misfits
            if above == UNLIMITED:
                self._try(self._fits, self._seconds(_IMPROVE_SHARE * self.left))
                if self._misfits == UNLIMITED:
                    break
                above, self._fits = self._misfits, narrow
            if above - self._fits < self.room // 64 or self.best.plan.seconds <= self._fastest_misfit * (1 + _WORTH):
                break
            self._try((self._fits + above) // 2, self._seconds(_IMPROVE_SHARE * self.left / 2))
        return self.best

    def _widen(self) -> None:
        """A search in the larger room that fixed offsets leave; the better of both rooms gets the long one."""
        floor, narrow = self.problem.resident_bytes, self.best
        wide = floor + int(_LIVE_SHARE * (self.most - floor))
        # Where the first plan did not fit, a larger one won't either.
        if narrow is None or self._last or self._misfits < UNLIMITED or wide <= self._fits:
            return
        if narrow.plan.seconds <= narrow.plan.seconds_unscheduled * (1 + _WORTH) or self.left <= _LEAST_SECONDS or self.interruption.asked:
            return
        limit = self._fits
        self._try(wide, self._seconds(_FIND_SHARE * self.search.time_limit))
        # Whether that one fitted says nothing of the room that is left to the arena alone.
        self._misfits = UNLIMITED
        if self.best is None or self.best.plan.seconds * (1 + _WORTH) > narrow.plan.seconds:
            self.best, self._fits = narrow, limit

    def _seconds(self, share: float) -> float:
        # A limit on work ends a search the same way on every machine, which the clock must not anticipate.
        return max(_LEAST_SECONDS, share) if self.search.work_limit is None else max(_LEAST_SECONDS, self.left)

    def _try(self, limit: int, seconds: float) -> Plan | Infeasible:
        """One search under a limit, from the best plan where there is one, and its placement."""
        search = replace(self.search, seed=self.search.seed + self._tries)
        self._tries += 1
        hint = None if self.best is None or self.best.plan.swapped_tensors else self.best.plan.sequence
        try:
            plan = _solve(self.problem, limit, search, seconds, hint, self._tell)
        except KeyboardInterrupt:
            self.interruption.settle()
            if self.best is None:
                raise
            return self.best.plan
        self.interruption.settle()
        if isinstance(plan, Infeasible):
            return plan
        fitting = self._placed(plan, limit, search.seed)
        if fitting is None:
            if plan.swapped_tensors and self._misfits == UNLIMITED and self.search.strategy != "swap_only":
                alone = _solve(replace(self.problem, transfer=None), limit, search, seconds, None, self._tell)
                placed = None if isinstance(alone, Infeasible) else self._placed(alone, limit, search.seed)
                self.without = min((s for s in (self.without, placed) if s is not None), key=lambda s: s.plan.seconds, default=None)
            self._fastest_misfit = plan.seconds if limit < self._misfits else self._fastest_misfit
            self._misfits = min(self._misfits, limit)
        elif self.best is None or fitting.plan.seconds < self.best.plan.seconds:
            self.best, self._fits = fitting, limit
        return plan

    def _placed(self, plan: Plan, limit: int, seed: int) -> Scheduled | None:
        """A plan with its runs moved for the arena; None where it does not fit."""
        most = max(plan.peak_bytes, self.problem.resident_bytes + self.room)
        patience = max(1.0, min(_COMPACT_SECONDS, _COMPACT_SHARE * self.search.time_limit))
        end = UNLIMITED if self.search.portable else self.capacity
        moved = compacted(self.problem, plan, max(limit, most), most, self.room, patience, seed, end)
        form = lowered(self.problem, moved)
        self._excess = max(1.0, place(form.problem, form.sequence, UNLIMITED).arena_bytes / max(1, self.room))
        return fit(self.problem, moved, self.budget, self.search)

    def _last_resort(self) -> Scheduled | None:
        """The tightest plan, where that one fits; it is what the smallest budget named in an error rests on, so that this one is found again.

        A busier machine may miss such a budget by a little: then chance gets another try.
        """
        for attempt in range(_LAST_ATTEMPTS):
            search = replace(self.search, seed=self.search.seed + attempt)
            plan: Plan | Infeasible | None = None
            if search.strategy in ("auto", "swap_only"):
                plan = smallest_plan(self.problem, _LAST_SHARE * search.time_limit, search.seed, search.strategy)
            elif self._tightest:
                plan = _solve(self.problem, self._tightest, search, _LAST_SHARE * search.time_limit)
            if not isinstance(plan, Plan):
                break
            tight = squeezed(self.problem, plan, search)
            self.smallest = min(self.smallest, needed(self.problem, tight))
            self.best, self._fits, self._last = fit(self.problem, tight.plan, self.budget, self.search), tight.plan.peak_bytes, True
            if self.best is not None or self.interruption.asked or self.smallest > self.budget * (1 + _NEAR):
                break
        return self.best

    def _tell(self, found: Progress) -> None:
        self.interruption.check()
        now = time.monotonic()
        self.progress(replace(found, elapsed=now - self._begin, left=max(0.0, self._deadline - now)))


def schedule_smallest(
    problem: Problem,
    search: Search,
    progress: Callable[[Progress], None] = lambda _: None,
    interruption: Interruption | None = None,
) -> Scheduled:
    """The fastest plan found within the smallest budget found; the plan's budget is what it needs."""
    plain = schedule_unscheduled(problem)
    tight = squeezed(problem, smallest_plan(problem, _LAST_SHARE * search.time_limit, search.seed, search.strategy), search)
    tight = min((plain, tight), key=lambda s: needed(problem, s))
    budget = needed(problem, tight)
    if tight is plain:
        return replace(plain, plan=replace(plain.plan, budget_bytes=budget, strategy=search.strategy))
    try:
        found = schedule(problem, budget, search, progress, interruption)
    except BudgetInfeasible:
        found = tight
    return replace(found, plan=replace(found.plan, budget_bytes=min(budget, needed(problem, found))))


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


def _infeasible(problem: Problem, budget: int, minimum: int, floor: int) -> BudgetInfeasible:
    proof = f"; no plan can take less than {format_bytes(floor)}" if floor > budget else ""
    return BudgetInfeasible(
        f"a step of {problem.name} was not brought below {format_bytes(minimum)}, and the budget is {format_bytes(budget)}{proof}: "
        f"raise --budget to {minimum}B, or make the batch smaller",
        minimum,
    )
