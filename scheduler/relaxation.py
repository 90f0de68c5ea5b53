"""The chain-stage relaxation: a lower bound on the seconds of any sequence, in any order, within a budget.

Take a path x_1 .. x_k of the graph.  The first runs of its ops come in that order in every valid sequence, whatever else is reordered or
recomputed; stage j is the time from the first run of x_j up to that of x_{j+1}.  A binary r[j,o] says that o runs in stage j, a binary
s[j,v] that storage v is live just before x_j first runs.  Every sequence gives a solution of the program below, so its optimum, and the
optimum of its linear relaxation, bound the seconds from below.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from .bounds import inplace_credit
from .errors import StrategyError
from .reduce import Reduced

__all__ = ["best_bound", "memory_paths", "stage_bound"]

# Variables beyond which a relaxation takes longer than it is worth by default.
_VARIABLES = 60_000


def memory_paths(reduced: Reduced, stages: int) -> list[list[int]]:
    """Paths worth trying: the heaviest by working set and by number of ops, thinned out to at most ``stages`` ops each."""
    n = reduced.count
    working = [sum(reduced.size[s] for s in {*reduced.reads[o], *reduced.outs[o]}) + reduced.workspace[o] for o in range(n)]
    paths: list[list[int]] = []
    for weight in ([1.0] * n, [float(w) for w in working]):
        best = list(weight)
        back = [-1] * n
        for o in range(n):
            for s in reduced.needs[o]:
                p = reduced.producer[s]
                if best[p] + weight[o] > best[o]:
                    best[o], back[o] = best[p] + weight[o], p
        if not n:
            continue
        o = max(range(n), key=lambda x: (best[x], -x))
        path: list[int] = []
        while o >= 0:
            path.append(o)
            o = back[o]
        path.reverse()
        if len(path) > stages:
            # Stages may skip ops of the path: their first runs are still ordered.  The ends carry the least memory and go first.
            path = [path[round(k * (len(path) - 1) / (stages - 1))] for k in range(stages)] if stages > 1 else path[:1]
        if path not in paths:
            paths.append(path)
    return paths


def best_bound(reduced: Reduced, budget: int, seconds: float) -> float:
    """The best bound that linear and integer relaxations of a few paths prove within ``seconds`` of wall time; 0 where none."""
    deadline = time.monotonic() + seconds
    stages = max(4, min(80, _VARIABLES // max(1, reduced.count + len(reduced.size))))
    paths = memory_paths(reduced, stages)
    best = 0.0
    for whole in (False, True):
        for k, path in enumerate(paths):
            left = (deadline - time.monotonic()) / (len(paths) - k)
            if left > 0.05:
                bound = stage_bound(reduced, budget, path, left, whole)
                best = max(best, bound if math.isfinite(bound) else 0.0)
    return best


def stage_bound(reduced: Reduced, budget: int, path: list[int], seconds: float, whole: bool = False) -> float:
    """The bound that one path proves.

    Args:
        reduced: the problem.
        budget: bytes, resident ones included.
        path: ops whose first runs come in this order in every valid sequence.
        seconds: wall time for the solver.
        whole: solve the integer program (its dual bound counts when time runs out) rather than its linear relaxation.

    Returns:
        Seconds below which no sequence within the budget stays; 0 where the solver proves nothing in time, infinity where it proves that
        there is no such sequence.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError as error:
        raise StrategyError("the stage bound needs scipy, which is not installed; ask for no bound") from error
    n, m, k = reduced.count, len(reduced.size), len(path)
    total = sum(reduced.cost)
    views = math.fsum(
        op.seconds
        for o, op in enumerate(reduced.problem.ops)
        if reduced.merged[o] and reduced.problem.index.must_run[o] and not reduced.problem.index.required[o]
    )
    if not k or total <= 0:
        return views
    below = [_descendants(reduced, x) for x in path]
    # r[j,o], j = 0 .. k: stage 0 comes before the first path op, stage k after the last one; s[j,v], j = 1 .. k.
    runs = np.arange((k + 1) * n).reshape(k + 1, n)
    live = (k + 1) * n + np.arange(k * m).reshape(k, m)
    count = (k + 1) * n + k * m
    low, high = np.zeros(count), np.ones(count)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    limits: list[float] = []

    def row(terms: list[tuple[int, float]], limit: float) -> None:
        for column, value in terms:
            rows.append(len(limits))
            columns.append(int(column))
            values.append(value)
        limits.append(limit)

    scale = 1.0 / max([1, *reduced.size, *reduced.workspace])
    for j in range(k + 1):
        if j < k:
            for o in below[j]:
                high[runs[j, o]] = 0.0
                for v in reduced.outs[o]:
                    high[live[j, v]] = 0.0
        if j > 0:
            low[runs[j, path[j - 1]]] = 1.0
        for o in range(n):
            if high[runs[j, o]] == 0.0:
                continue
            for u in reduced.needs[o]:
                terms = [(runs[j, o], 1.0), (runs[j, reduced.producer[u]], -1.0)]
                if j > 0:
                    terms.append((live[j - 1, u], -1.0))
                row(terms, 0.0)
        if j < k:
            x = path[j]
            for v in range(m):
                terms = [(live[j, v], 1.0), (runs[j, reduced.producer[v]], -1.0)]
                if j > 0:
                    terms.append((live[j - 1, v], -1.0))
                row(terms, 0.0)
            for u in reduced.needs[x]:
                low[live[j, u]] = 1.0
            own = sum(reduced.size[v] for v in reduced.outs[x]) - inplace_credit(reduced.problem, reduced.op[x])
            room = budget - reduced.resident - own - reduced.workspace[x]
            row([(live[j, v], reduced.size[v] * scale) for v in range(m) if reduced.size[v]], room * scale)
    for o in range(n):
        if reduced.problem.index.must_run[reduced.op[o]]:
            row([(runs[j, o], -1.0) for j in range(k + 1)], -1.0)
        if reduced.problem.ops[reduced.op[o]].pinned:
            row([(runs[j, o], 1.0) for j in range(k + 1)], 1.0)
    cost = np.zeros(count)
    for j in range(k + 1):
        cost[runs[j]] = np.array(reduced.cost) / total
    if np.any(low > high):
        return float("inf")
    matrix: Any = coo_matrix((values, (rows, columns)), shape=(len(limits), count)).tocsr()
    integrality = np.zeros(count)
    if whole:
        integrality[:] = 1
    found = milp(
        cost,
        integrality=integrality,
        bounds=Bounds(low, high),
        constraints=LinearConstraint(matrix, -np.inf, np.array(limits)),
        options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 1e-6},
    )
    if found.status == 2:
        return float("inf")
    # Out of time, an integer program still has a dual bound; a linear one proves nothing before its end.
    solved = found.fun if found.status == 0 else None
    bound = found.mip_dual_bound if whole else solved
    # The solver's tolerances are taken off, so that rounding never claims too much.
    return views if bound is None or not np.isfinite(bound) else max(0.0, float(bound) - 2e-6) * total + views


def _descendants(reduced: Reduced, x: int) -> list[int]:
    """The op and all that first run after it, because they read, directly or not, what it writes."""
    seen = {x}
    for o in range(x + 1, reduced.count):
        if any(reduced.producer[s] in seen for s in reduced.needs[o]):
            seen.add(o)
    return sorted(seen)
