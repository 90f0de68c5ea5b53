"""Tensors at fixed offsets beside the arena: the placement's invariants, and an artifact that needs it, run."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxremat import Artifact, Trainer, fit, schedule
from onnxremat.api import compile as compile_model
from onnxremat.artifact import OFFSETS, TRAINING
from onnxremat.emit import SMALL_BYTES
from onnxremat.errors import ArtifactError, OutOfBudget
from onnxremat.fit import Search, needed_budget, schedule_unscheduled
from onnxremat.placement import UNLIMITED, bookkeeping_bytes, buffer_lifetimes, place, place_fixed, rounded
from onnxremat.placement.simulate import Placement, place_buffers, scratch_of
from onnxremat.runtime import block, worker
from onnxremat.runtime.block import Block, fixed_session
from onnxremat.runtime.session import BoundSession, Options, make_session, sample_arrays, with_random_seeds
from onnxremat.scheduler import Op, Plan, Problem, Tensor, Transfer, evaluate
from tests.factories import CNN_INPUT, CNN_LABEL
from tests.fixed_jobs import losses_of
from tests.test_placement import _scaled

BIG = 2 * SMALL_BYTES


def _checked(problem: Problem, sequence: list[int], placement: Placement, capacity: int) -> None:
    """Step by step: what is in the block lies apart, within it; what is not fits the arena."""
    buffers = buffer_lifetimes(problem, sequence)
    outside = [b for b in buffers if b.values[0] not in placement.offsets]
    for b in buffers:
        assert len({placement.offsets.get(value) for value in b.values}) == 1, "what is written in place has one place"
        if b.bytes <= SMALL_BYTES or b.last == len(sequence):
            assert b in outside
    for step in range(len(sequence)):
        inside = sorted((placement.offsets[b.values[0]], rounded(b.bytes)) for b in buffers if b not in outside and b.first <= step <= b.last)
        ends = [0, *(offset + size for offset, size in inside)]
        assert all(end <= offset for end, (offset, _) in zip(ends, inside, strict=False)) and ends[-1] <= placement.block_bytes
    arena_alone = place_buffers(outside, scratch_of(problem, sequence), capacity)
    assert (arena_alone.arena_bytes, arena_alone.pen_bytes) == (placement.arena_bytes, placement.pen_bytes)
    assert placement.arena_bytes <= capacity


@pytest.mark.parametrize("seed", range(8))
def test_buffers_lie_apart(seed: int) -> None:
    problem, sequence = _scaled(seed, 16)
    placement, capacity = place_fixed(problem, sequence, lambda fill: fill, seconds=0.2, seed=seed)
    _checked(problem, sequence, placement, capacity)
    assert placement.live_bytes == place(problem, sequence, UNLIMITED).live_bytes
    assert placement.offsets


def test_without_a_compiled_search_offsets_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxremat.placement.offsets.compiled", lambda: None)
    problem, sequence = _scaled(3, 16)
    placement, capacity = place_fixed(problem, sequence, lambda fill: fill, seconds=0.2)
    _checked(problem, sequence, placement, capacity)


def _holed() -> Problem:
    """Best-fit puts c where a was, and d behind b, since it is larger than what is left there; the last op has scratch."""
    sizes = {"x": 1, "a": 12, "b": 1, "c": 4, "d": 9, "e": 1}
    tensors = tuple(Tensor(n, s * BIG, i - 1, output=n == "e") for i, (n, s) in enumerate(sizes.items()))
    ops = (
        Op("a", 1, (0,), (1,)),
        Op("b", 1, (0, 1), (2,)),
        Op("c", 1, (0, 2), (3,)),
        Op("d", 1, (2, 3), (4,)),
        Op("e", 1, (3, 4), (5,), pinned="output", workspace_bytes=BIG),
    )
    problem = Problem("holed", ops, tensors, {"batch": 1})
    problem.check()
    return problem


def test_fixed_offsets_need_what_is_alive() -> None:
    problem = _holed()
    best_fit = place(problem, range(5), UNLIMITED)
    placement, capacity = place_fixed(problem, range(5), lambda fill: fill, seconds=0.5)
    _checked(problem, list(range(5)), placement, capacity)
    small = best_fit.pen_bytes + 256
    assert best_fit.arena_bytes == small + 22 * BIG
    assert placement.block_bytes + placement.arena_bytes == small + 15 * BIG  # c, d, e and scratch


def test_scratch_is_shared_with_guests() -> None:
    """An arena for scratch lies idle at other steps: what lives then goes there."""
    sizes = [1, 10, 10, 10, 1]
    tensors = tuple(Tensor(f"t{i}", s * BIG, i - 1, output=i == 4) for i, s in enumerate(sizes))
    ops = tuple(Op(f"o{i}", 1, (i,), (i + 1,), pinned="output" if i == 3 else "", workspace_bytes=20 * BIG if i == 3 else 0) for i in range(4))
    problem = Problem("guests", ops, tensors, {"batch": 1})
    placement, capacity = place_fixed(problem, range(4), lambda fill: fill, seconds=0.5)
    _checked(problem, list(range(4)), placement, capacity)
    assert placement.block_bytes == 10 * BIG  # t3, which lives beside the scratch
    assert 20 * BIG <= placement.arena_bytes < 22 * BIG


def _no_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fit, schedule):
        monkeypatch.setattr(module, "OPTIMIZER_BYTES", 0)
        monkeypatch.setattr(module, "slack", lambda fill: 0)


def test_only_where_the_arena_alone_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _holed()
    alone = schedule_unscheduled(problem)
    enough = needed_budget(problem, alone.arena_bytes)
    search = Search("keep_all", 5.0, fixed=True)
    assert schedule.schedule(problem, enough, search).placement.block_bytes == 0
    _no_slack(monkeypatch)
    wanted = needed_budget(problem, alone.placement.live_bytes + BIG // 2)
    with pytest.raises(schedule.BudgetInfeasible):
        schedule.schedule(problem, wanted, Search("keep_all", 5.0))
    found = schedule.schedule(problem, wanted, search)
    assert found.placement.block_bytes > 0
    assert found.peak_bytes <= found.plan.budget_bytes == wanted
    held = problem.resident_bytes + found.placement.block_bytes + found.arena_bytes + bookkeeping_bytes(found.arena_bytes)
    assert held <= wanted, "block and capacity are a hard limit"
    assert found.plan.peak_bytes == evaluate(problem, range(5)).peak_bytes


def test_swaps_where_the_arena_alone_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a is away, no order of a chain lets best-fit use its place: d is larger than what c leaves there, or c lives beside a."""
    sizes = {"x": 1, "a": 12, "b": 1, "c": 4, "d": 9, "e": 1, "z": 1}
    tensors = tuple(Tensor(n, s * BIG, i - 1, output=n == "z") for i, (n, s) in enumerate(sizes.items()))
    reads = [(0,), (0, 1), (0, 2), (2, 3), (3, 4), (1, 5)]
    ops = tuple(Op("abcdez"[i], 1, inputs, (i + 1,), pinned="output" if i == 5 else "") for i, inputs in enumerate(reads))
    problem = Problem("holed", ops, tensors, {"batch": 1}, transfer=Transfer(BIG, BIG, 1 << 40))
    problem.check()
    _no_slack(monkeypatch)
    # All that is alive while a is away, or while it is back: b, c and d; a, e and z.
    wanted = needed_budget(problem, place(problem, [0], UNLIMITED).pen_bytes + 256 + 15 * BIG)
    with pytest.raises(schedule.BudgetInfeasible):
        schedule.schedule(problem, wanted, Search("swap_only", 5.0))
    found = schedule.schedule(problem, wanted, Search("swap_only", 5.0, fixed=True))
    form = schedule.lowered(problem, found.plan)
    _checked(form.problem, list(form.sequence), found.placement, found.arena_bytes)
    assert (found.plan.swapped_tensors, found.plan.recomputed_ops) == (1, 0)
    assert found.placement.block_bytes > 0 and found.peak_bytes <= wanted


# An artifact.


#: How memory is saved -> options of ``compile``, and what the names of tensors made again have in them.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "recompute": ({"activation_budget": "70%"}, "@"),
    "swap": ({"activation_budget": "70%", "swap": "disk", "swap_bandwidth": "1GiB/s", "strategy": "swap_only"}, ":back"),
}


@pytest.fixture(scope="module", params=WAYS)
def fixed_artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    """The tiny CNN at 70 % of its activations, as if no arena alone were small enough; verified when compiled."""
    really = fit._fit_arena

    def never_within(problem: Problem, plan: Plan, budget: int, portable: bool = False) -> Any:
        return really(problem, plan, budget) if budget == UNLIMITED else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "_fit_arena", never_within)
        yield compile_model(
            "tests.factories:tiny_cnn",
            tmp_path_factory.mktemp("artifacts") / "fixed",
            inputs=[CNN_INPUT],
            labels=[CNN_LABEL],
            loss="cross_entropy",
            costs="analytic",
            threads=1,
            time_limit=6,
            work_limit=30_000,
            **WAYS[request.param][0],
        )


def test_what_the_artifact_says(fixed_artifact: Artifact, request: pytest.FixtureRequest) -> None:
    memory, checked = (fixed_artifact.manifest[key] for key in ("memory", "verification"))
    offsets = json.loads(fixed_artifact.file(OFFSETS).read_text(encoding="utf-8"))
    way = request.node.callspec.params["fixed_artifact"]
    again = fixed_artifact.plan.recomputed_ops if way == "recompute" else fixed_artifact.plan.swapped_tensors
    assert again > 0 and any(WAYS[way][1] in name for name in offsets), "nothing made again has a place"
    assert memory["allocator"] == checked["allocator"] == "fixed offsets"
    assert checked["bitwise_equal"] and checked["passed"] and checked["within_budget"]
    assert abs(checked["peak_measured_bytes"] - memory["peak_predicted_bytes"]) <= max(0.02 * memory["peak_predicted_bytes"], 4 * 2**20)
    capacity = memory["arena_bytes"]
    assert memory["block_bytes"] + capacity + bookkeeping_bytes(capacity) + memory["resident_bytes"] <= memory["budget_bytes"]
    # Other users have an arena alone, which holds the whole step.
    whole = fixed_artifact.manifest["arena"]["max_mem"]
    form = schedule.lowered(fixed_artifact.problem, fixed_artifact.plan)
    assert place(form.problem, form.sequence, whole).arena_bytes <= whole
    assert min(memory["peak_arena_alone_bytes"], memory["peak_predicted_bytes"]) > memory["peak_live_bytes"]
    assert fixed_artifact.allocator.startswith("fixed offsets in")
    assert "fixed offsets in" in fixed_artifact.file("report.html").read_text(encoding="utf-8")


def test_training_in_the_block_is_that_in_an_arena(fixed_artifact: Artifact) -> None:
    free = Trainer(fixed_artifact, threads=1, capped=False, seed=5)
    size = fixed_artifact.manifest["memory"]["arena_bytes"]
    found = worker.call("tests.fixed_jobs:train_job", artifact=str(fixed_artifact.path), arena_bytes=size, steps=2)
    assert found == losses_of(free, 2)


def test_the_arena_beside_the_block_is_a_hard_limit(fixed_artifact: Artifact) -> None:
    with pytest.raises(OutOfBudget, match="exceeds the memory"):
        worker.call("tests.fixed_jobs:train_job", artifact=str(fixed_artifact.path), arena_bytes=2**20, steps=1)


def _fixed_run(artifact: Artifact, model: bytes) -> tuple[BoundSession, Block, dict[str, Any]]:
    memory = Block.of(artifact)
    assert memory is not None
    bound = fixed_session(model, memory, Options(threads=1))
    arrays = sample_arrays(bound.session, np.random.default_rng(0))
    bound.bind(arrays)
    return bound, memory, arrays


def test_steps_in_two_threads_have_a_block_each(fixed_artifact: Artifact) -> None:
    model = with_random_seeds(fixed_artifact.file(TRAINING), 1)
    plain = BoundSession(make_session(model, Options(threads=1)))
    expected = sample_arrays(plain.session, np.random.default_rng(0))
    plain.bind(expected)
    plain.run()
    runs = [_fixed_run(fixed_artifact, model) for _ in range(2)]
    threads = [threading.Thread(target=bound.run) for bound, _, _ in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, _, arrays in runs:
        assert all(np.array_equal(arrays[name], expected[name]) for name in expected)


def test_nothing_runs_in_another_order(fixed_artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors share memory by the order: a runtime that has another one is refused, not run."""
    memory = Block.of(fixed_artifact)
    assert memory is not None
    really = block.session_with_partition

    def swapped(model: bytes, options: Options) -> tuple[Any, dict[str, Any]]:
        session, partition = really(model, options)
        (order,) = partition["streams"]
        return session, {"streams": [order[::-1]]}

    monkeypatch.setattr(block, "session_with_partition", swapped)
    with pytest.raises(ArtifactError, match="another order"):
        fixed_session(fixed_artifact.file(TRAINING), memory, Options(threads=1))


def test_offsets_that_are_not_the_models_are_refused(fixed_artifact: Artifact) -> None:
    model = fixed_artifact.file(TRAINING)
    offsets = json.loads(fixed_artifact.file(OFFSETS).read_text(encoding="utf-8"))
    name, nbytes = next(iter(offsets)), fixed_artifact.manifest["memory"]["block_bytes"]
    with pytest.raises(ArtifactError, match="has no 'nothing'"):
        fixed_session(model, Block(nbytes, offsets | {"nothing": 0}), Options(threads=1))
    with pytest.raises(ArtifactError, match="does not lie within its block"):
        fixed_session(model, Block(nbytes, offsets | {name: nbytes}), Options(threads=1))


def test_a_changed_offset_is_noticed(fixed_artifact: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(fixed_artifact.path, copy)
    offsets = json.loads((copy / OFFSETS).read_text(encoding="utf-8"))
    (copy / OFFSETS).write_text(json.dumps(dict.fromkeys(offsets, 0)), encoding="utf-8")
    with pytest.raises(ArtifactError, match="its hash differs"):
        Artifact.load(copy)


def test_memory_of_a_block_is_given_back() -> None:
    from onnxremat.runtime.memory import resident_bytes

    size = 64 * 2**20
    memory = Block(size, {})
    before = resident_bytes()
    np.frombuffer(memory._memory, np.uint8)[:] = 1
    assert resident_bytes() - before > 0.9 * size
    memory.give_back()
    assert resident_bytes() - before < 0.1 * size
