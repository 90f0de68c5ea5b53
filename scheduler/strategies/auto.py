"""The default strategy: a portfolio of starts, then anytime local search on both cores.

Starts are the base order, the answers of all cheap strategies, and walks that evict and rematerialize on demand (see :mod:`..greedy`)
under several scores; :mod:`..search` improves them (after FastSA, Shen et al., NeurIPS 2023).  The work is limited by moves, so that the
answer is a function of the seed as long as the time limit does not cut it short.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..bounds import seconds_floor
from ..greedy import Weights, walk
from ..relaxation import best_bound
from ..search import Round, Search, rounds
from .registry import ROUNDING, Context, get_strategy, register

CHEAP = ("chen_sqrt", "chen_greedy", "mincut_knapsack", "griewank")
WEIGHTS = (
    Weights(1, 0.5, 1),
    Weights(1, 0, 1),
    Weights(1, 0.5, 0.5),
    Weights(1, 1, 1),
)
# Shares of the time limit that the cheap strategies and the walks may take together.
_CHEAP_SHARE, _WALK_SHARE = 0.15, 0.05
_MOVES_PER_OP = 60_000
# Moves without a better plan, relative to all, after which the search ends.
_PATIENCE = 0.5


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
    search(context, starts(context))


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
    for seconds, sequence in walks(context, context.budget, WEIGHTS, time.monotonic() + _WALK_SHARE * limit):
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
    local = Search(reduced, context.budget, context.deadline, context.seed, context.bound * (1 + ROUNDING), context.tell)
    best = portfolio[0][1] if portfolio else base
    # The base order comes in between: from hot, its own way down may be better than that of the best start.
    pool = [base, *(sequence for _, sequence in portfolio[:3])]
    total = _MOVES_PER_OP * max(20, reduced.count)
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
        ranked = sorted(((not context.offer(s), sum(reduced.cost[o] for o in s), i) for i, s in enumerate(found)))
        late, _, i = ranked[0]
        if not late or context.best is None:
            best = found[i]
        if context.best is not None and context.best_seconds < before:
            best = reduced.contract(context.best)
            idle = 0
        else:
            idle += plan[k].moves
        if idle > _PATIENCE * total:
            return
        if k == 0:
            early_bound(context)
            local.floor = context.bound * (1 + ROUNDING)
        left, spent = context.left, time.monotonic() - began
        k += 1
        if k < len(plan) and spent > 0 and 0 < left < spent * plan[k].moves / plan[k - 1].moves:
            # The next round would be cut while still hot: it is made to fit.
            plan = [*plan[:k], Round(max(2000, int(0.9 * plan[k - 1].moves * left / spent)), plan[k].explore, plan[k].refine)]


def early_bound(context: Context) -> None:
    """A bound before the long search, which ends it where it is met: a few seconds at most."""
    if context.bound_seconds > 0 and not context.proven_optimal:
        seconds = min(0.3 * context.bound_seconds, 0.1 * context.left)
        context.raise_bound(best_bound(context.reduced, context.budget, seconds, context.best_seconds))


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
        local = Search(reduced, target, context.deadline, context.seed + k)
        context.offer_all(local.run(Round(20 * reduced.count + 2000, 1e-3, 3e-3), start, start))
        if context.lowest_peak >= before:
            return
