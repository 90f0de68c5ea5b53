"""Swap as ops: a problem in which some tensors go out and come back is one without swap in which two more ops for each do that.

For a tensor x that is swapped, ``out`` reads x and writes a token of no bytes, and ``in`` reads the token and writes x', of which the view
ops have copies that make the same views.  Which first runs read x' instead of x is fixed beforehand; every recompute reads x'.  ``in`` may
run again like any op: a copy on the host serves any number of reads.  So whatever searches, bounds or places sequences of runs does so
with swaps too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .plan import Step
from .problem import Op, Problem, Tensor

__all__ = ["Late", "Lowered", "lower", "swappable", "with_swaps"]

#: What a search for sequences counts of the seconds of copies that hide behind ops; what is left of them in a plan is the evaluator's to say.
HIDDEN = 0.1
#: Tensor -> the ops whose first run reads what came back instead of what went out.
Late = Mapping[int, frozenset[int]]


@dataclass(frozen=True)
class Lowered:
    """A problem whose swaps are ops.

    Attributes:
        problem: the problem, without a channel.
        steps: per op of it, the step of the original problem that it stands for.
        sequence: its base order, or the sequence of a plan.
    """

    problem: Problem
    steps: tuple[Step, ...]
    sequence: tuple[int, ...]

    def plan_steps(self, sequence: Iterable[int]) -> list[Step]:
        """The steps that a sequence of its ops stands for."""
        return [self.steps[o] for o in sequence]


def family(problem: Problem, x: int) -> list[int]:
    """A tensor and all its views."""
    return [t for t, root in enumerate(problem.index.root) if root == x]


def swappable(problem: Problem) -> dict[int, list[int]]:
    """The tensors that may be swapped, each with the ops that read it or a view of it, ascending.

    They have a storage of their own that the step makes and that is no output of it; what shows them under another shape does nothing else,
    and can do it again at any time: of what is there from the beginning, it reads nothing that the step replaces.
    """
    index, tensors, ops = problem.index, problem.tensors, problem.ops
    replaced = {root for row in index.written for root in row}
    families: dict[int, list[int]] = {}
    barred: set[int] = set()
    for t, tensor in enumerate(tensors):
        root = index.root[t]
        families.setdefault(root, []).append(t)
        made = ops[tensor.producer] if tensor.producer >= 0 else None
        plain = made is not None and not made.pinned and not made.writes and all(index.root[v] == root for v in made.outputs)
        reads = () if made is None else (*made.inputs, *(made.recompute_inputs or ()))
        plain = plain and all(index.root[u] == root or (index.persistent[u] and index.root[u] not in replaced) for u in reads)
        if index.persistent[t] or tensor.output or (t != root and (not plain or made is None or root in made.outputs)):
            barred.add(root)
    return {x: sorted({o for t in views for o in index.readers[t]}) for x, views in families.items() if x not in barred and tensors[x].bytes}


def with_swaps(problem: Problem, late: Late) -> Lowered:
    """The problem with some tensors swapped.

    Args:
        problem: the problem, with a channel where ``late`` names a tensor.
        late: swappable tensors, each with the ops of which the first run reads what came back (never none).

    Returns:
        The problem with two ops more for each, ``out`` after the last op that reads the tensor itself and ``in`` before the first of
        ``late``, as the base order goes.
    """
    index, tensors, channel = problem.index, problem.tensors, problem.transfer
    count = len(tensors)
    made: list[Tensor] = []

    def new(tensor: Tensor) -> int:
        made.append(tensor)
        return count + len(made) - 1

    # What came back, by what went out; a view that is made from it from the first is its own counterpart.
    back: dict[int, int] = {}
    alias: dict[int, int] = {}
    rows: list[tuple[float, Op, Step]] = []
    for x, users in late.items():
        assert channel is not None, "only a problem with a channel has swaps"
        tensor = tensors[x]
        share = HIDDEN if channel.overlap else 1.0
        seconds = (share * tensor.bytes / channel.bytes_per_second_out, share * tensor.bytes / channel.bytes_per_second_in)
        token = new(Tensor(f"{tensor.name} on the host", 0, 0))
        back[x] = new(replace(tensor, name=f"{tensor.name}'"))
        first = min(users)
        last = max([tensor.producer, *(o for t in family(problem, x) for o in index.readers[t] if o < first and o not in users)])
        out = Op(f"swap out {tensor.name}", seconds[0], (x,), (token,), phase=problem.ops[last].phase, pinned="swap", op_type="SpillOut")
        come = Op(f"swap in {tensor.name}", seconds[1], (token,), (back[x],), phase=problem.ops[first].phase, op_type="SpillIn")
        rows += [(last + 0.5, out, Step("swap_out", x)), (first - 0.5, come, Step("swap_in", x))]
    views: list[int] = []
    for o, op in enumerate(problem.ops):
        for t in op.outputs:
            root = index.root[t]
            if root == t or root not in late:
                continue
            if o in late[root]:
                back[t], alias[t] = t, back[tensors[t].alias_of]
            else:
                back[t] = new(replace(tensors[t], name=f"{tensors[t].name}'", alias_of=back[tensors[t].alias_of]))
                if o not in views:
                    views.append(o)
    for o, op in enumerate(problem.ops):
        rows.append((o, _reading(problem, op, o, late, back, o in views), Step("run", o)))
    read = {t for _, op, _ in rows for t in (*op.inputs, *(op.recompute_inputs or ()))}
    for o in reversed(views):
        op = problem.ops[o]
        outputs = tuple(back[t] for t in op.outputs)
        if not read.intersection(outputs):
            continue
        inputs = tuple(back.get(t, t) for t in (op.inputs if op.recompute_inputs is None else op.recompute_inputs))
        read.update(inputs)
        # After the original, after what it reads came back, before its first reader.
        place = max(o + 0.25, min(late[index.root[op.outputs[0]]]) - 0.25)
        rows.append((place, replace(op, name=f"{op.name}'", inputs=inputs, outputs=outputs, recompute_inputs=None, inplace=()), Step("run", o)))
    # Ops of one place keep the order of the ops that they stand for; a view comes after what it is a view of.
    rows.sort(key=lambda row: (row[0], row[2].index))
    return _numbered(problem, [(op, step) for _, op, step in rows], made, alias)


def _reading(problem: Problem, op: Op, o: int, late: Late, back: Mapping[int, int], view: bool) -> Op:
    """The op, reading what came back on its first run where it is late, and on every recompute unless it is a view of what went out."""
    root = problem.index.root
    inputs = tuple(back[t] if t in back and o in late[root[t]] else t for t in op.inputs)
    again = op.inputs if op.recompute_inputs is None else op.recompute_inputs
    if not view:
        again = tuple(back.get(t, t) for t in again)
    known = {*inputs, *again}
    pairs = tuple(dict.fromkeys((a, b) for s, b in op.inplace for a in (s, back.get(s, s)) if a in known))
    return replace(op, inputs=inputs, recompute_inputs=None if again == inputs else again, inplace=pairs)


def _numbered(problem: Problem, rows: Sequence[tuple[Op, Step]], made: Sequence[Tensor], alias: Mapping[int, int]) -> Lowered:
    """The new problem, its producers and views under their numbers; tensors that nothing makes are left out."""
    tensors = [*problem.tensors, *made]
    producer = {t: o for o, (op, _) in enumerate(rows) for t in op.outputs}
    kept = [t for t, tensor in enumerate(tensors) if t in producer or tensor.producer < 0]
    number = {t: k for k, t in enumerate(kept)}

    def numbers(ts: Iterable[int]) -> tuple[int, ...]:
        return tuple(number[t] for t in ts)

    shown = {t: alias.get(t, tensors[t].alias_of) for t in kept}
    ops = tuple(
        replace(
            op,
            inputs=numbers(op.inputs),
            outputs=numbers(op.outputs),
            writes=numbers(op.writes),
            inplace=tuple((number[a], number[b]) for a, b in op.inplace),
            recompute_inputs=None if op.recompute_inputs is None else numbers(op.recompute_inputs),
        )
        for op, _ in rows
    )
    lowered = tuple(replace(tensors[t], producer=producer.get(t, -1), alias_of=number[shown[t]] if shown[t] >= 0 else -1) for t in kept)
    steps = tuple(step for _, step in rows)
    return Lowered(replace(problem, ops=ops, tensors=lowered, transfer=None), steps, tuple(range(len(rows))))


def lower(problem: Problem, steps: Sequence[Step]) -> Lowered | None:
    """The problem and sequence without swap that stand for the steps of a plan; None where the steps are of a kind that has none.

    Those are plans in which a tensor is copied out twice, a recompute reads what went out, or a view is made that nobody reads;
    sequences of :func:`with_swaps` have none of that unless they are wasteful.
    """
    late = _late(problem, steps)
    if late is None:
        return None
    form = with_swaps(problem, late)
    # A view op stands for two where it shows both what went out and what came back.
    of: dict[Step, list[int]] = {}
    for o, step in enumerate(form.steps):
        of.setdefault(step, []).append(o)
    returned: set[int] = set()
    sequence = []
    for step in steps:
        ops = of[step]
        if step.kind == "swap_in":
            returned.add(step.index)
        again = step.kind == "run" and bool(returned.intersection(_shown(problem, late, step.index)))
        if again and len(ops) == 1:
            return None  # a view that nobody reads
        sequence.append(ops[-1] if again else ops[0])
    return replace(form, sequence=tuple(sequence))


def _shown(problem: Problem, late: Late, o: int) -> list[int]:
    """The swapped tensor of which an op makes views both of what went out and of what came back, if it is such an op."""
    root = problem.index.root
    return [root[t] for t in problem.ops[o].outputs[:1] if root[t] != t and root[t] in late and o not in late[root[t]]]


def _late(problem: Problem, steps: Sequence[Step]) -> dict[int, frozenset[int]] | None:
    """Per swapped tensor, the ops that first read it when it had come back, as served by the latest instance."""
    index = problem.index
    swapped = {step.index for step in steps if step.kind == "swap_in"}
    late: dict[int, set[int]] = {x: set() for x in swapped}
    # Per tensor of their families, whether its latest instance came back.
    returned: dict[int, bool] = {}
    out: set[int] = set()
    ran: set[int] = set()
    for step in steps:
        if step.kind == "swap_out":
            if step.index in out:
                return None
            out.add(step.index)
            continue
        if step.kind == "swap_in":
            returned[step.index] = True
            continue
        o = step.index
        again = o in ran
        ran.add(o)
        view = any(index.root[t] in swapped and index.root[t] != t for t in problem.ops[o].outputs)
        for t in (index.again_reads if again else index.first_reads)[o]:
            x = index.root[t]
            if x not in swapped:
                continue
            if returned.get(t, False):
                if not again:
                    late[x].add(o)
            elif again and not view:
                return None
        for t in index.own[o]:
            if t in swapped:
                if returned.get(t, False):
                    return None
                returned[t] = False
        for t, source in (index.again_views if again else index.first_views)[o]:
            if index.root[t] in swapped:
                returned[t] = returned.get(source, False)
    return {x: frozenset(users) for x, users in sorted(late.items())} if all(late.values()) else None
