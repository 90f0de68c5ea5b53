"""Swap as ops: the problem without swap that stands for one with it says the same of every sequence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import PlanError, Problem, Step, Transfer, evaluate, plan_from_sequence
from onnxremat.scheduler.swap import lower, swappable, with_swaps
from onnxremat.scheduler.timeline import hide_copies, timeline

from .graphs import chain, random_problem


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
@example(481574, 8)  # a view reads a parameter that is replaced before the tensor is back
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


def overlapping(problem: Problem, rate: float = 3.0, host_bytes: int = 1 << 40) -> Problem:
    return replace(problem, transfer=Transfer(rate, 2 * rate, host_bytes, overlap=True))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([0.5, 3.0, 40.0]))
def test_overlapping_copies_need_the_same_bytes_and_no_more_time(seed: int, n: int, rate: float) -> None:
    """Also: simulator and validator, which share no code, agree on the time and on the host's bytes."""
    rng = random.Random(seed)
    base = random_problem(rng, n)
    p = overlapping(base, rate)
    serial = replace(base, transfer=Transfer(rate, 2 * rate, 1 << 40))
    form = with_swaps(p, random_swaps(p, rng))
    sequence = list(form.sequence)
    for _ in range(2 * n):
        trial = list(sequence)
        trial.insert(rng.randrange(len(trial)), trial.pop(rng.randrange(len(trial))))
        steps = form.plan_steps(trial)
        try:
            found = evaluate(p, steps)
        except PlanError:
            continue
        sequence = trial
        alone = evaluate(serial, steps)
        assert found.profile.tolist() == alone.profile.tolist()
        assert found.seconds <= alone.seconds * (1 + 1e-12)
        assert found.host_bytes >= alone.host_bytes
        plan_from_sequence(p, steps, found.peak_bytes)
        exact = overlapping(base, rate, found.host_bytes)
        plan_from_sequence(exact, steps, found.peak_bytes)
        if found.host_bytes:
            with pytest.raises(PlanError, match="host"):
                evaluate(overlapping(base, rate, found.host_bytes - 1), steps)
        budget = found.peak_bytes + rng.randrange(40)
        moved = hide_copies(p, steps, found.profile.tolist(), budget)
        assert [s for s in moved if s.kind == "run"] == [s for s in steps if s.kind == "run"]
        assert evaluate(p, moved).peak_bytes <= budget


def test_copies_hide_behind_ops_and_wait_for_each_other() -> None:
    """A chain of four ops of one second, each tensor of ten bytes, copies of two seconds out and one back."""
    p = overlapping(chain(4), 5.0)
    run = [Step("run", o) for o in range(8)]
    out, back = (lambda t: Step("swap_out", t)), (lambda t: Step("swap_in", t))
    # x0 is there after 1 s and away after 3 s; x1 after 2 s, and away after the copy before it: at 5 s.
    steps = [run[0], run[1], out(0), run[2], run[3], out(1), run[4], back(1), back(0), *run[5:]]
    times = timeline(p, steps)
    assert (times.copied, times.ready[3], times.ready[6]) == ({2: 3.0, 5: 5.0}, 3.0, 5.0)
    # Both back at once, one after the other; the op that reads the first waits for it, and the next for the second.
    assert times.arrived == {7: 7.0, 8: 8.0}
    assert evaluate(p, steps).seconds == times.end == 10.0
    serial = replace(p, transfer=Transfer(5.0, 10.0, 1 << 40))
    assert evaluate(serial, steps).seconds == 8 + 2 * 3
    assert evaluate(p, steps).host_bytes == 20
    # With room, nothing waits but for what has only just gone when it is wanted back.
    roomy = hide_copies(p, steps, evaluate(p, steps).profile.tolist(), 1000)
    assert evaluate(p, roomy).seconds == 9.0
