"""Greedy checkpointing by bytes: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", algorithm 3."""

from __future__ import annotations

from ..segments import crossing, forward_end, segmented
from .registry import Context, register

_TRIALS = 24


@register("chen_greedy")
def chen_greedy(context: Context) -> None:
    """Offer segments that end when their bytes exceed b, for a geometric range of b, linearised and at articulation points."""
    reduced = context.reduced
    end = forward_end(reduced)
    made = [sum(reduced.size[s] for s in reduced.outs[o]) for o in range(end)]
    if end < 2 or not sum(made):
        context.offer(range(reduced.count))
        return
    # One segment, the base order, is what the largest b gives.
    context.offer(range(reduced.count))
    width = crossing(reduced, end)
    low, high = max(1, sum(made) // (4 * end)), sum(made)
    seen = set()
    for k in range(_TRIALS):
        limit = low * (high / low) ** (k / (_TRIALS - 1))
        for articulated in (False, True):
            cuts, filled = [], 0
            for p in range(end):
                if filled > limit and p and (not articulated or width[p] == 1):
                    cuts.append(p)
                    filled = 0
                filled += made[p]
            if tuple(cuts) in seen:
                continue
            seen.add(tuple(cuts))
            sequence = segmented(reduced, cuts, end)
            if sequence is not None:
                context.offer(sequence)
            if context.left < 0:
                return
