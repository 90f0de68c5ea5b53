"""Exact windows: all runs of a few ops are taken out of a sequence, and a mixed-integer program finds the cheapest way to run them again.

The other runs stay in their order.  A *stage* is a place between two of them at which ops of the window may run, each at most once and in
the base order: where the sequence has such runs now, and before each of the other runs that reads what the window makes.  A run is useful
no earlier than its inputs and no later than right before a read, so that little is lost by leaving out other places.  The program knows,
as Checkmate's (Jain et al., MLSys 2020, section 4) does, what is held when a stage begins and what is freed within it, and counts the bytes
of every step: the other runs' own, and those of the window's storages and of what the window reads.

What annealing can't do is to change many runs at once where every smaller change is worse: such windows begin where it has stalled.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .reduce import Reduced
from .twin import swappable

__all__ = ["Window", "Windows", "eligible"]

# Ops around each centre of a window, and how many centres it has.
_WIDTHS, _CENTRES = (6, 8, 12, 16, 20), (1, 2)
# How often a window is drawn until there is one that is small enough and has something to gain.
_DRAWS = 8
# Variables beyond which a window is not solved, and nodes of the search tree after which it is given up.
_VARIABLES, _NODES = 2500, 50
# Share of the sequence's cost that a better one must save, well above what the solver rounds.
_WORTH = 1e-6
# What is taken off the budget, relative to it, for the solver's tolerance.
_MARGIN = 1e-7
_LANES = 2
_POLL_SECONDS = 0.1


def eligible(reduced: Reduced) -> list[int]:
    """The ops whose runs may be taken out: any of them may come first, and it makes something."""
    return [o for o in range(reduced.count) if reduced.outs[o] and swappable(reduced, o)]


class Windows:
    """Windows of sequences of one problem, chosen by chance: around ops that run more than once, and around others.

    Attributes:
        reduced: the problem.
        budget: bytes, resident ones included.
        deadline: ``time.monotonic()`` at which to stop.
        spent: wall seconds that all of them have taken.
    """

    def __init__(self, reduced: Reduced, budget: int, deadline: float, seed: int) -> None:
        self.reduced, self.budget, self.deadline, self.spent = reduced, budget, deadline, 0.0
        self._rng = random.Random(seed)
        self._eligible = eligible(reduced)

    def improve(self, sequence: Sequence[int], patience: float = math.inf) -> list[list[int]]:
        """Solve two windows of a sequence at once, each on a core of its own.

        Args:
            sequence: a valid sequence of reduced ops within the budget.
            patience: wall seconds after which both are given up.

        Returns:
            The cheaper sequences found, at most one for each window; the simulator has still to confirm their peaks.
        """
        began = time.monotonic()
        windows = [window for _ in range(_LANES) if (window := self._draw(sequence)) is not None]
        found: dict[int, list[int]] = {}

        def work(k: int, window: Window) -> None:
            better = window.solve(min(patience, self.deadline - time.monotonic()), _NODES)
            if better is not None:
                found[k] = better

        threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(windows)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_POLL_SECONDS)
        self.spent += time.monotonic() - began
        return [found[k] for k in sorted(found)]

    def _draw(self, sequence: Sequence[int]) -> Window | None:
        """A window in which there is something to gain, or None where none is found."""
        rng = self._rng
        runs = Counter(sequence)
        again = [k for k, o in enumerate(self._eligible) if runs[o] > 1]
        for _ in range(_DRAWS if again else 0):
            width = rng.choice(_WIDTHS)
            chosen: set[int] = set()
            for centre in range(rng.choice(_CENTRES)):
                k = rng.randrange(len(self._eligible)) if centre and rng.random() < 0.5 else rng.choice(again)
                start = max(0, min(k - rng.randrange(width), len(self._eligible) - width))
                chosen.update(self._eligible[start : start + width])
            window = Window(self.reduced, self.budget, sequence, sorted(chosen))
            if window.size:
                return window
        return None


@dataclass
class _Span:
    """Of an instance of a storage that the other runs make: the runs, by position, that make it and read it last, and up to which it has a buffer."""

    made: int
    read: int
    end: int


@dataclass
class _Model:
    """A mixed-integer program under construction."""

    low: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, whole: bool = True, low: float = 0.0) -> int:
        """A new variable between ``low`` and 1."""
        self.low.append(low)
        self.cost.append(cost)
        self.whole.append(int(whole))
        return len(self.low) - 1

    def row(self, terms: Sequence[tuple[int, float]], limit: float) -> None:
        """Require that the sum of coefficient times variable is at most ``limit``."""
        for column, value in terms:
            self.rows.append(len(self.limits))
            self.columns.append(column)
            self.values.append(value)
        self.limits.append(limit)

    def solve(self, seconds: float, nodes: int) -> Any:
        """The values of the best solution found, or None."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix

        size = len(self.low)
        matrix: Any = coo_matrix((self.values, (self.rows, self.columns)), shape=(len(self.limits), size)).tocsr()
        found = milp(
            np.array(self.cost),
            integrality=np.array(self.whole),
            bounds=Bounds(np.array(self.low), np.ones(size)),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self.limits)),
            options={"time_limit": max(seconds, 0.1), "node_limit": nodes, "mip_rel_gap": 1e-6},
        )
        return found.x


class Window:
    """The program of one window of a sequence.

    Attributes:
        size: number of variables; 0 where there is no program, because it would be too large or there is nothing to gain.
    """

    def __init__(self, reduced: Reduced, budget: int, sequence: Sequence[int], ops: Sequence[int]) -> None:
        """Build the program.

        Args:
            reduced: the problem.
            budget: bytes, resident ones included; the sequence must be within it.
            sequence: a valid sequence of reduced ops.
            ops: those of the window, all of them :func:`eligible`.
        """
        self.r, self.budget = reduced, budget
        self.ops = sorted(set(ops))
        inside = set(self.ops)
        self.fixed = [o for o in sequence if o not in inside]
        # The place before the first run is a stage, though nothing can run there: it spares its own case.
        places = {0}
        at = 0
        self.spent = 0.0
        for o in sequence:
            if o in inside:
                places.add(at)
                self.spent += reduced.cost[o]
            else:
                at += 1
        self._scan(inside, places)
        self.places = sorted(places)
        self.model = _Model()
        self.runs: dict[tuple[int, int], int] = {}
        self.size = 0
        # Each op once is the least that it can be.
        if self.spent > sum(reduced.cost[o] for o in self.ops) * (1 + 1e-9):
            self._limit()
            if self._estimate() <= _VARIABLES:
                self._build()
                self.size = len(self.model.low)

    # -- what the other runs do

    def _scan(self, inside: set[int], places: set[int]) -> None:
        """Simulate the other runs: spans of their storages, reads of the window's ones, bytes of every step."""
        r, fixed = self.r, self.fixed
        n = len(fixed)
        self.made_here = [v for o in self.ops for v in r.outs[o]]
        own = set(self.made_here)
        self.inputs = sorted({v for o in self.ops for v in r.again[o]} - own)
        self.first: dict[int, int] = {}
        # Of the window's storages: positions of the other runs that read them.
        self.read: dict[int, list[int]] = {v: [] for v in self.made_here}
        spans: dict[int, list[_Span]] = {}
        for k, o in enumerate(fixed):
            reads = r.again[o] if o in self.first else r.reads[o]
            self.first.setdefault(o, k)
            for v in reads:
                if v in own:
                    self.read[v].append(k)
                    places.add(k)
                else:
                    spans[v][-1].read = k
            for v in r.outs[o]:
                spans.setdefault(v, []).append(_Span(k, k, k))
        change, across = np.zeros(n + 2, dtype=np.int64), np.zeros(n + 2, dtype=np.int64)
        for v, known in spans.items():
            if r.held[v]:
                known[-1].read = n
            for span in known:
                span.end = span.read - int(span.made < span.read < n and v in r.takeover[fixed[span.read]])
                change[span.made] += r.size[v]
                change[min(span.end, n - 1) + 1] -= r.size[v]
                across[span.made + 1] += r.size[v]
                across[span.read + 1] -= r.size[v]
        self.step = np.cumsum(change)[:n] + r.resident + np.array([r.workspace[o] for o in fixed], dtype=np.int64)
        self.gap = np.cumsum(across)[: n + 1] + r.resident
        self.spans = {v: spans.get(v, []) for v in self.inputs}

    def _instance(self, v: int, place: int) -> _Span | None:
        """The latest instance of an input that is made before a place."""
        known = self.spans[v]
        k = bisect_left([span.made for span in known], place)
        return known[k - 1] if k else None

    def _limit(self) -> None:
        """The stages in which each op of the window can run and be of use."""
        r, places = self.r, self.places
        self.stages = len(places)
        self.early: dict[int, int] = {}
        self.late: dict[int, int] = {}
        for o in self.ops:
            first = 0
            for v in r.again[o]:
                p = r.producer[v]
                if p in self.early:
                    first = max(first, self.early[p])
                else:
                    known = self.spans[v]
                    first = max(first, bisect_left(places, known[0].made + 1) if known else self.stages)
            self.early[o] = first
        for o in reversed(self.ops):
            last = -1
            for v in r.outs[o]:
                if r.held[v]:
                    last = self.stages - 1
                if self.read[v]:
                    last = max(last, bisect_left(places, self.read[v][-1]))
                last = max([last, *(self.late[d] for d in r.readers[v] if d in self.late and d > o)])
            # A version that it reads may be replaced from some place on.
            for w in r.killers_again[o]:
                if w in self.first:
                    last = min(last, bisect_left(places, self.first[w] + 1) - 1)
            self.late[o] = last
        # Up to which stage each storage is of use there.
        self.until = {}
        for v in (*self.made_here, *self.inputs):
            last = max([-1, *(self.late[d] for d in r.readers[v] if d in self.late)])
            if self.read.get(v):
                last = max(last, bisect_left(places, self.read[v][-1]))
            self.until[v] = self.stages if r.held[v] and v in self.read else last

    def _estimate(self) -> int:
        """About how many variables the program has."""
        r = self.r
        count = 0
        for o in self.ops:
            count += (1 + len(r.again[o]) + 2 * len(r.outs[o])) * max(0, self.late[o] - self.early[o] + 1)
        return count

    # -- the program

    def _build(self) -> None:
        r, model = self.r, self.model
        scale = 1.0 / max(1, self.budget - r.resident)
        total = max(self.spent, 1e-300)
        room = [(self.budget * (1 - _MARGIN) - float(b)) * scale for b in self.step]
        gap = [(self.budget * (1 - _MARGIN) - float(b)) * scale for b in self.gap]
        runs = self.runs
        for o in self.ops:
            for t in range(self.early[o], self.late[o] + 1):
                runs[t, o] = model.variable(r.cost[o] / total)
        # held[t, v]: the storage is there when stage t begins, at the cost of its bytes.
        held: dict[tuple[int, int], int] = {}
        for v in self.made_here:
            for t in range(self.early[r.producer[v]] + 1, self.until[v] + 1):
                held[t, v] = model.variable(low=float(t == self.stages))
        # there[t, v]: whether an input is there in any case.
        there: set[tuple[int, int]] = set()
        for v in self.inputs:
            for t, place in enumerate(self.places):
                span = self._instance(v, place)
                if span is not None and span.read >= place:
                    there.add((t, v))
                elif span is not None and t <= self.until[v]:
                    held[t, v] = model.variable()
        for t in range(self.stages):
            self._stage(t, held, there, gap[self.places[t]], scale)
            self._between(t, held, there, room, scale)
        for o in self.ops:
            model.row([(runs[t, o], -1.0) for t in range(self.early[o], self.late[o] + 1)], -1.0)
        model.row([(x, c) for x, c in enumerate(model.cost) if c], 1.0 - _WORTH * sum(r.cost) / total)

    def _stage(self, t: int, held: dict[tuple[int, int], int], there: set[tuple[int, int]], room: float, scale: float) -> None:
        """The runs of the window in a stage: what they read is there, and the bytes of each are."""
        r, model, runs = self.r, self.model, self.runs
        active = [o for o in self.ops if (t, o) in runs]
        if not active:
            return
        reader = self.fixed[self.places[t]] if self.places[t] < len(self.fixed) else -1
        awaited = {v for v in self.made_here if self._reads_next(t, v)} if reader >= 0 else set()
        freed: dict[tuple[int, int], int] = {}
        touching: dict[int, list[int]] = {}
        for o in active:
            for v in (*r.again[o], *r.outs[o]):
                if (t, v) not in there:
                    touching.setdefault(v, []).append(o)
        for v, users in touching.items():
            if v in awaited or not r.size[v]:
                continue
            for o in users:
                freed[v, o] = model.variable(whole=False)
                model.row([(freed[v, o], 1.0), (runs[t, o], -1.0)], 0.0)
            for k, o in enumerate(users):
                for later in users[k + 1 :]:
                    model.row([(freed[v, o], 1.0), (runs[t, later], 1.0)], 1.0)
            kept = held.get((t + 1, v))
            model.row([*((freed[v, o], 1.0) for o in users), *([(kept, 1.0)] if kept is not None else [])], 1.0)
        present = [(x, r.size[v] * scale) for v in (*self.made_here, *self.inputs) if (x := held.get((t, v))) is not None and r.size[v]]
        for o in active:
            run = runs[t, o]
            for v in r.again[o]:
                if (t, v) in there:
                    continue
                source = [(x, -1.0) for x in (held.get((t, v)), runs.get((t, r.producer[v]))) if x is not None]
                model.row([(run, 1.0), *source], 0.0)
            present += [(run, r.size[v] * scale) for v in r.outs[o] if r.size[v]]
            extra = [(run, r.workspace[o] * scale)] if r.workspace[o] else []
            extra += [(freed[v, o], -r.size[v] * scale) for v in r.takeover[o] if (v, o) in freed and v in r.again[o]]
            model.row(present + extra, room)
            present += [(freed[v, o], -r.size[v] * scale) for v in (*r.again[o], *r.outs[o]) if (v, o) in freed]

    def _reads_next(self, t: int, v: int) -> bool:
        """Whether the other run right after a stage reads a storage of the window."""
        place, reads = self.places[t], self.read[v]
        k = bisect_left(reads, place)
        return k < len(reads) and reads[k] == place

    def _between(self, t: int, held: dict[tuple[int, int], int], there: set[tuple[int, int]], room: list[float], scale: float) -> None:
        """The other runs between a stage and the next: what they read is there, and their bytes and those of what is held are."""
        r, model, runs = self.r, self.model, self.runs
        start = self.places[t]
        end = self.places[t + 1] if t + 1 < self.stages else len(self.fixed)
        across: list[tuple[int, float]] = []
        first: list[tuple[int, float]] = []
        constant = 0.0
        for v in self.made_here:
            source = [(x, -1.0) for x in (held.get((t, v)), runs.get((t, r.producer[v]))) if x is not None]
            kept = held.get((t + 1, v))
            if kept is not None:
                model.row([(kept, 1.0), *source], 0.0)
                across.append((kept, r.size[v] * scale))
            if start < end and self._reads_next(t, v):
                model.row(source, -1.0)
                if v not in r.takeover[self.fixed[start]]:
                    constant += r.size[v] * scale
                    continue
            if kept is not None:
                first.append((kept, r.size[v] * scale))
        # Inputs that are held beyond their last read by the other runs.
        extended: list[tuple[int, int, float]] = []
        for v in self.inputs:
            kept = held.get((t + 1, v))
            if kept is None:
                continue
            span = self._instance(v, end)
            assert span is not None
            if span.made < start and (t, v) not in there:
                model.row([(kept, 1.0), *([(held[t, v], -1.0)] if (t, v) in held else [])], 0.0)
            extended.append((max(span.end + 1, start), kept, r.size[v] * scale))
        if start == end:
            return
        cuts = sorted({start, min(start + 1, end), end, *(at for at, _, _ in extended if at < end)})
        for a, b in itertools.pairwise(cuts):
            terms = [*(first if a == start else across), *((x, size) for at, x, size in extended if at <= a)]
            limit = min(room[a:b]) - (constant if a == start else 0.0)
            if sum(value for _, value in terms) > limit:
                model.row(terms, limit)

    def solve(self, seconds: float, nodes: int) -> list[int] | None:
        """The cheapest sequence found, or None where none is cheaper than the given one, or not within the limits.

        Args:
            seconds: wall time for the solver, which may exceed it.
            nodes: of its search tree.
        """
        found = self.model.solve(seconds, nodes) if self.size else None
        if found is None:
            return None
        out: list[int] = []
        for t, place in enumerate(self.places):
            out += [o for o in self.ops if (t, o) in self.runs and found[self.runs[t, o]] > 0.5]
            out += self.fixed[place : self.places[t + 1] if t + 1 < self.stages else len(self.fixed)]
        return out
