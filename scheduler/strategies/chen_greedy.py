"""Greedy checkpointing by bytes: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", algorithm 3.

A segment ends at the first place to cut once its bytes exceed b; b is swept, as the paper advises.
"""

from __future__ import annotations

from .chen_sqrt import segments
from .registry import Context
from .stages import Chain, Division, register_divided

__all__ = ["chen_greedy"]

_TRIALS = 24


@register_divided("chen_greedy")
def chen_greedy(context: Context, chain: Chain, division: Division) -> None:
    """Offer segments that end when their bytes exceed b, for a geometric range of b."""
    reduced, end = chain.reduced, chain.end
    made = [sum(reduced.size[s] for s in reduced.outs[o]) for o in range(end)]
    places = set(chain.positions(division))
    low, high = max(1, sum(made) // (4 * end)), max(1, sum(made))
    seen = set()
    for k in range(_TRIALS):
        limit = low * (high / low) ** (k / (_TRIALS - 1))
        cuts, filled = [], 0
        for p in range(end):
            if filled > limit and p in places:
                cuts.append(p)
                filled = 0
            filled += made[p]
        if tuple(cuts) not in seen:
            seen.add(tuple(cuts))
            context.offer(segments(chain, cuts))
        if context.left < 0:
            return
