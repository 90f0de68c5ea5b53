"""Orders without a recompute that hold few bytes: list scheduling (Graham, 1969, "Bounds on multiprocessing timing anomalies").

Of the ops that may run, the one that makes memory grow least runs next.  Where several do, one order follows the base order and the other
goes into depth: what has become ready last runs first.
"""

from __future__ import annotations

import itertools
import time

from ..reduce import Reduced
from .registry import Context, register

__all__ = ["list_schedule"]


@register("reorder")
def reorder(context: Context) -> None:
    """Offer the base order and both greedy orders."""
    context.offer(range(context.reduced.count))
    for deep in (False, True):
        sequence = list_schedule(context.reduced, deep, context.deadline)
        if sequence is not None:
            context.offer(sequence)


def list_schedule(reduced: Reduced, deep: bool, deadline: float = float("inf")) -> list[int] | None:
    """An order of all reduced ops, each once, by least growth of memory.

    Args:
        reduced: the problem.
        deep: of equal ops, take the one that has become ready last rather than the first of the base order.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        The order, None where time ran out.
    """
    n = reduced.count
    after: list[set[int]] = [set() for _ in range(n)]
    for o in range(n):
        for s in reduced.reads[o]:
            after[reduced.producer[s]].add(o)
        # Who replaces a version comes after who reads it.
        for w in reduced.killers_first[o]:
            after[o].add(w)
    # Ops whose order carries meaning keep it.
    fixed = [o for o in range(n) if not reduced.movable[o]]
    for a, b in itertools.pairwise(fixed):
        after[a].add(b)
    waits = [0] * n
    for later in after:
        for o in later:
            waits[o] += 1
    unread = [len({o for o in readers if s in reduced.reads[o]}) for s, readers in enumerate(reduced.readers)]
    made = [sum(reduced.size[s] for s in outs if unread[s] or reduced.held[s]) for outs in reduced.outs]
    ready = {o: 0 for o in range(n) if not waits[o]}
    out: list[int] = []

    def growth(o: int) -> int:
        return made[o] - sum(reduced.size[s] for s in reduced.reads[o] if unread[s] == 1 and not reduced.held[s])

    while ready:
        if time.monotonic() > deadline:
            return None
        chosen = min(ready, key=lambda o: (growth(o), -ready[o] if deep else 0, o))
        del ready[chosen]
        out.append(chosen)
        for s in reduced.reads[chosen]:
            unread[s] -= 1
        for o in after[chosen]:
            waits[o] -= 1
            if not waits[o]:
                ready[o] = len(out)
    return out
