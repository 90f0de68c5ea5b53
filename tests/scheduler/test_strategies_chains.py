"""Strategies for chains against closed forms, and against all persistent schedules of small chains, judged by the simulator."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache

import pytest

from onnxremat.scheduler import Infeasible, Op, Problem, Tensor, bytes_floor, evaluate, solve
from onnxremat.scheduler.reduce import reduce_problem
from onnxremat.scheduler.strategies.griewank import forward_steps, revolve
from onnxremat.scheduler.strategies.mincut_knapsack import knapsack, minimum_cut
from onnxremat.scheduler.strategies.stages import Action, Chain, Stages

from .graphs import chain, transformer


def heterogeneous(rng: random.Random, n: int) -> Problem:
    """A chain of n forward ops and their backward ops, with sizes, times and scratch of its own for each."""
    ops, tensors = [], []
    for i in range(n):
        tensors.append(Tensor(f"x{i}", rng.randrange(1, 9), i))
        ops.append(Op(f"f{i}", float(rng.randrange(1, 10)), (i - 1,) if i else (), (i,), workspace_bytes=rng.choice((0, 0, 3))))
    for k in range(n):
        i, t = n - 1 - k, n + k
        reads = {t - 1, i} | ({i - 1} if i else set())
        tensors.append(Tensor(f"g{i}", rng.randrange(1, 9), t, output=k == n - 1))
        ops.append(Op(f"b{i}", float(rng.randrange(1, 10)), tuple(sorted(reads)), (t,), phase="backward"))
    return Problem(f"heterogeneous{n}", tuple(ops), tuple(tensors), {})


@cache
def steps_by_recursion(stages: int, checkpoints: int) -> int:
    """The fewest forward steps by trying every place for the next checkpoint."""
    if stages <= 1:
        return 0
    if not checkpoints:
        return stages * (stages - 1) // 2
    return min(m + steps_by_recursion(m, checkpoints) + steps_by_recursion(stages - m, checkpoints - 1) for m in range(1, stages))


def persistent(s: int, t: int) -> Iterator[list[Action]]:
    """The actions of every persistent schedule of the stages s to t."""
    if s == t:
        yield [("last", s), ("back", s)]
        return
    for rest in persistent(s + 1, t):
        yield [("all", s), ("hold", s + 1), *rest, ("release", s + 1), ("back", s)]
    for cut in range(s + 1, t + 1):
        passed: list[Action] = [("forward", i) for i in range(s, cut)]
        for later in persistent(cut, t):
            for earlier in persistent(s, cut - 1):
                yield [*passed, ("hold", cut), *later, ("release", cut), *earlier]


def test_binomial_numbers_are_those_of_the_recursion() -> None:
    for checkpoints in range(6):
        for stages in range(1, 40):
            assert forward_steps(stages, checkpoints) == steps_by_recursion(stages, checkpoints)


@pytest.mark.parametrize("checkpoints", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("stages", [1, 2, 5, 13, 40])
def test_revolve_takes_the_steps_and_the_checkpoints_that_it_says(stages: int, checkpoints: int) -> None:
    actions = revolve(0, stages - 1, checkpoints)
    assert sum(kind == "forward" for kind, _ in actions) == forward_steps(stages, checkpoints)
    assert [i for kind, i in actions if kind == "back"] == list(range(stages - 1, -1, -1))
    held = most = 0
    for kind, _ in actions:
        held += {"hold": 1, "release": -1}.get(kind, 0)
        most = max(most, held)
    # The state that is held while the stage behind it is reversed at once takes no place of its own.
    assert held == 0 and most <= checkpoints + 1


def test_no_chain_longer_than_the_binomial_is_reversed_with_r_repetitions() -> None:
    for held in (1, 2, 3, 4):
        for r in (1, 2, 3):
            longest = math.comb(held + r, r)
            runs = max_runs(revolve(0, longest - 1, held - 1))
            assert runs == r and max_runs(revolve(0, longest, held - 1)) == r + 1


def max_runs(actions: list[Action]) -> int:
    forward = [i for kind, i in actions if kind == "forward"]
    return max(forward.count(i) for i in forward)


def test_rotor_is_the_best_persistent_schedule() -> None:
    found = 0
    for seed in range(24):
        rng = random.Random(seed)
        problem = heterogeneous(rng, rng.randrange(3, 6))
        reduced = reduce_problem(problem)
        whole = Chain.of(reduced)
        stages = Stages(whole, whole.positions("linear"))
        judged = [evaluate(problem, reduced.expand(stages.replay(a, sticky))) for a in persistent(0, stages.count - 1) for sticky in (True, False)]
        floor = bytes_floor(problem)
        for budget in range(floor, max(e.peak_bytes for e in judged) + 1):
            best = min((e.seconds for e in judged if e.peak_bytes <= budget), default=None)
            try:
                plan = solve(problem, budget, "rotor", bound_seconds=0.0)
            except Infeasible:
                assert best is None, (seed, budget)
                continue
            found += 1
            assert plan.seconds == best, (seed, budget)
    assert found > 50


def test_square_root_segments_need_square_root_memory() -> None:
    peaks = {n: solve(chain(n), 10**6, "chen_sqrt", bound_seconds=0.0) for n in (16,)}
    assert peaks[16].seconds == 32
    for n in (16, 64, 144):
        problem = chain(n)
        with pytest.raises(Infeasible) as caught:
            solve(problem, bytes_floor(problem), "chen_sqrt_linear")
        # Two times sqrt(n) activations of 10 bytes, and a few beside them.
        assert caught.value.minimum_budget_bytes <= 10 * (2 * math.isqrt(n) + 4)
        # One more forward pass, but for the last segment.
        plan = solve(problem, caught.value.minimum_budget_bytes, "chen_sqrt_linear", bound_seconds=0.0)
        assert 2 * n < plan.seconds <= 3 * n - math.isqrt(n)


def test_binomial_checkpoints_need_logarithmic_memory() -> None:
    problem = chain(128)
    with pytest.raises(Infeasible) as caught:
        solve(problem, bytes_floor(problem), "griewank_linear")
    assert caught.value.minimum_budget_bytes <= 10 * 8


def test_articulation_points_of_a_residual_network_lie_between_its_blocks() -> None:
    whole = Chain.of(reduce_problem(transformer(3, pinned=False)))
    names = [whole.reduced.problem.ops[whole.reduced.op[p - 1]].name for p in whole.articulation_points]
    assert {"add0", "add1"} <= set(names) and not {"norm1", "scores1", "mix1"} & set(names)


def test_states_are_what_later_stages_read() -> None:
    reduced = reduce_problem(chain(4))
    stages = Stages(Chain.of(reduced), [1, 2, 3])
    assert stages.state == [(), (0,), (1,), (2,), ()]
    # The last backward op reads x0 alone, which the block before it has there.
    assert [sorted(s) for s in stages.saved] == [[], [0, 1], [1, 2], [2, 3]]
    assert stages.block == [[], [6, 7], [5], [4]]


def test_a_cut_saves_the_fewest_bytes() -> None:
    """Wide activations that follow cheaply from a narrow one: the narrow one is saved, unless what makes them must not run again."""
    ops = [Op("x", 1.0, (), (0,)), Op("narrow", 1.0, (0,), (1,)), Op("wide1", 1.0, (1,), (2,)), Op("wide2", 1.0, (1,), (3,))]
    ops.append(Op("loss", 1.0, (2, 3), (4,)))
    ops.append(Op("grad", 1.0, (2, 3, 4), (5,), phase="backward"))
    tensors = tuple(Tensor(op.name, size, i) for i, (op, size) in enumerate(zip(ops, (50, 5, 30, 40, 1, 1), strict=True)))
    reduced = reduce_problem(Problem("wide", tuple(ops), tensors, {}))
    whole = Chain.of(reduced)
    dear = [False, True, False, False, False, False]
    assert minimum_cut(reduced, whole.free, 5, [2, 3], dear) == [1]
    dear[3] = True
    assert minimum_cut(reduced, whole.free, 5, [2, 3], dear) == [1, 3]


def test_the_knapsack_is_optimal() -> None:
    rng = random.Random(1)
    for _ in range(40):
        size = [rng.randrange(0, 20) for _ in range(9)]
        value = [float(rng.randrange(1, 30)) for _ in range(9)]
        choose = knapsack(size, value)
        for allowed in (0, 7, 30, sum(size) - 1, sum(size)):
            taken = choose(max(0, allowed))
            assert sum(size[k] for k in taken) <= max(0, allowed)
            subsets = ([k for k in range(9) if mask >> k & 1] for mask in range(2**9))
            best = max(sum(value[k] for k in s) for s in subsets if sum(size[k] for k in s) <= max(0, allowed))
            assert sum(value[k] for k in taken) == best
