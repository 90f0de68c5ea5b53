"""Bounds: below the brute-force optimum, below every valid sequence, and tight where the memory lies along a chain."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import Context, Infeasible, Problem, Progress, bytes_floor, evaluate, lower_bound, relaxation, seconds_floor, solve
from onnxremat.scheduler.proof import Proof
from onnxremat.scheduler.prover import Prover, best_bound
from onnxremat.scheduler.reduce import reduce_problem
from onnxremat.scheduler.relaxation import StageProgram, memory_paths, rounded_up
from onnxremat.scheduler.search import Round, Search
from onnxremat.scheduler.strategies.auto import relaxed

from .graphs import brute_force, chain, random_problem, random_steps, transformer


def test_the_bound_is_below_the_brute_force_optimum() -> None:
    compared = 0
    for seed in range(40):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randrange(3, 7), plain=seed % 2 == 0)
        budget = bytes_floor(problem) + rng.randrange(3)
        optimum = brute_force(problem, budget, len(problem.ops) + 2)
        if optimum is not None:
            assert best_bound(reduce_problem(problem), budget, 2.0) <= optimum + 1e-9, seed
            compared += 1
    assert compared >= 15


@pytest.mark.parametrize(("n", "budget"), [(3, 40), (4, 50)])
def test_the_bound_lies_between_the_floor_and_the_optimum_of_a_chain(n: int, budget: int) -> None:
    problem = chain(n, size=10)
    optimum = brute_force(problem, budget, 2 * n + 2)
    assert optimum is not None
    bound = best_bound(reduce_problem(problem), budget, 5.0)
    assert seconds_floor(problem) - 1e-4 <= bound <= optimum


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10))
def test_the_bounds_are_below_every_valid_sequence(seed: int, n: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n)
    found = evaluate(problem, random_steps(problem, rng))
    assert bytes_floor(problem) <= found.peak_bytes
    assert best_bound(reduce_problem(problem), found.peak_bytes, 1.0) <= found.seconds + 1e-9


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 10), st.floats(0.0, 0.8))
def test_every_path_bounds_the_plans_of_auto(seed: int, n: int, share: float) -> None:
    problem = random_problem(random.Random(seed), n)
    floor = bytes_floor(problem)
    budget = floor + int(share * (evaluate(problem, range(n)).peak_bytes - floor))
    try:
        plan = solve(problem, budget, time_limit=0.3)
    except Infeasible:
        return
    reduced = reduce_problem(problem)
    for stages in (2, 5, 80):
        for path in memory_paths(reduced, stages):
            for ignored in (0.0, 0.1, 1.0):
                program = StageProgram(reduced, budget, path, ignored)
                relaxed, whole = (program.solve(2.0, whole).bound for whole in (False, True))
                assert relaxed <= plan.seconds + 1e-9
                assert whole <= plan.seconds + 1e-9
                assert relaxed <= whole + 1e-5 * plan.seconds


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 12), st.floats(0.0, 0.8))
def test_more_stages_never_weaken_the_linear_relaxation(seed: int, n: int, share: float) -> None:
    """What a stage alone proves of all that follows it is kept when others are added."""
    problem = random_problem(random.Random(seed), n)
    floor = bytes_floor(problem)
    budget = floor + int(share * (evaluate(problem, range(n)).peak_bytes - floor))
    reduced = reduce_problem(problem)
    for path in memory_paths(reduced, 14):
        together = StageProgram(reduced, budget, path).solve(5.0).bound
        for o in path:
            assert StageProgram(reduced, budget, [o]).solve(5.0).bound <= together + 1e-6 * problem_seconds(problem)


def test_stretches_prove_more_than_the_same_stages_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer(3)
    reduced = reduce_problem(problem)
    budget = 100 + int(0.5 * (evaluate(problem, range(len(problem.ops))).peak_bytes - 100))
    path = memory_paths(reduced, 9)[0]
    strong = StageProgram(reduced, budget, path).solve(20.0).bound
    monkeypatch.setattr(relaxation, "_stretches", lambda k: [(-1, k - 1)])
    weak = StageProgram(reduced, budget, path).solve(20.0).bound
    plan = solve(problem, budget, time_limit=5.0)
    assert weak < strong <= plan.seconds


def problem_seconds(problem: Problem) -> float:
    """Seconds of every op once."""
    return math.fsum(op.seconds for op in problem.ops)


def test_leaving_out_small_storages_never_strengthens_the_bound() -> None:
    problem = transformer(2)
    reduced = reduce_problem(problem)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    (path, *_) = memory_paths(reduced, 20)
    bounds = [StageProgram(reduced, budget, path, ignored).solve(10.0).bound for ignored in (0.0, 0.05, 0.3, 1.0)]
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(bounds))
    assert bounds[0] > bounds[-1]


def test_a_bound_on_sums_of_integers_is_rounded_up_to_one() -> None:
    reduced = reduce_problem(chain(3, seconds=4.0))
    assert [rounded_up(reduced, x) for x in (0.0, 3.0, 4.0, 4.0 + 1e-12, 4.1)] == [0.0, 4.0, 4.0, 4.0 + 1e-12, 8.0]
    assert rounded_up(reduce_problem(chain(3, seconds=0.3)), 0.4) == 0.4


@pytest.mark.parametrize("budget", [50, 60])
def test_the_bound_is_tight_on_a_chain(budget: int) -> None:
    problem = chain(6)
    plan = solve(problem, budget, time_limit=12)
    assert seconds_floor(problem) < plan.seconds_lower_bound <= plan.seconds
    assert plan.gap <= 0.25


def test_the_bound_does_not_rise_with_the_budget() -> None:
    problem = transformer(1)
    reduced = reduce_problem(problem)
    (path, *_) = memory_paths(reduced, 80)
    low, high = bytes_floor(problem), evaluate(problem, range(len(problem.ops))).peak_bytes
    bounds = [StageProgram(reduced, low + k * (high - low) // 4, path).solve(5.0).bound for k in range(1, 5)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(seconds_floor(problem), rel=1e-5)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 8))
def test_a_finished_prover_is_monotone_in_the_budget(seed: int, n: int) -> None:
    problem = random_problem(random.Random(seed), n)
    reduced = reduce_problem(problem)
    low, high = bytes_floor(problem), evaluate(problem, range(n)).peak_bytes
    provers = [Prover(reduced, low + k * (high - low) // 3) for k in range(4)]
    bounds = [prover.work(30.0) for prover in provers]
    assert all(prover.done for prover in provers)
    assert all(after <= before + 1e-5 * (1 + before) for before, after in itertools.pairwise(bounds))


def test_a_prover_goes_on_where_it_was_stopped() -> None:
    problem = transformer(3)
    reduced = reduce_problem(problem)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    told: list[float] = []
    prover = Prover(reduced, budget)
    while not prover.done and len(told) < 400:
        before = prover.bound
        # By a clock that jumps, there is time for one step.
        ticks = itertools.count()
        assert prover.work(0.5, clock=lambda ticks=ticks: 0.25 * next(ticks)) >= before
        told.append(prover.bound)
        if prover.bound > 0 and len(told) > 30:
            break
    once = Prover(reduced, budget).work(3.0)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(once, rel=0.02)
    assert told[-1] > seconds_floor(problem)


def test_a_prover_stops_where_it_meets_the_plan() -> None:
    problem = chain(6)
    prover = Prover(reduce_problem(problem), 60)
    met = prover.work(60.0, enough=lambda: 13.0)
    assert prover.done
    assert met == pytest.approx(13.0, rel=1e-4)


def test_the_paths_are_paths_and_see_what_lies_across() -> None:
    for problem in (chain(5), transformer(2), random_problem(random.Random(5), 30)):
        reduced = reduce_problem(problem)
        before: list[set[int]] = []
        for o in range(reduced.count):
            direct = [reduced.producer[s] for s in reduced.needs[o]]
            before.append(set(direct).union(*(before[p] for p in direct)))
        for stages in (1, 2, 7, 100):
            for path in memory_paths(reduced, stages):
                assert 0 < len(path) <= stages
                assert all(a in before[b] for a, b in itertools.pairwise(path))
    # On a chain all bytes of the forward pass lie across its end.
    assert [5] in memory_paths(reduce_problem(chain(5)), 1)


def test_a_proof_runs_beside_and_its_bound_holds() -> None:
    problem = transformer(2)
    reduced = reduce_problem(problem)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    plan = solve(problem, budget, time_limit=20, bound_seconds=2)
    assert seconds_floor(problem) < plan.seconds_lower_bound <= plan.seconds
    proof = Proof(Prover(reduced, budget), 30.0)
    proof.tell(plan.seconds)
    while proof.bound == 0.0 and not proof.done:
        time.sleep(0.01)
    began = time.monotonic()
    proof.stop()
    assert time.monotonic() - began < 1.0
    assert proof.done
    assert 0.0 < proof.bound <= plan.seconds


def test_progress_shows_a_bound_that_rises_and_a_cost_that_falls() -> None:
    problem = transformer(6)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    seen: list[Progress] = []
    began = time.monotonic()
    plan = solve(problem, budget, time_limit=15, progress=seen.append)
    assert time.monotonic() - began < 18
    bounds, costs = [p.bound for p in seen], [p.seconds for p in seen if p.seconds is not None]
    assert bounds == sorted(bounds)
    assert seconds_floor(problem) < bounds[-1] <= plan.seconds_lower_bound * (1 + 1e-9)
    assert costs[-1] <= costs[0]


def test_a_bound_alone_keeps_its_time_limit() -> None:
    problem = transformer(40)
    budget = int(0.5 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    began = time.monotonic()
    bound = lower_bound(problem, budget, 3.0)
    assert time.monotonic() - began < 4.5
    assert seconds_floor(problem) <= bound < math.inf
    assert lower_bound(problem, budget, 0.0) == seconds_floor(problem)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 14))
@example(12, 12)
def test_solutions_run_and_cost_no_less_than_their_program_proves(seed: int, n: int) -> None:
    problem = random_problem(random.Random(seed), n, plain=True)
    reduced = reduce_problem(problem)
    budget = int(0.8 * evaluate(problem, range(n)).peak_bytes)
    for stages in (1, 3):
        for path in memory_paths(reduced, stages):
            answer = StageProgram(reduced, budget, path).solve(10.0, whole=True)
            if answer.sequence is not None:
                cost = evaluate(problem, reduced.expand(answer.sequence)).seconds
                assert answer.final
                # An op that a stage drops and reads again is rerun, at a cost that the program need not see.
                assert answer.bound <= cost + 1e-9


def test_a_solution_repaired_is_where_the_search_begins() -> None:
    problem = transformer(10)
    reduced = reduce_problem(problem)
    budget = int(0.55 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    context = Context(problem, budget, time.monotonic() + 30.0)
    context.prover.work(10.0, first=True)
    found = relaxed(context)
    assert found
    local = Search(reduced, budget, float("inf"), 0)
    local.run(Round(200_000, 1e-4, 1e-5), found[0], found[-1])
    assert min(lane.best for lane in local._lanes)[0] <= 1.02 * context.prover.bound
    assert all(lane.best[1] <= budget for lane in local._lanes)


def _with_pinned(problem: Problem, rng: random.Random, share: float) -> Problem:
    return replace(problem, ops=tuple(replace(op, pinned=op.pinned or ("random" if rng.random() < share else "")) for op in problem.ops))


def test_no_sequence_of_any_order_stays_below_the_floor() -> None:
    """Brute force over all orders and recomputes of small graphs in which many ops run once."""
    raised = met = 0
    for seed in range(60):
        rng = random.Random(seed)
        free = chain(3) if seed % 3 == 0 else random_problem(rng, rng.randrange(3, 7))
        if seed % 3 == 0:
            free = replace(free, tensors=tuple(replace(t, bytes=rng.randrange(1, 20)) for t in free.tensors))
        problem = _with_pinned(free, rng, 0.4 if seed % 3 < 2 else 0.0)
        floor, longest = bytes_floor(problem), len(problem.ops) + 1
        assert brute_force(problem, floor - 1, longest) is None, seed
        raised += floor > bytes_floor(free)
        met += floor > bytes_floor(free) and brute_force(problem, floor, longest) is not None
    assert raised >= 8 and met >= 5, "kept tensors count, and no more than they should"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0.0, 0.6))
def test_the_floor_is_below_sequences_with_many_pinned_ops(seed: int, n: int, share: float) -> None:
    rng = random.Random(seed)
    problem = _with_pinned(random_problem(rng, n), rng, share)
    assert bytes_floor(problem) <= evaluate(problem, random_steps(problem, rng)).peak_bytes


def test_masks_that_the_backward_pass_awaits_prove_a_budget_infeasible() -> None:
    layers = 40
    problem, free = transformer(layers), transformer(layers, pinned=False)
    # At the loss every mask of 32 bytes is there.
    loss = next(i for i, op in enumerate(problem.ops) if op.name == "loss")
    assert bytes_floor(problem) >= 100 + 32 * layers + sum(problem.tensors[t].bytes for t in problem.ops[loss].outputs)
    assert bytes_floor(problem) > bytes_floor(free)
    with pytest.raises(Infeasible, match="proven"):
        solve(problem, bytes_floor(problem) - 1, time_limit=1)
