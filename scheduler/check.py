"""The checks that a problem passes before anything is planned with it."""

from __future__ import annotations

from .errors import ProblemError
from .problem import PHASES, Op, Problem, is_duration, is_size

__all__ = ["check_problem"]


def check_problem(problem: Problem) -> None:
    """Raise ProblemError, one line that names the op or tensor, unless the problem is well formed."""
    _check_numbers(problem)
    _check_references(problem)
    _check_aliases(problem)
    _check_order(problem)
    _check_versions(problem)


def _fail(problem: Problem, text: str) -> ProblemError:
    return ProblemError(f"problem {problem.name!r}: {text}")


def _check_numbers(problem: Problem) -> None:
    for what, size in [*problem.resident.items(), ("optimizer_peak_bytes", problem.optimizer_peak_bytes)]:
        if not is_size(size):
            raise _fail(problem, f"{what} must be a number of bytes from 0 to 2**52, not {size!r}")
    for tensor in problem.tensors:
        if not is_size(tensor.bytes):
            raise _fail(problem, f"tensor {tensor.name!r}: bytes must be an integer from 0 to 2**52, not {tensor.bytes!r}")
    for op in problem.ops:
        if not is_duration(op.seconds):
            raise _fail(problem, f"op {op.name!r}: {problem.unit} must be a finite number from 0 to 1e100, not {str(op.seconds)[:40]}")
        if not is_size(op.workspace_bytes):
            raise _fail(problem, f"op {op.name!r}: workspace_bytes must be an integer from 0 to 2**52, not {op.workspace_bytes!r}")
        if op.phase not in PHASES:
            raise _fail(problem, f"op {op.name!r}: phase must be one of {', '.join(PHASES)}, not {op.phase!r}")
    total = problem.resident_bytes + sum(t.bytes for t in problem.tensors) + sum(op.workspace_bytes for op in problem.ops)
    if not is_size(total):
        raise _fail(problem, f"all bytes together ({total}) exceed 2**52, beyond which sums are not exact")
    channel = problem.transfer
    if channel is not None:
        for what, rate in (("bytes_per_second_out", channel.bytes_per_second_out), ("bytes_per_second_in", channel.bytes_per_second_in)):
            if not is_duration(rate) or rate == 0:
                raise _fail(problem, f"transfer: {what} must be a positive number, not {rate!r}")
        if not isinstance(channel.overlap, bool):
            raise _fail(problem, f"transfer: overlap must be true or false, not {channel.overlap!r}")
        if not is_size(channel.host_bytes):
            raise _fail(problem, f"transfer: host_bytes must be an integer from 0 to 2**52, not {channel.host_bytes!r}")


def _check_references(problem: Problem) -> None:
    ops, tensors = problem.ops, problem.tensors

    def known(op: Op, what: str, t: object) -> int:
        if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < len(tensors):
            raise _fail(problem, f"op {op.name!r}: {what} refers to tensor {t!r}, which does not exist (there are {len(tensors)})")
        return t

    made: dict[int, int] = {}
    for i, op in enumerate(ops):
        reads = [known(op, "inputs", t) for t in op.inputs]
        again = reads if op.recompute_inputs is None else [known(op, "recompute_inputs", t) for t in op.recompute_inputs]
        for t in op.outputs:
            known(op, "outputs", t)
            if t in made:
                raise _fail(problem, f"tensor {tensors[t].name!r} is written by both {ops[made[t]].name!r} and {op.name!r}")
            made[t] = i
            if tensors[t].producer != i:
                named = tensors[t].producer
                raise _fail(problem, f"tensor {tensors[t].name!r} is an output of op {op.name!r} ({i}) but names {named} as producer")
        for t in op.writes:
            known(op, "writes", t)
            if tensors[t].producer >= 0 or tensors[t].alias_of >= 0:
                raise _fail(problem, f"op {op.name!r} replaces tensor {tensors[t].name!r}, which is not a persistent storage")
        for a, b in op.inplace:
            if known(op, "inplace", a) not in reads and a not in again:
                raise _fail(problem, f"op {op.name!r}: in-place input {tensors[a].name!r} is not one of its inputs")
            if known(op, "inplace", b) not in op.outputs:
                raise _fail(problem, f"op {op.name!r}: in-place output {tensors[b].name!r} is not one of its outputs")
    for t, tensor in enumerate(tensors):
        if tensor.producer < -1 or tensor.producer >= len(ops):
            raise _fail(problem, f"tensor {tensor.name!r}: its producer {tensor.producer} does not exist (there are {len(ops)} ops)")
        if tensor.producer >= 0 and made.get(t) != tensor.producer:
            raise _fail(problem, f"tensor {tensor.name!r} is missing in the outputs of its producer {ops[tensor.producer].name!r}")


def _check_aliases(problem: Problem) -> None:
    ops, tensors = problem.ops, problem.tensors
    root: list[int] = []
    for t, tensor in enumerate(tensors):
        r, hops = t, 0
        while tensors[r].alias_of >= 0:
            r, hops = tensors[r].alias_of, hops + 1
            if r >= len(tensors):
                raise _fail(problem, f"tensor {tensor.name!r}: alias_of refers to tensor {r}, which does not exist")
            if hops > len(tensors):
                raise _fail(problem, f"tensor {tensor.name!r}: its chain of aliases never ends (a cycle)")
        if tensors[t].alias_of < -1:
            raise _fail(problem, f"tensor {tensor.name!r}: alias_of must be -1 or a tensor, not {tensor.alias_of}")
        root.append(r)
    for t, tensor in enumerate(tensors):
        if tensor.alias_of < 0:
            continue
        if tensor.producer < 0:
            if tensors[root[t]].producer >= 0:
                raise _fail(problem, f"tensor {tensor.name!r} is persistent but a view of {tensors[root[t]].name!r}, which is computed")
            continue
        op = ops[tensor.producer]
        if root[t] in op.outputs:
            continue
        for reads in (op.inputs, op.inputs if op.recompute_inputs is None else op.recompute_inputs):
            if all(root[u] != root[t] for u in reads):
                base = tensors[root[t]].name
                raise _fail(problem, f"tensor {tensor.name!r} is a view of {base!r}, which its op {op.name!r} does not read")


def _check_order(problem: Problem) -> None:
    ops, tensors = problem.ops, problem.tensors
    for i, op in enumerate(ops):
        first = set(op.inputs)
        for t in (*op.inputs, *(op.recompute_inputs or ())):
            producer = tensors[t].producer
            if producer < i:
                continue
            cycle = _find_cycle(problem)
            if cycle:
                raise _fail(problem, f"the ops depend on each other in a cycle: {' -> '.join(ops[j].name for j in cycle[:8])}")
            if t not in first:
                continue  # a recompute may read what only a later op writes, such as a tensor that is swapped in
            when = f"before {ops[producer].name!r} writes it; give the ops in a valid order"
            raise _fail(problem, f"op {op.name!r} reads {tensors[t].name!r} {when}")


def _find_cycle(problem: Problem) -> list[int]:
    """Ops of one dependency cycle, the first op repeated at the end, or an empty list."""
    ops, tensors = problem.ops, problem.tensors
    before = [sorted({tensors[t].producer for t in (*op.inputs, *(op.recompute_inputs or ()))} - {-1}) for op in ops]
    state = [0] * len(ops)
    for start in range(len(ops)):
        path, stack = [start], [iter(before[start])]
        if state[start]:
            continue
        state[start] = 1
        while stack:
            j = next(stack[-1], None)
            if j is None:
                state[path.pop()] = 2
                stack.pop()
            elif state[j] == 1:
                cycle = [*path[path.index(j) :], j]
                return cycle[::-1]
            elif state[j] == 0:
                state[j] = 1
                path.append(j)
                stack.append(iter(before[j]))
    return []


def _check_versions(problem: Problem) -> None:
    index = problem.index
    replaced: dict[int, int] = {}
    for i, op in enumerate(problem.ops):
        for r in index.first_old[i]:
            if r in replaced:
                when = f"after {problem.ops[replaced[r]].name!r} has replaced it; give the ops in a valid order"
                raise _fail(problem, f"op {op.name!r} reads {problem.tensors[r].name!r} {when}")
        for r in index.written[i]:
            replaced[r] = i
