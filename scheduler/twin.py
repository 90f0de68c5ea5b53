"""Simulated annealing on the sequence of runs, in Python: what ``_annealer.c`` does, move for move and draw for draw.

Most slots of the sequence are empty, as in FastSA (Shen et al., NeurIPS 2023, section 4); per op the slots where it runs and per storage
those where it is read are kept sorted, so that a change touches few live spans.  A move takes a run away, shifts one, inserts one, or makes
a *cone*: a storage that lies idle at some slot is made again right before its next read, with its dead inputs.  What a move frees or
exceeds is used or repaired within the move.  A move that does not pay is undone.  The energy is seconds * max(1, 1 + excess / room),
excess being the bytes of the peak beyond the budget and room those between the resident ones and the budget.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .reduce import Reduced

__all__ = ["SPREAD", "Twin", "swappable"]

# Slots per run, limits of a cone and of repairs, moves between two even spreads; all as in the compiled one.
SPREAD = 6
_CONE, _REPAIRS, _RESPREAD = 40, 8, 20000
# The lowest draw that stands for relieving the peak.
_RELIEVE = 70
_SCANNED = 64
_MASK = (1 << 64) - 1


def swappable(reduced: Reduced, o: int) -> bool:
    """Whether any run of an op may become its first: a first run reads what a recompute does."""
    same = reduced.again[o] == reduced.reads[o] and reduced.killers_again[o] == reduced.killers_first[o]
    return reduced.rerun[o] and reduced.movable[o] and same


class Twin:
    """The annealer in Python; see :class:`.annealer.Annealer` for what its methods promise."""

    compiled = False

    def __init__(self, reduced: Reduced) -> None:
        self.r = reduced
        n = reduced.count
        self.swappable = [swappable(reduced, o) for o in range(n)]
        self.heavy = [s for s in range(len(reduced.size)) if reduced.size[s] and reduced.rerun[reduced.producer[s]]]
        self.rng = self.moves = 0
        # The cone under way.
        self.visited: set[int] = set()
        self.order: list[int] = []
        self.low, self.price = 0, 0.0
        self.best_at: list[int] = []
        self.best_seconds, self.best_peak = math.inf, 1 << 62

    # -- chance

    def _draw(self) -> int:
        self.rng = (self.rng + 0x9E3779B97F4A7C15) & _MASK
        z = self.rng
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def _below(self, k: int) -> int:
        return ((self._draw() >> 33) * k) >> 31

    def _unit(self) -> float:
        return (self._draw() >> 11) * (1.0 / 9007199254740992.0)

    # -- loading and saving

    def _load(self, sequence: Sequence[int]) -> None:
        r = self.r
        self.length = len(sequence) * SPREAD + SPREAD
        self.at = [-1] * self.length
        self.mem: npt.NDArray[np.int64] = np.full(self.length, r.resident, dtype=np.int64)
        self.runs: list[list[int]] = [[] for _ in range(r.count)]
        self.reads: list[list[int]] = [[] for _ in r.size]
        self.spans: list[list[tuple[int, int]]] = [[] for _ in r.size]
        # Ops that run more than once, in the order of the compiled one.
        self.extra: list[int] = []
        self.extra_at = [0] * r.count
        self.seconds = 0.0
        self.log: list[tuple[bool, int, int]] = []
        self.touched: dict[int, None] = {}
        for k, o in enumerate(sequence):
            self._put(o, k * SPREAD + SPREAD - 1)
        self.log.clear()
        self._refresh()

    def load(self, sequence: Sequence[int], seed: int) -> None:
        self._load(sequence)
        self.rng, self.moves = seed & _MASK, 0
        self._keep()

    def restart(self) -> None:
        self._load([o for o in self.best_at if o >= 0])

    def best(self) -> tuple[float, int]:
        return self.best_seconds, self.best_peak

    def sequence(self) -> list[int]:
        return [o for o in self.best_at if o >= 0]

    def _peak(self) -> int:
        return int(self.mem.max())

    def _keep(self) -> None:
        self.best_at, self.best_seconds, self.best_peak = self.at.copy(), self.seconds, self._peak()

    # -- changes

    def _reading(self, o: int, first: bool) -> tuple[int, ...]:
        return self.r.reads[o] if first else self.r.again[o]

    def _put(self, o: int, x: int) -> None:
        runs = self.runs[o]
        first = not runs or x < runs[0]
        self.at[x] = o
        insort(runs, x)
        if len(runs) == 2:
            self.extra_at[o] = len(self.extra)
            self.extra.append(o)
        for s in self._reading(o, first):
            insort(self.reads[s], x)
            self.touched[s] = None
        for s in self.r.outs[o]:
            self.touched[s] = None
        self.mem[x] += self.r.workspace[o]
        self.seconds += self.r.cost[o]
        self.log.append((True, o, x))

    def _take(self, o: int, x: int) -> None:
        runs = self.runs[o]
        first = runs[0] == x
        self.at[x] = -1
        del runs[bisect_left(runs, x)]
        if len(runs) == 1:
            last = self.extra.pop()
            if last != o:
                self.extra[self.extra_at[o]] = last
                self.extra_at[last] = self.extra_at[o]
        for s in self._reading(o, first):
            reads = self.reads[s]
            del reads[bisect_left(reads, x)]
            self.touched[s] = None
        for s in self.r.outs[o]:
            self.touched[s] = None
        self.mem[x] -= self.r.workspace[o]
        self.seconds -= self.r.cost[o]
        self.log.append((False, o, x))

    def _refresh(self) -> None:
        r, mem = self.r, self.mem
        for s in self.touched:
            runs, reads, new = self.runs[r.producer[s]], self.reads[s], []
            for k, a in enumerate(runs):
                final = k + 1 == len(runs)
                if final and r.held[s]:
                    new.append((a, self.length - 1))
                    continue
                j = len(reads) if final else bisect_left(reads, runs[k + 1])
                b = reads[j - 1] if j and reads[j - 1] > a else a
                if b > a and s in r.takeover[self.at[b]]:
                    b -= 1
                new.append((a, b))
            old, self.spans[s] = self.spans[s], new
            if new != old and r.size[s]:
                for a, b in old:
                    mem[a : b + 1] -= r.size[s]
                for a, b in new:
                    mem[a : b + 1] += r.size[s]
        self.touched.clear()

    def _undo(self, seconds: float) -> None:
        while self.log:
            put, o, x = self.log.pop()
            (self._take if put else self._put)(o, x)
            self.log.pop()
        self._refresh()
        self.seconds = seconds

    # -- parts of moves

    def _serving(self, s: int, x: int) -> int:
        """Slot of the run that serves a read of ``s`` at ``x``, or -1."""
        runs = self.runs[self.r.producer[s]]
        k = bisect_left(runs, x)
        return runs[k - 1] if k else -1

    def _after(self, slots: list[int], x: int) -> int:
        k = bisect_right(slots, x)
        return slots[k] if k < len(slots) else self.length

    def _unread(self, o: int, x: int) -> bool:
        until = self._after(self.runs[o], x)
        return all(self._after(self.reads[s], x) >= until for s in self.r.outs[o])

    def _removable(self, o: int, x: int) -> bool:
        """Whether another run of ``o`` can do the work of the one at ``x``."""
        runs = self.runs[o]
        if len(runs) < 2:
            return False
        return runs[0] != x or (self.swappable[o] and self._unread(o, x))

    def _take_away(self, o: int, x: int) -> None:
        """Take a run away, and recursively the runs that nobody reads any more."""
        reads = self._reading(o, self.runs[o][0] == x)
        self._take(o, x)
        for s in reads:
            self._prune(self.r.producer[s], self._serving(s, x))

    def _prune(self, o: int, x: int) -> None:
        if x >= 0 and self.at[x] == o and len(self.runs[o]) > 1 and self._unread(o, x) and self._removable(o, x):
            self._take_away(o, x)

    def _end(self, s: int, a: int) -> int:
        return next((end for start, end in self.spans[s] if start == a), a)

    def _kept_from(self, o: int, x: int) -> bool:
        """Whether a version that a recompute of ``o`` reads is replaced by slot ``x``."""
        return any(self.runs[w] and self.runs[w][0] <= x for w in self.r.killers_again[o])

    def _visit(self, o: int, n: int, deep: float, limit: float) -> bool:
        r = self.r
        self.visited.add(o)
        self.price += r.cost[o]
        if not r.rerun[o] or len(self.visited) > _CONE or self.price > limit or self._kept_from(o, n):
            return False
        for s in r.again[o]:
            p = r.producer[s]
            if p in self.visited:
                continue
            y = self._serving(s, n)
            if y < 0:
                return False
            if self._end(s, y) >= n - 1 or not r.rerun[p] or len(self.visited) > _CONE // 2 or self._unit() > deep:
                self.low = max(self.low, y)
            elif not self._visit(p, n, deep, limit):
                return False
        self.order.append(o)
        return True

    def _cone(self, s: int, x: int, n: int, deep: float, limit: float) -> bool:
        """Make ``s`` again right before slot ``n``, which reads it and lies after ``x``, with inputs that are dead there."""
        self.visited, self.order = set(), []
        self.low, self.price = x, 0.0
        if not self._visit(self.r.producer[s], n, deep, limit):
            return False
        slots: list[int] = []
        for y in range(n - 1, self.low, -1):
            if len(slots) == len(self.order):
                break
            if self.at[y] < 0:
                slots.append(y)
        if len(slots) < len(self.order):
            return False
        before = [self._serving(self.r.outs[o][0], n) for o in self.order]
        for o, y in zip(self.order, reversed(slots), strict=True):
            self._put(o, y)
        for o, y in zip(self.order, before, strict=True):
            self._prune(o, y)
        self._refresh()
        return True

    def _relieve(self, x: int, limit: float) -> bool:
        """Drop a storage that lies idle at slot ``x`` and make it again before its next read."""
        r, heavy = self.r, self.heavy
        if not heavy:
            return False
        i = self._below(len(heavy))
        step = 1 if self._below(2) else len(heavy) - 1
        wanted = 1 << self._below(3)
        found, at, price = -1, 0, 0.0
        for _ in range(min(len(heavy), _SCANNED)):
            if not wanted:
                break
            s = heavy[i]
            i = (i + step) % len(heavy)
            if self._serving(s, x) < 0:
                continue
            n = self._after(self.reads[s], x)
            if n == self.length or self._after(self.runs[r.producer[s]], x) <= n:
                continue
            reads = self.reads[s]
            j = bisect_left(reads, x)
            if j < len(reads) and reads[j] == x:
                continue
            p = (r.cost[r.producer[s]] + 1e-30) / r.size[s]
            if found < 0 or p < price:
                found, price, at = s, p, n
            wanted -= 1
        if found < 0:
            return False
        return self._cone(found, x, at, (0.0, 0.5, 1.0)[self._below(3)], limit)

    def _shift(self, o: int, x: int) -> bool:
        """Move a run to another slot that its inputs and readers allow."""
        r, runs = self.r, self.runs[o]
        k = bisect_left(runs, x)
        first = k == 0
        if first and not r.movable[o]:
            return False
        low = runs[k - 1] if k else -1
        until = self._after(runs, x)
        reads = self._reading(o, first)
        low = max([low, *(self._serving(s, x) for s in reads)])
        until = min([until, *(self._after(self.reads[s], x) for s in r.outs[o])])
        for w in r.killers_first[o] if first else r.killers_again[o]:
            if self.runs[w]:
                until = min(until, self.runs[w][0])
        if until - low < 3:
            return False
        style = self._below(5)
        if style < 2:
            places = range(until - 1, low, -1)
        elif style < 3:
            places = range(low + 1, until)
        else:
            places = range(low + 1 + self._below(until - low - 1), until)
        for y in places:
            if y == x or self.at[y] >= 0:
                continue
            self._take(o, x)
            self._put(o, y)
            if y > x:
                for s in reads:
                    self._prune(r.producer[s], self._serving(s, x))
            self._refresh()
            return True
        return False

    # -- moves; each returns whether it did something

    def _largest(self) -> int:
        """The first or the last of the largest slots."""
        return self.length - 1 - int(self.mem[::-1].argmax()) if self._below(2) else int(self.mem.argmax())

    def _any_run(self) -> int:
        o = self.extra[self._below(len(self.extra))] if self.extra and self._below(2) else self._below(self.r.count)
        return self.runs[o][self._below(len(self.runs[o]))] if self.runs[o] else -1

    def _shift_any(self) -> bool:
        x = -1
        if self._below(2):
            # The run at the peak, or one near it.
            x = self._largest()
            skip = self._below(4)
            for _ in range(8 * SPREAD):
                if self.at[x] >= 0:
                    if not skip:
                        break
                    skip -= 1
                x = x + 1 if x + 1 < self.length else 0
            if self.at[x] < 0:
                x = -1
        if x < 0:
            x = self._any_run()
        return x >= 0 and self._shift(self.at[x], x)

    def _remove_any(self) -> bool:
        if not self.extra:
            return False
        o = self.extra[self._below(len(self.extra))]
        x = self.runs[o][self._below(len(self.runs[o]))]
        if not self._removable(o, x):
            return False
        self._take_away(o, x)
        self._refresh()
        return True

    def _insert_any(self, limit: float) -> bool:
        r = self.r
        o, x = self._below(r.count), self._below(self.length)
        runs = self.runs[o]
        if not r.rerun[o] or r.cost[o] > limit or self.at[x] >= 0 or not runs or x < runs[0] or self._kept_from(o, x):
            return False
        if any(self._serving(s, x) < 0 for s in r.again[o]):
            return False
        y = runs[bisect_left(runs, x) - 1]
        self._put(o, x)
        self._prune(o, y)
        self._refresh()
        return True

    def _energy(self, budget: int, room: float) -> float:
        over = self._peak() - budget
        return self.seconds * (1.0 + over / room) if over > 0 else self.seconds

    def run(self, moves: int, budget: int, hot: float, cold: float, floor: float, aim: bool = False) -> None:
        room = max(float(budget - self.r.resident), 1.0)
        if not self.r.count:
            return
        heat, now = hot, self._energy(budget, room)
        for k in range(moves):
            if self.best_peak <= budget and self.best_seconds <= floor:
                break
            self.moves += 1
            if self.moves % _RESPREAD == 0:
                self._load([o for o in self.at if o >= 0])
                now = self._energy(budget, room)
            if k % 256 == 0:
                heat = hot * math.pow(cold / hot, k / moves)
            seconds = self.seconds
            allowed = now - heat * math.log(1.0 - self._unit())
            limit = allowed - seconds
            choice = self._below(100)
            if aim and self._peak() > budget and self._below(4):
                choice = _RELIEVE
            repairs = 0
            self.log.clear()
            if choice < 35:
                moved = self._shift_any()
            elif choice < _RELIEVE:
                moved = self._remove_any()
                repairs = _REPAIRS if moved else 0
            elif choice < 80:
                moved = self._relieve(self._largest(), limit)
            elif choice < 95:
                moved = self._relieve(self._below(self.length), limit + 0.05 * seconds)
                for _ in range(4 if moved else 0):
                    if self.seconds <= allowed:
                        break
                    self._remove_any()
                repairs = _REPAIRS // 2 if moved else 0
            else:
                moved = self._insert_any(limit)
            while repairs and self._peak() > budget and self.seconds < allowed:
                if not self._relieve(self._largest(), allowed - self.seconds):
                    break
                repairs -= 1
            if not moved:
                continue
            then = self._energy(budget, room)
            if then > allowed:
                self._undo(seconds)
                continue
            now = then
            peak = self._peak()
            if (
                self.best_peak > budget or self.seconds < self.best_seconds * (1 - 1e-12)
                if peak <= budget
                else self.best_peak > budget and peak < self.best_peak
            ):
                self._keep()
