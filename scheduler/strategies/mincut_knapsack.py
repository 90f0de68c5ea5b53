"""Min-cut and knapsack, as PyTorch's ``torch._functorch.partitioners`` plans an ``activation_memory_budget``, checked against the true peak.

What the backward pass reads of the forward pass is either saved or made again when it is first read, and then kept to its last read.  A
minimum cut between what must not run again and what the backward pass reads gives the fewest bytes to save when everything cheap is
recomputed.  Of the cut, a 0/1 knapsack then saves what takes most seconds to make within a number of saved bytes.  That number is no
peak: it is found here by a sweep and by bisection on the peak that the simulator finds.  What counts as cheap, seconds per byte, is swept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import StrategyError
from ..reduce import Reduced
from .machine import Machine, forward_end, last_asked
from .registry import Context, register

__all__ = ["knapsack", "mincut_knapsack", "minimum_cut"]

_LEVELS = 8  # densities from which ops count as dear
_SHARES = 12  # points of the sweep over saved bytes
_BISECTIONS = 7
_CELLS = 2000  # resolution of the knapsack
_SPREAD = 1e-4  # by how much the worth of equals differs
_CAPACITY = 2**30  # of the cut, as a 32-bit integer


@register("mincut_knapsack")
def mincut_knapsack(context: Context) -> None:
    """Offer the base order, then for each density the saved sets along a sweep of their bytes."""
    reduced = context.reduced
    context.offer(range(reduced.count))
    end = forward_end(reduced)
    asked = last_asked(reduced, end)
    free = [o >= 0 for o in asked]
    read = sorted({s for o in range(end, reduced.count) for s in reduced.reads[o] if free[s]})
    if not read or context.left <= 0:
        return
    seconds = [reduced.cost[p] / max(1, len(reduced.outs[p])) for p in reduced.producer]
    density = np.array([seconds[s] / max(1, reduced.size[s]) for s in range(len(free)) if free[s]])
    # From all dear, where the knapsack alone decides, to none.
    levels = [-1.0, *np.unique(np.quantile(density, np.linspace(0, 1, _LEVELS))).tolist()]
    tried: dict[tuple[int, ...], bool] = {}

    def fits(saved: list[int]) -> bool:
        """Offer the step with these saved and all else recomputed; whether its true peak is within the budget."""
        key = tuple(saved)
        if key not in tried:
            tried[key] = context.offer(_sequence(reduced, asked, end, saved))
        return tried[key]

    for level in levels:
        dear = [free[s] and seconds[s] / max(1, reduced.size[s]) > level for s in range(len(free))]
        cut = minimum_cut(reduced, free, end, read, dear)
        size, total = [reduced.size[s] for s in cut], sum(reduced.size[s] for s in cut)
        # Of equals, as in identical layers, a knapsack saves those that come first; or else, those that split the pass evenly.
        even = [seconds[s] * (1 + _SPREAD * _radical_inverse(k + 1)) for k, s in enumerate(cut)]
        for worth in ([seconds[s] for s in cut], even):
            choose = knapsack(size, worth)
            enough, too_much = -1, total + 1
            for k in range(_SHARES + 1):
                allowed = total * k // _SHARES
                if fits([cut[i] for i in choose(allowed)]):
                    enough, too_much = allowed, total + 1
                elif too_much > total and enough >= 0:
                    too_much = allowed
                if context.left < 0:
                    return
            # The more is saved, the less is run again: between the largest share that fits and the next, the border is searched.
            for _ in range(_BISECTIONS if 0 <= enough < too_much <= total else 0):
                middle = (enough + too_much) // 2
                if fits([cut[i] for i in choose(middle)]):
                    enough = middle
                else:
                    too_much = middle
                if context.left < 0:
                    return


def _radical_inverse(k: int) -> float:
    """The binary digits of k mirrored at the point (van der Corput): 1/2, 1/4, 3/4, 1/8, ... for k = 1, 2, 3, 4, ..."""
    return int(f"{k:b}"[::-1], 2) / float(1 << k.bit_length())


def _sequence(reduced: Reduced, asked: list[int], end: int, saved: list[int]) -> list[int]:
    machine = Machine(reduced, asked)
    for o in range(end):
        machine.run(o)
    machine.drop(saved)
    for o in range(end, reduced.count):
        machine.run(o)
    return machine.out


def minimum_cut(reduced: Reduced, free: list[bool], end: int, read: list[int], dear: list[bool]) -> list[int]:
    """The droppable storages of fewest bytes from which all in ``read`` can be made without running what is ``dear`` again.

    Args:
        reduced: the problem.
        free: per storage, whether it may be dropped.
        end: number of ops of the forward pass.
        read: storages that the backward pass reads.
        dear: per storage, whether its op must not run again.

    Returns:
        Storages, ascending.

    Raises:
        StrategyError: scipy is missing.
    """
    try:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow
    except ImportError as error:
        raise StrategyError("mincut_knapsack: scipy is not installed; install it or use auto") from error
    m = len(reduced.size)
    largest = max(1, sum(reduced.size[s] for s in range(m) if free[s]))
    source, sink = 2 * m, 2 * m + 1
    rows: list[int] = []
    columns: list[int] = []
    capacity: list[int] = []

    def edge(a: int, b: int, limit: int) -> None:
        rows.append(a)
        columns.append(b)
        capacity.append(limit)

    # Node 2s is the storage as it is made, 2s + 1 as it is read; the edge between them is cut where it is saved.
    for s in range(m):
        p = reduced.producer[s]
        if not free[s]:
            continue
        # The capacity is at least one, so that of two cuts of equal bytes the one with fewer storages is taken.
        edge(2 * s, 2 * s + 1, 1 + reduced.size[s] * (_CAPACITY // 2) // largest)
        if dear[s]:
            edge(source, 2 * s, _CAPACITY)
        for u in reduced.again[p]:
            if free[u]:
                edge(2 * u + 1, 2 * s, _CAPACITY)
    for s in read:
        edge(2 * s + 1, sink, _CAPACITY)
    graph: Any = coo_matrix((np.array(capacity, dtype=np.int32), (rows, columns)), shape=(2 * m + 2, 2 * m + 2)).tocsr()
    residual = graph - maximum_flow(graph, source, sink).flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [s for s in range(m) if free[s] and 2 * s in reached and 2 * s + 1 not in reached]


class _Knapsack:
    def __init__(self, size: list[int], value: list[float]) -> None:
        self.size, self.value = size, value
        self.unit = max(1, -(-sum(size) // _CELLS))
        self.cells = [-(-x // self.unit) for x in size]
        top = sum(self.cells)
        best = np.zeros(top + 1)
        self.taken: list[npt.NDArray[np.bool_]] = []
        for cells, worth in zip(self.cells, value, strict=True):
            trial = np.full(top + 1, -np.inf)
            trial[cells:] = best[: top + 1 - cells] + worth
            take = trial > best
            best = np.where(take, trial, best)
            self.taken.append(take)
        self.top = top

    def __call__(self, allowed: int) -> list[int]:
        if allowed >= sum(self.size):
            return list(range(len(self.size)))
        m = min(self.top, allowed // self.unit)
        chosen = []
        for k in range(len(self.size) - 1, -1, -1):
            if self.taken[k][m]:
                chosen.append(k)
                m -= self.cells[k]
        return chosen[::-1]


def knapsack(size: list[int], value: list[float]) -> _Knapsack:
    """A 0/1 knapsack, solved once for all capacities.

    Args:
        size: bytes of each item; rounded up to a 2000th of their sum, so that an answer never exceeds what is allowed.
        value: worth of each item.

    Returns:
        A function from the bytes allowed to the indices of the items taken, ascending.
    """
    return _Knapsack(size, value)
