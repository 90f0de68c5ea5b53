"""A machine that runs reduced ops on demand: what it is told to drop is made again when it is read next.

Strategies of the literature are stated on the forward pass: what to keep of it, and what to run again for the backward pass.  On the graph
of a whole step, forward and backward together, they become orders to this machine.  The backward ops run once, in the base order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..evaluate import evaluate
from ..reduce import Reduced

__all__ = ["Machine", "forward_end", "last_asked"]


def forward_end(reduced: Reduced) -> int:
    """Number of reduced ops that make up the forward pass.

    Where the problem does not tell phases apart, the forward pass is taken to end at the peak of the base order.
    """
    phases = [reduced.problem.ops[o].phase for o in reduced.op]
    if "backward" in phases:
        return phases.index("backward")
    steps = reduced.expand(range(reduced.count))
    if not steps:
        return 0
    peak = steps[evaluate(reduced.problem, steps).peak_step]
    return int(np.searchsorted(np.array(reduced.op), peak)) + 1


def last_asked(reduced: Reduced, end: int) -> list[int]:
    """Per storage, the last op that may ask for it, directly or for something that is made again from it; -1 where it must not be dropped.

    Dropped and made again can be what the first ``end`` ops write, except what pinned ops write, outputs of the step, what nobody reads,
    and what is made from a version that is replaced before the last op that may ask.
    """
    last = [max(readers, default=-1) for readers in reduced.readers]
    for s in range(len(last) - 1, -1, -1):
        p = reduced.producer[s]
        for o in reduced.readers[s]:
            if s in reduced.again[o]:
                last[s] = max([last[s], *(last[v] for v in reduced.outs[o])])
        if p >= end or not reduced.rerun[p] or reduced.held[s] or any(w < last[s] for w in reduced.killers_again[p]):
            last[s] = -1
    return last


class Machine:
    """Runs ops, each after what it reads.

    Attributes:
        out: the reduced ops run so far.
        here: droppable storages that are held, in the order they were made.
    """

    def __init__(self, reduced: Reduced, asked: list[int]) -> None:
        """Start before the first op; ``asked`` is what :func:`last_asked` gives."""
        self.reduced = reduced
        self.asked = asked
        self.free = [o >= 0 for o in asked]
        self.next = 0
        self.out: list[int] = []
        self.here: dict[int, None] = {}
        self.ran = [False] * reduced.count

    def run(self, o: int) -> None:
        """Run an op, before it whatever it reads that is not held."""
        self.demand(self.reduced.again[o] if self.ran[o] else self.reduced.reads[o])
        self._run(o)

    def demand(self, storages: Iterable[int]) -> None:
        """Make storages that are not held and may still be asked for, with what they are made from, in the base order."""
        r = self.reduced
        wanted: dict[int, None] = {}
        stack = [s for s in storages if self.asked[s] >= self.next and s not in self.here]
        while stack:
            p = r.producer[stack.pop()]
            if p in wanted:
                continue
            wanted[p] = None
            stack += [s for s in (r.again[p] if self.ran[p] else r.reads[p]) if self.free[s] and s not in self.here]
        for p in sorted(wanted):
            self._run(p)

    def _run(self, o: int) -> None:
        self.out.append(o)
        self.ran[o] = True
        self.next = max(self.next, o + 1)
        for s in self.reduced.outs[o]:
            if self.free[s]:
                self.here[s] = None

    def drop(self, kept: Iterable[int]) -> None:
        """Drop all droppable storages but these."""
        keep = set(kept)
        for s in [s for s in self.here if s not in keep]:
            del self.here[s]
