"""A smaller problem for the solvers: views merged into their storages, only storages and real ops left.

A view costs no memory, so a solver need not decide about it: whoever reads a view reads its storage, and when a sequence of the reduced
ops is expanded, each view is made anew right before the first reader that finds it bound to an older instance.  At that place it reads
only what is alive anyway, so the peak does not rise.

An op that computes something and passes on a view of what it reads as well (a kernel that updates a buffer in place) may not run again as
long as the buffer could be made anew between it and the view's readers.  Where the buffer comes from an op that reads nothing, such as a
constant of zeros, and nobody else reads it, both become one reduced op, which may.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .problem import Problem

__all__ = ["Reduced", "reduce_problem"]

# Ops whose relative order carries meaning: a generator's stream, a state.
_ORDERED = ("random", "stateful")


@dataclass
class Reduced:
    """The reduced problem; lists are indexed by reduced op or by storage.

    Attributes:
        problem: the problem it came from.
        op: per reduced op, its index in the problem (base order is kept).
        cost: seconds of a run.
        workspace: bytes of scratch.
        reads: storages that the first run reads.
        again: storages that a recompute reads.
        needs: storages that every run of it needs to be there; a subset of both, because a reader of a view reads, for simplicity, what
            the view was made from as well, which a schedule might have freed by then. Bounds rest on this one.
        outs: storages that a run writes.
        rerun: whether it may run again at all.
        movable: whether its first run may move in the order.
        killers_first: reduced ops that replace a version its first run reads, and must come later.
        killers_again: the same for a recompute.
        takeover: per reduced op, input storage -> output storage, for in-place pairs.
        size: bytes of a storage.
        producer: reduced op that writes a storage.
        held: whether the storage is held to the end of the step.
        readers: per storage, the reduced ops that read it.
        merged: per op of the problem, whether it makes views only and is run where they are needed.
        led: per reduced op, the ops of the problem that run right before it each time, as parts of it.
    """

    problem: Problem
    op: list[int] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    again: list[tuple[int, ...]] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)
    outs: list[tuple[int, ...]] = field(default_factory=list)
    rerun: list[bool] = field(default_factory=list)
    movable: list[bool] = field(default_factory=list)
    killers_first: list[tuple[int, ...]] = field(default_factory=list)
    killers_again: list[tuple[int, ...]] = field(default_factory=list)
    takeover: list[dict[int, int]] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)
    held: list[bool] = field(default_factory=list)
    readers: list[tuple[int, ...]] = field(default_factory=list)
    merged: list[bool] = field(default_factory=list)
    led: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of reduced ops."""
        return len(self.op)

    @property
    def resident(self) -> int:
        """Bytes held during the whole step."""
        return self.problem.resident_bytes

    def contract(self, sequence: Sequence[int]) -> list[int]:
        """The sequence of reduced ops behind a sequence of the problem's ops: the views are left out, but for those that must run."""
        of = {o: r for r, o in enumerate(self.op)}
        out: list[int] = []
        seen: set[int] = set()
        for o in sequence:
            r = of.get(o)
            if r is not None and not (self.merged[o] and r in seen):
                seen.add(r)
                out.append(r)
        return out

    def expand(self, sequence: Sequence[int]) -> list[int]:
        """The sequence of the problem's ops for a sequence of reduced ops.

        Args:
            sequence: reduced ops in the order they run.

        Returns:
            Problem ops, with every view made where it is needed.
        """
        problem, index = self.problem, self.problem.index
        ops, tensors, root = problem.ops, problem.tensors, index.root
        version = [0] * len(tensors)
        bound = [-1] * len(tensors)
        ran = [False] * len(ops)
        out: list[int] = []

        def refresh(t: int) -> None:
            """Make the views that a read of ``t`` needs, sources first."""
            stack = [t]
            while stack:
                v = stack[-1]
                o = tensors[v].producer
                if o < 0 or not self.merged[o] or bound[v] == version[root[v]]:
                    stack.pop()
                    continue
                missing = [
                    u
                    for u in (index.again_reads[o] if ran[o] else index.first_reads[o])
                    if self.merged[tensors[u].producer] and bound[u] != version[root[u]]
                ]
                if missing:
                    stack.extend(missing)
                    continue
                stack.pop()
                emit(o)

        def emit(o: int) -> None:
            out.append(o)
            ran[o] = True
            for t in ops[o].outputs:
                if root[t] == t:
                    version[t] += 1
                bound[t] = version[root[t]]

        for r in sequence:
            o = self.op[r]
            if self.merged[o]:
                for t in ops[o].outputs:
                    refresh(t)
                continue
            for t in index.again_reads[o] if ran[o] else index.first_reads[o]:
                refresh(t)
            for part in self.led[r]:
                emit(part)
            emit(o)
        return out


def reduce_problem(problem: Problem) -> Reduced:
    """Merge the views of a problem into their storages."""
    ops, tensors, index = problem.ops, problem.tensors, problem.index
    reduced = Reduced(problem)
    # A pure view makes nothing but views of what it reads, and has no side effect.  One that reads a version which is replaced later,
    # other than through the storage that it is a view of, cannot wait for its first reader and stays an op.
    pure = [
        bool(op.outputs)
        and not op.writes
        # What its scratch memory adds at the place where it is made is nothing that a solver of the reduced problem could see.
        and not op.workspace_bytes
        and all(tensors[t].alias_of >= 0 and index.root[t] not in op.outputs for t in op.outputs)
        and {*index.first_old[i], *index.again_old[i]} <= {index.root[t] for t in op.outputs}
        for i, op in enumerate(ops)
    ]
    reduced.merged = pure
    parts = _parts(problem, pure)
    leader = {part: o for o, led in parts.items() for part in led}
    storage: dict[int, int] = {}
    resolved: list[tuple[int, ...]] = [() for _ in tensors]
    certain: list[tuple[int, ...]] = [() for _ in tensors]
    old: list[tuple[int, ...]] = [index.root[t : t + 1] if tensors[t].producer < 0 else () for t in range(len(tensors))]
    frozen: set[int] = set()
    # What recomputes read may come later in the base order, so it is looked up at the end.
    repeats: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def union(groups: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(s for group in groups for s in group))

    def add_storage(size: int, producer: int, held: bool) -> int:
        reduced.size.append(size)
        reduced.producer.append(producer)
        reduced.held.append(held)
        return len(reduced.size) - 1

    for i, op in enumerate(ops):
        first = union([resolved[t] for t in op.inputs])
        again_inputs = op.inputs if op.recompute_inputs is None else op.recompute_inputs
        again = union([resolved[t] for t in again_inputs])
        first_old, again_old = union([old[t] for t in op.inputs]), union([old[t] for t in again_inputs])
        if pure[i]:
            for t in op.outputs:
                resolved[t] = union([first, again])
                old[t] = union([first_old, again_old])
                r = index.root[t]
                certain[t] = (storage[r],) if r in storage else ()
                if tensors[t].output and r in storage:
                    reduced.held[storage[r]] = True
                if (tensors[t].output or op.pinned) and r in storage:
                    frozen.add(reduced.producer[storage[r]])
            if not index.required[i]:
                continue
        if i in leader:
            continue
        r = len(reduced.op)
        led = parts.get(i, ())
        reduced.op.append(i)
        reduced.led.append(led)
        reduced.cost.append(math.fsum(ops[o].seconds for o in (*led, i)))
        reduced.workspace.append(max(ops[o].workspace_bytes for o in (*led, i)))
        outs: list[int] = []
        inner = {t for o in led for t in ops[o].outputs}
        for t in sorted(inner):
            storage[t] = add_storage(tensors[t].bytes, r, False)
            outs.append(storage[t])
        if not pure[i]:
            for t in op.outputs:
                if tensors[t].alias_of < 0:
                    storage[t] = add_storage(tensors[t].bytes, r, tensors[t].output)
                    resolved[t] = certain[t] = (storage[t],)
                    outs.append(storage[t])
            for t in op.outputs:
                base = index.root[t]
                if tensors[t].alias_of < 0:
                    continue
                if base in op.outputs or base in inner:
                    resolved[t] = certain[t] = (storage[base],)
                    reduced.held[storage[base]] |= tensors[t].output
                    continue
                # The op computes something and passes a view on as well: readers depend on it through a storage of no bytes.
                token = add_storage(0, r, False)
                outs.append(token)
                resolved[t] = certain[t] = (storage[base], token) if base in storage else (token,)
                old[t] = () if base in storage else (base,)
                frozen.add(r)
                if base in storage:
                    frozen.add(reduced.producer[storage[base]])
                    reduced.held[storage[base]] |= tensors[t].output
        reduced.reads.append(first)
        repeats.append((op.inputs, again_inputs))
        reduced.outs.append(tuple(outs))
        reduced.rerun.append(not op.pinned and not op.writes and not pure[i])
        reduced.movable.append(not op.writes and op.pinned not in _ORDERED)
        reduced.killers_first.append(first_old)
        pairs: dict[int, int] = {}
        for a, b in op.inplace:
            source, target = storage.get(index.root[a]), storage.get(b)
            if source is None or target is None or index.root[a] in inner:
                continue
            if reduced.size[source] == reduced.size[target] and target not in pairs.values():
                pairs.setdefault(source, target)
        reduced.takeover.append(pairs)
    for first_inputs, again_inputs in repeats:
        reduced.again.append(union([resolved[t] for t in again_inputs]))
        always = union([certain[t] for t in again_inputs])
        reduced.needs.append(tuple(s for s in union([certain[t] for t in first_inputs]) if s in always))
        reduced.killers_again.append(union([old[t] for t in again_inputs]))
    for r in frozen:
        reduced.rerun[r] = False
    _name_killers(reduced)
    readers: list[dict[int, None]] = [{} for _ in reduced.size]
    for r in range(reduced.count):
        for s in (*reduced.reads[r], *reduced.again[r]):
            readers[s][r] = None
    reduced.readers = [tuple(x) for x in readers]
    return reduced


def _parts(problem: Problem, pure: list[bool]) -> dict[int, tuple[int, ...]]:
    """Per op that passes on a view of a buffer of its own, and could not run again otherwise, the ops that make such buffers."""
    ops, tensors, index = problem.ops, problem.tensors, problem.index
    found: dict[int, tuple[int, ...]] = {}
    for i, op in enumerate(ops):
        if pure[i] or op.pinned or op.recompute_inputs is not None:
            continue
        roots = {index.root[t] for t in op.outputs if tensors[t].alias_of >= 0 and not index.persistent[t]}
        made = sorted({tensors[r].producer for r in roots if r not in op.outputs})
        if made and all(
            not index.first_reads[p]
            and not index.first_old[p]
            and ops[p].recompute_inputs is None
            and not ops[p].pinned
            and not ops[p].writes
            and all(tensors[t].alias_of < 0 and not tensors[t].output and index.readers[t] == (i,) for t in ops[p].outputs)
            for p in made
        ):
            found[i] = tuple(made)
    return found


def _name_killers(reduced: Reduced) -> None:
    """Replace, in the killers of each op, the persistent storages it reads by the reduced ops that write them."""
    index = reduced.problem.index
    writers: dict[int, list[int]] = {}
    for r, o in enumerate(reduced.op):
        for s in index.written[o]:
            writers.setdefault(s, []).append(r)
    for table in (reduced.killers_first, reduced.killers_again):
        for r, roots in enumerate(table):
            table[r] = tuple(w for s in roots for w in writers.get(s, ()) if w != r)
