"""The chain-stage relaxation: a lower bound on the seconds of any sequence, in any order, within a budget.

Take a path x_1 .. x_k of the graph.  The first runs of its ops come in that order in every valid sequence, whatever else is reordered or
recomputed; stage j is the time from the first run of x_j up to that of x_{j+1}.  A binary r[j,o] says that o runs in stage j, a binary
s[j,v] that storage v is live just before x_j first runs.  With a swap channel a binary w[j,v] says that v comes back in stage j, which
serves there as a run of its op would, and z[v] that it went out; each costs its transfer, or, where copies overlap with ops, the end of all
is no earlier than that of the ops, of the copies back and of the copies out, each by themselves.  Every sequence gives a solution of the program
below, so its optimum, and the optimum of its linear relaxation, bound the seconds from below.  :mod:`.prover` chooses paths and shares time
among their programs.

A linear relaxation may run one half of an op in one stage and the other half in the next, and hold half of what it reads: the more stages,
the weaker.  So a number a[i,j,o] says for some stretches of stages, i+1 to j, whether o runs within them at all.  It is at most one, however
often o runs; it asks for what o reads as a run does, either live where the stretch begins or made within it; and what must run there counts
whole.  With the stretches up to each place and from there to the end, the relaxation is no weaker than those with one of its places alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bounds import inplace_credit
from .errors import StrategyError
from .reduce import Reduced

__all__ = ["Answer", "StageProgram", "memory_paths", "rounded_up"]

# What is taken off a proven bound, relative to the cost of running every op once, so that the solver's tolerances never claim too much.
_TOLERANCE = 2e-6
# Stages up to which all stretches of them count.
_ALL_STRETCHES = 9


def memory_paths(reduced: Reduced, stages: int) -> list[list[int]]:
    """Paths worth trying: the heaviest by number of ops and by working set, thinned out to at most ``stages`` ops each.

    Stages may skip ops of a path, as their first runs are still ordered.  Of each stretch of a path, the op whose first run sees most
    memory binds most: the one with the largest working set, or the one across which most bytes lie.
    """
    n = reduced.count
    working = [sum(reduced.size[s] for s in {*reduced.reads[o], *reduced.outs[o]}) + reduced.workspace[o] for o in range(n)]
    paths: list[list[int]] = []
    for weight in ([1.0] * n, [float(w) for w in working]):
        path = _heaviest(reduced, weight)
        if len(path) <= stages:
            chosen = [path]
        else:
            cuts = [k * len(path) // stages for k in range(stages + 1)]
            across = _bytes_across(reduced, path)
            chosen = [
                [path[max(range(a, b), key=lambda k: (binding[k], -k))] for a, b in itertools.pairwise(cuts)]
                for binding in ([working[o] for o in path], across)
            ]
        paths += [p for p in chosen if p and p not in paths]
    return paths


def _heaviest(reduced: Reduced, weight: list[float]) -> list[int]:
    """The path with the largest sum of weights."""
    n = reduced.count
    best, back = list(weight), [-1] * n
    for o in range(n):
        for s in reduced.needs[o]:
            p = reduced.producer[s]
            if best[p] + weight[o] > best[o]:
                best[o], back[o] = best[p] + weight[o], p
    o = max(range(n), key=lambda x: (best[x], -x), default=-1)
    path: list[int] = []
    while o >= 0:
        path.append(o)
        o = back[o]
    return path[::-1]


def _after(reduced: Reduced, path: list[int]) -> list[int]:
    """Per op, the last op of the path, as a position, that it is or first runs after because it reads what follows from it; -1 for none."""
    place = {o: j for j, o in enumerate(path)}
    last = [-1] * reduced.count
    for o in range(reduced.count):
        last[o] = max([place.get(o, -1), *(last[reduced.producer[s]] for s in reduced.needs[o])])
    return last


def _before(reduced: Reduced, path: list[int]) -> list[int]:
    """Per op, the first op of the path, as a position, that it is or first runs before; the length of the path for none."""
    place = {o: j for j, o in enumerate(path)}
    first = [place.get(o, len(path)) for o in range(reduced.count)]
    for o in range(reduced.count - 1, -1, -1):
        for s in reduced.needs[o]:
            first[reduced.producer[s]] = min(first[reduced.producer[s]], first[o])
    return first


def _bytes_across(reduced: Reduced, path: list[int]) -> list[int]:
    """Per op of a path, the bytes that are made before it and read from it on, in every order."""
    after, before = _after(reduced, path), _before(reduced, path)
    change = [0] * (len(path) + 1)
    for s, p in enumerate(reduced.producer):
        end = len(path) - 1 if reduced.held[s] else max((after[o] for o in reduced.readers[s]), default=-1)
        if before[p] <= end:
            change[before[p]] += reduced.size[s]
            change[end + 1] -= reduced.size[s]
    return list(itertools.accumulate(change))[: len(path)]


def rounded_up(reduced: Reduced, bound: float) -> float:
    """The least cost, not below the bound, that a sequence can have: a sum of costs that are multiples of one integer is one as well."""
    costs = [op.seconds for op in reduced.problem.ops]
    if reduced.problem.transfer is not None or not math.isfinite(bound) or not all(float(c).is_integer() and c < 2**40 for c in costs):
        return bound
    unit = math.gcd(*(int(c) for c in costs))
    return max(bound, float(unit * math.ceil((bound / unit) * (1 - 1e-9)))) if unit else bound


def _stretches(k: int) -> list[tuple[int, int]]:
    """Stretches of more than one stage, as pairs i < j of places between stages: -1 is the beginning of the first one, k the end of the last.

    All of them for few stages; of many, those from the beginning and to the end, and those of 2, 4, 8 ... stages, at twice as many places as
    lie side by side.
    """
    if k <= _ALL_STRETCHES:
        return [(i, j) for i in range(-1, k - 1) for j in range(i + 2, k + 1) if j - i <= k]
    lengths = [2**e for e in range(1, k.bit_length()) if 2**e < k]
    sliding = [(i, i + length) for length in lengths for i in range(0, k - length, length // 2)]
    return [*((-1, j) for j in range(1, k)), *((i, k) for i in range(k - 1)), *sliding]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program came to.

    Attributes:
        bound: seconds below which no sequence within the budget stays, little where the solver proves nothing in time, infinity where it
            proves that there is no such sequence.
        final: whether the program was solved, so that more time would prove nothing more.
        sequence: the best solution of an integer program as a valid sequence of reduced ops, which is within the budget where a stage
            begins, but perhaps not in between; None where there is none.
    """

    bound: float
    final: bool
    sequence: tuple[int, ...] | None = None


class StageProgram:
    """The program of one path; its linear relaxation and itself are solved as often as one likes, and each answer is a bound.

    Attributes:
        size: number of variables.
        constant: seconds of what the program leaves out because it runs once at no bytes.
    """

    def __init__(self, reduced: Reduced, budget: int, path: list[int], ignored: float = 0.0) -> None:
        """Build the program.

        Args:
            reduced: the problem.
            budget: bytes, resident ones included.
            path: ops whose first runs come in this order in every valid sequence.
            ignored: the smallest storages, of this share of the activations' room together, are taken to need no bytes, which makes the
                program smaller and the bound a little weaker.

        Raises:
            StrategyError: scipy is not installed.
        """
        try:
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
        self.total = sum(price)
        self.constant = math.fsum(
            [op.seconds for o, op in enumerate(problem.ops) if reduced.merged[o] and index.must_run[o] and not index.required[o]]
            + [problem.ops[p].seconds for o, led in zip(reduced.op, reduced.led, strict=True) if index.must_run[o] for p in led]
            + [price[o] for o in range(reduced.count) if o not in column and index.must_run[reduced.op[o]]]
        )
        # r[j,o], j = 0 .. k: stage 0 comes before the first path op, stage k after the last one; s[j,v], j = 1 .. k.
        runs = np.arange((k + 1) * n).reshape(k + 1, n)
        live = (k + 1) * n + np.arange(k * m).reshape(k, m)
        self.size = (k + 1) * n + k * m
        # w[j,v], j = 0 .. k, and z[v], where there is a channel.
        channel = problem.transfer
        back = self.size + np.arange((k + 1) * m).reshape(k + 1, m)
        out = self.size + (k + 1) * m + np.arange(m)
        if channel is not None:
            self.size += (k + 2) * m
        # Where copies overlap with ops, the end of all of it is a variable of its own.
        end = self.size if channel is not None and channel.overlap else -1
        self.size += end >= 0
        # a[i,j,o].
        stretches = _stretches(k)
        within = self.size + np.arange(len(stretches) * n).reshape(len(stretches), n)
        self.size += within.size
        low, high = np.zeros(self.size), np.ones(self.size)
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

        after = _after(reduced, path)
        scale = 1.0 / max([1, *reduced.size, *reduced.workspace])
        for j in range(k + 1):
            if j < k:
                for i, o in enumerate(ops):
                    if after[o] >= j:
                        high[runs[j, i]] = 0.0
                        for v in outputs[o]:
                            high[live[j, place[v]]] = 0.0
                            if channel is not None:
                                high[back[j, place[v]]] = 0.0
            if j > 0:
                low[runs[j, column[path[j - 1]]]] = 1.0
            for i, o in enumerate(ops):
                if high[runs[j, i]] == 0.0:
                    continue
                for v in inputs[o]:
                    terms = [(runs[j, i], 1.0), (runs[j, column[reduced.producer[v]]], -1.0)]
                    if j > 0:
                        terms.append((live[j - 1, place[v]], -1.0))
                    if channel is not None:
                        terms.append((back[j, place[v]], -1.0))
                    row(terms, 0.0)
            if j < k:
                x = path[j]
                for i, v in enumerate(storages):
                    if high[live[j, i]] == 0.0:
                        continue
                    terms = [(live[j, i], 1.0), (runs[j, column[reduced.producer[v]]], -1.0)]
                    if j > 0:
                        terms.append((live[j - 1, i], -1.0))
                    if channel is not None:
                        terms.append((back[j, i], -1.0))
                    row(terms, 0.0)
                for v in inputs[x]:
                    low[live[j, place[v]]] = 1.0
                own = sum(reduced.size[v] for v in reduced.outs[x]) - inplace_credit(problem, reduced.op[x])
                room = budget - reduced.resident - own - reduced.workspace[x]
                row([(live[j, i], reduced.size[v] * scale) for i, v in enumerate(storages)], room * scale)
        number = dict(zip(stretches, within, strict=True))
        for (first, last), again in number.items():
            stages = range(first + 1, last + 1)
            for x in path[max(first, 0) : last]:
                low[again[column[x]]] = 1.0
            for i, o in enumerate(ops):
                row([(again[i], 1.0), *((runs[j, i], -1.0) for j in stages)], 0.0)
                for v in inputs[o]:
                    terms = [(again[i], 1.0), (again[column[reduced.producer[v]]], -1.0)]
                    if first >= 0:
                        terms.append((live[first, place[v]], -1.0))
                    if channel is not None:
                        terms += [(back[j, place[v]], -1.0) for j in stages]
                    row(terms, 0.0)
                if last == k and index.must_run[reduced.op[o]]:
                    if after[o] >= first:
                        low[again[i]] = 1.0
                    else:
                        row([(again[i], -1.0), (number.get((-1, first), runs[0])[i], -1.0)], -1.0)
            if last < k:
                for i, v in enumerate(storages):
                    if high[live[last, i]] == 0.0:
                        continue
                    terms = [(live[last, i], 1.0), (again[column[reduced.producer[v]]], -1.0)]
                    if first >= 0:
                        terms.append((live[first, i], -1.0))
                    if channel is not None:
                        terms += [(back[j, i], -1.0) for j in stages]
                    row(terms, 0.0)
        for i, o in enumerate(ops):
            if index.must_run[reduced.op[o]]:
                # Before the last stage, where there is more than one, or in it.
                row([(a, -1.0) for a in sorted({number.get((-1, k - 1), runs[0])[i], runs[k, i]})], -1.0)
            if problem.ops[reduced.op[o]].pinned:
                row([(runs[j, i], 1.0) for j in range(k + 1)], 1.0)
        self._cost = np.zeros(self.size)
        for j in range(k + 1):
            self._cost[runs[j]] = np.array([price[o] for o in ops]) / max(self.total, 1e-300)
        if channel is not None:
            sizes = np.array([reduced.size[v] for v in storages], dtype=np.float64) / max(self.total, 1e-300)
            into, away = sizes / channel.bytes_per_second_in, sizes / channel.bytes_per_second_out
            if end >= 0:
                # It comes after all ops, after all copies back and after all copies out; those may run beside what is constant here.
                free = self.constant / max(self.total, 1e-300)
                row([*((x, c) for x, c in enumerate(self._cost) if c), (end, -1.0)], 0.0)
                row([*((back[j, i], c) for j in range(k + 1) for i, c in enumerate(into)), (end, -1.0)], free)
                row([*((out[i], c) for i, c in enumerate(away)), (end, -1.0)], free)
                self._cost[:], self._cost[end], high[end] = 0.0, 1.0, np.inf
            else:
                self._cost[back], self._cost[out] = into, away
            for j in range(k + 1):
                for i in range(m):
                    row([(back[j, i], 1.0), (out[i], -1.0)], 0.0)
        self._reduced, self._ops, self._stages = reduced, ops, k + 1
        # What the stretches add is a matter of the linear relaxation only, and whether the end is whole is not known.
        self._whole = np.isfinite(high)
        self._whole[within] = False
        self._low, self._high, self._limits = low, high, np.array(limits)
        self._matrix: Any = coo_matrix((values, (rows, columns)), shape=(len(limits), self.size)).tocsr()

    def solve(self, seconds: float, whole: bool = False, nodes: int | None = None) -> Answer:
        """Solve the program or its linear relaxation.

        Args:
            seconds: wall time for the solver, which may exceed it.
            whole: solve the integer program (its dual bound counts when time runs out) rather than its linear relaxation.
            nodes: after so many nodes of its search tree it is given up; None sets no limit.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        if not self.size or self.total <= 0:
            return Answer(self.constant, True)
        if np.any(self._low > self._high):
            return Answer(math.inf, True)
        found = milp(
            self._cost,
            integrality=np.where(self._whole, int(whole), 0),
            bounds=Bounds(self._low, self._high),
            constraints=LinearConstraint(self._matrix, -np.inf, self._limits),
            options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 1e-6} | ({} if nodes is None else {"node_limit": nodes}),
        )
        if found.status == 2:
            return Answer(math.inf, True)
        # Out of time, an integer program still has a dual bound; a linear one proves nothing before its end.
        proven = found.mip_dual_bound if whole else found.fun if found.status == 0 else None
        if proven is None or not np.isfinite(proven):
            return Answer(self.constant, False)
        sequence = self._sequence(found.x) if whole and found.x is not None else None
        return Answer(max(0.0, float(proven) - _TOLERANCE) * self.total + self.constant, found.status == 0, sequence)

    def _sequence(self, solution: Any) -> tuple[int, ...]:
        """The runs of a solution, stage after stage, in the base order in each; what the program leaves out runs when it is first read."""
        r, n = self._reduced, len(self._ops)
        ran: dict[int, None] = {}
        out: list[int] = []

        def run(o: int) -> None:
            stack = [o]
            while stack:
                missing = [p for p in (r.producer[s] for s in (*r.reads[stack[-1]], *r.again[stack[-1]])) if p not in ran]
                if missing:
                    stack.extend(missing)
                    continue
                q = stack.pop()
                if q == o or q not in ran:
                    ran[q] = None
                    out.append(q)

        for j in range(self._stages):
            for i, o in enumerate(self._ops):
                # Solvers may leave a run of something that may run once in two stages, where the row that forbids it has no teeth.
                if solution[j * n + i] > 0.5 and (o not in ran or r.rerun[o]):
                    run(o)
        for o in range(r.count):
            if o not in ran:
                run(o)
        return tuple(out)


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
