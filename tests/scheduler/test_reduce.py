"""The reduction: an op that passes on a view of a buffer made for it alone runs again, and makes that buffer anew each time."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from onnxremat.scheduler import Infeasible, Op, Problem, Tensor, evaluate, solve, validate
from onnxremat.scheduler.reduce import reduce_problem


def norms(n: int, scratches: int = 2, shared: bool = False, workspace: int = 0, maker_seconds: float = 0.1) -> Problem:
    """A chain of n products, each followed by a normalization whose statistics are views of scratch that ops without inputs make.

    Args:
        n: number of products.
        scratches: scratch buffers of a normalization.
        shared: all normalizations write into the first one's scratch.
        workspace: bytes of scratch memory of the ops that make the buffers.
        maker_seconds: their time.
    """
    ops: list[Op] = []
    tensors = [Tensor("running", 1, -1)]

    def op(name: str, seconds: float, inputs: list[int], sizes: dict[str, tuple[int, int]], **traits: object) -> list[int]:
        made = list(range(len(tensors), len(tensors) + len(sizes)))
        tensors.extend(Tensor(f"{name}.{key}", size, len(ops), alias_of=alias) for key, (size, alias) in sizes.items())
        ops.append(replace(Op(name, seconds, tuple(inputs), tuple(made)), **traits))  # type: ignore[arg-type]
        return made

    (x,) = op("first", 5.0, [], {"x": (64, -1)})
    layers: list[tuple[int, int]] = []
    scratch: list[int] = []
    for k in range(n):
        (wide,) = op(f"product{k}", 8.0, [x], {"wide": (64, -1)})
        if not (shared and k):
            scratch = [op(f"zeros{k}.{i}", maker_seconds, [], {"zeros": (1, -1)}, workspace_bytes=workspace)[0] for i in range(scratches)]
        y, *stats = op(f"norm{k}", 1.0, [wide, *scratch], {"y": (64, -1)} | {f"stat{i}": (1, s) for i, s in enumerate(scratch)})
        shown = [op(f"shape{k}.{i}", 0.0, [s], {"view": (1, s)})[0] for i, s in enumerate(stats)]
        op(f"follow{k}", 0.1, [0, *shown], {"running": (1, -1)}, pinned="output")
        layers.append((wide, y))
        x = y
    (grad,) = op("loss", 1.0, [x], {"grad": (64, -1)})
    for k, (wide, y) in reversed(list(enumerate(layers))):
        (grad,) = op(f"gnorm{k}", 2.0, [grad, wide, y], {"grad": (64, -1)})
        (grad,) = op(f"gproduct{k}", 8.0, [grad, wide], {"grad": (64, -1)})
    ops[-1] = replace(ops[-1], pinned="output")
    return Problem(f"norms{n}", tuple(ops), tuple(tensors), {"parameters": 1})


@pytest.mark.parametrize("workspace", [0, 3])
@pytest.mark.parametrize("scratches", [1, 2])
def test_what_writes_into_scratch_of_its_own_runs_again(scratches: int, workspace: int) -> None:
    problem = norms(6, scratches, workspace=workspace)
    reduced = reduce_problem(problem)
    again = {problem.ops[o].name for r, o in enumerate(reduced.op) if reduced.rerun[r]}
    assert {f"norm{k}" for k in range(6)} <= again
    budget = int(0.75 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    plan = solve(problem, budget, time_limit=2)
    validate(problem, plan)
    names = [problem.ops[o].name for o in plan.sequence]
    assert sum(names.count(f"norm{k}") > 1 for k in range(6)) >= 2, "normalizations are cheap, products are not"
    assert all(names.count(f"product{k}") == 1 for k in range(6))
    for i, name in enumerate(names):
        if name.startswith("norm"):
            made = [f"zeros{name.removeprefix('norm')}.{j}" for j in range(scratches)]
            assert sorted(names[i - scratches : i]) == made, "each run has new scratch, made right before it"


def test_what_shares_its_scratch_runs_once() -> None:
    """A second run would write into a buffer whose views may still be read."""
    problem = norms(4, shared=True)
    reduced = reduce_problem(problem)
    assert not any(reduced.rerun[r] for r, o in enumerate(reduced.op) if problem.ops[o].name.startswith(("norm", "zeros")))
    peak = evaluate(problem, range(len(problem.ops))).peak_bytes
    try:
        plan = solve(problem, int(0.8 * peak), time_limit=1)
    except Infeasible:
        return
    validate(problem, plan)
    assert len([o for o in plan.sequence if problem.ops[o].name.startswith("norm")]) == 4


def test_bounds_hold_where_an_op_could_run_again_without_the_op_that_makes_its_scratch() -> None:
    """The simulator takes a sequence that repeats the op alone, and its scratch may be dear: no bound may count it twice."""
    problem = norms(1, scratches=1, maker_seconds=20.0)
    norm, zeros = (next(i for i, op in enumerate(problem.ops) if op.name.startswith(name)) for name in ("norm", "zeros"))
    base = list(range(len(problem.ops)))
    at = next(i for i in base if problem.ops[i].name == "loss") + 1
    alone = evaluate(problem, [*base[:at], norm, *base[at:]])
    plan = solve(problem, alone.peak_bytes, time_limit=2)
    assert plan.seconds_lower_bound <= alone.seconds
    assert zeros in plan.sequence


def test_expanded_sequences_with_scratch_are_valid() -> None:
    rng = random.Random(5)
    for n, scratches in itertools.product((1, 3, 5), (1, 2)):
        problem = norms(n, scratches)
        reduced = reduce_problem(problem)
        for _ in range(20):
            sequence: list[int] = []
            for o in range(reduced.count):
                sequence += [p for p in (reduced.producer[s] for s in reduced.reads[o]) if reduced.rerun[p] and rng.random() < 0.5]
                sequence.append(o)
            steps = reduced.expand(sequence)
            evaluate(problem, steps)
            assert reduced.contract(steps) == sequence
