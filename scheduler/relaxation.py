"""The chain-stage relaxation: a lower bound on the seconds of any sequence, in any order, within a budget.

Take a path x_1 .. x_k of the graph.  The first runs of its ops come in that order in every valid sequence, whatever else is reordered or
recomputed; stage j is the time from the first run of x_j up to that of x_{j+1}.  A binary r[j,o] says that o runs in stage j, a binary
s[j,v] that storage v is live just before x_j first runs.  Every sequence gives a solution of the program below, so its optimum, and the
optimum of its linear relaxation, bound the seconds from below.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np

from .bounds import inplace_credit
from .errors import StrategyError
from .reduce import Reduced

__all__ = ["best_bound", "memory_paths", "rounded_up", "stage_bound"]

# Variables beyond which a relaxation takes longer than it is worth by default.
_VARIABLES = 60_000
# Share of the room that the storages left out of a large program take together.
_IGNORED = 0.01
# Numbers of stages that are tried.
_STAGES = (3, 4, 6, 9, 14, 20, 32, 52, 80)
# Share of the time for integer programs, and the seconds that one of them should have.
_INTEGER_SHARE, _INTEGER_SECONDS = 0.55, 4.0
# Relative distance at which a bound meets a plan: what is taken off for the solver's rounding, and a little.
_ENOUGH = 4e-6


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
            # Stages may skip ops of the path: their first runs are still ordered.  Of each stretch the op that needs most binds most.
            cuts = [k * len(path) // stages for k in range(stages + 1)]
            path = [max(path[a:b], key=lambda x: (working[x], -x)) for a, b in itertools.pairwise(cuts)]
        if path not in paths:
            paths.append(path)
    return paths


def best_bound(reduced: Reduced, budget: int, seconds: float, enough: float = math.inf) -> float:
    """The best bound that linear and integer relaxations prove within ``seconds`` of wall time; 0 where none.

    Linear relaxations with few stages often bind more than those with many: half of an input, held over two stages, makes a whole output
    there.  So stages of all numbers are tried, and the integer programs of the best ones, which with few stages are quick.

    Args:
        reduced: the problem.
        budget: bytes, resident ones included.
        seconds: wall time.
        enough: the cost of a plan: a bound that meets it ends the work.
    """
    deadline = time.monotonic() + seconds
    size = max(1, reduced.count + len(reduced.size))
    ignored = 0.0 if size * _STAGES[-1] <= _VARIABLES else _IGNORED
    most = max(_STAGES[0], _VARIABLES // size)
    best, ranked = 0.0, []
    linear = deadline - _INTEGER_SHARE * seconds
    paths: list[list[int]] = []
    for stages in _STAGES:
        paths += [path for path in memory_paths(reduced, stages) if path not in paths and stages <= most]
    for path in paths:
        left = linear - time.monotonic()
        if left > 0.02 and best < enough * (1 - _ENOUGH):
            bound = stage_bound(reduced, budget, path, left, False, ignored)
            bound = bound if math.isfinite(bound) else 0.0
            best = max(best, bound)
            ranked.append((-bound, len(path), path))
    ranked.sort()
    # The first ones get a fair time each; what they leave over goes to the others, until the bound meets what it is compared with.
    fair = max(1, min(4, int(_INTEGER_SHARE * seconds / _INTEGER_SECONDS)))
    for k, (_, _, path) in enumerate(ranked):
        left = (deadline - time.monotonic()) / max(1, fair - k)
        if left > 0.05 and rounded_up(reduced, best) < enough * (1 - _ENOUGH):
            bound = stage_bound(reduced, budget, path, left, True, ignored)
            best = max(best, bound if math.isfinite(bound) else 0.0)
    return rounded_up(reduced, best)


def rounded_up(reduced: Reduced, bound: float) -> float:
    """The least cost, not below the bound, that a sequence can have: a sum of costs that are multiples of one integer is one as well."""
    costs = [op.seconds for op in reduced.problem.ops]
    if not all(float(c).is_integer() and c < 2**40 for c in costs):
        return bound
    unit = math.gcd(*(int(c) for c in costs))
    return max(bound, float(unit * math.ceil((bound / unit) * (1 - 1e-9)))) if unit else bound


def stage_bound(reduced: Reduced, budget: int, path: list[int], seconds: float, whole: bool = False, ignored: float = 0.0) -> float:
    """The bound that one path proves.

    Args:
        reduced: the problem.
        budget: bytes, resident ones included.
        path: ops whose first runs come in this order in every valid sequence.
        seconds: wall time for the solver.
        whole: solve the integer program (its dual bound counts when time runs out) rather than its linear relaxation.
        ignored: the smallest storages, of this share of the activations' room together, are taken to need no bytes, which makes the
            program smaller and the bound a little weaker.

    Returns:
        Seconds below which no sequence within the budget stays; 0 where the solver proves nothing in time, infinity where it proves that
        there is no such sequence.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError as error:
        raise StrategyError("the stage bound needs scipy, which is not installed; ask for no bound") from error
    problem, index = reduced.problem, reduced.problem.index
    big = _large(reduced, (budget - reduced.resident) * ignored)
    inputs = [[v for v in needs if big[v]] for needs in reduced.needs]
    outputs = [[v for v in outs if big[v]] for outs in reduced.outs]
    # Ops that neither read nor write anything large run once, at no bytes: constants.
    ops = [o for o in range(reduced.count) if inputs[o] or outputs[o] or o in path]
    storages = [v for v in range(len(reduced.size)) if big[v]]
    column = {o: i for i, o in enumerate(ops)}
    place = {v: i for i, v in enumerate(storages)}
    n, m, k = len(ops), len(storages), len(path)
    # A plan may run an op again without those that lead it; what they take is only counted once.
    price = [problem.ops[o].seconds for o in reduced.op]
    total = sum(price)
    constant = math.fsum(
        [op.seconds for o, op in enumerate(problem.ops) if reduced.merged[o] and index.must_run[o] and not index.required[o]]
        + [problem.ops[p].seconds for o, led in zip(reduced.op, reduced.led, strict=True) if index.must_run[o] for p in led]
        + [price[o] for o in range(reduced.count) if o not in column and index.must_run[reduced.op[o]]]
    )
    if not k or total <= 0:
        return constant
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
        for variable, value in terms:
            rows.append(len(limits))
            columns.append(int(variable))
            values.append(value)
        limits.append(limit)

    scale = 1.0 / max([1, *reduced.size, *reduced.workspace])
    for j in range(k + 1):
        if j < k:
            for o in _descendants(reduced, path[j]):
                if o in column:
                    high[runs[j, column[o]]] = 0.0
                    for v in outputs[o]:
                        high[live[j, place[v]]] = 0.0
        if j > 0:
            low[runs[j, column[path[j - 1]]]] = 1.0
        for i, o in enumerate(ops):
            if high[runs[j, i]] == 0.0:
                continue
            for v in inputs[o]:
                terms = [(runs[j, i], 1.0), (runs[j, column[reduced.producer[v]]], -1.0)]
                if j > 0:
                    terms.append((live[j - 1, place[v]], -1.0))
                row(terms, 0.0)
        if j < k:
            x = path[j]
            for i, v in enumerate(storages):
                if high[live[j, i]] == 0.0:
                    continue
                terms = [(live[j, i], 1.0), (runs[j, column[reduced.producer[v]]], -1.0)]
                if j > 0:
                    terms.append((live[j - 1, i], -1.0))
                row(terms, 0.0)
            for v in inputs[x]:
                low[live[j, place[v]]] = 1.0
            own = sum(reduced.size[v] for v in reduced.outs[x]) - inplace_credit(problem, reduced.op[x])
            room = budget - reduced.resident - own - reduced.workspace[x]
            row([(live[j, i], reduced.size[v] * scale) for i, v in enumerate(storages)], room * scale)
    for i, o in enumerate(ops):
        if index.must_run[reduced.op[o]]:
            row([(runs[j, i], -1.0) for j in range(k + 1)], -1.0)
        if problem.ops[reduced.op[o]].pinned:
            row([(runs[j, i], 1.0) for j in range(k + 1)], 1.0)
    cost = np.zeros(count)
    for j in range(k + 1):
        cost[runs[j]] = np.array([price[o] for o in ops]) / total
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
    return constant if bound is None or not np.isfinite(bound) else max(0.0, float(bound) - 2e-6) * total + constant


def _large(reduced: Reduced, allowed: float) -> list[bool]:
    """Per storage, whether it has bytes and is not one of the smallest, which take ``allowed`` bytes together."""
    large = [size > 0 for size in reduced.size]
    taken = 0
    for v in sorted(range(len(large)), key=lambda v: reduced.size[v]):
        taken += reduced.size[v]
        if taken > allowed:
            break
        large[v] = False
    return large


def _descendants(reduced: Reduced, x: int) -> list[int]:
    """The op and all that first run after it, because they read, directly or not, what it writes."""
    seen = {x}
    for o in range(x + 1, reduced.count):
        if any(reduced.producer[s] in seen for s in reduced.needs[o]):
            seen.add(o)
    return sorted(seen)
