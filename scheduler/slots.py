"""A sequence of runs in an array of slots, with the memory of every slot kept up to date.

Most slots are empty, as in FastSA (Shen et al., NeurIPS 2023, section 4); per op the slots where it runs and per storage those where it is
read are kept sorted, so that a change touches few live spans.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from .reduce import Reduced

__all__ = ["SPREAD", "Slots"]

SPREAD = 5
_CONE_OPS = 40


class Slots:
    """A sequence in slots; every change is logged and can be undone."""

    def __init__(self, reduced: Reduced, sequence: Sequence[int]) -> None:
        self.r = reduced
        n = max(len(sequence), 1)
        self.length = n * SPREAD + SPREAD
        self.at = [-1] * self.length
        self.runs: list[list[int]] = [[] for _ in range(reduced.count)]
        self.reads: list[list[int]] = [[] for _ in reduced.size]
        self.spans: list[list[tuple[int, int]]] = [[] for _ in reduced.size]
        self.mem = np.full(self.length, float(reduced.resident))
        self.seconds = 0.0
        self.log: list[tuple[bool, int, int]] = []
        self.victims: list[list[int]] = [[] for _ in range(reduced.count)]
        for o in range(reduced.count):
            for w in reduced.killers_first[o]:
                self.victims[w].append(o)
        touched: dict[int, None] = {}
        for k, o in enumerate(sequence):
            self._put(o, k * SPREAD + SPREAD - 1, touched)
        self._refresh(touched)
        self.log.clear()

    def sequence(self) -> list[int]:
        return [o for o in self.at if o >= 0]

    def reading(self, o: int, first: bool) -> tuple[int, ...]:
        return self.r.reads[o] if first else self.r.again[o]

    def _put(self, o: int, x: int, touched: dict[int, None]) -> None:
        runs = self.runs[o]
        first = not runs or x < runs[0]
        self.at[x] = o
        insort(runs, x)
        for s in self.reading(o, first):
            insort(self.reads[s], x)
            touched[s] = None
        for s in self.r.outs[o]:
            touched[s] = None
        if self.r.workspace[o]:
            self.mem[x] += self.r.workspace[o]
        self.seconds += self.r.cost[o]
        self.log.append((True, o, x))

    def _take(self, o: int, x: int, touched: dict[int, None]) -> None:
        runs = self.runs[o]
        first = runs[0] == x
        self.at[x] = -1
        del runs[bisect_left(runs, x)]
        for s in self.reading(o, first):
            reads = self.reads[s]
            del reads[bisect_left(reads, x)]
            touched[s] = None
        for s in self.r.outs[o]:
            touched[s] = None
        if self.r.workspace[o]:
            self.mem[x] -= self.r.workspace[o]
        self.seconds -= self.r.cost[o]
        self.log.append((False, o, x))

    def _refresh(self, touched: dict[int, None]) -> None:
        r, mem, at = self.r, self.mem, self.at
        for s in touched:
            runs, reads, old = self.runs[r.producer[s]], self.reads[s], self.spans[s]
            new = []
            for k, a in enumerate(runs):
                final = k + 1 == len(runs)
                if final and r.held[s]:
                    new.append((a, self.length - 1))
                    continue
                j = len(reads) if final else bisect_left(reads, runs[k + 1])
                b = reads[j - 1] if j and reads[j - 1] > a else a
                if b > a and s in r.takeover[at[b]]:
                    b -= 1
                new.append((a, b))
            if new == old:
                continue
            size = r.size[s]
            if size:
                for a, b in old:
                    if (a, b) not in new:
                        mem[a : b + 1] -= size
                for a, b in new:
                    if (a, b) not in old:
                        mem[a : b + 1] += size
            self.spans[s] = new

    def undo(self, mark: int, seconds: float) -> None:
        touched: dict[int, None] = {}
        while len(self.log) > mark:
            put, o, x = self.log.pop()
            if put:
                self._take(o, x, touched)
            else:
                self._put(o, x, touched)
            self.log.pop()
        self._refresh(touched)
        self.seconds = seconds

    # -- moves; each returns whether it did something, and leaves a valid sequence either way

    def serving(self, s: int, x: int) -> int:
        """Slot of the run that serves a read of ``s`` at ``x``."""
        runs = self.runs[self.r.producer[s]]
        k = bisect_left(runs, x)
        return runs[k - 1] if k else -1

    def unread(self, o: int, x: int) -> bool:
        runs = self.runs[o]
        k = bisect_right(runs, x)
        until = runs[k] if k < len(runs) else self.length
        for s in self.r.outs[o]:
            reads = self.reads[s]
            j = bisect_right(reads, x)
            if j < len(reads) and reads[j] < until:
                return False
        return True

    def removable(self, o: int, x: int) -> bool:
        """Whether another run of ``o`` can do the work of the one at ``x``."""
        runs = self.runs[o]
        if len(runs) < 2:
            return False
        if runs[0] == x:
            # The next run would become the first, which may read other storages; and nothing before it could be served.
            r = self.r
            return r.again[o] is r.reads[o] and r.killers_again[o] == r.killers_first[o] and self.unread(o, x)
        return True

    def remove(self, o: int, x: int) -> None:
        """Take a run away, and recursively the runs that nobody reads any more."""
        touched: dict[int, None] = {}
        stack = [(o, x)]
        while stack:
            o, x = stack.pop()
            if self.at[x] != o:
                continue
            reads = self.reading(o, self.runs[o][0] == x)
            self._take(o, x, touched)
            for s in reads:
                p, y = self.r.producer[s], self.serving(s, x)
                if y >= 0 and self.unread(p, y) and self.removable(p, y):
                    stack.append((p, y))
        self._refresh(touched)

    def prune(self, o: int, x: int) -> None:
        if x >= 0 and self.at[x] == o and self.unread(o, x) and self.removable(o, x):
            self.remove(o, x)

    def cone(self, s: int, x: int, rng: random.Random, deep: float) -> bool:
        """Make ``s`` again between slot ``x`` and its next read, with inputs that are dead there."""
        r = self.r
        reads = self.reads[s]
        j = bisect_right(reads, x)
        if j == len(reads):
            return False
        n = reads[j]
        low = x
        order: list[int] = []
        state: dict[int, int] = {}
        stack = [r.producer[s]]
        while stack:
            o = stack[-1]
            if state.get(o) == 1:
                stack.pop()
                if o not in order:
                    order.append(o)
                continue
            state[o] = 1
            if not r.rerun[o] or len(state) > _CONE_OPS:
                return False
            for w in r.killers_again[o]:
                if self.runs[w] and self.runs[w][0] <= n:
                    return False
            for u in r.again[o]:
                p = r.producer[u]
                if p in state:
                    continue
                y = self.serving(u, n)
                if y < 0:
                    return False
                end = self.live_until(u, y)
                live = end >= n - 1
                if live or not r.rerun[p] or len(state) > _CONE_OPS // 2 or rng.random() > deep:
                    low = max(low, y)
                else:
                    stack.append(p)
        slots: list[int] = []
        y = n - 1
        at = self.at
        while y > low and len(slots) < len(order):
            if at[y] < 0:
                slots.append(y)
            y -= 1
        if len(slots) < len(order):
            return False
        touched: dict[int, None] = {}
        before = [(o, self.previous(o, n)) for o in order]
        for o, y in zip(order, reversed(slots), strict=True):
            self._put(o, y, touched)
        self._refresh(touched)
        for o, y in before:
            self.prune(o, y)
        return True

    def live_until(self, s: int, a: int) -> int:
        for start, end in self.spans[s]:
            if start == a:
                return end
        return a

    def previous(self, o: int, x: int) -> int:
        runs = self.runs[o]
        k = bisect_left(runs, x)
        return runs[k - 1] if k else -1

    def shift(self, o: int, x: int, rng: random.Random) -> bool:
        """Move a run to another place that its inputs and readers allow."""
        r = self.r
        runs = self.runs[o]
        k = bisect_left(runs, x)
        first = k == 0
        if first and not r.movable[o]:
            return False
        low = runs[k - 1] if k else -1
        until = runs[k + 1] if k + 1 < len(runs) else self.length
        for s in self.reading(o, first):
            low = max(low, self.serving(s, x))
        for s in r.outs[o]:
            reads = self.reads[s]
            j = bisect_right(reads, x)
            if j < len(reads) and reads[j] < until:
                until = reads[j]
        for w in r.killers_first[o] if first else r.killers_again[o]:
            if self.runs[w]:
                until = min(until, self.runs[w][0])
        if until - low < 3:
            return False
        style = rng.random()
        if style < 0.4:
            places = range(until - 1, low, -1)
        elif style < 0.6:
            places = range(low + 1, until)
        else:
            start = rng.randrange(low + 1, until)
            places = range(start, until)
        for y in places:
            if y != x and self.at[y] < 0:
                touched: dict[int, None] = {}
                self._take(o, x, touched)
                self._put(o, y, touched)
                self._refresh(touched)
                return True
        return False
