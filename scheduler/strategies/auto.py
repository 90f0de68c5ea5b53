"""The default strategy: a portfolio of starts, then anytime local search.

Starts are the base order, Chen's segments and walks that evict and rematerialize on demand (see :mod:`..greedy`) under several scores;
the best are improved by :mod:`..search` (after FastSA, Shen et al., NeurIPS 2023).  The work is limited by rounds, so that the answer is
a function of the seed as long as the time limit does not cut it short.
"""

from __future__ import annotations

import random
import time

from ..bounds import seconds_floor
from ..greedy import Weights, walk
from ..search import improve
from .chen_greedy import chen_greedy
from .chen_sqrt import chen_sqrt
from .keep_all import keep_all
from .registry import Context, register

WEIGHTS = (
    Weights(1, 0.5, 1),
    Weights(1, 0, 1),
    Weights(1, 0.5, 0.5),
    Weights(1, 1, 1),
    Weights(0.5, 0.5, 1),
    Weights(1, 1, 0.5),
    Weights(1, 0.5, 0),
)
# A walk that does not fit thrashes; all walks for one budget share this time.
_WALK_SECONDS = 4.0
_TRIAL_ROUNDS = 3000
_ROUNDS = 80000
_ROUNDS_PER_OP = 400


@register("auto")
def auto(context: Context) -> None:
    """Offer the cheap strategies' answers, the walks', and what local search makes of the best of them."""
    floor = seconds_floor(context.problem)
    keep_all(context)
    if context.best is not None and context.best_seconds <= floor * (1 + 1e-12):
        return
    chen_sqrt(context)
    chen_greedy(context)
    starts = walks(context, context.budget, WEIGHTS)
    search(context, starts, floor)


def walks(context: Context, budget: int, weights: tuple[Weights, ...]) -> list[tuple[float, list[int]]]:
    """Offer the walks for a budget; returns (seconds, sequence of reduced ops) of those that came through, best first."""
    found = []
    until = min(context.deadline, time.monotonic() + _WALK_SECONDS)
    for w in weights:
        if time.monotonic() > until:
            break
        sequence = walk(context.reduced, budget, w, until)
        if sequence is not None:
            context.offer(sequence)
            found.append((sum(context.reduced.cost[o] for o in sequence), sequence))
    found.sort(key=lambda x: x[0])
    return found


def search(context: Context, starts: list[tuple[float, list[int]]], floor: float) -> None:
    """Improve the two best starts and the base order briefly, then the best of these at length."""
    reduced = context.reduced
    base = list(range(reduced.count))
    # Small graphs are soon done; long ones pay more per round, and get fewer, so that the default stays a matter of seconds.
    rounds = int(min(_ROUNDS * min(1.0, 1000 / max(1, reduced.count)), 2000 + _ROUNDS_PER_OP * reduced.count))
    trial = min(_TRIAL_ROUNDS, rounds // 8)
    trials = []
    for start in [*(s for _, s in starts[:2]), base]:
        if context.left < 0:
            return
        sequence = improve(reduced, start, context.budget, context.deadline, random.Random(context.seed), trial, floor=floor)
        within = context.offer(sequence)
        trials.append((not within, sum(reduced.cost[o] for o in sequence), sequence))
    trials.sort(key=lambda x: x[:2])
    if context.best_seconds <= floor * (1 + 1e-12) or context.left < 0:
        return
    sequence = improve(reduced, trials[0][2], context.budget, context.deadline, random.Random(context.seed + 1), rounds, floor=floor)
    context.offer(sequence)


def lower_peak(context: Context, floor: int) -> None:
    """Look for sequences of ever lower peak, by bisection with walks and then by local search, until one is within the budget.

    Args:
        context: receives what is found; its ``lowest`` is where to start.
        floor: bytes below which nothing exists.
    """
    reduced = context.reduced
    low = floor
    best: tuple[int, list[int]] | None = None
    while context.lowest_peak > max(low, context.budget) and context.left > 0:
        high = context.lowest_peak
        middle = (low + high) // 2
        if high - low <= max(1, high // 500):
            break
        for _, sequence in walks(context, middle, WEIGHTS[:4]):
            if best is None or context.lowest_peak < best[0]:
                best = (context.lowest_peak, sequence)
        if context.lowest_peak > middle:
            low = middle
    start = best[1] if best is not None else list(range(reduced.count))
    rng = random.Random(context.seed)
    for _ in range(12):
        if context.best is not None or context.left <= 0 or context.lowest_peak <= floor:
            return
        # A little below the lowest peak: near enough that the search can get there.
        target = max(floor, context.budget, int(context.lowest_peak * 0.97))
        before = context.lowest_peak
        start = improve(reduced, start, target, context.deadline, rng, 2500)
        context.offer(start)
        if context.lowest_peak >= before:
            return
