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

__all__ = ["Evaluation", "evaluate"]

_NONE, _PERSISTENT = -1, -2


@dataclass(frozen=True)
class Evaluation:
    """What a sequence needs.

    Attributes:
        peak_bytes: the larger of the largest step and the optimizer's peak.
        seconds: sum of the runs and transfers.
        peak_step: index of the (first) largest step, -1 for an empty sequence.
        profile: int64 array, bytes of every step.
    """

    peak_bytes: int
    seconds: float
    peak_step: int
    profile: npt.NDArray[np.int64]


def evaluate(problem: Problem, steps: Sequence[Step] | Sequence[int]) -> Evaluation:
    """Simulate a sequence of steps; a plain integer stands for the run of that op.

    Transfers are serial: ``swap_out`` frees the device bytes after its step and holds host bytes until the matching ``swap_in``,
    which needs device bytes from its step on.

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
    # Instances: step of birth (or of the latest swap-in), last step alive, bytes, on the host or not.
    start: list[int] = []
    last: list[int] = []
    size: list[int] = []
    away: list[bool] = []
    closed: list[tuple[int, int, int]] = []
    takeovers: list[tuple[int, int, int]] = []
    workspace = np.zeros(count, dtype=np.int64)
    replaced: set[int] = set()
    # Added up exactly, so that the same runs in another order take the same time to the last bit.
    spent: list[float] = []
    host = 0
    sequence: Sequence[Step | int] = steps
    for k, step in enumerate(sequence):
        if isinstance(step, Step):
            if step.kind != "run":
                host, seconds = _transfer(problem, k, step, bound, start, last, size, away, closed, host)
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
            if away[i]:
                raise PlanError(f"step {k}: op {op.name!r} reads {tensors[t].name!r}, which is swapped out")
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
            away.append(False)
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
            if away[bound[t]]:
                raise PlanError(f"step {count}: output {tensor.name!r} is swapped out at the end")
            held.add(bound[t])
            last[bound[t]] = count - 1
    taken: set[int] = set()
    for k, i, j in takeovers:
        # `last` of a buffer taken over drops below k, so that it cannot be taken twice; `taken` guards the receiving side.
        if last[i] == k and i not in held and start[i] < k and size[i] == size[j] and j not in taken:
            last[i] = k - 1
            taken.add(j)
    alive = [i for i in range(len(start)) if not away[i]]
    begin = np.array([start[i] for i in alive] + [c[0] for c in closed], dtype=np.int64)
    end = np.array([last[i] for i in alive] + [c[1] for c in closed], dtype=np.int64) + 1
    weight = np.array([size[i] for i in alive] + [c[2] for c in closed], dtype=np.float64)
    change = np.bincount(begin, weights=weight, minlength=count + 1) - np.bincount(end, weights=weight, minlength=count + 1)
    profile = np.cumsum(change[:count]).astype(np.int64) + workspace + problem.resident_bytes
    peak_step = int(profile.argmax()) if count else -1
    peak = int(profile[peak_step]) if count else problem.resident_bytes
    return Evaluation(max(peak, problem.optimizer_peak_bytes), math.fsum(spent), peak_step, profile)


def _transfer(
    problem: Problem,
    k: int,
    step: Step,
    bound: list[int],
    start: list[int],
    last: list[int],
    size: list[int],
    away: list[bool],
    closed: list[tuple[int, int, int]],
    host: int,
) -> tuple[int, float]:
    """Do one swap step on the state of :func:`evaluate`; returns the host bytes then held and the seconds it takes."""
    channel = problem.transfer
    if channel is None:
        raise PlanError(f"step {k}: {step.kind} needs a transfer channel, and the problem has none")
    if not 0 <= step.index < len(bound):
        raise PlanError(f"step {k}: there is no tensor {step.index}")
    name, i = problem.tensors[step.index].name, bound[step.index]
    if i == _PERSISTENT:
        raise PlanError(f"step {k}: {name!r} is persistent and cannot be swapped")
    if i == _NONE:
        raise PlanError(f"step {k}: {step.kind} of {name!r}, which has not been computed")
    if step.kind == "swap_out":
        if away[i]:
            raise PlanError(f"step {k}: {name!r} is already swapped out")
        host += size[i]
        if host > channel.host_bytes:
            raise PlanError(f"step {k}: swapping out {name!r} needs {host} host bytes, {channel.host_bytes} are lent")
        closed.append((start[i], k, size[i]))
        away[i] = True
        return host, size[i] / channel.bytes_per_second_out
    if not away[i]:
        raise PlanError(f"step {k}: {name!r} is not swapped out")
    away[i] = False
    start[i] = last[i] = k
    return host - size[i], size[i] / channel.bytes_per_second_in
