"""When copies to and from the host run beside the ops: the time of a sequence as the longest chain of what waits for what.

Ops run one after another.  Copies out form a queue, and copies back another; each queue does one copy at a time, in the order of the steps.

- A copy out starts as soon as its tensor is there, right behind the run that makes it.  Its ``swap_out`` step says by when it must have
  ended: the ops wait for it there, and the tensor's bytes are free after it.
- ``swap_in`` takes the bytes of the new instance and starts the copy back, at the earliest when all ops before it and the copy out have
  ended.  The first op that reads the instance waits for it.
- A copy out also waits for the copies back that come before it, since it may take over their bytes on the host.

So what is held at each step does not depend on how fast anything is, and a wrong guess of speed costs time, never memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Step
from .problem import Problem

__all__ = ["Timeline", "copy_starts", "hide_copies", "seconds_overlapped", "timeline"]

# Moving one copy changes how long others are waited for: it is looked at anew so often.
_ROUNDS = 4


@dataclass(frozen=True)
class Timeline:
    """When the steps of a sequence take place, in the problem's unit of time.

    Attributes:
        ready: per step, when the ops before it have ended, before it waits for anything.
        copied: of each ``swap_out`` step, when its copy has ended.
        arrived: of each ``swap_in`` step, when its copy has ended.
        end: when everything has.
    """

    ready: list[float]
    copied: dict[int, float]
    arrived: dict[int, float]
    end: float


def copy_starts(problem: Problem, steps: Sequence[Step]) -> dict[int, int]:
    """Of each ``swap_out`` step, the step that made the instance which it copies: the copy starts behind that."""
    born: dict[int, int] = {}
    starts: dict[int, int] = {}
    for k, step in enumerate(steps):
        if step.kind == "swap_out":
            starts[k] = born[step.index]
        elif step.kind == "swap_in":
            born[step.index] = k
        else:
            born |= dict.fromkeys(problem.index.own[step.index], k)
    return starts


def timeline(problem: Problem, steps: Sequence[Step]) -> Timeline:
    """Times of a valid sequence for a problem whose channel overlaps."""
    index, channel = problem.index, problem.transfer
    assert channel is not None
    behind: dict[int, list[int]] = {}
    for k, start in copy_starts(problem, steps).items():
        behind.setdefault(start, []).append(k)
    now = out = back = 0.0
    ready: list[float] = []
    copied: dict[int, float] = {}
    arrived: dict[int, float] = {}
    on_host: dict[int, float] = {}
    awaited: dict[int, float] = {}
    ran: set[int] = set()
    for k, step in enumerate(steps):
        ready.append(now)
        t = step.index
        if step.kind == "swap_out":
            now = max(now, copied[k])
            on_host[t] = copied[k]
            continue
        if step.kind == "swap_in":
            back = max(back, now, on_host[t]) + problem.tensors[t].bytes / channel.bytes_per_second_in
            arrived[k] = awaited[t] = there = back
        else:
            for read in index.again_reads[t] if t in ran else index.first_reads[t]:
                now = max(now, awaited.pop(read, 0.0))
            ran.add(t)
            now += problem.ops[t].seconds
            there = now
            for made in index.own[t]:
                awaited.pop(made, None)
        for copy in behind.get(k, ()):
            out = max(out, there, back) + problem.tensors[steps[copy].index].bytes / channel.bytes_per_second_out
            copied[copy] = out
    return Timeline(ready, copied, arrived, max(now, back))


def seconds_overlapped(problem: Problem, steps: Sequence[Step | int]) -> float:
    """The time that a valid sequence takes where the channel overlaps."""
    return timeline(problem, [step if isinstance(step, Step) else Step("run", step) for step in steps]).end


def hide_copies(problem: Problem, steps: Sequence[Step], profile: Sequence[int], budget: int) -> list[Step]:
    """Move the swap steps of a sequence so that its copies hide behind ops, as far as the budget allows.

    A ``swap_out`` at which ops would wait goes back to where its copy has ended; a ``swap_in`` comes forward so that it ends when it is read,
    and those behind it can end in time as well.  What is held in between grows by the tensor.

    Args:
        problem: its channel overlaps.
        steps: a valid sequence.
        profile: bytes of every step.
        budget: bytes that no step may exceed.

    Returns:
        A sequence whose runs have the same order, and whose bytes are within the budget where the given ones are.
    """
    moving = _Moving(problem, list(steps), [int(size) for size in profile], budget)
    for _ in range(_ROUNDS):
        before = list(moving.steps)
        moving.delay_joins()
        moving.fetch_early()
        if moving.steps == before:
            break
    return moving.steps


class _Moving:
    """A sequence whose swap steps move, and (at most) the bytes of each step."""

    def __init__(self, problem: Problem, steps: list[Step], profile: list[int], budget: int) -> None:
        self.problem, self.steps, self.profile, self.budget = problem, steps, profile, budget

    def delay_joins(self) -> None:
        """Put off every wait for a copy out by as much as there is to wait."""
        times = timeline(self.problem, self.steps)
        # From the last one on, so that the others keep their places.
        for k in sorted(times.copied, reverse=True):
            t = self.steps[k].index
            wait, j = times.copied[k] - times.ready[k], k
            while wait > 0 and j + 1 < len(self.steps) and self._room(j + 1, t) and not self._concerns(self.steps[j + 1], t, reads=False):
                j += 1
                wait -= self.problem.ops[self.steps[j].index].seconds if self.steps[j].kind == "run" else 0.0
            self._move(k, j, t)

    def fetch_early(self) -> None:
        """Start every copy back so long before its tensor is read that it and those behind it can end in time."""
        times, channel = timeline(self.problem, self.steps), self.problem.transfer
        assert channel is not None
        ready, free = times.ready, math.inf
        left = sorted(times.arrived)
        while left:
            k = left.pop()
            t, j = self.steps[k].index, k
            reader = next((r for r in range(k + 1, len(self.steps)) if self._concerns(self.steps[r], t)), len(self.steps) - 1)
            free = min(free, ready[reader]) - self.problem.tensors[t].bytes / channel.bytes_per_second_in
            while j and ready[j] > free and self._room(j - 1, t) and not self._concerns(self.steps[j - 1], t):
                j -= 1
            self._move(k, j, t)
            ready.insert(j, ready.pop(k))
            left = [other + (other >= j) for other in left]  # those that it went past

    def _room(self, k: int, t: int) -> bool:
        return self.profile[k] + self.problem.tensors[t].bytes <= self.budget

    def _concerns(self, step: Step, t: int, reads: bool = True) -> bool:
        """Whether a step makes or copies a tensor, or reads it or a view of it."""
        index = self.problem.index
        if step.kind != "run":
            return step.index == t
        found = (*index.first_reads[step.index], *index.again_reads[step.index]) if reads else ()
        return t in index.own[step.index] or any(index.root[read] == t for read in found)

    def _move(self, k: int, j: int, t: int) -> None:
        size, profile = self.problem.tensors[t].bytes, self.profile
        if j > k:
            profile[k : j + 1] = [*(held + size for held in profile[k + 1 : j + 1]), profile[j] + size]
        elif j < k:
            profile[j : k + 1] = [profile[j] + size, *(held + size for held in profile[j:k])]
        self.steps.insert(j, self.steps.pop(k))
