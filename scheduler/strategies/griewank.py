"""Binomial checkpointing: Griewank and Walther, 2000, "Algorithm 799: revolve" (ACM TOMS 26), sections 2 and 3.

With c checkpoints besides the start, a chain of l equal stages is reversed with the fewest forward steps by splitting it where the two parts
again are reversed best.  On the graph of a step a checkpoint is the state of a cut; the logarithmic schedule has about log2(l) of them,
and other numbers are tried as well, because the budget is in bytes.
"""

from __future__ import annotations

import math
from functools import lru_cache

from .registry import Context
from .stages import Action, Chain, Division, Stages, register_divided

__all__ = ["forward_steps", "griewank", "revolve"]

# Longer chains are thinned out: a schedule of l stages runs them r * l times in the worst case.
_STAGES = 400


@lru_cache(maxsize=1 << 16)
def forward_steps(stages: int, checkpoints: int) -> int:
    """The fewest forward steps, beyond the one that each stage needs for its own reversal, that reverse a chain.

    t(l, s) = r l - C(s + r, r - 1) with C(s + r - 1, s) < l <= C(s + r, s) (the paper's theorem on optimal offline checkpointing), where
    the s = ``checkpoints`` + 1 states that are held include the start.
    """
    if stages <= 1:
        return 0
    held = checkpoints + 1
    r = 1
    while math.comb(held + r, held) < stages:
        r += 1
    return r * stages - math.comb(held + r, r - 1)


def revolve(first: int, last: int, checkpoints: int) -> list[Action]:
    """Actions that reverse the stages ``first`` to ``last`` (inclusive), the state before the first being held."""
    actions: list[Action] = []
    # Each entry is a part to reverse, or an action to take between two.
    stack: list[tuple[int, int, int] | Action] = [(first, last, checkpoints)]
    while stack:
        entry = stack.pop()
        if len(entry) == 2:
            actions.append(entry)
            continue
        s, t, c = entry
        if s == t:
            actions += [("last", s), ("back", s)]
            continue
        length = t - s + 1
        # Without a checkpoint to spare, the stages are reversed one by one, each from the start.
        m = length - 1 if c == 0 else min(range(1, length), key=lambda k: (k + forward_steps(k, c) + forward_steps(length - k, c - 1), k))
        actions += [("forward", i) for i in range(s, s + m)]
        after: Action = ("release", s + m)
        actions.append(("hold", s + m))
        stack += [(s, s + m - 1, c), after, (s + m, t, max(0, c - 1))]
    return actions


@register_divided("griewank")
def griewank(context: Context, chain: Chain, division: Division) -> None:
    """Offer schedules with log2(l) checkpoints, and with fewer and more."""
    stages = Stages(chain, chain.thinned(division, _STAGES))
    last = stages.count - 1
    log = math.ceil(math.log2(stages.count))
    tried = dict.fromkeys([log, *(round(1.5**k) for k in range(64) if 1.5**k < last), 0 if last < 24 else 1])
    for checkpoints in tried:
        context.offer(stages.replay(revolve(0, last, checkpoints)))
        if context.left < 0:
            return
