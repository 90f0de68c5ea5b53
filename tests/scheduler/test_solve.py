"""Strategies: feasible on every graph, optimal where they say so, judged by brute force, the simulator and the validator."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import (
    Context,
    Infeasible,
    Op,
    PlanError,
    Problem,
    ProblemError,
    Progress,
    StrategyError,
    Tensor,
    bytes_floor,
    evaluate,
    minimum_budget,
    register,
    seconds_floor,
    solve,
    strategies,
    validate,
)
from onnxremat.scheduler.reduce import reduce_problem

from .graphs import brute_force, chain, random_problem, transformer

ALL = ("auto", "checkmate_ilp", "chen_greedy", "chen_sqrt", "keep_all")


def peak(problem: Problem) -> int:
    return evaluate(problem, range(len(problem.ops))).peak_bytes


def test_the_registry_lists_every_strategy() -> None:
    assert set(ALL) <= set(strategies())


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StrategyError, match="unknown strategy 'magic'; known: auto, checkmate_ilp"):
        solve(chain(2), 1000, "magic")


def test_a_strategy_cannot_be_registered_twice() -> None:
    def again(context: Context) -> None:
        raise AssertionError(context)

    with pytest.raises(StrategyError, match="registered twice"):
        register("auto")(again)


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("problem", [chain(6), transformer(2)], ids=lambda p: p.name)
def test_every_strategy_is_free_at_the_full_budget(problem: Problem, strategy: str) -> None:
    plan = solve(problem, peak(problem), strategy, time_limit=20)
    if strategy in ("auto", "checkmate_ilp", "keep_all"):
        assert plan.seconds == pytest.approx(plan.seconds_unscheduled)
    assert plan.seconds_lower_bound <= plan.seconds
    assert plan.peak_bytes <= plan.budget_bytes


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0.3, 1.0))
def test_every_plan_on_random_graphs_is_valid(seed: int, n: int, share: float) -> None:
    problem = random_problem(random.Random(seed), n)
    floor = bytes_floor(problem)
    budget = floor + int(share * (peak(problem) - floor))
    for strategy in ("auto", "chen_sqrt", "chen_greedy", "keep_all"):
        try:
            plan = solve(problem, budget, strategy, time_limit=0.5)
        except Infeasible as error:
            assert error.minimum_budget_bytes > budget
            assert error.lower_bound_bytes == floor
            continue
        validate(problem, plan)
        assert seconds_floor(problem) <= plan.seconds_lower_bound * (1 + 1e-12)
        assert plan.seconds_lower_bound <= plan.seconds * (1 + 1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(0.2, 0.9))
def test_the_exact_program_is_valid_on_random_graphs(seed: int, n: int, share: float) -> None:
    problem = random_problem(random.Random(seed), n)
    floor = bytes_floor(problem)
    budget = floor + int(share * (peak(problem) - floor))
    try:
        plan = solve(problem, budget, "checkmate_ilp", time_limit=20.0)
    except Infeasible:
        return
    validate(problem, plan)


def test_brute_force_judges_the_solvers_on_small_graphs() -> None:
    solved = 0
    for seed in range(30):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randrange(3, 7), plain=True)
        budget = bytes_floor(problem) + rng.randrange(4)
        optimum = brute_force(problem, budget, len(problem.ops) + 2)
        for strategy in ("auto", "checkmate_ilp"):
            try:
                plan = solve(problem, budget, strategy, time_limit=5.0)
            except Infeasible:
                # In the base order there may be no answer where another order has one; auto reorders.
                assert strategy == "checkmate_ilp" or optimum is None
                continue
            if optimum is None:
                assert len(plan.sequence) > len(problem.ops) + 2
                continue
            assert plan.seconds_lower_bound <= optimum + 1e-9
            assert optimum <= plan.seconds + 1e-9 or len(plan.sequence) > len(problem.ops) + 2
            if strategy == "auto":
                assert plan.seconds == pytest.approx(optimum), (seed, plan.sequence)
                solved += 1
    assert solved >= 20


@pytest.mark.parametrize(("n", "budget", "extra"), [(3, 41, 0), (4, 40, 2), (5, 50, 1), (6, 50, 4)])
def test_the_exact_program_is_optimal_on_chains(n: int, budget: int, extra: int) -> None:
    problem = chain(n)
    optimum = brute_force(problem, budget, 2 * n + extra + 1) if n <= 4 else None
    plan = solve(problem, budget, "checkmate_ilp", time_limit=20)
    best = solve(problem, budget, "auto", time_limit=3)
    if optimum is not None:
        assert plan.seconds == optimum
    assert best.seconds == plan.seconds


@pytest.mark.parametrize("strategy", ["auto", "checkmate_ilp"])
def test_seconds_do_not_rise_with_the_budget(strategy: str) -> None:
    problem = chain(8)
    seconds = [solve(problem, budget, strategy, time_limit=3 if strategy == "auto" else 20).seconds for budget in (50, 60, 80, 90)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 16


def test_auto_is_never_worse_than_the_cheap_strategies() -> None:
    for problem in (chain(16), transformer(3), random_problem(random.Random(3), 30)):
        full = peak(problem)
        for share in (0.8, 0.6):
            budget = int(share * full)
            for strategy in ("chen_sqrt", "chen_greedy", "keep_all"):
                try:
                    other = solve(problem, budget, strategy, time_limit=0.5)
                except Infeasible:
                    continue
                assert solve(problem, budget, "auto", time_limit=1).seconds <= other.seconds


def test_auto_is_a_function_of_the_seed() -> None:
    problem = transformer(1)
    budget = int(0.75 * peak(problem))
    plans = [solve(problem, budget, "auto", time_limit=100, seed=5) for _ in range(2)]
    assert plans[0].steps == plans[1].steps


def test_pinned_ops_and_views_survive_a_tight_budget() -> None:
    problem = transformer(3)
    budget = int(1.1 * minimum_budget(problem, 3.0))
    plan = solve(problem, budget, time_limit=3)
    assert plan.recomputed_ops > 0
    pinned = [i for i, op in enumerate(problem.ops) if op.pinned]
    assert all(plan.sequence.count(i) == 1 for i in pinned)


def test_random_ops_keep_their_order() -> None:
    problem = transformer(4)
    plan = solve(problem, int(0.6 * peak(problem)), time_limit=3)
    masks = [i for i in plan.sequence if problem.ops[i].pinned == "random"]
    assert masks == sorted(masks)


def test_an_infeasible_budget_names_the_smallest_found_and_the_floor() -> None:
    problem = chain(6)
    with pytest.raises(Infeasible, match="proven") as caught:
        solve(problem, 20, time_limit=5)
    error = caught.value
    assert error.lower_bound_bytes == bytes_floor(problem) == 40
    assert error.minimum_budget_bytes >= 40
    assert (error.strategy, error.budget_bytes) == ("auto", 20)
    plan = solve(problem, error.minimum_budget_bytes, time_limit=5)
    assert plan.peak_bytes <= error.minimum_budget_bytes
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)


@pytest.mark.parametrize("strategy", ["keep_all", "chen_sqrt", "chen_greedy"])
def test_the_smallest_budget_of_a_strategy_works_for_it(strategy: str) -> None:
    problem = transformer(4)
    with pytest.raises(Infeasible) as caught:
        solve(problem, bytes_floor(problem), strategy)
    budget = caught.value.minimum_budget_bytes
    assert solve(problem, budget, strategy, time_limit=1).peak_bytes <= budget


def test_an_op_larger_than_the_budget_is_proven_infeasible() -> None:
    problem = Problem("wide", (Op("wide", 1.0, (), (0,)),), (Tensor("x", 10**9, 0),), {"parameters": 1})
    for strategy in ALL:
        with pytest.raises(Infeasible, match="proven"):
            solve(problem, 10**8, strategy)


def test_the_optimizer_peak_is_part_of_the_floor() -> None:
    problem = replace(chain(3), optimizer_peak_bytes=10_000)
    assert bytes_floor(problem) == 10_000
    with pytest.raises(Infeasible) as caught:
        solve(problem, 9_999)
    assert caught.value.minimum_budget_bytes == 10_000


@pytest.mark.parametrize("strategy", ALL)
def test_a_time_limit_of_zero_gives_the_best_known_plan_or_none(strategy: str) -> None:
    problem = transformer(2)
    plan = solve(problem, peak(problem), strategy, time_limit=0)
    assert plan.peak_bytes <= plan.budget_bytes
    started = time.monotonic()
    with pytest.raises(Infeasible):
        solve(problem, bytes_floor(problem), strategy, time_limit=0)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("limit", [-1.0, float("nan"), float("inf")])
def test_a_bad_time_limit_is_refused(limit: float) -> None:
    with pytest.raises(PlanError, match="time limit must be"):
        solve(chain(2), 1000, time_limit=limit)


def test_a_bad_problem_is_refused_before_anything_runs() -> None:
    with pytest.raises(ProblemError, match="bytes must be"):
        solve(Problem("bad", (Op("a", 1.0, (), (0,)),), (Tensor("x", -5, 0),), {}), 100)


def test_zero_bytes_and_zero_seconds_are_fine() -> None:
    ops = tuple(Op(f"o{i}", 0.0, (i - 1,) if i else (), (i,)) for i in range(5))
    tensors = tuple(Tensor(f"t{i}", 0, i) for i in range(5))
    for strategy in ALL:
        plan = solve(Problem("zero", ops, tensors, {}), 0, strategy, time_limit=5)
        assert (plan.peak_bytes, plan.seconds, plan.gap) == (0, 0.0, 0.0)


def test_an_empty_problem_has_an_empty_plan() -> None:
    for strategy in ALL:
        plan = solve(Problem("empty", (), (), {"parameters": 3}), 3, strategy, time_limit=5)
        assert (plan.steps, plan.peak_bytes) == ((), 3)


def test_the_exact_program_refuses_a_large_graph() -> None:
    with pytest.raises(StrategyError, match="too many for the exact program"):
        solve(chain(100), 10**6, "checkmate_ilp")


def test_progress_tells_of_improvements() -> None:
    told: list[Progress] = []
    problem = transformer(3)
    plan = solve(problem, int(0.6 * peak(problem)), time_limit=2, progress=told.append)
    seconds = [p.seconds for p in told if p.seconds is not None]
    # Sums of the same runs in another order differ by rounding.
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(seconds))
    assert seconds[-1] == pytest.approx(plan.seconds)
    assert all(p.bound <= plan.seconds * (1 + 1e-9) and p.left >= 0 for p in told)
    assert told[-1].gap == pytest.approx(plan.gap, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_reduction_expands_to_valid_sequences(seed: int, n: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n)
    reduced = reduce_problem(problem)
    base = evaluate(problem, reduced.expand(range(reduced.count)))
    assert base.seconds <= sum(op.seconds for op in problem.ops) + 1e-9
    # An extra run right before each op that reads its output is always possible where the reduction says so.
    sequence: list[int] = []
    for o in range(reduced.count):
        for s in reduced.reads[o]:
            p = reduced.producer[s]
            if reduced.rerun[p] and not reduced.killers_again[p] and rng.random() < 0.5:
                sequence.append(p)
        sequence.append(o)
    evaluate(problem, reduced.expand(sequence))


def test_importing_the_package_loads_no_solver() -> None:
    code = "import sys, onnxremat.scheduler as s; print([m for m in ('scipy', 'torch', 'onnx', 'numba', 'networkx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_auto_on_a_thousand_ops_keeps_tight_budgets_within_a_minute() -> None:
    problem = transformer(62)
    assert len(problem.ops) > 990
    started = time.monotonic()
    smallest = minimum_budget(problem, 25.0)
    for budget in (int(1.1 * smallest), (smallest + peak(problem)) // 2):
        started = time.monotonic()
        plan = solve(problem, budget, time_limit=20.0)
        assert time.monotonic() - started < 40
        assert plan.peak_bytes <= budget


@pytest.mark.parametrize("seed", [103, 236, 409, 482, 539, 2693])
def test_no_recompute_reads_a_version_after_its_replacement(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randrange(2, 25))
    floor = bytes_floor(problem)
    budget = floor + int(rng.random() * (peak(problem) - floor))
    for strategy in ("auto", "chen_sqrt"):
        try:
            validate(problem, solve(problem, budget, strategy, time_limit=0.5))
        except Infeasible as error:
            assert error.lower_bound_bytes == floor


def test_a_work_limit_makes_the_plan_a_function_of_it_and_the_seed() -> None:
    problem = transformer(4)
    budget = int(0.6 * peak(problem))
    plans = [solve(problem, budget, time_limit=300, seed=seed, bound_seconds=bound, work_limit=20_000) for seed, bound in ((1, 0), (1, 5), (2, 0))]
    assert plans[0].steps == plans[1].steps, "a proof changes nothing"
    assert plans[0].seconds == plans[1].seconds
    none, some = (solve(problem, budget, time_limit=300, bound_seconds=0, work_limit=work).seconds for work in (0, 20_000))
    assert some <= none, "a limit of zero leaves the starts"


@pytest.mark.parametrize("limit", [-1, 1.5, True])
def test_a_bad_work_limit_is_refused(limit: int) -> None:
    with pytest.raises(PlanError, match="work limit must be a number of moves"):
        solve(chain(2), 1000, work_limit=limit)
