"""From a budget to a plan that the arena holds, and the budget that an error names."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from onnxremat import schedule as schedule_module
from onnxremat.errors import BudgetInfeasible
from onnxremat.fit import OPTIMIZER_BYTES, Scheduled, Search, needed_budget, schedule_unscheduled
from onnxremat.placement import UNLIMITED, bookkeeping_bytes, capacity_within, place
from onnxremat.progress import Interruption
from onnxremat.schedule import schedule, schedule_smallest
from onnxremat.scheduler import Problem, Transfer

from .scheduler.graphs import chain, transformer

MIB = 2**20
QUICK = Search("auto", 3.0, work_limit=3000)


def _uneven(seed: int) -> Problem:
    """A training step whose buffers have many sizes, so that the arena fragments."""
    chance = random.Random(seed)
    problem = transformer(3)
    return replace(problem, tensors=tuple(replace(t, bytes=int(t.bytes * MIB * chance.uniform(0.3, 3.0))) for t in problem.tensors))


def _check(problem: Problem, found: Scheduled, budget: int) -> None:
    assert found.peak_bytes <= budget
    block_bytes = found.placement.block_bytes
    assert found.arena_bytes <= capacity_within(budget - problem.resident_bytes - block_bytes)
    if block_bytes:
        assert found.peak_bytes >= found.plan.peak_bytes
        assert found.peak_bytes <= problem.resident_bytes + block_bytes + found.arena_bytes + bookkeeping_bytes(found.arena_bytes)
        return
    assert place(problem, found.plan.sequence, found.arena_bytes).arena_bytes == found.placement.arena_bytes


@pytest.mark.parametrize(("seed", "fixed"), [(0, False), (1, False), (2, False), (0, True)])
def test_a_plan_fits_where_live_bytes_are_all_but_the_whole_arena(seed: int, fixed: bool) -> None:
    problem, search = _uneven(seed), replace(QUICK, fixed=fixed)
    whole, least = needed_budget(problem, schedule_unscheduled(problem).arena_bytes), schedule_smallest(problem, search).plan.budget_bytes
    assert least < whole
    for share in (0.0, 0.2):
        budget = least + int(share * (whole - least))
        _check(problem, schedule(problem, budget, search), budget)


@pytest.mark.parametrize(("seed", "fixed"), [(0, False), (1, False), (2, False), (0, True)])
def test_the_budget_that_an_error_names_suffices(seed: int, fixed: bool) -> None:
    problem, search = _uneven(seed), replace(QUICK, fixed=fixed)
    with pytest.raises(BudgetInfeasible) as refused:
        schedule(problem, problem.resident_bytes + 12 * MIB, search)
    budget = refused.value.minimum_budget_bytes
    _check(problem, schedule(problem, budget, search), budget)


def test_a_small_step_is_told_that_the_arena_is_the_limit() -> None:
    """No arena is smaller than what the optimizer's slices take, however little the step holds."""
    problem = chain(4, size=1000)
    with pytest.raises(BudgetInfeasible, match=r"no plan can take less than 4\.\d MiB") as refused:
        schedule(problem, 2 * MIB, QUICK)
    assert schedule_unscheduled(problem).peak_bytes < 2 * MIB < OPTIMIZER_BYTES < refused.value.minimum_budget_bytes < 5 * MIB


@pytest.mark.parametrize("strategy", ["keep_all", "chen_sqrt", "swap_only"])
def test_every_strategy_names_a_budget_that_suffices(strategy: str) -> None:
    """At the latest that of the unscheduled step, which is a plan of all of them."""
    problem = replace(_uneven(0), transfer=Transfer(1e6, 1e6, 2**40) if strategy == "swap_only" else None)
    search = replace(QUICK, strategy=strategy)
    with pytest.raises(BudgetInfeasible) as refused:
        schedule(problem, problem.resident_bytes + 6 * MIB, search)
    budget = refused.value.minimum_budget_bytes
    assert budget <= needed_budget(problem, schedule_unscheduled(problem).arena_bytes)
    found = schedule(problem, budget, search)
    assert found.peak_bytes <= budget and found.plan.strategy == strategy


def test_an_interrupted_search_leaves_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has no plan of its own yet."""
    problem, interruption, calls = _uneven(0), Interruption(), []
    solve = schedule_module._solve

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 1:
            interruption.asked = True
            raise KeyboardInterrupt
        return solve(*arguments)

    monkeypatch.setattr(schedule_module, "_solve", interrupted)
    budget = needed_budget(problem, schedule_unscheduled(problem).arena_bytes) * 9 // 10
    _check(problem, schedule(problem, budget, replace(QUICK, time_limit=30.0), interruption=interruption), budget)
    assert len(calls) == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_portable_placement_does_not_hinge_on_the_end_of_the_arena(seed: int) -> None:
    problem = _uneven(seed)
    whole = needed_budget(problem, schedule_unscheduled(problem).arena_bytes)
    budget = problem.resident_bytes + int(0.8 * (whole - problem.resident_bytes))
    found = schedule(problem, budget, replace(QUICK, portable=True))
    _check(problem, found, budget)
    endless = place(problem, found.plan.sequence, UNLIMITED).arena_bytes
    assert endless <= found.arena_bytes and found.placement.arena_bytes <= endless


def _even(ops: int, size: int) -> Problem:
    """A chain of tensors of one size (bytes), which no allocator fragments: of its live bytes, a recompute saves those of one tensor."""
    problem = chain(ops)
    return replace(problem, tensors=tuple(replace(t, bytes=size) for t in problem.tensors))


def test_fixed_offsets_are_planned_for_from_the_start() -> None:
    """The tables of an arena alone take a 33rd of the budget, more than one of the tensors; beside a block they are those of a small arena."""
    problem, budget = _even(60, 10 * MIB), 596 * MIB
    alone, beside = (schedule(problem, budget, replace(QUICK, fixed=fixed)) for fixed in (False, True))
    for found in (alone, beside):
        _check(problem, found, budget)
    assert capacity_within(budget) < 580 * MIB
    assert alone.plan.peak_bytes <= 570 * MIB and alone.plan.recomputed_ops >= 4
    assert (beside.plan.peak_bytes, beside.plan.recomputed_ops) == (580 * MIB, 3)


def test_an_arena_alone_is_preferred_where_it_does_as_well() -> None:
    problem, budget = _even(8, 100 * MIB), 800 * MIB
    found = schedule(problem, budget, replace(QUICK, fixed=True))
    assert (found.plan.peak_bytes, found.plan.recomputed_ops, found.placement.block_bytes) == (700 * MIB, 2, 0)
