"""Schedules from a division of the forward pass into segments (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .evaluate import evaluate
from .reduce import Reduced

__all__ = ["crossing", "forward_end", "segmented"]


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


def crossing(reduced: Reduced, end: int) -> list[int]:
    """For each forward position p, how many storages written before p are read by the forward pass from p on.

    Positions with one are the articulation points at which Chen's segments of a general graph end.
    """
    change = [0] * (end + 2)
    for s, producer in enumerate(reduced.producer):
        reads = [o for o in reduced.readers[s] if o < end]
        if producer < end and reads and reduced.size[s]:
            change[producer + 1] += 1
            change[max(reads) + 1] -= 1
    return [int(x) for x in np.cumsum(change)[: end + 1]]


def segmented(reduced: Reduced, cuts: Sequence[int], end: int) -> list[int] | None:
    """The sequence that keeps what crosses a cut, drops the rest, and recomputes a segment as a whole when it is first needed.

    Args:
        reduced: the problem.
        cuts: ascending positions in the forward pass; a segment ends before each. The last segment is kept.
        end: length of the forward pass.

    Returns:
        Reduced ops in the order they run, or None where a segment cannot be recomputed when it is needed.
    """
    segment, g = [0] * end, 0
    for p in range(end):
        while g < len(cuts) and p >= cuts[g]:
            g += 1
        segment[p] = g
    dropped: list[bool] = []
    for s, producer in enumerate(reduced.producer):
        dropped.append(
            producer < end
            and segment[producer] < len(cuts)
            and reduced.rerun[producer]
            and not reduced.held[s]
            and all(segment[o] == segment[producer] for o in reduced.readers[s] if o < end)
        )
    restored = [False] * (len(cuts) + 1)
    out = list(range(end))
    for o in range(end, reduced.count):
        for s in reduced.reads[o]:
            producer = reduced.producer[s]
            if not dropped[s] or restored[segment[producer]]:
                continue
            g = segment[producer]
            restored[g] = True
            wanted = {
                reduced.producer[u]
                for u in range(len(reduced.size))
                if dropped[u] and segment[reduced.producer[u]] == g and any(x >= o for x in reduced.readers[u])
            }
            for p in range(max(wanted), -1, -1):
                if p in wanted:
                    wanted |= {reduced.producer[u] for u in reduced.again[p] if dropped[u]}
            for p in sorted(wanted):
                if any(w < o for w in reduced.killers_again[p]):
                    return None
                out.append(p)
        out.append(o)
    return out
