"""Keep, recompute or swap: plans with a channel are never slower than without, bounds hold, and refusals say what would do."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.fit import Search
from onnxremat.schedule import schedule_smallest
from onnxremat.scheduler import Infeasible, PlanError, Problem, Step, StrategyError, Transfer, evaluate, smallest_plan, solve
from onnxremat.scheduler.reduce import reduce_problem
from onnxremat.scheduler.relaxation import StageProgram, memory_paths
from onnxremat.scheduler.swap_search import candidates

from .graphs import chain, random_problem, transformer


def budget_of(problem: Problem, share: float) -> int:
    peak = evaluate(problem, range(len(problem.ops))).peak_bytes
    return int(problem.resident_bytes + share * (peak - problem.resident_bytes))


def with_channel(problem: Problem, rate: float, host_bytes: int = 1 << 40, overlap: bool = False) -> Problem:
    return replace(problem, transfer=Transfer(rate, rate, host_bytes, overlap))


def best_with_swaps(problem: Problem, budget: int, longest: int) -> float:
    """The least seconds of any steps, swaps included, up to a length; by trying all."""
    best = float("inf")
    channel = problem.transfer
    assert channel is not None
    moves = [Step("run", o) for o in range(len(problem.ops))]
    moves += [Step(kind, t) for t in range(len(problem.tensors)) for kind in ("swap_out", "swap_in")]  # type: ignore[arg-type]

    def spent(step: Step) -> float:
        if step.kind == "run":
            return problem.ops[step.index].seconds
        if channel.overlap:
            return 0.0
        return problem.tensors[step.index].bytes / (channel.bytes_per_second_out if step.kind == "swap_out" else channel.bytes_per_second_in)

    def extend(steps: list[Step], seconds: float) -> None:
        nonlocal best
        if seconds >= best:
            return
        try:
            found = evaluate(problem, steps)
            if found.peak_bytes <= budget:
                best = min(best, found.seconds)
                if not channel.overlap:
                    return
        except PlanError as error:
            # A fault of a step that is there can't be mended by further ones; one of the end can.
            if not str(error).startswith(f"step {len(steps)}:") and "never read back" not in str(error):
                return
        if len(steps) < longest:
            for step in moves:
                if not steps or steps[-1] != step:
                    extend([*steps, step], seconds + spent(step))

    extend([], 0.0)
    return best


@pytest.mark.parametrize("rate", [5.0, 40.0])
@pytest.mark.parametrize("share", [0.6, 0.5])
def test_both_is_never_slower_than_either_alone(rate: float, share: float) -> None:
    plain = chain(9)
    budget = budget_of(plain, share)
    # Small enough for the search to end by itself, so that the time it has does not matter.
    alone = [solve(plain, budget, time_limit=9, bound_seconds=0).seconds]
    p = with_channel(plain, rate)
    both = solve(p, budget, time_limit=20, bound_seconds=1)
    try:
        swapped = solve(p, budget, "swap_only", time_limit=4, bound_seconds=0)
        alone.append(swapped.seconds)
    except Infeasible:
        pass
    assert both.seconds <= min(alone) * (1 + 1e-9)
    assert both.seconds_lower_bound <= both.seconds


def test_a_fast_channel_is_used_and_a_slow_one_is_not() -> None:
    plain = chain(12)
    budget = budget_of(plain, 0.5)
    recompute = solve(plain, budget, time_limit=3, bound_seconds=0)
    fast = solve(with_channel(plain, 1e4), budget, time_limit=4, bound_seconds=0)
    slow = solve(with_channel(plain, 0.1), budget, time_limit=4, bound_seconds=0)
    assert fast.swapped_tensors > 0
    assert fast.seconds < recompute.seconds
    assert slow.swapped_tensors == 0
    assert slow.seconds == pytest.approx(recompute.seconds)


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_copies_that_overlap_cost_less(share: float) -> None:
    """Never more than copies that take turns with ops, and nothing at all where they fit beside them."""
    plain = chain(12)
    budget = budget_of(plain, share)
    serial = solve(with_channel(plain, 20.0), budget, time_limit=4, bound_seconds=0)
    beside = solve(with_channel(plain, 20.0, overlap=True), budget, time_limit=4, bound_seconds=0)
    assert beside.seconds < serial.seconds
    assert beside.seconds == beside.seconds_unscheduled == 24.0
    # A channel that is busy all the time is the bottleneck, and the bound knows it.
    p = with_channel(replace(plain, ops=tuple(replace(op, pinned="stateful") for op in plain.ops)), 1.0, overlap=True)
    slow = solve(p, budget, time_limit=3, bound_seconds=1)
    moved = sum(p.tensors[step.index].bytes for step in slow.steps if step.kind == "swap_in")
    assert slow.seconds >= moved
    assert 24.0 < slow.seconds_lower_bound <= slow.seconds


def test_what_is_dear_to_make_again_is_swapped_and_the_rest_is_made_again() -> None:
    """A channel that has time for a few tensors: both together take less than either alone."""
    plain = transformer(3)
    budget = budget_of(plain, 0.5)
    alone = solve(plain, budget, time_limit=4, bound_seconds=0).seconds
    p = with_channel(plain, 8.0, overlap=True)
    both = solve(p, budget, time_limit=5, bound_seconds=0)
    assert both.seconds < alone
    assert both.swapped_tensors > 0
    with contextlib.suppress(Infeasible):
        assert both.seconds <= solve(p, budget, "swap_only", time_limit=2, bound_seconds=0).seconds


def test_host_bytes_bound_what_is_swapped() -> None:
    plain = chain(12)
    budget = budget_of(plain, 0.5)
    for host in (0, 10, 30):
        p = with_channel(plain, 1e4, host)
        plan = solve(p, budget, time_limit=3, bound_seconds=0)
        assert evaluate(p, plan.steps).host_bytes <= host
        assert plan.swapped_tensors <= host // 10


def test_swap_reaches_budgets_that_recompute_does_not() -> None:
    ops = transformer(3)
    pinned = replace(ops, ops=tuple(replace(op, pinned=op.pinned or "stateful") for op in ops.ops))
    budget = budget_of(pinned, 0.5)
    with pytest.raises(Infeasible):
        solve(pinned, budget, time_limit=2)
    plan = solve(with_channel(pinned, 100.0), budget, time_limit=4)
    assert plan.peak_bytes <= budget
    assert plan.swapped_tensors > 0
    for strategy in ("auto", "swap_only"):
        with pytest.raises(Infeasible) as refused:
            solve(with_channel(pinned, 100.0), 1, strategy, time_limit=2)
        least = refused.value.minimum_budget_bytes
        assert solve(with_channel(pinned, 100.0), least, strategy, time_limit=4).peak_bytes <= least


def test_without_a_channel_swap_only_says_where_to_get_one() -> None:
    with pytest.raises(StrategyError, match="--swap disk"):
        solve(chain(3), 1000, "swap_only")


def test_what_is_small_or_never_away_is_no_candidate() -> None:
    p = with_channel(chain(6), 1.0)
    assert {p.tensors[c.tensor].name for c in candidates(p)} == {"x0", "x1", "x2", "x3"}
    assert candidates(replace(p, transfer=None)) == []
    assert candidates(with_channel(p, 1.0, 5)) == []


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2.0, 50.0]), st.booleans())
def test_no_plan_beats_the_bound(seed: int, rate: float, overlap: bool) -> None:
    """Against every sequence of steps of a small problem."""
    rng = random.Random(seed)
    p = with_channel(random_problem(rng, 3), rate, overlap=overlap)
    peak = evaluate(p, range(3)).peak_bytes
    budget = p.resident_bytes + int((peak - p.resident_bytes) * rng.choice([0.6, 0.8, 0.95]))
    best = best_with_swaps(p, budget, 6)
    reduced = reduce_problem(p)
    for path in memory_paths(reduced, 4):
        bound = StageProgram(reduced, budget, path).solve(5.0, whole=True).bound
        assert bound <= best * (1 + 1e-9) or best == float("inf")
    if best < float("inf"):
        try:
            assert solve(p, budget, time_limit=0.5, bound_seconds=0.2).seconds_lower_bound <= best * (1 + 1e-6)
        except Infeasible as error:
            # The search looks at one absence of each tensor only; what it calls proven must still be true.
            assert error.lower_bound_bytes <= budget


def test_a_bound_knows_the_channel() -> None:
    plain = chain(8)
    budget = budget_of(plain, 0.6)
    path = max(memory_paths(reduce_problem(plain), 14), key=len)

    def bound(problem: Problem) -> float:
        return StageProgram(reduce_problem(problem), budget, path).solve(2.0).bound

    assert bound(with_channel(plain, 1e-3)) == pytest.approx(bound(plain), rel=1e-4)
    assert sum(op.seconds for op in plain.ops) <= bound(with_channel(plain, 1e6)) + 1e-3 < bound(plain)


def test_the_smallest_plan_swaps_and_with_swap_only_does_nothing_else() -> None:
    problem = with_channel(transformer(3), 40.0)
    recomputing = smallest_plan(replace(problem, transfer=None), 1.0)
    swapping = smallest_plan(problem, 1.0, strategy="swap_only")
    both = smallest_plan(problem, 2.0)
    assert swapping.swapped_tensors and not swapping.recomputed_ops
    assert both.peak_bytes < min(recomputing.peak_bytes, evaluate(problem, range(len(problem.ops))).peak_bytes)
    assert both.peak_bytes <= swapping.peak_bytes
    # The arena hands out multiples of 256 bytes.
    large = replace(problem, tensors=tuple(replace(t, bytes=t.bytes << 12) for t in problem.tensors))
    found = schedule_smallest(large, Search("swap_only", 2.0)).plan
    assert found.swapped_tensors and not found.recomputed_ops
