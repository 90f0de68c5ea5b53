"""A walk over the base order that evicts and rematerializes on demand.

The online greedy of dynamic tensor rematerialization (Kirisame et al., 2021, "Dynamic Tensor Rematerialization", section 3) made
offline: distances to the next use are known (Belady), and the cost of an eviction is that of the whole chain that has to run again.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass

from .reduce import Reduced

__all__ = ["Weights", "walk"]

_NEVER = 1 << 60
# Chains longer than this are priced as if they ended here; the price only ranks candidates.
_PRICED_OPS = 400
# Ops looked at for prices before a walk is given up: it thrashes, and the limit keeps its end a matter of work rather than of time.
_LOOKED_AT = 3_000_000


@dataclass(frozen=True, slots=True)
class Weights:
    """Exponents of the score bytes^a * distance^b / cost^c by which storages are evicted, largest first."""

    size: float = 1.0
    distance: float = 0.5
    cost: float = 1.0


class _Stuck(Exception):
    """Nothing that may be evicted is left."""


class _Walk:
    def __init__(self, reduced: Reduced, budget: int, weights: Weights, deadline: float) -> None:
        self.r = reduced
        self.budget = budget
        self.weights = weights
        self.deadline = deadline
        n, m = reduced.count, len(reduced.size)
        self.uses: list[list[int]] = [[] for _ in range(m)]
        for o in range(n):
            for s in reduced.reads[o]:
                self.uses[s].append(o)
        for s in range(m):
            if reduced.held[s]:
                self.uses[s].append(_NEVER - 1)
        self.here = [False] * m
        self.made = [False] * m
        self.ran = [False] * n
        self.locks = [0] * m
        self.mem = reduced.resident
        self.now = 0
        self.out: list[int] = []
        self.live: dict[int, None] = {}
        # Storages that cannot be made again at every later time have to wait for the evicted ones that depend on them.
        self.fragile = [not reduced.rerun[p] or bool(reduced.killers_again[p]) for p in reduced.producer]
        self.evicted = 0
        self.looked_at = 0

    def next_use(self, s: int) -> int:
        uses = self.uses[s]
        k = bisect_left(uses, self.now)
        return uses[k] if k < len(uses) else _NEVER

    def can_rerun(self, o: int, at: int) -> bool:
        return self.r.rerun[o] and all(w >= at for w in self.r.killers_again[o])

    def awaited(self, s: int) -> bool:
        """Whether something evicted that will be used depends on ``s`` and ``s`` could not be made again by then."""
        if not self.evicted:
            return False
        r, seen, stack = self.r, {s}, [s]
        own = r.producer[s]
        while stack:
            u = stack.pop()
            self.looked_at += 1
            for o in r.readers[u]:
                if not self.ran[o] or not r.rerun[o] or u not in r.again[o]:
                    continue
                for v in r.outs[o]:
                    if self.here[v] or v in seen or not self.made[v]:
                        continue
                    seen.add(v)
                    use = self.next_use(v)
                    if use < _NEVER and not self.can_rerun(own, use):
                        return True
                    stack.append(v)
        return False

    def price(self, s: int, at: int) -> float | None:
        """Seconds to make ``s`` again at time ``at`` from what is here, or None where that is impossible."""
        r = self.r
        total, seen, stack = 0.0, {r.producer[s]}, [r.producer[s]]
        while stack:
            o = stack.pop()
            if not self.can_rerun(o, at):
                return None
            total += r.cost[o]
            for u in r.again[o]:
                if not self.here[u] and r.producer[u] not in seen:
                    seen.add(r.producer[u])
                    stack.append(r.producer[u])
        self.looked_at += len(seen)
        if self.looked_at > _LOOKED_AT or time.monotonic() > self.deadline:
            raise _Stuck
        return total if len(seen) <= _PRICED_OPS else total * len(seen)

    def drop(self, s: int) -> None:
        self.here[s] = False
        self.live.pop(s, None)
        self.mem -= self.r.size[s]

    def make_room(self, need: int, keep: tuple[int, ...]) -> None:
        """Evict until ``need`` bytes more fit."""
        r, w = self.r, self.weights
        if self.mem + need <= self.budget:
            return
        scored = []
        for s in list(self.live):
            if self.locks[s] or s in keep or not r.size[s]:
                continue
            use = self.next_use(s)
            if use == _NEVER:
                if not (self.fragile[s] and self.awaited(s)):
                    self.drop(s)
                continue
            if use == _NEVER - 1:
                continue
            cost = self.price(s, use)
            if cost is not None:
                scored.append((r.size[s] ** w.size * (use - self.now + 1.0) ** w.distance / (cost + 1e-30) ** w.cost, s))
        # Best first; the prices of the rest rise with each eviction, so they are taken anew after every one that changes a chain.
        scored.sort(key=lambda x: (-x[0], x[1]))
        while self.mem + need > self.budget:
            best = None
            for _ in range(min(4, len(scored))):
                score, s = scored.pop(0)
                del score
                use = self.next_use(s)
                cost = self.price(s, use)
                if cost is None or (self.fragile[s] and self.awaited(s)):
                    continue
                fresh = r.size[s] ** w.size * (use - self.now + 1.0) ** w.distance / (cost + 1e-30) ** w.cost
                if not scored or fresh >= scored[0][0]:
                    best = s
                    break
                scored.append((fresh, s))
                scored.sort(key=lambda x: (-x[0], x[1]))
            else:
                if scored:
                    best = scored.pop(0)[1]
                    if self.price(best, self.next_use(best)) is None or (self.fragile[best] and self.awaited(best)):
                        continue
            if best is None:
                if not scored:
                    raise _Stuck
                continue
            self.evicted += 1
            self.drop(best)

    def run(self, o: int, first: bool) -> None:
        r = self.r
        reads = r.reads[o] if first else r.again[o]
        new = [s for s in r.outs[o] if not self.here[s]]
        saved = 0
        if r.takeover[o]:
            saved = sum(r.size[s] for s in r.takeover[o] if s in reads and self.locks[s] == 1 and self.dies(s, o))
        self.make_room(sum(r.size[s] for s in new) + r.workspace[o] - saved, r.outs[o])
        self.out.append(o)
        self.ran[o] = True
        for s in new:
            self.here[s] = self.made[s] = True
            self.live[s] = None
            self.mem += r.size[s]

    def dies(self, s: int, o: int) -> bool:
        uses = self.uses[s]
        k = bisect_left(uses, self.now + 1 if o == self.now else self.now)
        return k == len(uses) and not (self.fragile[s] and self.awaited(s))

    def release(self, storages: tuple[int, ...], after: int) -> None:
        """Free what has no use from base position ``after`` on."""
        for s in storages:
            if not self.here[s] or self.locks[s]:
                continue
            uses = self.uses[s]
            if bisect_left(uses, after) == len(uses) and not (self.fragile[s] and self.awaited(s)):
                self.drop(s)

    def bring(self, target: int) -> None:
        """Run the op at base position ``target``, and before it whatever has to run again for it."""
        r = self.r
        stack: list[tuple[int, int]] = [(target, 0)]
        while stack:
            o, k = stack.pop()
            first = o == target and len(stack) == 0
            reads = r.reads[o] if first else r.again[o]
            while k < len(reads) and self.here[reads[k]]:
                self.locks[reads[k]] += 1
                k += 1
            if k < len(reads):
                p = r.producer[reads[k]]
                if not self.can_rerun(p, self.now):
                    raise _Stuck
                stack.append((o, k))
                stack.append((p, 0))
                if len(stack) > r.count + 1:
                    raise _Stuck
                continue
            self.run(o, first)
            for s in reads:
                self.locks[s] -= 1
            after = self.now + 1 if first else self.now
            self.release(reads, after)
            if first:
                self.release(r.outs[o], after)
            elif stack:
                # The reader below in the stack takes what it waits for; siblings nobody needs go at once.
                wanted = r.reads[stack[-1][0]] if len(stack) == 1 else r.again[stack[-1][0]]
                self.release(tuple(s for s in r.outs[o] if s not in wanted), after)

    def go(self) -> list[int]:
        # A walk this long thrashes: other scores do better than waiting for it.
        limit = 8 * self.r.count + 100
        for o in range(self.r.count):
            self.now = o
            self.bring(o)
            if len(self.out) > limit or time.monotonic() > self.deadline:
                raise _Stuck
        return self.out


def walk(reduced: Reduced, budget: int, weights: Weights, deadline: float = float("inf")) -> list[int] | None:
    """Walk the base order within a budget.

    Args:
        reduced: the problem.
        budget: bytes, resident ones included.
        weights: how storages to evict are chosen.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        A sequence of reduced ops whose peak the simulator has still to confirm, or None where the walk got stuck.
    """
    try:
        return _Walk(reduced, budget, weights, deadline).go()
    except _Stuck:
        return None
