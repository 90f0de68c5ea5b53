"""The simulated arena: its invariants, the lifetimes it is given, and the real arena of the runtime beside it."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxremat import Artifact
from onnxremat.emit import SMALL_BYTES
from onnxremat.errors import OutOfBudget
from onnxremat.fit import fit_arena_alone
from onnxremat.placement import (
    GRANULE,
    UNLIMITED,
    ArenaExhausted,
    BestFitArena,
    bookkeeping_bytes,
    buffer_lifetimes,
    capacity_within,
    compact,
    place,
    rounded,
)
from onnxremat.placement.compaction import compiled, native_moves, twin_moves
from onnxremat.runtime import worker
from onnxremat.scheduler import Op, PlanError, Problem, Tensor, evaluate

from .scheduler.graphs import random_problem

BIG = SMALL_BYTES * 2


class _Cells:
    """Best fit by brute force: one flag a granule."""

    def __init__(self, granules: int) -> None:
        self.used = [False] * granules
        self.blocks: dict[int, int] = {}
        self.high_water = 0

    def holes(self) -> list[tuple[int, int]]:
        found, start = [], None
        for at, used in enumerate([*self.used, True]):
            if not used and start is None:
                start = at
            elif used and start is not None:
                found.append((at - start, start))
                start = None
        return found

    def allocate(self, size: int) -> int:
        granules = max(1, -(-size // GRANULE))
        fitting = sorted(hole for hole in self.holes() if hole[0] >= granules)
        if not fitting:
            raise ArenaExhausted("full")
        start = fitting[0][1]
        self.used[start : start + granules] = [True] * granules
        self.blocks[start] = granules
        self.high_water = max(self.high_water, (start + granules) * GRANULE)
        return start * GRANULE

    def release(self, offset: int) -> None:
        start = offset // GRANULE
        granules = self.blocks.pop(start)
        self.used[start : start + granules] = [False] * granules


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * GRANULE), st.integers(0, 50)), max_size=60), st.integers(4, 40))
def test_arena_is_best_fit_with_coalescing(actions: list[tuple[bool, int, int]], granules: int) -> None:
    arena, cells = BestFitArena(granules * GRANULE), _Cells(granules)
    blocks: dict[int, int] = {}
    for take, size, which in actions:
        if take:
            try:
                expected = cells.allocate(size)
            except ArenaExhausted:
                with pytest.raises(ArenaExhausted):
                    arena.allocate(size)
                continue
            offset = arena.allocate(size)
            assert offset == expected
            end = offset + rounded(size)
            assert end <= arena.capacity
            assert all(end <= other or other + length <= offset for other, length in blocks.items()), "blocks overlap"
            blocks[offset] = rounded(size)
        elif blocks:
            offset = sorted(blocks)[which % len(blocks)]
            del blocks[offset]
            arena.release(offset)
            cells.release(offset)
    assert arena.high_water == cells.high_water
    for offset in sorted(blocks):
        arena.release(offset)
    assert arena.allocate(granules * GRANULE) == 0, "all is one block again when all is free"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**10))
def test_the_largest_capacity_within_a_room(room: int) -> None:
    capacity = capacity_within(room)
    assert capacity % GRANULE == 0
    assert capacity + bookkeeping_bytes(capacity) <= max(room, 0)
    larger = capacity + GRANULE
    assert larger + bookkeeping_bytes(larger) > room


def _scaled(seed: int, ops: int) -> tuple[Problem, list[int]]:
    """A random problem with buffers of sizes to both sides of the pen's bound, and its base order with some recomputes."""
    chance = random.Random(seed)
    problem = random_problem(chance, ops)
    tensors = tuple(Tensor(t.name, chance.choice([100, 5000, BIG, 3 * BIG]), t.producer, t.alias_of, t.output) for t in problem.tensors)
    # Of some the scratch is two blocks that come first.
    branching = [replace(op, op_type="Where", workspace_bytes=chance.choice([0, 200, 2 * BIG])) for op in problem.ops]
    kinds = tuple(chance.choice(pair) for pair in zip(problem.ops, problem.ops, branching, strict=True))
    problem = Problem(problem.name, kinds, tensors, problem.resident)
    sequence: list[int] = []
    for op in range(len(problem.ops)):
        again = [o for o in sequence if not problem.ops[o].pinned and not problem.ops[o].writes]
        if again and chance.random() < 0.3:
            sequence.append(chance.choice(again))
            try:
                evaluate(problem, [*sequence, *range(op, len(problem.ops))])
            except PlanError:
                sequence.pop()
        sequence.append(op)
    evaluate(problem, sequence)
    return problem, sequence


def _brute_force(problem: Problem, sequence: list[int]) -> tuple[int, int]:
    """Arena and live bytes, step by step on cells."""
    buffers = buffer_lifetimes(problem, sequence)
    small = [b for b in buffers if b.bytes <= SMALL_BYTES]
    alive = [sum(rounded(b.bytes) for b in small if b.first <= s <= b.last) for s in range(len(sequence))]
    most = max(alive, default=0)
    pen = rounded(most + most // 10)
    total = sum(rounded(b.bytes) for b in buffers) + sum(rounded(o.workspace_bytes) for o in problem.ops) + pen
    cells = _Cells(4 * total // GRANULE + 8)
    block = cells.allocate(pen)
    cells.allocate(GRANULE)
    cells.release(block)
    offsets: dict[int, int] = {}
    peak = pen + GRANULE
    for step, op in enumerate(sequence):
        scratch = problem.ops[op].workspace_bytes
        branches = [cells.allocate(scratch // 2) for _ in range(2) if scratch and problem.ops[op].op_type == "Where"]
        for number, b in enumerate(buffers):
            if b.first == step:
                offsets[number] = cells.allocate(b.bytes)
        if scratch and not branches:
            branches = [cells.allocate(scratch)]
        for branch in branches:
            cells.release(branch)
        held = sum(rounded(b.bytes) for b in buffers if b.first <= step <= b.last)
        peak = max(peak, held + GRANULE + (rounded(scratch) if scratch else 0))
        for number, b in enumerate(buffers):
            if b.last == step:
                cells.release(offsets[number])
    return cells.high_water, peak


@pytest.mark.parametrize("seed", range(12))
def test_place_equals_brute_force(seed: int) -> None:
    problem, sequence = _scaled(seed, 14)
    placement = place(problem, sequence, UNLIMITED)
    assert (placement.arena_bytes, placement.live_bytes) == _brute_force(problem, sequence)
    assert place(problem, sequence, placement.arena_bytes + 1024 * BIG).live_bytes == placement.live_bytes
    with pytest.raises(ArenaExhausted):
        place(problem, sequence, placement.live_bytes - GRANULE)


@pytest.mark.parametrize("seed", range(3))
def test_compact_keeps_the_runs_and_the_promises(seed: int) -> None:
    problem, sequence = _scaled(100 + seed, 12)
    limit = evaluate(problem, sequence).peak_bytes
    moved = compact(problem, sequence, limit, 0, 60, seed=3, moves=1000)
    assert sorted(moved) == sorted(sequence)
    assert evaluate(problem, moved).peak_bytes <= limit
    assert place(problem, moved, UNLIMITED).arena_bytes <= place(problem, sequence, UNLIMITED).arena_bytes
    assert moved == compact(problem, sequence, limit, 0, 60, seed=3, moves=1000), "the same seed gives the same sequence"
    assert compact(problem, sequence, limit, UNLIMITED, 60) == sequence, "nothing moves where it fits"


def test_the_inner_loop_is_compiled_where_a_compiler_is() -> None:
    assert compiled() is not None or shutil.which("cc") is None


@pytest.mark.skipif(compiled() is None, reason="no compiled inner loop")
@pytest.mark.parametrize("slack", [0, 20])
@pytest.mark.parametrize("seed", range(12))
def test_the_compiled_loop_makes_the_moves_of_its_twin(seed: int, slack: int) -> None:
    problem, sequence = _scaled(seed, 14)
    limit = evaluate(problem, sequence).peak_bytes * (100 + slack) // 100
    library = compiled()
    assert library is not None
    found = native_moves(library, problem, limit, 0)(sequence, 400, seed)
    assert found == twin_moves(problem, limit, 0)(sequence, 400, seed)
    assert found[1] == place(problem, found[0], UNLIMITED).arena_bytes
    assert found[0] != sequence, "no move was accepted"


@pytest.mark.parametrize("seed", range(6))
def test_moves_that_fit_an_arena_of_a_given_capacity(seed: int) -> None:
    """Best-fit places buffers otherwise where the region ends: what is found must fit the very arena that it is for."""
    problem, sequence = _scaled(seed, 14)
    limit = evaluate(problem, sequence).peak_bytes
    live, wanted = (getattr(place(problem, sequence, UNLIMITED), name) for name in ("live_bytes", "arena_bytes"))
    for capacity in (live, (live + wanted) // 2 // GRANULE * GRANULE, wanted):
        found = twin_moves(problem, limit, capacity, capacity)(sequence, 100, seed)
        assert found[1] == place(problem, found[0], capacity, overflow=True).arena_bytes
        library = compiled()
        if library is not None:
            assert native_moves(library, problem, limit, capacity, capacity)(sequence, 100, seed) == found
        if found[1] <= capacity:
            assert place(problem, found[0], capacity).arena_bytes == found[1]
        else:
            assert found[1] > capacity + GRANULE
            with pytest.raises(ArenaExhausted):
                place(problem, found[0], capacity)


def test_without_a_compiled_loop_the_result_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, sequence = _scaled(5, 12)
    limit = evaluate(problem, sequence).peak_bytes
    moved = compact(problem, sequence, limit, 0, 60, moves=150)
    monkeypatch.setattr("onnxremat.placement.compaction.compiled", lambda: None)
    assert compact(problem, sequence, limit, 0, 60, moves=150) == moved


def _chain(*tensors: Tensor, ops: list[Op]) -> Problem:
    problem = Problem("case", tuple(ops), tensors, {"batch": 1})
    problem.check()
    return problem


def _spans(problem: Problem) -> list[tuple[int, int]]:
    return [(b.first, b.last) for b in buffer_lifetimes(problem, range(len(problem.ops)))]


def test_views_extend_their_base() -> None:
    tensors = (Tensor("x", BIG, -1), Tensor("a", BIG, 0), Tensor("v", BIG, 1, alias_of=1), Tensor("b", BIG, 2), Tensor("c", BIG, 3))
    ops = [
        Op("a", 1, (0,), (1,)),
        Op("v", 1, (1,), (2,)),
        Op("b", 1, (0,), (3,)),
        Op("c", 1, (2, 3), (4,)),
        Op("end", 1, (4,), (), pinned="output"),
    ]
    assert _spans(_chain(*tensors, ops=ops)) == [(0, 3), (2, 3), (3, 4)]


def test_in_place_chains_are_one_buffer() -> None:
    tensors = (Tensor("x", BIG, -1), *(Tensor(f"t{i}", BIG, i) for i in range(4)))
    ops = [Op("a", 1, (0,), (1,)), *(Op(f"r{i}", 1, (i,), (i + 1,), inplace=((i, i + 1),)) for i in (1, 2, 3))]
    ops.append(Op("end", 1, (4,), (), pinned="output"))
    assert _spans(_chain(*tensors, ops=ops)) == [(0, 4)]


def test_in_place_needs_the_last_read_and_an_own_buffer() -> None:
    tensors = (Tensor("x", BIG, -1), Tensor("a", BIG, 0), Tensor("b", BIG, 1), Tensor("c", BIG, 2))
    ops = [
        Op("a", 1, (0,), (1,)),
        Op("b", 1, (1,), (2,), inplace=((1, 2),)),
        Op("c", 1, (1, 2), (3,)),  # reads a again, so b had to have a buffer of its own
        Op("end", 1, (3,), (), pinned="output"),
    ]
    assert _spans(_chain(*tensors, ops=ops)) == [(0, 2), (1, 2), (2, 3)]
    persistent = (Tensor("x", BIG, -1), Tensor("a", BIG, 0))
    fed = [Op("a", 1, (0,), (1,), inplace=((0, 1),)), Op("end", 1, (1,), (), pinned="output")]
    assert _spans(_chain(*persistent, ops=fed)) == [(0, 1)], "what the caller feeds is never taken over"


def test_unread_outputs() -> None:
    """A small one stays to the end, a large one is freed at once, an optional one is not made."""
    tensors = (
        *(Tensor("x", BIG, -1), Tensor("y", BIG, 0), Tensor("large", BIG, 0), Tensor("small", 512, 0)),
        *(Tensor("pooled", BIG, 1), Tensor("indices", BIG, 1), Tensor("z", BIG, 2, output=True)),
    )
    ops = [
        Op("y", 1, (0,), (1, 2, 3), op_type="Split"),
        Op("pool", 1, (1,), (4, 5), op_type="MaxPool"),
        Op("z", 1, (4,), (6,), pinned="output"),
    ]
    buffers = buffer_lifetimes(_chain(*tensors, ops=ops), range(3))
    assert [(b.first, b.last, b.bytes) for b in buffers] == [(0, 1, BIG), (0, 0, BIG), (0, 3, 512), (1, 2, BIG), (2, 3, BIG)]


def test_small_buffers_live_in_the_pen() -> None:
    """Without a pen the small buffer that stays would split the hole that the large ones leave."""
    tensors = (
        *(Tensor("x", BIG, -1), Tensor("a", BIG, 0), Tensor("s", GRANULE, 1, output=True)),
        *(Tensor("b", BIG, 2), Tensor("c", 2 * BIG, 3), Tensor("d", BIG, 4, output=True)),
    )
    ops = [
        Op("a", 1, (0,), (1,)),
        Op("s", 1, (1,), (2,), pinned="output"),
        Op("b", 1, (1,), (3,)),
        Op("c", 1, (0,), (4,)),
        Op("d", 1, (3, 4), (5,), pinned="output"),
    ]
    placement = place(_chain(*tensors, ops=ops), range(5), UNLIMITED)
    assert placement.pen_bytes == 2 * GRANULE  # a tenth more, rounded up
    assert placement.arena_bytes == placement.pen_bytes + GRANULE + 4 * BIG  # d moves into the hole of a
    assert placement.fragmentation == pytest.approx(placement.arena_bytes / placement.live_bytes - 1)


# The real arena.


def arena_job(artifact: str, arena_bytes: int, threads: int) -> float:
    """In a worker: one step of an artifact in an arena of this size."""
    from onnxremat.runtime import arena
    from onnxremat.runtime.trainer import Trainer

    arena.register(arena_bytes)
    found = Artifact.load(artifact)
    trainer = Trainer(found, threads=threads, capped=False)
    rng = np.random.default_rng(0)
    return trainer.train_step({s.name: s.sample(rng) for s in (*found.inputs, *found.labels)})


def test_the_measured_peak_is_the_predicted_one(cnn_artifact: Artifact, momentum_artifact: Artifact) -> None:
    for artifact in (cnn_artifact, momentum_artifact):
        memory = artifact.manifest["memory"]
        found = worker.call("onnxremat.runtime.run:measure_job", artifact=str(artifact.path), steps=3, threads=1)
        peak = found["peak_measured_bytes"]
        assert peak <= memory["budget_bytes"]
        assert abs(peak - memory["peak_predicted_bytes"]) <= max(0.02 * memory["peak_predicted_bytes"], 4 * 2**20)
        assert peak > memory["resident_bytes"] + 10 * 2**20, "the activations were not measured"
        assert len(found["losses"]) == len(found["step_seconds"]) == 3 and found["providers"] == ["CPUExecutionProvider"]
        assert memory["budget_bytes"] < memory["peak_unscheduled_bytes"]


def test_the_unscheduled_step_does_not_fit_the_plans_arena(cnn_artifact: Artifact) -> None:
    with pytest.raises(OutOfBudget, match="exceeds the memory"):
        worker.call("onnxremat.runtime.run:measure_job", artifact=str(cnn_artifact.path), steps=1, threads=1, scheduled=False)


def test_an_arena_smaller_than_what_is_alive_ends_in_one_line(cnn_artifact: Artifact) -> None:
    placement = place(cnn_artifact.problem, cnn_artifact.plan.sequence, UNLIMITED)
    job = "tests.test_placement:arena_job"
    alone = fit_arena_alone(cnn_artifact.problem, cnn_artifact.plan)  # the artifact itself may have fixed offsets
    whole = worker.call(job, artifact=str(cnn_artifact.path), arena_bytes=alone.arena_bytes, threads=1)
    assert 0 < whole < 10
    with pytest.raises(OutOfBudget) as failed:
        worker.call(job, artifact=str(cnn_artifact.path), arena_bytes=placement.live_bytes - 2**20, threads=1)
    message = str(failed.value)
    assert "\n" not in message and "bytes were asked for in '" in message and "compile for a larger budget" in message


def chain_job(model: str, capacity: int) -> str:
    """In a worker: run a model in an arena of exactly this capacity."""
    from onnxremat.runtime import arena
    from onnxremat.runtime.session import BoundSession, make_session, sample_arrays

    arena.register(capacity)
    session = make_session(model)
    bound = BoundSession(session)
    bound.bind(sample_arrays(session, np.random.default_rng(0)))
    try:
        bound.run()
        bound.run()
    except OutOfBudget as error:
        return str(error)
    return "ok"


def _runs_in_no_less(model: Path, problem: Problem) -> int:
    """Bytes of the arena that a model without small buffers is predicted to take; it runs in that, and not in one granule less."""
    placement = place(problem, range(len(problem.ops)), UNLIMITED)
    # The model has no pen; the place for it is not needed.
    wanted = placement.arena_bytes - placement.pen_bytes - GRANULE
    assert worker.call("tests.test_placement:chain_job", model=str(model), capacity=wanted) == "ok"
    refused = worker.call("tests.test_placement:chain_job", model=str(model), capacity=wanted - GRANULE)
    assert " bytes were asked for" in refused
    return wanted


def test_scratch_that_comes_before_the_output(tmp_path: Path) -> None:
    """Where makes what each branch gives first: a hole as large as its output is taken by a branch, and the output lies behind both."""
    size = [1 << 18]
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Exp", ["a"], ["b"]),  # leaves a hole before b
        helper.make_node("Where", ["c", "b", "x"], ["y"]),
        helper.make_node("Concat", ["y", "b"], ["z"], axis=0),
    ]
    info = [helper.make_tensor_value_info(n, kind, size) for n, kind in (("c", TensorProto.BOOL), ("x", TensorProto.FLOAT))]
    info.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2 * size[0]]))
    model = helper.make_model(helper.make_graph(nodes, "g", info[:2], info[2:]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(tmp_path / "m.onnx"))
    mega = 1 << 20
    made = [Tensor(n, size, i, output=n == "z") for i, (n, size) in enumerate({"a": mega, "b": mega, "y": mega, "z": 2 * mega}.items())]
    tensors = (Tensor("c", mega // 4, -1), Tensor("x", mega, -1), *made)
    kinds = [("Neg", (1,), 0), ("Exp", (2,), 0), ("Where", (0, 3, 1), 2 * mega), ("Concat", (4, 3), 0)]
    ops = [
        Op(f"o{i}", 1, reads, (i + 2,), workspace_bytes=scratch, op_type=kind, pinned="output" if i == 3 else "")
        for i, (kind, reads, scratch) in enumerate(kinds)
    ]
    # One branch is in the hole, then come b, the other branch and y, and z behind them; scratch after y would leave y in the hole.
    assert _runs_in_no_less(tmp_path / "m.onnx", _chain(*tensors, ops=ops)) == 6 * mega


def test_the_predicted_capacity_is_exact(tmp_path: Path) -> None:
    """A residual chain without small buffers."""
    names = [f"t{i}" for i in range(7)]
    nodes = [helper.make_node("Neg", ["x"], ["t0"])]
    nodes += [helper.make_node("Exp" if i % 2 else "Neg", [names[i - 1]], [names[i]], name=names[i]) for i in range(1, 5)]
    nodes += [helper.make_node("Add", ["t0", "t4"], ["t5"]), helper.make_node("Add", ["t5", "t2"], ["t6"])]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1 << 18]) for n in ("x", "t6")]
    model = helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, str(tmp_path / "m.onnx"))
    reads = {0: (0,), 1: (1,), 2: (2,), 3: (3,), 4: (4,), 5: (1, 5), 6: (6, 3)}
    ops = [Op(f"o{i}", 1, reads[i], (i + 1,), pinned="output" if i == 6 else "") for i in range(7)]
    tensors = (Tensor("x", 1 << 20, -1), *(Tensor(n, 1 << 20, i, output=i == 6) for i, n in enumerate(names)))
    problem = _chain(*tensors, ops=ops)
    _runs_in_no_less(tmp_path / "m.onnx", problem)
