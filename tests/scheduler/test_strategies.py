"""Every strategy on random graphs: valid plans only, exact ones optimal by search, answers that depend on nothing but what is asked."""

from __future__ import annotations

import heapq
import importlib.util
import random
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxremat.scheduler import (
    Infeasible,
    Op,
    Problem,
    StrategyError,
    Tensor,
    bytes_floor,
    compare,
    evaluate,
    seconds_floor,
    solve,
    strategies,
    validate,
)
from onnxremat.scheduler.reduce import reduce_problem
from onnxremat.scheduler.strategies.reorder import list_schedule

from .graphs import chain, random_problem, random_steps, transformer

SOLVERS = ("moccasin",) if importlib.util.find_spec("ortools") else ()
CHEAP = ("chen_greedy", "chen_sqrt", "griewank", "keep_all", "mincut_knapsack", "reorder", "rotor")
DIVIDED = tuple(f"{name}_{part}" for name in ("chen_greedy", "chen_sqrt", "griewank", "rotor") for part in ("ap", "linear"))
QUICK = (*CHEAP, *DIVIDED)
EXACT = ("checkmate_ilp", *SOLVERS)
MOCCASIN = pytest.mark.skipif(not SOLVERS, reason="needs ortools")


def peak(problem: Problem) -> int:
    return evaluate(problem, range(len(problem.ops))).peak_bytes


def budget_of(problem: Problem, share: float) -> int:
    floor = bytes_floor(problem)
    return floor + int(share * (peak(problem) - floor))


def plain(problem: Problem) -> tuple[list[frozenset[int]], list[int]]:
    """Per op of a problem of single-output ops, the ops it reads and the bytes it makes."""
    tensors = problem.tensors
    reads = [frozenset(tensors[t].producer for t in op.inputs if tensors[t].producer >= 0) for op in problem.ops]
    return reads, [tensors[op.outputs[0]].bytes for op in problem.ops]


def optimum(problem: Problem, budget: int, base_order: bool) -> float | None:
    """The least seconds of a plain problem within the budget, by a search over all states of the memory; None where there is no plan.

    A state is what has run and what is held; dropping is free.  With ``base_order``, first runs follow the base order, and between two of
    them ops run again in that order, each at most once: what the programs of Checkmate and Moccasin can say.
    """
    n = len(problem.ops)
    reads, size = plain(problem)
    needed = frozenset(range(n)) - frozenset[int]().union(*reads)
    start = (frozenset[int](), frozenset[int](), -1)
    best = {start: 0.0}
    queue: list[tuple[float, int, tuple[frozenset[int], frozenset[int], int]]] = [(0.0, 0, start)]
    pushed = 0
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if seconds > best[state]:
            continue
        ran, held, latest = state
        if needed <= ran and (not base_order or len(ran) == n):
            return seconds
        follow = [(seconds, (ran, held - {s}, latest)) for s in held]
        for o in range(n):
            first = o not in ran
            if not reads[o] <= held or problem.resident_bytes + sum(size[s] for s in held | {o}) > budget:
                continue
            if base_order and (o != len(ran) if first else o <= latest):
                continue
            after = -1 if first or not base_order else o
            follow.append((seconds + problem.ops[o].seconds, (ran | {o}, held | {o}, after)))
        for cost, state in follow:
            if cost < best.get(state, float("inf")):
                best[state] = cost
                pushed += 1
                heapq.heappush(queue, (cost, pushed, state))
    return None


def score(problem: Problem, sequence: tuple[int, ...]) -> tuple[int, float]:
    """Peak and seconds of a plain problem's sequence by the counting rules: from its run to its last read an instance is held, that included."""
    reads, size = plain(problem)
    memory = [problem.resident_bytes] * len(sequence)
    for k, o in enumerate(sequence):
        until = k
        for later in range(k + 1, len(sequence)):
            until = later if o in reads[sequence[later]] else until
            if sequence[later] == o:
                break
        for step in range(k, until + 1):
            memory[step] += size[o]
    return max(memory, default=problem.resident_bytes), sum(problem.ops[o].seconds for o in sequence)


def test_the_registry_lists_every_strategy() -> None:
    assert strategies() == tuple(sorted({*QUICK, "auto", "checkmate_ilp", "checkmate_lp", "moccasin", "swap_only"}))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 14), st.floats(0.1, 1.0))
def test_every_cheap_plan_on_random_graphs_is_valid(seed: int, n: int, share: float) -> None:
    problem = random_problem(random.Random(seed), n)
    budget = budget_of(problem, share)
    for strategy in (*QUICK, "checkmate_lp"):
        try:
            plan = solve(problem, budget, strategy, time_limit=5.0, bound_seconds=0.0)
        except Infeasible as error:
            assert error.minimum_budget_bytes > budget
            continue
        validate(problem, plan)
        assert plan.seconds >= seconds_floor(problem) * (1 - 1e-12)


@MOCCASIN
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10), st.floats(0.2, 1.0))
def test_constraint_programs_on_random_graphs_are_valid(seed: int, n: int, share: float) -> None:
    problem = random_problem(random.Random(seed), n)
    try:
        plan = solve(problem, budget_of(problem, share), "moccasin", time_limit=20.0, bound_seconds=0.0)
    except Infeasible:
        return
    validate(problem, plan)


def test_search_judges_all_strategies_on_graphs_of_up_to_ten_ops() -> None:
    met: dict[str, int] = {}
    for seed in range(24):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.randrange(4, 11), plain=True)
        budget = budget_of(problem, rng.choice((0.0, 0.3, 0.6)))
        best, staged = optimum(problem, budget, False), optimum(problem, budget, True)
        for strategy in (*CHEAP, "checkmate_lp", *EXACT):
            try:
                plan = solve(problem, budget, strategy, time_limit=30.0)
            except Infeasible as error:
                assert strategy != "checkmate_ilp" or staged is None, seed
                assert optimum(problem, error.minimum_budget_bytes, True) is not None
                continue
            met[strategy] = met.get(strategy, 0) + 1
            assert best is not None and staged is not None
            assert score(problem, plan.sequence) == (plan.peak_bytes, pytest.approx(plan.seconds))
            assert plan.seconds_lower_bound <= best + 1e-9
            # ``reorder`` may be faster than any plan in the given order.
            assert (best if strategy == "reorder" else staged) <= plan.seconds + 1e-9, (seed, strategy)
            if strategy == "checkmate_ilp":
                assert plan.seconds == pytest.approx(staged), seed
                if "moccasin" in EXACT and max(map(plan.sequence.count, plan.sequence), default=0) <= 2:
                    assert solve(problem, budget, "moccasin", time_limit=30.0).seconds == pytest.approx(staged), seed
    assert met["checkmate_ilp"] >= 12 and min(met[s] for s in CHEAP) >= 4, met


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_simulator_counts_as_the_rules_say(seed: int, n: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, n, plain=True)
    sequence = tuple(step.index for step in random_steps(problem, rng))
    found = evaluate(problem, sequence)
    assert (found.peak_bytes, pytest.approx(found.seconds)) == score(problem, sequence)


@pytest.mark.parametrize("strategy", [*QUICK, "checkmate_lp"])
@pytest.mark.parametrize("problem", [chain(8), transformer(2), random_problem(random.Random(5), 18)], ids=lambda p: p.name)
def test_answers_are_the_same_each_time(problem: Problem, strategy: str) -> None:
    def answer() -> object:
        try:
            return solve(problem, budget_of(problem, 0.5), strategy, time_limit=30.0, bound_seconds=0.0).steps
        except Infeasible as error:
            return str(error)

    assert answer() == answer()


@pytest.mark.parametrize("strategy", EXACT)
def test_exact_answers_are_the_same_each_time(strategy: str) -> None:
    problem = chain(6)
    plans = [solve(problem, 60, strategy, time_limit=60.0, seed=3, bound_seconds=0.0) for _ in range(2)]
    assert plans[0].steps == plans[1].steps


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("seed", [1, 4, 12])
def test_exact_strategies_are_monotone_in_the_budget(strategy: str, seed: int) -> None:
    problem = random_problem(random.Random(seed), 9)
    seconds = []
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        try:
            seconds.append(solve(problem, budget_of(problem, share), strategy, time_limit=30.0, bound_seconds=0.0).seconds)
        except Infeasible:
            assert not seconds, "feasible at a smaller budget"
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(evaluate(problem, range(9)).seconds)


@pytest.mark.parametrize("strategy", QUICK)
@pytest.mark.parametrize("problem", [chain(12), transformer(3)], ids=lambda p: p.name)
def test_the_smallest_budget_that_a_strategy_names_works_for_it(problem: Problem, strategy: str) -> None:
    budget = bytes_floor(problem)
    try:
        solve(problem, budget, strategy, bound_seconds=0.0)
    except Infeasible as error:
        budget = error.minimum_budget_bytes
    assert solve(problem, budget, strategy, bound_seconds=0.0).peak_bytes <= budget


@pytest.mark.parametrize("strategy", [s for s in QUICK if s not in ("keep_all", "reorder")])
def test_each_saves_memory_on_a_chain(strategy: str) -> None:
    problem = chain(16)
    plan = solve(problem, int(0.75 * peak(problem)), strategy, bound_seconds=0.0)
    assert plan.recomputed_ops > 0


def test_pinned_ops_run_once_and_random_ones_in_their_order() -> None:
    problem = transformer(4)
    for strategy in (*QUICK, "checkmate_lp"):
        try:
            plan = solve(problem, int(0.75 * peak(problem)), strategy, time_limit=20.0, bound_seconds=0.0)
        except Infeasible:
            assert strategy != "rotor"
            continue
        masks = [o for o in plan.sequence if problem.ops[o].pinned == "random"]
        assert masks == [o for o, op in enumerate(problem.ops) if op.pinned == "random"]


def test_a_version_that_is_replaced_is_not_read_again() -> None:
    """A forward op reads a parameter that the update overwrites: its output can be made again before that, and not after."""
    rng = random.Random(0)
    for late in (False, True):
        base = chain(8)
        weight = len(base.tensors)
        tensors = (*base.tensors, Tensor("weight", 4, -1))
        ops = [replace(op, inputs=(*op.inputs, weight)) if op.phase == "forward" else op for op in base.ops]
        at = 15 if late else 10
        ops[at] = replace(ops[at], writes=(weight,), pinned="stateful")
        problem = Problem(f"fused{late}", tuple(ops), tensors, {"parameters": 4})
        for strategy in (*QUICK, "checkmate_lp", *EXACT):
            for share in (0.0, rng.random(), 1.0):
                try:
                    validate(problem, solve(problem, budget_of(problem, share), strategy, time_limit=10.0, bound_seconds=0.0))
                except Infeasible as error:
                    assert error.lower_bound_bytes == bytes_floor(problem)


@pytest.mark.parametrize("strategy", [*QUICK, "checkmate_lp", *EXACT])
def test_zero_bytes_zero_seconds_and_nothing_at_all(strategy: str) -> None:
    ops = tuple(Op(f"o{i}", 0.0, (i - 1,) if i else (), (i,)) for i in range(5))
    tensors = tuple(Tensor(f"t{i}", 0, i) for i in range(5))
    plan = solve(Problem("zero", ops, tensors, {}), 0, strategy, time_limit=5)
    assert (plan.peak_bytes, plan.seconds, plan.gap) == (0, 0.0, 0.0)
    assert solve(Problem("empty", (), (), {"parameters": 3}), 3, strategy, time_limit=5).steps == ()


@pytest.mark.parametrize("strategy", [*QUICK, "checkmate_lp", *EXACT])
def test_huge_bytes_stay_exact(strategy: str) -> None:
    scale = 2**44 + 1
    small = chain(6)
    large = replace(small, tensors=tuple(replace(t, bytes=t.bytes * scale) for t in small.tensors))
    for problem, budget in ((small, 60), (large, 60 * scale)):
        lowers = strategy not in ("keep_all", "reorder")
        plan = solve(problem, budget, strategy, time_limit=20, bound_seconds=0.0) if lowers else None
        if plan is not None:
            assert plan.peak_bytes <= budget
    if strategy in EXACT:
        assert solve(large, 60 * scale, strategy, time_limit=20).seconds == solve(small, 60, strategy, time_limit=20).seconds


@pytest.mark.parametrize("strategy", [*QUICK, "checkmate_lp", *EXACT])
def test_without_time_there_is_the_best_known_plan_or_a_refusal(strategy: str) -> None:
    problem = transformer(2)
    assert solve(problem, peak(problem), strategy, time_limit=0).peak_bytes <= peak(problem)
    with pytest.raises(Infeasible):
        solve(problem, bytes_floor(problem), strategy, time_limit=0)


@pytest.mark.parametrize("strategy", [*QUICK, "checkmate_lp", *EXACT])
def test_an_op_that_needs_more_than_the_budget_is_a_proof(strategy: str) -> None:
    problem = Problem("wide", (Op("wide", 1.0, (), (0,)),), (Tensor("x", 10**9, 0),), {"parameters": 1})
    with pytest.raises(Infeasible, match="proven"):
        solve(problem, 10**8, strategy)


def test_a_missing_package_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(StrategyError, match=r"moccasin: the package ortools is not installed; .*onnxremat\[moccasin\]"):
        solve(chain(4), 1000, "moccasin")
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse.csgraph", None)
    for strategy in ("checkmate_ilp", "checkmate_lp", "mincut_knapsack"):
        with pytest.raises(StrategyError, match=f"{strategy}: scipy is not installed"):
            solve(chain(4), 60, strategy)


@pytest.mark.parametrize(("strategy", "ops"), [("checkmate_ilp", 100), ("checkmate_lp", 220)])
def test_a_program_that_would_be_too_large_is_refused(strategy: str, ops: int) -> None:
    with pytest.raises(StrategyError, match=f"{strategy}: {2 * ops} ops are too many"):
        solve(chain(ops), 10**6, strategy)


def test_comparison_ranks_plans_and_says_why_there_is_none() -> None:
    problem = chain(10)
    outcomes = compare(problem, int(0.5 * peak(problem)), ("keep_all", "checkmate_ilp", "chen_sqrt", "rotor"), time_limit=20.0)
    assert outcomes[0].strategy == "checkmate_ilp" and outcomes[-1].strategy == "keep_all"
    plans = [o.plan for o in outcomes if o.plan is not None]
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans) and len({p.seconds_lower_bound for p in plans}) == 1
    assert plans[0].seconds_lower_bound <= plans[0].seconds
    assert outcomes[-1].minimum_budget_bytes == peak(problem) and "infeasible" in outcomes[-1].reason
    with pytest.raises(StrategyError, match="unknown strategy"):
        compare(problem, 100, ("nothing",))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.booleans())
def test_list_schedules_run_every_op_once_and_keep_what_is_ordered(seed: int, n: int, deep: bool) -> None:
    problem = random_problem(random.Random(seed), n)
    reduced = reduce_problem(problem)
    order = list_schedule(reduced, deep)
    assert order is not None
    assert sorted(order) == list(range(reduced.count))
    fixed = [o for o in order if not reduced.movable[o]]
    assert fixed == sorted(fixed)
    evaluate(problem, reduced.expand(order))


def test_a_list_schedule_finishes_one_branch_before_the_next() -> None:
    # Eight branches, interleaved in the base order: wide middles that shrink to a small end each, read by one op.
    ops = [Op(f"wide{k}", 1.0, (), (k,)) for k in range(8)]
    ops += [Op(f"end{k}", 1.0, (k,), (8 + k,)) for k in range(8)]
    ops.append(Op("join", 1.0, tuple(range(8, 16)), (16,)))
    tensors = [Tensor(f"t{k}", 100 if k < 8 else 1, k) for k in range(17)]
    problem = Problem("branches", tuple(ops), tuple(tensors), {"parameters": 0})
    plan = solve(problem, 110, "reorder", bound_seconds=0.0)
    assert plan.seconds == 17.0
    assert evaluate(problem, range(17)).peak_bytes > 800
