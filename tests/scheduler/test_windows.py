"""Exact windows: what they find is valid, within the budget, cheaper, and the optimum where the window takes in all that matters."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import PlanError, Problem, evaluate, plan_from_sequence, solve
from onnxremat.scheduler.greedy import Weights, walk
from onnxremat.scheduler.reduce import Reduced, reduce_problem
from onnxremat.scheduler.windows import Window, Windows, eligible

from .graphs import brute_force, chain, random_problem, transformer


def walked(problem: Problem, budget: int) -> tuple[Reduced, list[int]]:
    """A greedy plan within a budget."""
    reduced = reduce_problem(problem)
    sequence = walk(reduced, budget, Weights())
    assert sequence is not None
    assert evaluate(problem, reduced.expand(sequence)).peak_bytes <= budget
    return reduced, sequence


def wasteful(reduced: Reduced, rng: random.Random) -> list[int]:
    """The base order with many runs again of what may run again, wherever the simulator lets them pass."""
    sequence = list(range(reduced.count))
    again = [o for o in sequence if reduced.rerun[o]]
    for _ in range(4 * len(again)):
        k = rng.randrange(len(sequence) + 1)
        trial = [*sequence[:k], rng.choice(again), *sequence[k:]]
        try:
            evaluate(reduced.problem, reduced.expand(trial))
        except PlanError:
            continue
        sequence = trial
    return sequence


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 14), st.floats(0.3, 1.0))
def test_a_window_of_any_sequence_gives_a_cheaper_valid_one_within_its_peak(seed: int, n: int, share: float) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n)
    reduced = reduce_problem(problem)
    given_sequence = wasteful(reduced, rng)
    before = evaluate(problem, reduced.expand(given_sequence))
    ops = [o for o in eligible(reduced) if rng.random() < share]
    window = Window(reduced, before.peak_bytes, given_sequence, ops)
    better = window.solve(5.0, 1000)
    if better is None:
        return
    # The validator judges it as well.
    plan = plan_from_sequence(problem, reduced.expand(better), before.peak_bytes)
    assert plan.peak_bytes <= before.peak_bytes
    assert plan.seconds < before.seconds
    assert [o for o in better if o not in ops] == [o for o in given_sequence if o not in ops]


@pytest.mark.parametrize(("n", "budget"), [(3, 40), (4, 50), (4, 40), (5, 60)])
def test_a_window_of_all_forward_ops_of_a_chain_is_the_optimum(n: int, budget: int) -> None:
    problem = chain(n, size=10)
    optimum = brute_force(problem, budget, 2 * n + 4)
    assert optimum is not None
    reduced = reduce_problem(problem)
    # The worst plan there is: every gradient has all forward ops before it run again.
    worst = [*range(n)]
    for k in range(n):
        worst += [*range(n - k), n + k]
    assert evaluate(problem, worst).peak_bytes <= budget
    found = Window(reduced, budget, worst, range(n)).solve(10.0, 10_000)
    assert found is not None
    assert evaluate(problem, found).seconds == optimum
    # From there nothing is to be gained.
    assert Window(reduced, budget, found, range(n)).solve(10.0, 10_000) is None


@pytest.mark.parametrize("share", [0.6, 0.7])
def test_windows_take_a_greedy_plan_to_the_proven_optimum(share: float) -> None:
    problem = transformer(2)
    base = evaluate(problem, range(len(problem.ops))).peak_bytes
    budget = 100 + int(share * (base - 100))
    optimum = solve(problem, budget, time_limit=20.0)
    assert optimum.seconds <= optimum.seconds_lower_bound * (1 + 1e-5)
    reduced, sequence = walked(problem, budget)
    windows = Windows(reduced, budget, time.monotonic() + 60, 0)
    start = evaluate(problem, reduced.expand(sequence)).seconds
    assert start > optimum.seconds
    for _ in range(3):
        for better in windows.improve(sequence):
            found = evaluate(problem, reduced.expand(better))
            assert found.peak_bytes <= budget
            if found.seconds < evaluate(problem, reduced.expand(sequence)).seconds:
                sequence = better
    assert evaluate(problem, reduced.expand(sequence)).seconds == pytest.approx(optimum.seconds)


def test_windows_are_a_function_of_the_seed() -> None:
    problem = transformer(3)
    budget = 100 + int(0.6 * (evaluate(problem, range(len(problem.ops))).peak_bytes - 100))
    reduced, sequence = walked(problem, budget)
    first, second = (Windows(reduced, budget, time.monotonic() + 60, 7) for _ in range(2))
    assert [first.improve(sequence) for _ in range(3)] == [second.improve(sequence) for _ in range(3)]


def test_a_sequence_without_a_recompute_has_no_window() -> None:
    problem = transformer(2)
    reduced = reduce_problem(problem)
    order = list(range(reduced.count))
    peak = evaluate(problem, reduced.expand(order)).peak_bytes
    assert Windows(reduced, peak, time.monotonic() + 60, 0).improve(order) == []
    assert Window(reduced, peak, order, eligible(reduced)).size == 0
