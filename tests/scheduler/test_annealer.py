"""The annealer: the compiled one and its twin make the same moves; sequences stay valid; interruption keeps the best."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduler.synthetic import layered
from onnxremat.scheduler import Context, Problem, Progress, evaluate, solve
from onnxremat.scheduler import annealer as annealers
from onnxremat.scheduler.annealer import Compiled, library, make_annealer
from onnxremat.scheduler.reduce import reduce_problem
from onnxremat.scheduler.search import Round, Search, rounds
from onnxremat.scheduler.twin import Twin

from .graphs import chain, random_problem, transformer

SOURCE = Path(annealers.__file__).resolve().parent / "_annealer.c"


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where the package was not built, build the library for these tests; skip them only where there is no compiler either."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        built = library() is not None
    if built:
        yield
        return
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no compiler: the twin has nothing to be compared with")
    folder = tmp_path_factory.mktemp("annealer")
    target = folder / f"_annealer{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([compiler, "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-lm"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(annealers, "__file__", str(folder / "annealer.py"))
        library.cache_clear()
        assert library() is not None
        yield
    library.cache_clear()


def both(problem: Problem) -> tuple[Compiled, Twin]:
    reduced = reduce_problem(problem)
    lib = library()
    assert lib is not None
    return Compiled(lib, reduced), Twin(reduced)


def base(problem: Problem) -> list[int]:
    return list(range(reduce_problem(problem).count))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.floats(0.3, 1.0), st.integers(0, 2**64 - 1), st.booleans())
def test_the_twin_makes_the_same_moves(seed: int, n: int, share: float, chance: int, aim: bool) -> None:
    problem = random_problem(random.Random(seed), n)
    budget = int(share * evaluate(problem, range(n)).peak_bytes)
    pair = both(problem)
    for a in pair:
        a.load(base(problem), chance)
    for hot in (0.1, 0.01):
        for a in pair:
            a.run(150, budget, hot, 1e-5, 0.0, aim)
        assert pair[0].best() == pair[1].best()
        assert pair[0].sequence() == pair[1].sequence()
    for a in pair:
        a.restart()
        a.run(50, budget, 0.01, 1e-5, 0.0)
    assert pair[0].sequence() == pair[1].sequence()
    evaluate(problem, reduce_problem(problem).expand(pair[0].sequence()))


def test_the_twin_makes_the_same_moves_on_a_transformer_across_a_new_spread() -> None:
    problem = transformer(2)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    pair = both(problem)
    for a in pair:
        a.load(base(problem), 7)
        a.run(20_500, budget, 0.3, 1e-4, 0.0)
    assert pair[0].sequence() == pair[1].sequence()
    assert pair[0].best() == pair[1].best()
    assert pair[0].best()[1] <= budget


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(0.4, 1.0))
def test_what_the_annealer_says_is_what_the_simulator_finds(seed: int, n: int, share: float) -> None:
    problem = random_problem(random.Random(seed), n, plain=True)
    reduced = reduce_problem(problem)
    annealer = both(problem)[0]
    annealer.load(base(problem), seed)
    annealer.run(2000, int(share * evaluate(problem, range(n)).peak_bytes), 0.1, 1e-4, 0.0)
    found = evaluate(problem, reduced.expand(annealer.sequence()))
    assert (found.seconds, found.peak_bytes) == pytest.approx(annealer.best())


def test_an_empty_problem_is_left_alone() -> None:
    for a in both(Problem("empty", (), (), {"parameters": 3})):
        a.load([], 1)
        a.run(10, 5, 1.0, 0.1, 0.0)
        assert (a.sequence(), a.best()) == ([], (0.0, 3))


def test_without_the_library_the_twin_is_used_and_plans_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(annealers, "__file__", str(tmp_path / "annealer.py"))
    library.cache_clear()
    try:
        problem = transformer(2)
        with pytest.warns(RuntimeWarning, match="no compiled annealer .*install a C compiler"):
            assert isinstance(make_annealer(reduce_problem(problem)), Twin)
        budget = int(0.7 * evaluate(problem, range(len(problem.ops))).peak_bytes)
        plan = solve(problem, budget, time_limit=4)
        assert plan.peak_bytes <= budget
    finally:
        library.cache_clear()


def test_a_library_that_cannot_be_loaded_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / f"_annealer{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    monkeypatch.setattr(annealers, "__file__", str(tmp_path / "annealer.py"))
    library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no compiled annealer"):
            assert library() is None
    finally:
        library.cache_clear()


@given(st.integers(1, 10**8), st.integers(1, 5000))
def test_rounds_do_the_work_they_are_given(moves: int, count: int) -> None:
    steps = rounds(moves, count)
    assert sum(step.moves for step in steps) == moves
    assert all(step.moves > 0 for step in steps)


def test_a_search_is_a_function_of_its_seed() -> None:
    problem = transformer(3)
    reduced = reduce_problem(problem)
    budget = int(0.6 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    found = []
    for seed in (1, 1, 2):
        local = Search(reduced, budget, float("inf"), seed)
        found.append(local.run(Round(4000, 3e-3, 1e-3), range(reduced.count), range(reduced.count)))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_search_aimed_at_the_peak_is_the_first_within_a_tight_budget() -> None:
    problem = layered(1000)
    reduced = reduce_problem(problem)
    budget = int(0.7 * evaluate(problem, range(1000)).peak_bytes)
    met = []
    for aim in (True, False):
        local = Search(reduced, budget, float("inf"), 0, math.inf, aim=aim)
        found = local.run(Round(100_000, 1e-3, 3e-4), range(1000), range(1000))
        met.append(any(evaluate(problem, reduced.expand(sequence)).peak_bytes <= budget for sequence in found))
    assert met == [True, False]


def test_an_interrupted_search_returns_its_best() -> None:
    problem = transformer(12)
    budget = int(0.5 * evaluate(problem, range(len(problem.ops))).peak_bytes)

    def interrupt(progress: Progress) -> None:
        if progress.seconds is not None and progress.elapsed > 1.0:
            raise KeyboardInterrupt

    plan = solve(problem, budget, time_limit=60, progress=interrupt)
    assert plan.peak_bytes <= budget
    assert plan.solve_seconds < 30


def test_an_interruption_before_there_is_a_plan_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(context: Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[solve.__module__], "get_strategy", lambda name: interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve(transformer(1), 10**6)


def test_auto_proves_small_chains_optimal_and_stops() -> None:
    problem = chain(6)
    plan = solve(problem, evaluate(problem, range(12)).peak_bytes - 10, time_limit=30)
    assert plan.solve_seconds < 25
    assert plan.seconds_lower_bound <= plan.seconds
