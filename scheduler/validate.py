"""The validator: judges a finished plan by another algorithm than the simulator's.

It runs the plan twice on a small machine.  The first run only counts how often each buffer will be touched; the second allocates,
touches and frees buffers as a runtime with reference counts would, and adds up what is held.  It shares no code with
:mod:`onnxremat.scheduler.evaluate`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from .errors import PlanError
from .plan import Plan, Step
from .problem import Op, Problem

__all__ = ["validate"]

Buffer = tuple[int, int]  # the op that allocated it and a serial number


@dataclass
class _Machine:
    """Where every tensor's value lies, and what is held on the device and on the host."""

    problem: Problem
    home: dict[int, Buffer] = field(default_factory=dict)
    bytes_of: dict[Buffer, int] = field(default_factory=dict)
    times_run: Counter[int] = field(default_factory=Counter)
    replaced: dict[int, int] = field(default_factory=dict)
    copies: list[list[int]] = field(default_factory=list)  # bytes, number of reads
    copy_of: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def storage(self, t: int) -> int:
        while self.problem.tensors[t].alias_of != -1:
            t = self.problem.tensors[t].alias_of
        return t

    def reads(self, op: Op, o: int) -> tuple[int, ...]:
        if self.times_run[o] and op.recompute_inputs is not None:
            return op.recompute_inputs
        return op.inputs

    def fetch(self, k: int, op: Op, t: int, o: int) -> Buffer | None:
        """The buffer that serves a read, or None for a persistent storage."""
        name = self.problem.tensors[t].name
        base = self.storage(t)
        if self.problem.tensors[base].producer == -1:
            writer = self.replaced.get(base, o)
            if writer != o or (base in self.replaced and self.times_run[o]):
                raise PlanError(f"step {k}: op {op.name!r} would read the new value of {self.problem.tensors[base].name!r} for the old one")
            # A view of a persistent storage still has to be made before it is read.
            producer = self.problem.tensors[t].producer
            if producer != -1 and not self.times_run[producer]:
                raise PlanError(f"step {k}: op {op.name!r} reads {name!r}, a view that has not been made")
            return None
        if t not in self.home:
            raise PlanError(f"step {k}: op {op.name!r} reads {name!r}, which no run before it has written")
        return self.home[t]


def validate(problem: Problem, plan: Plan) -> None:
    """Raise PlanError, one line, unless the plan is valid for the problem and keeps its promises.

    Checked: every read is served; pinned ops run once; outputs, pinned ops and side effects are there; no old version is read after its
    replacement; the peak is within the budget and is the plan's; the time is the plan's; copies on the host are read and fit there.
    """
    touches: Counter[Buffer] = Counter()
    first = _Machine(problem)
    for k, step in enumerate(plan.steps):
        used, made = _advance(first, k, step)
        touches.update(used)
        touches.update(made)
    kept = _kept(first, len(plan.steps))
    reads_left = [copy[1] for copy in first.copies]
    if 0 in reads_left:
        raise PlanError(f"plan for {problem.name!r}: a tensor is copied to the host that nobody reads back")
    on_host = 0
    # A copy that overlaps takes its bytes on the host from when its tensor is made.
    early = problem.transfer is not None and problem.transfer.overlap
    made_at: dict[Buffer, int] = {}
    copied_from: Counter[int] = Counter()
    machine = _Machine(problem)
    for k, step in enumerate(plan.steps if early else ()):
        used, made = _advance(machine, k, step)
        made_at |= dict.fromkeys(made, k)
        if step.kind == "swap_out":
            copied_from[made_at[used[0]]] += problem.tensors[step.index].bytes

    machine = _Machine(problem)
    touched: list[tuple[list[Buffer], list[Buffer]]] = []
    held: dict[Buffer, int] = {}
    resident = sum(problem.resident.values())
    peak = resident
    for k, step in enumerate(plan.steps):
        op = problem.ops[step.index] if step.kind == "run" else None
        before = dict.fromkeys(op.inplace, None) if op is not None else {}
        sources = {pair: machine.home.get(pair[0]) for pair in before}
        reads = machine.reads(op, step.index) if op is not None else ()
        used, made = _advance(machine, k, step)
        touched.append((used, made))
        for buffer in made:
            held[buffer] = machine.bytes_of[buffer]
        on_host += copied_from[k] if early else machine.copies[-1][0] if step.kind == "swap_out" else 0
        if problem.transfer is not None and on_host > problem.transfer.host_bytes:
            raise PlanError(f"step {k}: {on_host} bytes on the host, {problem.transfer.host_bytes} are lent")
        if step.kind == "swap_in":
            copy = machine.copy_of[step.index]
            reads_left[copy] -= 1
            on_host -= 0 if reads_left[copy] else machine.copies[copy][0]
        credit = 0
        given: set[Buffer] = set()
        received: set[Buffer] = set()
        for pair, source in sources.items():
            target = machine.home.get(pair[1])
            if source is None or target not in made or pair[0] not in reads or source in given or target in received:
                continue
            if touches[source] == 1 and source not in kept and held[source] == held[target]:
                given.add(source)
                received.add(target)
                credit += held[source]
        scratch = op.workspace_bytes if op is not None else 0
        peak = max(peak, resident + sum(held.values()) + scratch - credit)
        for buffer in [*used, *made]:
            touches[buffer] -= 1
            if not touches[buffer] and buffer not in kept:
                held.pop(buffer, None)
    peak = max(peak, problem.optimizer_peak_bytes)

    if peak != plan.peak_bytes:
        raise PlanError(f"plan for {problem.name!r}: its peak is {peak} bytes, it says {plan.peak_bytes}")
    if peak > plan.budget_bytes:
        raise PlanError(f"plan for {problem.name!r}: its peak of {peak} bytes exceeds the budget of {plan.budget_bytes}")
    overlaps = problem.transfer is not None and problem.transfer.overlap and bool(machine.copies)
    seconds = _last_end(problem, plan.steps, touched) if overlaps else math.fsum(machine.seconds)
    if not math.isclose(seconds, plan.seconds, rel_tol=1e-9, abs_tol=1e-12):
        raise PlanError(f"plan for {problem.name!r}: it takes {seconds} {problem.unit}, it says {plan.seconds}")


def _advance(machine: _Machine, k: int, step: Step) -> tuple[list[Buffer], list[Buffer]]:
    """Do a step; returns the buffers that it touches and those that it allocates, each once."""
    problem = machine.problem
    if step.kind != "run":
        return _move(machine, k, step)
    o = step.index
    if not 0 <= o < len(problem.ops):
        raise PlanError(f"step {k}: op {o} does not exist")
    op = problem.ops[o]
    if op.pinned and machine.times_run[o]:
        raise PlanError(f"step {k}: op {op.name!r} runs again though it is pinned ({op.pinned})")
    used: dict[Buffer, None] = {}
    by_tensor: dict[int, Buffer | None] = {}
    by_storage: dict[int, Buffer | None] = {}
    for t in machine.reads(op, o):
        buffer = machine.fetch(k, op, t, o)
        by_tensor[t] = buffer
        by_storage.setdefault(machine.storage(t), buffer)
        if buffer is not None:
            used[buffer] = None
    made: list[Buffer] = []
    for t in op.outputs:
        if problem.tensors[t].alias_of == -1:
            buffer = (o, len(machine.bytes_of))
            machine.bytes_of[buffer] = problem.tensors[t].bytes
            machine.home[t] = buffer
            made.append(buffer)
    for t in op.outputs:
        base = machine.storage(t)
        if t == base:
            continue
        if base in op.outputs:
            machine.home[t] = machine.home[base]
            continue
        alias = problem.tensors[t].alias_of
        while alias in op.outputs:
            alias = problem.tensors[alias].alias_of
        source = by_tensor[alias] if alias in by_tensor else by_storage[base]
        if source is not None:
            machine.home[t] = source
    for t in op.writes:
        machine.replaced[machine.storage(t)] = o
    machine.times_run[o] += 1
    machine.seconds.append(op.seconds)
    return [b for b in used if b not in made], made


def _move(machine: _Machine, k: int, step: Step) -> tuple[list[Buffer], list[Buffer]]:
    """Do a transfer; returns the buffer that it reads, or the one that it fills."""
    problem, channel = machine.problem, machine.problem.transfer
    if channel is None:
        raise PlanError(f"step {k}: the problem has no transfer channel for {step.kind}")
    if not 0 <= step.index < len(problem.tensors):
        raise PlanError(f"step {k}: tensor {step.index} does not exist")
    tensor = problem.tensors[step.index]
    if tensor.producer == -1 or tensor.alias_of != -1 or tensor.output:
        raise PlanError(f"step {k}: {step.kind} of {tensor.name!r}, which has no buffer of its own that could be freed")
    if step.kind == "swap_out":
        if step.index not in machine.home:
            raise PlanError(f"step {k}: {step.kind} of {tensor.name!r}, which is not in a buffer of the step")
        machine.copy_of[step.index] = len(machine.copies)
        machine.copies.append([tensor.bytes, 0])
        machine.seconds.append(tensor.bytes / channel.bytes_per_second_out)
        return [machine.home[step.index]], []
    if step.index not in machine.copy_of:
        raise PlanError(f"step {k}: {tensor.name!r} does not lie on the host")
    machine.copies[machine.copy_of[step.index]][1] += 1
    buffer = (-1, len(machine.bytes_of))
    machine.bytes_of[buffer] = tensor.bytes
    machine.home[step.index] = buffer
    machine.seconds.append(tensor.bytes / channel.bytes_per_second_in)
    return [], [buffer]


def _last_end(problem: Problem, steps: tuple[Step, ...], touched: list[tuple[list[Buffer], list[Buffer]]]) -> float:
    """The end of the last run or copy where copies overlap with runs: the longest chain of waits.

    The rules are those of :mod:`.timeline`; here every run, copy and wait is a node that names what it waits for.
    """
    channel = problem.transfer
    assert channel is not None
    takes: dict[tuple[str, int], float] = {}
    waits: dict[tuple[str, int], list[tuple[str, int]]] = {}
    maker: dict[Buffer, tuple[str, int]] = {}
    going: list[tuple[int, int]] = []  # (step that made what is copied out, step that waits for the copy)
    latest: dict[int, tuple[str, int]] = {}
    runs: list[tuple[str, int]] = []
    copies_in: list[tuple[str, int]] = []
    for k, (step, (used, made)) in enumerate(zip(steps, touched, strict=True)):
        size = problem.tensors[step.index].bytes if step.kind != "run" else 0
        node = ("in" if step.kind == "swap_in" else "run", k)
        waits[node] = runs[-1:]
        if step.kind == "run":
            takes[node] = problem.ops[step.index].seconds
            waits[node] += [maker[buffer] for buffer in used]
            runs.append(node)
        elif step.kind == "swap_out":
            copy = latest[step.index] = ("out", k)
            takes[node], takes[copy] = 0.0, size / channel.bytes_per_second_out
            waits[node].append(copy)
            source = maker[used[0]]
            going.append((source[1], k))
            waits[copy] = [source, *[other for other in copies_in if other[1] <= source[1]][-1:]]
            runs.append(node)
        else:
            takes[node] = size / channel.bytes_per_second_in
            waits[node] += [latest[step.index], *copies_in[-1:]]
            copies_in.append(node)
        maker |= dict.fromkeys(made, node)
    going.sort()
    for (_, before), (_, after) in itertools.pairwise(going):
        waits["out", after].append(("out", before))
    ends: dict[tuple[str, int], float] = {}
    stack = list(waits)
    while stack:
        missing = [other for other in waits[stack[-1]] if other not in ends]
        if missing:
            stack += missing
            continue
        node = stack.pop()
        ends[node] = max((ends[other] for other in waits[node]), default=0.0) + takes[node]
    return max(ends.values(), default=0.0)


def _kept(machine: _Machine, count: int) -> set[Buffer]:
    """Buffers held to the end; raises where something that must be there is not."""
    problem = machine.problem
    read = {t for op in problem.ops for t in (*op.inputs, *(op.recompute_inputs or ()))}
    for o, op in enumerate(problem.ops):
        if machine.times_run[o]:
            continue
        if op.pinned or op.writes:
            raise PlanError(f"step {count}: op {op.name!r} ({op.pinned or 'a side effect'}) is missing")
        if any(problem.tensors[t].output for t in op.outputs):
            raise PlanError(f"step {count}: op {op.name!r}, which writes an output, is missing")
        if not read.intersection(op.outputs):
            raise PlanError(f"step {count}: op {op.name!r}, which nobody reads, is missing")
    kept = set()
    for t, tensor in enumerate(problem.tensors):
        if tensor.output and t in machine.home:
            kept.add(machine.home[t])
    return kept
