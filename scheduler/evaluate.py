"""The simulator: what a sequence of steps needs, in bytes at every step and in seconds.

An *instance* is what one run of an op leaves in one storage.  A read is served by the latest instance; an instance lives from the
step of its run up to and including its last read through any view, an output of the step to the end.  Memory of a step = resident
bytes + all live instances (inputs and outputs of the running op together) + its workspace.  Where an in-place pair's input dies at the
step, its buffer becomes the output's and counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import PlanError
from .plan import Step
from .problem import Problem
from .timeline import copy_starts, seconds_overlapped

__all__ = ["Evaluation", "evaluate"]

_NONE, _PERSISTENT = -1, -2


@dataclass(frozen=True)
class Evaluation:
    """What a sequence needs.

    Attributes:
        peak_bytes: the larger of the largest step and the optimizer's peak.
        seconds: sum of the runs and transfers; of a channel that overlaps, the time at which all is done.
        peak_step: index of the (first) largest step, -1 for an empty sequence.
        profile: int64 array, bytes of every step.
        host_bytes: the most bytes that swapped tensors take on the host at one time.
    """

    peak_bytes: int
    seconds: float
    peak_step: int
    profile: npt.NDArray[np.int64]
    host_bytes: int = 0


def evaluate(problem: Problem, steps: Sequence[Step] | Sequence[int]) -> Evaluation:
    """Simulate a sequence of steps; a plain integer stands for the run of that op.

    Transfers are serial unless the channel overlaps (:mod:`.timeline`); bytes are the same either way.  ``swap_out`` reads the latest instance of
    a tensor with a storage of its own and keeps a copy on the host, which takes bytes there up to the last ``swap_in`` that reads it; the
    instance dies as any other does, after its last read.  ``swap_in`` makes a new instance from the latest copy, as a run would; views of the
    old one stay with that until they are made again.

    Args:
        problem: a checked problem.
        steps: the steps in order.

    Returns:
        Peak, time and profile.

    Raises:
        PlanError: the sequence cannot run; the message names the step.
    """
    index, ops, tensors = problem.index, problem.ops, problem.tensors
    first_reads, again_reads = index.first_reads, index.again_reads
    own = index.own
    count = len(steps)
    bound = [_PERSISTENT if tensor.producer < 0 else _NONE for tensor in tensors]
    runs = [0] * len(ops)
    # Instances: step of birth, last step alive, bytes.
    start: list[int] = []
    last: list[int] = []
    size: list[int] = []
    takeovers: list[tuple[int, int, int]] = []
    copies = _Copies(problem)
    workspace = np.zeros(count, dtype=np.int64)
    replaced: set[int] = set()
    # Added up exactly, so that the same runs in another order take the same time to the last bit.
    spent: list[float] = []
    sequence: Sequence[Step | int] = steps
    for k, step in enumerate(sequence):
        if isinstance(step, Step):
            if step.kind != "run":
                t = step.index
                nbytes, seconds = copies.move(k, step, bound)
                if step.kind == "swap_out":
                    last[bound[t]] = k
                else:
                    bound[t] = len(start)
                    start.append(k)
                    last.append(k)
                    size.append(nbytes)
                spent.append(seconds)
                continue
            o = step.index
        else:
            o = step
        if not 0 <= o < len(ops):
            raise PlanError(f"step {k}: there is no op {o}")
        op = ops[o]
        if runs[o]:
            if op.pinned:
                raise PlanError(f"step {k}: op {op.name!r} is pinned ({op.pinned}) and must run once")
            reads, old, views = again_reads[o], index.again_old[o], index.again_views[o]
        else:
            reads, old, views = first_reads[o], index.first_old[o], index.first_views[o]
        runs[o] += 1
        for t in reads:
            i = bound[t]
            if i < 0:
                if i == _PERSISTENT:
                    continue
                raise PlanError(f"step {k}: op {op.name!r} reads {tensors[t].name!r}, which has not been computed")
            last[i] = k
        if old and replaced:
            for r in old:
                if r in replaced:
                    raise PlanError(f"step {k}: op {op.name!r} reads the old version of {tensors[r].name!r}, which has been replaced")
        if op.inplace:
            sources = [(bound[a], b) for a, b in op.inplace if a in reads]
        for t in own[o]:
            bound[t] = len(start)
            start.append(k)
            last.append(k)
            size.append(tensors[t].bytes)
        for t, source in views:
            bound[t] = bound[source]
        if op.inplace:
            takeovers += [(k, i, bound[b]) for i, b in sources if i >= 0 and b in own[o]]
        if op.workspace_bytes:
            workspace[k] = op.workspace_bytes
        if op.writes:
            replaced.update(index.written[o])
        spent.append(op.seconds)
    for o, required in enumerate(index.required):
        if required and not runs[o]:
            raise PlanError(f"step {count}: op {ops[o].name!r} never runs, but it is {ops[o].pinned or 'an output or has no reader'}")
    held = set()
    for t, tensor in enumerate(tensors):
        if tensor.output and bound[t] >= 0:
            held.add(bound[t])
            last[bound[t]] = count - 1
    taken: set[int] = set()
    for k, i, j in takeovers:
        # `last` of a buffer taken over drops below k, so that it cannot be taken twice; `taken` guards the receiving side.
        if last[i] == k and i not in held and start[i] < k and size[i] == size[j] and j not in taken:
            last[i] = k - 1
            taken.add(j)
    begin = np.array(start, dtype=np.int64)
    end = np.array(last, dtype=np.int64) + 1
    weight = np.array(size, dtype=np.float64)
    change = np.bincount(begin, weights=weight, minlength=count + 1) - np.bincount(end, weights=weight, minlength=count + 1)
    profile = np.cumsum(change[:count]).astype(np.int64) + workspace + problem.resident_bytes
    peak_step = int(profile.argmax()) if count else -1
    peak = int(profile[peak_step]) if count else problem.resident_bytes
    overlaps = bool(copies.rows) and problem.transfer is not None and problem.transfer.overlap
    if overlaps:
        copies.start_early([Step("run", step) if not isinstance(step, Step) else step for step in sequence])
    seconds = seconds_overlapped(problem, sequence) if overlaps else math.fsum(spent)
    return Evaluation(max(peak, problem.optimizer_peak_bytes), seconds, peak_step, profile, copies.host_bytes(count))


class _Copies:
    """The copies of swapped tensors on the host."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.latest: dict[int, int] = {}
        # Per copy: tensor, step that made it, step that reads it last (or -1).
        self.rows: list[list[int]] = []

    def move(self, k: int, step: Step, bound: Sequence[int]) -> tuple[int, float]:
        """Do one swap step; returns bytes and seconds."""
        channel, t = self.problem.transfer, step.index
        if channel is None:
            raise PlanError(f"step {k}: {step.kind} needs a transfer channel, and the problem has none")
        if not 0 <= t < len(bound):
            raise PlanError(f"step {k}: there is no tensor {t}")
        tensor = self.problem.tensors[t]
        if bound[t] == _PERSISTENT or self.problem.index.persistent[t]:
            raise PlanError(f"step {k}: {tensor.name!r} is persistent and cannot be swapped")
        if tensor.alias_of >= 0 or tensor.output:
            raise PlanError(f"step {k}: {tensor.name!r} is {'an output of the step' if tensor.output else 'a view'} and cannot be swapped")
        if step.kind == "swap_out":
            if bound[t] == _NONE:
                raise PlanError(f"step {k}: {step.kind} of {tensor.name!r}, which has not been computed")
            self.latest[t] = len(self.rows)
            self.rows.append([t, k, -1])
            return tensor.bytes, tensor.bytes / channel.bytes_per_second_out
        if t not in self.latest:
            raise PlanError(f"step {k}: {tensor.name!r} is not swapped out")
        self.rows[self.latest[t]][2] = k
        return tensor.bytes, tensor.bytes / channel.bytes_per_second_in

    def start_early(self, steps: Sequence[Step]) -> None:
        """Let each copy take its bytes from when it starts."""
        starts = copy_starts(self.problem, steps)
        for row in self.rows:
            row[1] = starts[row[1]]

    def host_bytes(self, count: int) -> int:
        """The most bytes that copies take at one time; raises PlanError where that is more than is lent, or where one is never read."""
        tensors, channel = self.problem.tensors, self.problem.transfer
        if not self.rows or channel is None:
            return 0
        change = [0] * (count + 1)
        for t, made, read in self.rows:
            if read < 0:
                raise PlanError(f"step {made}: {tensors[t].name!r} is swapped out and never read back")
            change[made] += tensors[t].bytes
            change[read + 1] -= tensors[t].bytes
        held = peak = 0
        for k, delta in enumerate(change):
            held += delta
            peak = max(peak, held)
            if held > channel.host_bytes:
                raise PlanError(f"step {k}: what is swapped out needs {held} host bytes, {channel.host_bytes} are lent")
        return peak
