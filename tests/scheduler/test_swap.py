"""Swap as ops: the problem without swap that stands for one with it says the same of every sequence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import PlanError, Problem, Step, Transfer, evaluate, plan_from_sequence
from onnxremat.scheduler.swap import lower, swappable, with_swaps

from .graphs import random_problem


def with_channel(problem: Problem) -> Problem:
    return replace(problem, transfer=Transfer(3.0, 5.0, 1 << 40))


def random_swaps(problem: Problem, rng: random.Random) -> dict[int, frozenset[int]]:
    """Some tensors, each away from somewhere in the base order up to its next reader."""
    late = {}
    for x, readers in swappable(problem).items():
        if readers and rng.random() < 0.6:
            cut = rng.choice(readers)
            late[x] = frozenset(o for o in readers if o >= cut)
    return late


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_both_forms_of_a_swap_need_the_same(seed: int, n: int) -> None:
    rng = random.Random(seed)
    p = with_channel(random_problem(rng, n))
    late = random_swaps(p, rng)
    form = with_swaps(p, late)
    form.problem.check()
    sequence = list(form.sequence)
    for _ in range(3 * n):
        trial = list(sequence)
        if rng.random() < 0.5:
            trial.insert(rng.randrange(len(trial) + 1), rng.randrange(len(form.steps)))
        else:
            trial.insert(rng.randrange(len(trial)), trial.pop(rng.randrange(len(trial))))
        try:
            evaluate(form.problem, trial)
        except PlanError:
            continue
        sequence = trial
        below = evaluate(form.problem, sequence)
        steps = form.plan_steps(sequence)
        try:
            above = evaluate(p, steps)
        except PlanError:
            continue  # such as a swap out that only the first, moved readers were waiting for
        back = lower(p, steps)
        if back is None:
            continue
        assert back.plan_steps(back.sequence) == steps
        again = evaluate(back.problem, back.sequence)
        assert again.profile.tolist() == above.profile.tolist()
        assert again.seconds == pytest.approx(above.seconds)
        assert above.seconds == pytest.approx(below.seconds)
        plan_from_sequence(p, steps, above.peak_bytes)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12))
def test_the_base_order_with_swaps_is_a_plan(seed: int, n: int) -> None:
    rng = random.Random(seed)
    p = with_channel(random_problem(rng, n))
    late = random_swaps(p, rng)
    form = with_swaps(p, late)
    steps = form.plan_steps(form.sequence)
    found = evaluate(p, steps)
    assert found.profile.tolist() == evaluate(form.problem, form.sequence).profile.tolist()
    plan = plan_from_sequence(p, steps, found.peak_bytes)
    assert plan.swapped_tensors == len(late)
    assert lower(p, steps) == form
    assert found.host_bytes <= sum(p.tensors[x].bytes for x in late)


def test_a_problem_without_swaps_is_its_own_form() -> None:
    p = random_problem(random.Random(1), 6)
    steps = [Step("run", o) for o in range(6)]
    form = lower(p, steps)
    assert form is not None
    assert form.problem == replace(p, transfer=None)
    assert form.sequence == tuple(range(6))
