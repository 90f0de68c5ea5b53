"""Local search on the sequence of runs (after FastSA, Shen et al., NeurIPS 2023): simulated annealing whose moves are repaired.

A round takes a run away or moves it, then repairs the peak with *cones*: a storage that is live across the largest slot and not read
there is made again right before its next read, with its dead inputs.  A round that does not pay is undone.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from .reduce import Reduced
from .slots import SPREAD, Slots

__all__ = ["improve"]

# Temperature of the annealing at its start and end, relative to the seconds of the best sequence.
_HOT, _COLD = 1e-3, 1e-7


def improve(
    reduced: Reduced,
    sequence: Sequence[int],
    budget: int,
    deadline: float,
    rng: random.Random,
    max_rounds: int = 10**9,
    report: Callable[[float], None] | None = None,
    floor: float = 0.0,
) -> list[int]:
    """Improve a sequence; the result is never worse: fewer seconds within the budget, or a lower peak where the start exceeds it.

    Args:
        reduced: the problem.
        sequence: reduced ops in the order they run; it may exceed the budget.
        budget: bytes, resident ones included.
        deadline: ``time.monotonic()`` at which to stop.
        rng: source of chance; the result is a function of its state and of the rounds done.
        max_rounds: stop after so many rounds.
        report: called with the seconds of every improvement within the budget.
        floor: stop when no sequence can take fewer seconds than this.

    Returns:
        The best sequence met.
    """
    slots = Slots(reduced, sequence)
    producers = reduced.producer
    heavy = [s for s in range(len(reduced.size)) if reduced.size[s] and reduced.rerun[producers[s]]]
    peak = float(slots.mem.max())
    best = slots.sequence()
    best_seconds = slots.seconds
    best_peak = peak
    excess = _excess(slots, budget)
    rounds = 0
    began = time.monotonic()
    done = 0.0
    while rounds < max_rounds:
        if rounds % 32 == 0:
            now = time.monotonic()
            if now > deadline:
                break
            # The temperature follows the rounds, unless the time will not suffice for them.
            done = max(rounds / max_rounds, (now - began) / max(deadline - began, 1e-9) if deadline < began + 1e6 else 0.0)
        if best_peak <= budget and best_seconds <= floor * (1 + 1e-12):
            break
        rounds += 1
        if rounds % 2000 == 0:
            # Spread the runs evenly again, so that every gap has room; start over from the best state now and then.
            base = best if best_peak <= budget and rng.random() < 0.25 else slots.sequence()
            slots = Slots(reduced, base)
            peak, excess = float(slots.mem.max()), _excess(slots, budget)
        slots.log.clear()
        seconds = slots.seconds
        feasible = peak <= budget
        moved = False
        choice = rng.random()
        if not feasible or choice < 0.15:
            moved = _relieve(slots, heavy, rng, None)
            if not moved:
                moved = _shift_any(slots, rng)
        elif choice < 0.6:
            x = _random_run(slots, rng)
            o = slots.at[x]
            if slots.removable(o, x):
                slots.remove(o, x)
                moved = True
            else:
                moved = slots.shift(o, x, rng)
        elif choice < 0.85:
            moved = _shift_any(slots, rng)
        else:
            moved = bool(heavy) and _relieve(slots, heavy, rng, rng.randrange(slots.length))
            for _ in range(3):
                x = _random_run(slots, rng)
                if slots.removable(slots.at[x], x):
                    slots.remove(slots.at[x], x)
                    break
        if not moved:
            slots.undo(0, seconds)
            continue
        if feasible:
            for _ in range(6):
                if slots.seconds > seconds or slots.mem.max() <= budget:
                    break
                if not _relieve(slots, heavy, rng, None):
                    break
        new_peak = float(slots.mem.max())
        if new_peak <= budget:
            heat = _HOT * (_COLD / _HOT) ** done * max(best_seconds, 1e-30)
            accept = not feasible or slots.seconds <= seconds - heat * math.log(1 - rng.random())
            new_excess = 0.0
        else:
            new_excess = _excess(slots, budget)
            # Towards the budget at any price first: what was paid too much is taken back once within it.
            price = (slots.seconds - seconds) / max(seconds, 1e-30)
            accept = not feasible and (new_excess < excess * (1 - 1e-9) or (new_excess <= excess and price <= 0)) and price < 0.2
        if not accept:
            slots.undo(0, seconds)
            continue
        peak, excess = new_peak, new_excess
        within = peak <= budget
        better = best_peak > budget or slots.seconds < best_seconds * (1 - 1e-12) if within else best_peak > budget and peak < best_peak
        if better:
            best, best_seconds, best_peak = slots.sequence(), slots.seconds, peak
            if within and report is not None:
                report(best_seconds)
    return best


def _excess(slots: Slots, budget: int) -> float:
    return float(np.maximum(slots.mem - budget, 0.0).sum())


def _random_run(slots: Slots, rng: random.Random) -> int:
    """A random occupied slot; half the time one of an op that runs more than once, where there is one nearby."""
    wanted = rng.random() < 0.5
    found = -1
    x = rng.randrange(slots.length)
    for _ in range(60 * SPREAD):
        o = slots.at[x]
        if o >= 0:
            found = x
            if not wanted or len(slots.runs[o]) > 1:
                return x
        x = x + 1 if x + 1 < slots.length else 0
    return found if found >= 0 else slots.runs[0][0]


def _shift_any(slots: Slots, rng: random.Random) -> bool:
    if rng.random() < 0.5:
        # Aim at the peak: move the run at it, or one right around it.
        x = int(slots.mem.argmax())
        for _ in range(rng.randrange(1, 4 * SPREAD)):
            x = x + 1 if x + 1 < slots.length else 0
            if slots.at[x] >= 0 and rng.random() < 0.5:
                return slots.shift(slots.at[x], x, rng)
    x = _random_run(slots, rng)
    return slots.shift(slots.at[x], x, rng)


def _relieve(slots: Slots, heavy: list[int], rng: random.Random, x: int | None) -> bool:
    """Drop a storage that lies idle at slot ``x`` (the largest where None) and make it again before its next read."""
    if not heavy:
        return False
    if x is None:
        x = int(slots.mem.argmax())
    found: list[tuple[float, int]] = []
    start = rng.randrange(len(heavy))
    step = rng.choice((1, -1))
    limit = rng.choice((1, 2, 4))
    for k in range(len(heavy)):
        s = heavy[(start + step * k) % len(heavy)]
        for a, b in slots.spans[s]:
            if a < x < b:
                reads = slots.reads[s]
                j = bisect_left(reads, x)
                if j < len(reads) and reads[j] > x:
                    cost = slots.r.cost[slots.r.producer[s]]
                    found.append(((cost + 1e-30) / slots.r.size[s], s))
                break
        if len(found) >= limit:
            break
    if not found:
        return False
    found.sort()
    return slots.cone(found[0][1], x, rng, rng.choice((0.0, 0.5, 1.0)))
