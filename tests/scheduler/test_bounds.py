"""Bounds: below the brute-force optimum, below every valid sequence, and tight where the memory lies along a chain."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import Infeasible, bytes_floor, evaluate, seconds_floor, solve
from onnxremat.scheduler.reduce import reduce_problem
from onnxremat.scheduler.relaxation import best_bound, memory_paths, rounded_up, stage_bound

from .graphs import brute_force, chain, random_problem, random_steps, transformer


def test_the_bound_is_below_the_brute_force_optimum() -> None:
    compared = 0
    for seed in range(60):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randrange(3, 7), plain=seed % 2 == 0)
        budget = bytes_floor(problem) + rng.randrange(3)
        optimum = brute_force(problem, budget, len(problem.ops) + 2)
        if optimum is not None:
            assert best_bound(reduce_problem(problem), budget, 5.0) <= optimum + 1e-9, seed
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(("n", "budget"), [(3, 40), (4, 50)])
def test_the_bound_lies_between_the_floor_and_the_optimum_of_a_chain(n: int, budget: int) -> None:
    problem = chain(n, size=10)
    optimum = brute_force(problem, budget, 2 * n + 2)
    assert optimum is not None
    bound = best_bound(reduce_problem(problem), budget, 5.0)
    assert seconds_floor(problem) - 1e-4 <= bound <= optimum


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_bounds_are_below_every_valid_sequence(seed: int, n: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n)
    found = evaluate(problem, random_steps(problem, rng))
    assert bytes_floor(problem) <= found.peak_bytes
    assert best_bound(reduce_problem(problem), found.peak_bytes, 2.0) <= found.seconds + 1e-9


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.floats(0.0, 0.8))
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
            for whole in (False, True):
                for ignored in (0.0, 0.1, 1.0):
                    assert stage_bound(reduced, budget, path, 2.0, whole, ignored) <= plan.seconds + 1e-9


def test_leaving_out_small_storages_never_strengthens_the_bound() -> None:
    problem = transformer(2)
    reduced = reduce_problem(problem)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    (path, *_) = memory_paths(reduced, 20)
    bounds = [stage_bound(reduced, budget, path, 10.0, ignored=ignored) for ignored in (0.0, 0.05, 0.3, 1.0)]
    assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(bounds))
    assert bounds[0] > bounds[-1]


def test_a_bound_on_sums_of_integers_is_rounded_up_to_one() -> None:
    reduced = reduce_problem(chain(3, seconds=4.0))
    assert [rounded_up(reduced, x) for x in (0.0, 3.0, 4.0, 4.0 + 1e-12, 4.1)] == [0.0, 4.0, 4.0, 4.0 + 1e-12, 8.0]
    assert rounded_up(reduce_problem(chain(3, seconds=0.3)), 0.4) == 0.4


@pytest.mark.parametrize("budget", [50, 60])
def test_the_bound_is_tight_on_a_chain(budget: int) -> None:
    problem = chain(6)
    plan = solve(problem, budget, time_limit=4)
    assert seconds_floor(problem) < plan.seconds_lower_bound <= plan.seconds
    assert plan.gap <= 0.25


def test_the_bound_does_not_rise_with_the_budget() -> None:
    problem = transformer(1)
    reduced = reduce_problem(problem)
    (path, *_) = memory_paths(reduced, 80)
    low, high = bytes_floor(problem), evaluate(problem, range(len(problem.ops))).peak_bytes
    bounds = [stage_bound(reduced, low + k * (high - low) // 4, path, 5.0) for k in range(1, 5)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(seconds_floor(problem), rel=1e-5)
