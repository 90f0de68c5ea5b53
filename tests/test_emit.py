"""What becomes of a plan: the same numbers, the plan's order, and no value overwritten before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxremat
from onnxremat import Artifact, Optimizer
from onnxremat.artifact import TRAINING, UNSCHEDULED
from onnxremat.costs import analytic_costs
from onnxremat.emit import CLONE_OF, emit
from onnxremat.errors import OnnxRematError
from onnxremat.exporters import InputSpec, Loss, load_source
from onnxremat.placement import UNLIMITED, place
from onnxremat.problem import scheduling_problem
from onnxremat.runtime.ort import onnxruntime
from onnxremat.runtime.session import Options, execution_order, run_profiled, sample_arrays, with_random_seeds
from onnxremat.scheduler import Infeasible, Plan, PlanError, Problem, Step, Transfer, evaluate, plan_from_sequence, solve
from onnxremat.training_graph import GRADIENT_BUFFER, LAZY_RESET, PHASE, TrainingGraph, build_training_graph

from .factories import batch_of

SOURCES: dict[str, tuple[str, list[str], list[str], Optimizer]] = {
    "cnn": ("tests.factories:tiny_cnn", ["x=4x3x16x16"], ["labels=4:int64:5"], Optimizer()),
    "gpt2": ("tests.factories:tiny_gpt2", ["input_ids=2x32:int64:64"], ["labels=2x32:int64:64"], Optimizer()),
    "momentum": (
        *("tests.factories:tiny_cnn", ["x=4x3x16x16"], ["labels=4:int64:5"]),
        Optimizer("sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01),
    ),
}


@pytest.fixture(scope="module")
def steps() -> dict[str, tuple[TrainingGraph, Problem]]:
    """Each source as a training graph with its problem."""
    made = {}
    for name, (source, inputs, labels, optimizer) in SOURCES.items():
        forward = load_source(source, tuple(map(InputSpec.parse, inputs)), tuple(map(InputSpec.parse, labels)), Loss.of("cross_entropy"), seed=0)
        training = build_training_graph(forward, optimizer)
        made[name] = (training, scheduling_problem(training.graph, analytic_costs(training.graph), training.resident(), name))
    return made


def _eager_plan(problem: Problem) -> Plan:
    """A recompute of everything that may be recomputed, right before it is read in the backward phase: the hardest case."""
    sequence: list[int] = []
    producer = [t.producer for t in problem.tensors]

    def repeatable(op: int) -> bool:
        spec = problem.ops[op]
        return op in sequence and not spec.pinned and not spec.writes and spec.phase == "forward"

    for op, spec in enumerate(problem.ops):
        if spec.phase != "forward":
            for tensor in spec.inputs:
                made = producer[tensor]
                if made >= 0 and repeatable(made):
                    trial = [*sequence, made, *range(op, len(problem.ops))]
                    try:
                        evaluate(problem, trial)
                    except PlanError:
                        continue
                    sequence.append(made)
        sequence.append(op)
    return plan_from_sequence(problem, sequence, UNLIMITED)


def _plans(problem: Problem) -> Iterator[Plan]:
    base = evaluate(problem, range(len(problem.ops))).peak_bytes
    for share in (0.85, 0.7):
        budget = problem.resident_bytes + int(share * (base - problem.resident_bytes))
        try:
            yield solve(problem, budget, time_limit=2, seed=0, bound_seconds=0)
        except Infeasible as error:
            yield solve(problem, error.minimum_budget_bytes, time_limit=2, seed=0, bound_seconds=0)
    yield _eager_plan(problem)


def _feeds(training: TrainingGraph, graph: ir.Graph) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    batch = {s.name: s.sample(rng) for s in (*training.inputs, *training.labels)}
    feeds: dict[str, Any] = {}
    for value in graph.inputs:
        name = str(value.name)
        assert value.shape is not None and value.dtype is not None
        if name in batch:
            feeds[name] = batch[name]
        elif name in training.weights:
            feeds[name] = training.weights[name].astype(value.dtype.numpy()).copy()
        elif name == LAZY_RESET:
            feeds[name] = np.asarray([True])
        elif name == "learning_rate":
            feeds[name] = np.asarray([0.1], np.float32)
        else:
            feeds[name] = np.zeros(value.shape.numpy(), value.dtype.numpy())
    return feeds


def _run(model: ir.Model, training: TrainingGraph, tmp_path: Path, count: int = 2, defaults: bool = False) -> dict[str, Any]:
    """Two steps with seeded dropout: loss and everything that the graph wrote over its inputs."""
    ir.save(model, tmp_path / "m.onnx")
    seeded = with_random_seeds(tmp_path / "m.onnx", 3)
    feeds = _feeds(training, model.graph)
    losses = []
    if defaults:
        ort = onnxruntime()
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        session = ort.InferenceSession(seeded, settings, providers=["CPUExecutionProvider"])
    else:
        from onnxremat.runtime.session import make_session

        session = make_session(seeded, Options(threads=1))
    from onnxremat.runtime.session import BoundSession

    bound = BoundSession(session)
    bound.bind(feeds)
    for _ in range(count):
        losses.append(bound.run()[0].copy())
        for name in feeds:
            if name.endswith(GRADIENT_BUFFER):
                feeds[name.removesuffix(GRADIENT_BUFFER)] -= np.float32(0.1) * feeds[name]
    return {"loss": np.stack(losses), **{n: a for n, a in feeds.items() if n not in ("learning_rate", LAZY_RESET)}}


@pytest.mark.parametrize("name", ["cnn", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("momentum", marks=pytest.mark.slow)])
def test_every_schedule_gives_the_same_bits(name: str, steps: dict[str, tuple[TrainingGraph, Problem]], tmp_path: Path) -> None:
    training, problem = steps[name]
    reference = _run(training.model, training, tmp_path)
    start = _feeds(training, training.graph)
    changed = [n for n in training.state if not np.array_equal(reference[n], start[n])]
    assert changed == list(training.state), "running statistics moved"
    clones = 0
    for plan in _plans(problem):
        placement = place(problem, plan.sequence, UNLIMITED)
        emitted = emit(training.model, problem, plan, placement.pen_bytes)
        clones += len(emitted.clones)
        found = _run(emitted.model, training, tmp_path)
        different = [n for n, a in reference.items() if a.tobytes() != found[n].tobytes()]
        assert different == []
    assert clones > 20


@pytest.mark.parametrize("name", list(SOURCES))
def test_default_sessions_get_the_same_results(name: str, steps: dict[str, tuple[TrainingGraph, Problem]], tmp_path: Path) -> None:
    """Default options: another order, optimizations on.  No write may come before a reader of the old value."""
    training, problem = steps[name]
    emitted = emit(training.model, problem, _eager_plan(problem))
    reference = _run(training.model, training, tmp_path)
    found = _run(emitted.model, training, tmp_path, defaults=True)
    for key, array in reference.items():
        scale = max(float(np.abs(array).max()), 1e-3)
        assert np.abs(found[key] - array).max() <= 2e-3 * scale, key


def test_a_default_order_that_ignored_the_edges_would_be_seen(steps: dict[str, tuple[TrainingGraph, Problem]]) -> None:
    """Every node that reads an overwritten value is an ancestor of the write, in any session."""
    for training, problem in steps.values():
        graph = emit(training.model, problem, _eager_plan(problem)).model.graph
        above: dict[int, set[int]] = {}
        for node in graph:
            producers = [v.producer() for v in node.inputs if v is not None]
            above[id(node)] = set().union(*({id(p)} | above[id(p)] for p in producers if p is not None))
        writes = [n for n in graph if n.op_type == "InPlaceAccumulatorV2"]
        assert len(writes) > 10
        readers = 0
        for write in writes:
            target = write.inputs[0]
            assert target is not None
            pending = [u.node for u in target.uses() if u.node is not write]
            while pending:
                node = pending.pop()
                if node.op_type in ("Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten"):
                    pending += [u.node for u in node.outputs[0].uses()]
                    continue
                readers += 1
                assert id(node) in above[id(write)], f"{node.name} may run after {write.name}"
        assert readers or not training.state


def test_reading_after_the_overwrite_is_refused(steps: dict[str, tuple[TrainingGraph, Problem]]) -> None:
    training, problem = steps["momentum"]
    weight = problem.ops[next(i for i, op in enumerate(problem.ops) if op.writes and problem.tensors[op.writes[0]].name == "stem.weight")]
    conv = next(i for i, op in enumerate(problem.ops) if op.op_type == "Conv" and weight.writes[0] in op.inputs)
    sequence = [*range(len(problem.ops)), conv]
    with pytest.raises(PlanError):
        evaluate(problem, sequence)
    plan = replace(plan_from_sequence(problem, range(len(problem.ops)), UNLIMITED), steps=tuple(Step("run", i) for i in sequence))
    with pytest.raises(OnnxRematError, match=r"reads 'stem\.weight' after 'InPlaceAccumulatorV2.*' has overwritten it") as failed:
        emit(training.model, problem, plan)
    assert "\n" not in str(failed.value)


def test_swaps_become_operators_and_later_readers_read_what_came_back(steps: dict[str, tuple[TrainingGraph, Problem]]) -> None:
    training, problem = steps["cnn"]
    conv = next(i for i, op in enumerate(problem.ops) if op.op_type == "Conv")
    (tensor,) = problem.ops[conv].outputs
    last = max(problem.index.readers[tensor])
    runs = [Step("run", o) for o in range(len(problem.ops))]
    problem = replace(problem, transfer=Transfer(1e9, 1e9, 2**40))
    moves = [Step("swap_out", tensor), *runs[conv + 1 : last], Step("swap_in", tensor), Step("swap_in", tensor), *runs[last:]]
    plan = plan_from_sequence(problem, [*runs[: conv + 1], *moves], UNLIMITED)
    graph = emit(training.model, problem, plan).model.graph
    (out,) = [n for n in graph if n.op_type == "SpillOut"]
    first, second = [n for n in graph if n.op_type == "SpillIn"]
    assert graph.opset_imports["onnxremat.spill"] == 1
    assert out.attributes["reads"].as_int() == 2
    assert out.inputs[0] is graph.node(str(problem.ops[conv].name)).outputs[0]
    assert first.inputs[0] is second.inputs[0] is out.outputs[0]
    assert [u.node.name for u in second.outputs[0].uses()] == [problem.ops[last].name]
    assert [str(n.name) for n in graph if n.op_type != "Size"][: conv + 2] == [*(op.name for op in problem.ops[: conv + 1]), out.name]


def test_the_source_is_left_alone(steps: dict[str, tuple[TrainingGraph, Problem]]) -> None:
    training, problem = steps["cnn"]
    before = ir.to_proto(training.model).SerializeToString(deterministic=True)
    first = emit(training.model, problem, _eager_plan(problem), 4096)
    assert ir.to_proto(training.model).SerializeToString(deterministic=True) == before
    again = emit(training.model, problem, _eager_plan(problem), 4096)
    texts = [ir.to_proto(e.model).SerializeToString(deterministic=True) for e in (first, again)]
    assert texts[0] == texts[1], "the same plan gives the same file"


def test_clones_are_exact_copies_in_the_plans_place(steps: dict[str, tuple[TrainingGraph, Problem]]) -> None:
    kinds: set[str] = set()
    for training, problem in steps.values():
        plan = _eager_plan(problem)
        emitted = emit(training.model, problem, plan)
        sources = list(training.graph)
        laid = {str(n.name): n for n in emitted.model.graph}
        assert [name.partition("@")[0] for name in emitted.order] == [sources[op].name for op in plan.sequence]
        assert len(emitted.clones) == plan.recomputed_ops > 0
        for name in emitted.clones:
            clone, original = laid[name], laid[name.partition("@")[0]]
            assert clone.metadata_props[CLONE_OF] == original.name
            assert (clone.op_type, clone.domain, dict(clone.attributes)) == (original.op_type, original.domain, dict(original.attributes))
            assert [(v.shape, v.type) for v in clone.outputs] == [(v.shape, v.type) for v in original.outputs]
            assert clone.op_type != "Dropout", "masks are drawn once"
            assert clone.op_type != "InPlaceAccumulatorV2", "state is written once"
        kinds |= {laid[c].op_type for c in emitted.clones}
    assert {"BatchNormInternal", "LayerNormalization", "DropoutGrad"} <= kinds, "a mask is kept, what follows it is recomputed"


def test_phases_are_in_the_metadata(steps: dict[str, tuple[TrainingGraph, Problem]]) -> None:
    for name, (training, problem) in steps.items():
        graph = emit(training.model, problem, _eager_plan(problem), 4096).model.graph
        phases = [n.metadata_props.get(PHASE) for n in graph]
        assert None not in phases
        wanted = {"forward", "backward", *(["update"] if training.optimizer.in_graph or training.state else [])}
        assert set(phases) == wanted, name
        assert phases[0] == "forward" and "forward" in phases[phases.index("backward") :], "clones keep the phase of what they repeat"


def test_the_runtime_runs_the_plans_order(cnn_artifact: Artifact) -> None:
    """The order that the profiler saw is the plan's, with every clone."""
    path = cnn_artifact.file(TRAINING)
    from onnxremat.runtime.session import make_session

    session = make_session(path, Options(threads=1))
    profiled, walls = run_profiled(path, sample_arrays(session, np.random.default_rng(0)), 1, Options(threads=1))
    executed = [row["name"] for row in profiled[0]]
    model = onnx.load(str(path))
    helpers = {n.name for n in model.graph.node if any(p.key == "onnxremat.helper" for p in n.metadata_props)}
    sources = [n.name for n in onnx.load(str(cnn_artifact.file(UNSCHEDULED))).graph.node]
    planned, runs = [], dict.fromkeys(sources, 0)
    for op in cnn_artifact.plan.sequence:
        name = sources[op]
        planned.append(f"{name}@{runs[name]}" if runs[name] else name)
        runs[name] += 1
    assert [n for n in executed if n not in helpers] == planned
    clones = cnn_artifact.manifest["plan"]["clones"]
    assert clones and set(clones) <= set(executed)
    assert [n for n in execution_order(path) if n not in helpers] == planned
    assert walls[0] > 0


def test_in_graph_update_artifact_in_a_default_session(momentum_artifact: Artifact) -> None:
    """The artifact's own file: a session without any of the manifest's options computes the same step."""
    ort = onnxruntime()
    results = []
    for scheduled, default in ((False, False), (True, True)):
        trainer = onnxremat.Trainer(momentum_artifact, threads=1, capped=False, scheduled=scheduled)
        if default:
            from onnxremat.runtime.session import BoundSession

            settings = ort.SessionOptions()
            settings.log_severity_level = 4
            session = ort.InferenceSession(str(momentum_artifact.file(TRAINING)), settings, providers=["CPUExecutionProvider"])
            trainer._step = BoundSession(session)
            trainer._step.bind({n: a for n, a in trainer._arrays().items() if n in trainer._step.inputs})
        losses = [trainer.train_step(batch_of(momentum_artifact, i)) for i in range(2)]
        results.append((losses, trainer.parameters))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    start = momentum_artifact.parameters()
    for name, array in results[0][1].items():
        moved = float(np.abs(array - start[name]).max())
        assert np.abs(results[1][1][name] - array).max() <= 0.02 * moved + 1e-6, name
