"""The default strategy: a portfolio of starts, then anytime local search on both cores.

Starts are the base order, the answers of all cheap strategies, walks that evict and rematerialize on demand (see :mod:`..greedy`) under
several scores, and the solutions of the relaxations that prove bounds (see :mod:`..relaxation`), which are a little over the budget but
hardly cost more than is proven necessary; :mod:`..search` improves them (after FastSA, Shen et al., NeurIPS 2023), and :mod:`..windows`
where that finds nothing better.  The work is limited by moves, so that the answer is a function of the seed as long as the time limit does
not cut it short.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

from ..bounds import seconds_floor
from ..errors import PlanError
from ..greedy import Weights, walk
from ..search import Round, Search, rounds
from ..windows import Windows
from .registry import ROUNDING, Context, get_strategy, register

CHEAP = ("reorder", "chen_sqrt", "chen_greedy", "mincut_knapsack", "griewank", "rotor")
WEIGHTS = (
    Weights(1, 0.5, 1),
    Weights(1, 0, 1),
    Weights(1, 0.5, 0.5),
    Weights(1, 1, 1),
)
# Shares of the time limit that the relaxations, the cheap strategies and the walks may take together.
_RELAXED_SHARE, _CHEAP_SHARE, _WALK_SHARE = 0.2, 0.15, 0.05
# Moves per op of a round that looks for a first plan where no quick start has one, those of the round that improves it, the temperatures of
# the lanes, and the number of rounds.
_FIRST_MOVES, _SECOND_MOVES, _FIRST, _FIRST_ROUNDS = 450, 150, (1e-3, 3e-4), 2
# How many solutions of relaxations are repaired, in how many moves per op, and the temperatures that the two lanes start at.
_RELAXED, _REPAIR_MOVES, _REPAIR = 4, 1500, (1e-4, 1e-5)
_MOVES_PER_OP = 60_000
# Moves without a better plan, relative to all, after which the search ends.
_PATIENCE = 0.5
# Moves of a round that found nothing better for each pair of windows that is tried then, and, where work is not limited, the share of the
# annealing's wall time that windows may take; a pair with fewer seconds than this is not begun.
_WINDOW_MOVES, _WINDOW_SHARE, _WINDOW_SECONDS = 500_000, 0.5, 1.0


@register("auto")
def auto(context: Context) -> None:
    """Offer the cheap strategies' answers, the walks', and what local search makes of them."""
    context.bound = max(context.bound, seconds_floor(context.problem))
    get_strategy("keep_all")(context)
    if context.hint is not None:
        context.offer_ops(context.hint)
    if context.proven_optimal:
        return
    if context.hint is not None:
        # A plan for a budget nearby is worth more than any start; those are tried only where it leads nowhere.
        search(context, [(context.best_seconds, list(context.reduced.contract(context.hint)))])
        if context.best is not None:
            return
    # A plan first: these two are quick on thousands of ops.
    get_strategy("reorder")(context)
    early = walks(context, context.budget, WEIGHTS[:1], time.monotonic() + _WALK_SHARE * max(0.0, context.left))
    if context.best is None:
        early += first_plan(context)
    if context.work_limit is None:
        # A proof comes as far as the time lets it, so that with a limit on work there is none before the end.
        context.prover.work(_RELAXED_SHARE * max(0.0, context.left), first=True)
        context.raise_bound(context.prover.bound)
        context.prove_beside()
    portfolio = sorted([*early, *starts(context)], key=lambda x: x[0])
    if not context.proven_optimal:
        search(context, portfolio)


def first_plan(context: Context) -> list[tuple[float, list[int]]]:
    """Rounds of local search, aimed at the peak, from the base order and from the sequence of the lowest peak, until there is a plan.

    Then a round that improves it.

    Returns:
        (seconds, sequence of reduced ops) of the best one, a list of one or none.
    """
    reduced = context.reduced
    local = Search(reduced, context.budget, context.deadline, context.seed, math.inf, context.tell, aim=True)
    sequences = [list(range(reduced.count)), list(range(reduced.count)) if context.lowest is None else reduced.contract(context.lowest)]
    found: list[tuple[float, list[int]]] = []
    try:
        for _ in range(_FIRST_ROUNDS):
            if found or context.left <= 0:
                break
            sequences = local.run(Round(max(20_000, _FIRST_MOVES * reduced.count), *_FIRST), *sequences)
            found = [(sum(reduced.cost[o] for o in s), s) for s in sequences if context.offer(s)]
        if found and context.left > 0:
            local.floor, local.aim = 0.0, False
            sequences = local.run(Round(max(20_000, _SECOND_MOVES * reduced.count), *_FIRST), found[0][1], found[-1][1])
            found += [(sum(reduced.cost[o] for o in s), s) for s in sequences if context.offer(s)]
    except KeyboardInterrupt:
        context.offer_all(local.found())
        raise
    return [min(found)] if found else []


def relaxed(context: Context) -> list[list[int]]:
    """Solutions of the relaxations as sequences of reduced ops that can run, those of the best bounds first."""
    reduced = context.reduced
    found: dict[tuple[int, ...], None] = {}
    for _, sequence in sorted(context.prover.sequences, key=lambda x: -x[0]):
        fixed = [o for o in sequence if not reduced.movable[o]]
        if fixed == sorted(fixed) and len(found) < _RELAXED and sequence not in found:
            try:
                context.offer(sequence)
            except PlanError:  # something in it reads what is replaced by then
                continue
            found[sequence] = None
    return [list(sequence) for sequence in found]


def starts(context: Context) -> list[tuple[float, list[int]]]:
    """(seconds, sequence of reduced ops) of the cheap starts within the budget, best first, all of them offered."""
    reduced = context.reduced
    found: dict[tuple[int, ...], float] = {}
    limit = max(0.0, context.left)
    until = time.monotonic() + _CHEAP_SHARE * limit
    for name in CHEAP:
        # Each on its own, so that it leaves its own best behind.
        own = Context(context.problem, context.budget, until, context.seed, strategy=context.strategy)
        own.share(reduced)
        get_strategy(name)(own)
        for sequence in (own.best, own.lowest):
            if sequence is not None and context.offer_ops(sequence):
                found.setdefault(tuple(reduced.contract(sequence)), own.best_seconds)
    for seconds, sequence in walks(context, context.budget, WEIGHTS[1:], time.monotonic() + _WALK_SHARE * limit):
        found.setdefault(tuple(sequence), seconds)
    return sorted(((seconds, list(sequence)) for sequence, seconds in found.items()), key=lambda x: x[0])


def walks(context: Context, budget: int, weights: Sequence[Weights], until: float) -> list[tuple[float, list[int]]]:
    """Offer the walks for a budget; returns (seconds, sequence of reduced ops) of those within the context's budget, best first."""
    found = []
    for w in weights:
        if time.monotonic() > until:
            break
        sequence = walk(context.reduced, budget, w, until)
        if sequence is not None and context.offer(sequence):
            found.append((sum(context.reduced.cost[o] for o in sequence), sequence))
    found.sort(key=lambda x: x[0])
    return found


def search(context: Context, portfolio: list[tuple[float, list[int]]]) -> None:
    """Rounds of local search, ever longer, until the work or the time is done or the best plan is proven optimal."""
    reduced = context.reduced
    base = list(range(reduced.count))

    def tell(seconds: float | None) -> None:
        """Pass on what is new, both ways: the search ends where it meets a bound that rises meanwhile."""
        context.tell(seconds)
        local.floor = context.bound * (1 + ROUNDING)

    local = Search(reduced, context.budget, context.deadline, context.seed, context.bound * (1 + ROUNDING), tell)
    windows = Windows(reduced, context.budget, context.deadline, context.seed)
    annealed = 0.0
    best = portfolio[0][1] if portfolio else base if context.lowest is None else reduced.contract(context.lowest)
    # The base order comes in between: from hot, its own way down may be better than that of the best start.
    pool = [base, *(sequence for _, sequence in portfolio[:3])]
    repair = relaxed(context)
    for a, b in itertools.product(repair, repair) if len(repair) < 2 else zip(repair[::2], repair[1::2], strict=False):
        if context.left > 0 and not context.proven_optimal:
            try:
                context.offer_all(local.run(Round(max(20_000, _REPAIR_MOVES * reduced.count), *_REPAIR), a, b))
            except KeyboardInterrupt:
                context.offer_all(local.found())
                raise
    if repair and context.best is not None:
        best = reduced.contract(context.best)
    total = _MOVES_PER_OP * max(20, reduced.count) if context.work_limit is None else context.work_limit
    plan = rounds(total, reduced.count)
    idle = 0
    k = 0
    while k < len(plan) and context.left > 0 and not context.proven_optimal:
        before = context.best_seconds
        began = time.monotonic()
        explore = pool[k % len(pool)]
        try:
            found = local.run(plan[k], explore, best)
        except KeyboardInterrupt:
            context.offer_all(local.found())
            raise
        spent = time.monotonic() - began
        annealed += spent
        ranked = sorted(((not context.offer(s), sum(reduced.cost[o] for o in s), i) for i, s in enumerate(found)))
        late, _, i = ranked[0]
        if not late or context.best is None:
            best = found[i]
        if context.best is not None and context.best_seconds < before:
            best = reduced.contract(context.best)
            idle = 0
        else:
            idle += plan[k].moves
            allowed = _WINDOW_SHARE * annealed if context.work_limit is None else math.inf
            if context.best is not None and exact(context, windows, max(1, plan[k].moves // _WINDOW_MOVES), allowed):
                best = reduced.contract(context.best)
                idle = 0
        if idle > _PATIENCE * total:
            return
        left = context.left
        k += 1
        if k < len(plan) and spent > 0 and 0 < left < spent * plan[k].moves / plan[k - 1].moves:
            # The next round would be cut while still hot: it is made to fit.
            plan = [*plan[:k], Round(max(2000, int(0.9 * plan[k - 1].moves * left / spent)), plan[k].explore, plan[k].refine)]


def exact(context: Context, windows: Windows, pairs: int, allowed: float) -> bool:
    """Try pairs of windows of the best plan, going on from each better one.

    Args:
        context: has the best plan, and receives better ones.
        windows: of its problem.
        pairs: how many at most.
        allowed: wall seconds that all pairs may have taken by the end, those of earlier calls included.

    Returns:
        Whether there was a better plan.
    """
    before = context.best_seconds
    for _ in range(pairs):
        if context.best is None or min(context.left, allowed - windows.spent) < _WINDOW_SECONDS or context.proven_optimal:
            break
        context.offer_all(windows.improve(context.reduced.contract(context.best), allowed - windows.spent))
        context.tell(None)
    return context.best_seconds < before


def lower_peak(context: Context, floor: int) -> None:
    """Look for sequences of ever lower peak, by bisection with walks and then by local search, until one is within the budget.

    Args:
        context: receives what is found; its ``lowest`` is where to start.
        floor: bytes below which nothing exists.
    """
    reduced = context.reduced
    low = floor
    while context.lowest_peak > max(low, context.budget) and context.left > 0:
        high = context.lowest_peak
        middle = (low + high) // 2
        if high - low <= max(1, high // 500):
            break
        walks(context, middle, WEIGHTS, min(context.deadline, time.monotonic() + 4.0))
        if context.lowest_peak > middle:
            low = middle
    for k in range(12):
        if context.best is not None or context.left <= 0 or context.lowest_peak <= floor or context.lowest is None:
            return
        # A little below the lowest peak: near enough that the search can get there.
        target = max(floor, context.budget, int(context.lowest_peak * 0.97))
        before = context.lowest_peak
        start = reduced.contract(context.lowest)
        local = Search(reduced, target, context.deadline, context.seed + k, aim=True)
        context.offer_all(local.run(Round(20 * reduced.count + 2000, 1e-3, 3e-3), start, start))
        if context.lowest_peak >= before:
            return
