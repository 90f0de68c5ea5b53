"""report.html: what it says is what the simulator says, it is whole by itself, and its snippets run."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnxremat import Optimizer
from onnxremat.api import compile as compile_model
from onnxremat.artifact import Artifact
from onnxremat.report import _seconds, alive_at, api_snippet, node_scopes, trainer_snippet, write_report
from onnxremat.report_plot import phase_spans
from onnxremat.scheduler import Op, Plan, Problem, Step, Tensor, Transfer, evaluate, plan_from_sequence
from onnxremat.units import format_bytes

from .scheduler.graphs import random_problem, random_steps

MIB = 2**20
EVIL = "<script>alert('x')</script>&\"$title"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def drawn(self, kind: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if attrs.get("class") == kind]


def chain_problem(layers: int = 6) -> Problem:
    """Forward ops, backward ops that read what forward made, one update; names that need escaping."""
    tensors = [Tensor("x", 0, -1)]
    ops: list[Op] = []
    for i in range(layers):
        tensors.append(Tensor(EVIL if i == layers - 1 else f"h{i}", 8 * MIB, i))
        name = f"Conv:{EVIL}" if i == 0 else f"Conv:/block{i // 2}/conv/out{i}"
        ops.append(Op(name, 0.01, (i,), (i + 1,), 2 * MIB, op_type="Conv"))
    for k in range(layers):
        source = layers - k
        reads = (source,) if k == 0 else (source, len(tensors) - 1)
        tensors.append(Tensor(f"g{k}", 4 * MIB, len(ops), output=k == layers - 1))
        ops.append(Op(f"Grad:g{k}", 0.02, reads, (len(tensors) - 1,), phase="backward", op_type="ConvGrad"))
    tensors.append(Tensor("flag", 1, len(ops)))
    ops.append(Op("Write:flag", 0.005, (len(tensors) - 2,), (len(tensors) - 1,), phase="update", pinned="stateful", op_type="Write"))
    resident = {"parameters": 10 * MIB, "gradients": 10 * MIB, "batch": MIB, "runtime": 2 * MIB}
    return Problem("chain", tuple(ops), tuple(tensors), resident, optimizer_peak_bytes=24 * MIB)


def recomputing(problem: Problem, layers: int = 6) -> Plan:
    """Runs the first two forward ops again before the last two gradients."""
    first = layers + layers - 2
    order = [*range(first), 0, 1, *range(first, len(problem.ops))]
    return plan_from_sequence(problem, order, evaluate(problem, order).peak_bytes + MIB, "by hand")


def make_artifact(folder: Path, problem: Problem, plan: Plan, **changes: Any) -> Artifact:
    """An artifact as far as the report looks at it."""
    problem.save(folder / "problem.json")
    plan.save(folder / "plan.json")
    nodes = [helper.make_node("Identity", ["x"], [f"y{i}"], name=op.name) for i, op in enumerate(problem.ops)]
    scopes = nodes[2].metadata_props.add()
    scopes.key, scopes.value = "pkg.torch.onnx.name_scopes", "['', 'encoder', 'encoder.0', 'conv2d']"
    ends = [helper.make_tensor_value_info("y0", TensorProto.FLOAT, [1])]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])], ends)
    onnx.save(helper.make_model(graph), folder / "unscheduled_model.onnx")
    manifest: dict[str, Any] = {
        "target": "ort-training",
        "source": {"kind": "torch", "spec": f"shop:{EVIL}", "seed": 7, "loss": "cross_entropy"},
        "inputs": ["x=8x3x4x4"],
        "labels": ["labels=8:int64:10"],
        "optimizer": {"name": "adamw", "learning_rate": 0.001, "momentum": 0.0},
        "update": "separate",
        "roles": {"loss": "loss", "trainable": ["w"], "frozen": [], "state": []},
        "memory": {
            "budget_bytes": plan.budget_bytes,
            "resident_bytes": problem.resident_bytes,
            "arena_bytes": 8 * MIB,
            "peak_predicted_bytes": plan.peak_bytes + MIB,
            "peak_unscheduled_bytes": plan.peak_unscheduled_bytes + 3 * MIB,
        },
        "time": {
            "costs": "measured",
            "seconds_unscheduled": plan.seconds_unscheduled,
            "seconds_predicted": plan.seconds,
            "solve_seconds": 1.5,
        },
        "plan": {"strategy": plan.strategy},
        "session_options": {"graph_optimization_level": "ORT_DISABLE_ALL", "enable_mem_reuse": False, "config": {"session.x": "1"}},
        "threads": 0,
        "versions": {"onnxremat": "0.1.0", "torch": EVIL},
        "verification": None,
    }
    return Artifact(folder, manifest | changes)


@pytest.fixture
def plan() -> Plan:
    return recomputing(chain_problem())


def page_of(artifact: Artifact) -> tuple[str, Page]:
    write_report(artifact, artifact.path / "report.html")
    text = (artifact.path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_it_is_whole_by_itself(tmp_path: Path, plan: Plan) -> None:
    text, page = page_of(make_artifact(tmp_path, chain_problem(), plan))
    assert text.startswith("<!DOCTYPE html>")
    assert "script" not in {tag for tag, _ in page.tags}
    assert not {"src", "href", "srcset", "onclick", "onload"} & {name for _, attrs in page.tags for name in attrs}
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert ("viewport", "width=device-width, initial-scale=1") in {(a.get("name"), a.get("content")) for t, a in page.tags if t == "meta"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_every_name_is_escaped(tmp_path: Path, plan: Plan) -> None:
    text, page = page_of(make_artifact(tmp_path, chain_problem(), plan))
    assert "<script" not in text
    # Title, heading, source, versions, tensor, operator: as text they are all there, and no placeholder was filled in twice.
    assert page.text.count(EVIL) >= 6


def test_headline_numbers(tmp_path: Path, plan: Plan) -> None:
    _, page = page_of(make_artifact(tmp_path, chain_problem(), plan))
    assert plan.recomputed_ops == 2
    overhead = 100 * (plan.seconds / plan.seconds_unscheduled - 1)
    for expected in (
        f"Budget {format_bytes(plan.budget_bytes)}",
        f"Peak, predicted {format_bytes(plan.peak_bytes + MIB)}",
        f"unscheduled {format_bytes(plan.peak_unscheduled_bytes + 3 * MIB)}",
        "Peak, measured not measured",
        "Allocator best-fit arena of 8.0 MiB",
        f"Step time, predicted {1000 * plan.seconds:.0f} ms",
        f"Overhead {overhead:.1f} %",
        f"gap {100 * plan.gap:.1f} %",
        "Recomputed ops 2",
    ):
        assert expected in page.text


def test_not_verified(tmp_path: Path, plan: Plan) -> None:
    _, page = page_of(make_artifact(tmp_path, chain_problem(), plan))
    assert "target ort-training not verified" in page.text
    assert "Verification not verified: compiled with --no-verify" in page.text


def test_verified(tmp_path: Path, plan: Plan) -> None:
    found = {
        "passed": True,
        "bitwise_equal": True,
        "state_equal": True,
        "max_relative_error_torch": 3.2e-6,
        "tolerance_torch": 1e-3,
        "steps": 3,
        "peak_measured_bytes": plan.peak_bytes,
        "within_budget": True,
        "reason": "",
    }
    _, page = page_of(make_artifact(tmp_path, chain_problem(), plan, verification=found))
    assert "target ort-training verified" in page.text
    assert "Bit-equal to the unscheduled step yes, over 3 steps" in page.text
    assert "Largest relative error against torch 3.2e-06, allowed 0.001" in page.text
    assert f"Peak, measured {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes)" in page.text
    assert "Remarks" not in page.text
    failed = found | {"passed": False, "max_relative_error_torch": None, "reason": "'w' differs"}
    _, page = page_of(make_artifact(tmp_path, chain_problem(), plan, verification=failed))
    assert "verification failed" in page.text
    assert "not compared" in page.text
    assert "Remarks 'w' differs" in page.text


def heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"V([\d.]+)", path)] + [float(re.match(r"M[\d.]+ ([\d.]+)", path)[1])]  # type: ignore[index]


def test_the_plot_is_to_scale(tmp_path: Path, plan: Plan) -> None:
    """Budget line, resident band and the tops of both profiles tell one scale."""
    problem = chain_problem()
    _, page = page_of(make_artifact(tmp_path, problem, plan))
    (budget,), (band,) = page.drawn("budget"), page.drawn("resident")
    ground = float(str(band["y"])) + float(str(band["height"]))
    per_byte = float(str(band["height"])) / problem.resident_bytes
    for kind, peak in (("scheduled", plan.peak_bytes), ("unscheduled", plan.peak_unscheduled_bytes)):
        (curve,) = page.drawn(kind)
        assert ground - min(heights(str(curve["d"]))) == pytest.approx(peak * per_byte, abs=0.5)
    assert ground - heights(str(budget["d"]))[-1] == pytest.approx(plan.budget_bytes * per_byte, abs=0.5)
    assert len(page.drawn("recompute")) == plan.recomputed_ops
    assert [shade["fill"] for shade in page.drawn("phase")] == ["var(--forward)", "var(--backward)", "var(--update)"]


def test_the_bars_add_up_to_the_peaks(tmp_path: Path, plan: Plan) -> None:
    problem = chain_problem()
    _, page = page_of(make_artifact(tmp_path, problem, plan))
    assert f"scheduled, {format_bytes(plan.peak_bytes + MIB)}" in page.text
    assert f"unscheduled, {format_bytes(plan.peak_unscheduled_bytes + 3 * MIB)}" in page.text
    assert "parameters 10.0 MiB 10.0 MiB" in page.text
    assert "arena placement and tables 1.0 MiB 3.0 MiB" in page.text


def test_what_is_recomputed(tmp_path: Path, plan: Plan) -> None:
    _, page = page_of(make_artifact(tmp_path, chain_problem(), plan))
    assert "Operator Runs Time Saved Conv 2 20.0 ms 16.0 MiB all 2 20.0 ms 16.0 MiB" in page.text
    assert "Module Runs Time Saved" in page.text
    assert "block0.conv 1 10.0 ms 8.0 MiB" in page.text


def test_a_plan_without_recomputes_or_time(tmp_path: Path) -> None:
    problem = chain_problem()
    problem = replace(problem, ops=tuple(replace(op, seconds=0.0) for op in problem.ops))
    plan = plan_from_sequence(problem, range(len(problem.ops)), 2 * evaluate(problem, range(len(problem.ops))).peak_bytes, "keep_all")
    _, page = page_of(make_artifact(tmp_path, problem, plan))
    assert "Nothing: the step fits the budget by its order alone." in page.text
    assert "Overhead unknown" in page.text
    assert page.drawn("recompute") == []


def test_many_steps_are_drawn_with_few_points(tmp_path: Path) -> None:
    problem = chain_problem(3000)
    plan = plan_from_sequence(problem, range(len(problem.ops)), evaluate(problem, range(len(problem.ops))).peak_bytes, "keep_all")
    text, page = page_of(make_artifact(tmp_path, problem, plan))
    assert len(text) < 150_000
    (curve,), (budget,) = page.drawn("scheduled"), page.drawn("budget")
    assert plan.budget_bytes == plan.peak_bytes
    assert min(heights(str(curve["d"]))) == heights(str(budget["d"]))[-1]


def test_it_is_deterministic(tmp_path: Path, plan: Plan) -> None:
    artifact = make_artifact(tmp_path, chain_problem(), plan)
    assert page_of(artifact)[0] == page_of(artifact)[0]


def test_module_scopes(tmp_path: Path, plan: Plan) -> None:
    make_artifact(tmp_path, chain_problem(), plan)
    scopes = node_scopes(tmp_path / "unscheduled_model.onnx")
    assert scopes["Conv:/block1/conv/out2"] == "encoder.0"  # noted by the exporter
    assert scopes["Conv:/block0/conv/out1"] == "block0.conv"  # told by the name
    assert "Grad:g0" not in scopes


def test_phases_ignore_recomputes_and_early_updates() -> None:
    problem = chain_problem(2)
    order = [0, 1, 2, 0, 3, 4]
    steps = [Step("run", o) for o in order]
    assert phase_spans(problem, steps, [0, 1, 2, 3, 4, 5, 6]) == [("forward", 0, 2), ("backward", 2, 5), ("update", 5, 6)]


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**6))
def test_alive_buffers_add_up_to_the_profile(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(1, 14))
    steps = random_steps(problem, rng, swaps=problem.transfer is not None)
    profile = evaluate(problem, steps).profile
    for k, step in enumerate(steps):
        workspace = problem.ops[step.index].workspace_bytes if step.kind == "run" else 0
        held = sum(problem.tensors[b.tensor].bytes for b in alive_at(problem, steps, k))
        assert held + workspace + problem.resident_bytes == profile[k]


def test_alive_buffers_know_recomputes(plan: Plan) -> None:
    problem = chain_problem()
    again = plan.sequence.index(0, 1)
    (buffer,) = [b for b in alive_at(problem, plan.steps, again) if b.op == 0]
    assert (buffer.tensor, buffer.recomputed, buffer.start) == (1, True, again)


def test_swaps_are_told(tmp_path: Path) -> None:
    problem = replace(chain_problem(), transfer=Transfer(1e9, 1e9, 100 * MIB))
    steps = [Step("run", o) for o in range(len(problem.ops))]
    steps.insert(4, Step("swap_out", 1))
    steps.insert(12, Step("swap_in", 1))
    run = evaluate(problem, steps)
    plan = replace(
        plan_from_sequence(problem, range(len(problem.ops)), 2 * run.peak_bytes, "by hand"),
        steps=tuple(steps),
        peak_bytes=run.peak_bytes,
        seconds=run.seconds,
    )
    _, page = page_of(make_artifact(tmp_path, problem, plan))
    assert "Swapped tensors 1" in page.text


@pytest.mark.parametrize(
    ("value", "told"), [(0.0, "0 s"), (4e-4, "400 µs"), (9e-6, "9.00 µs"), (0.0124, "12.4 ms"), (0.25, "250 ms"), (1.35, "1.35 s")]
)
def test_durations_have_three_digits(value: float, told: str) -> None:
    assert _seconds(value) == told


def test_snippets_name_every_session_option(tmp_path: Path, plan: Plan) -> None:
    artifact = make_artifact(tmp_path, chain_problem(), plan)
    snippet = api_snippet(artifact)
    compile(snippet, "api", "exec")
    compile(trainer_snippet(artifact), "trainer", "exec")
    assert "options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL" in snippet
    assert "options.enable_mem_reuse = False" in snippet
    assert "options.add_session_config_entry('session.x', '1')" in snippet
    assert "optimizer.step()" in snippet
    inside = api_snippet(Artifact(tmp_path, artifact.manifest | {"update": "in the training graph"}))
    compile(inside, "api", "exec")
    assert "Optimizer" not in inside
    assert "'learning_rate': np.array([0.001], np.float32)" in inside


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "CheckpointState"),
        ({"update": "fused"}, "updated within the step"),
        ({"target": "onnxruntime"}, "the next value of an input"),
    ],
)
def test_training_elsewhere_is_told_as_the_artifact_allows(tmp_path: Path, plan: Plan, changed: dict[str, str], told: str) -> None:
    made = make_artifact(tmp_path, chain_problem(), plan)
    artifact = Artifact(tmp_path, made.manifest | changed)
    _, page = page_of(artifact)
    assert told in page.text
    assert ("CheckpointState" in page.text) == (not changed)


NET = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 10))
"""
COMPILE = """
import sys
from pathlib import Path
from onnxremat.pipeline import Request, compile_source
from onnxremat.exporters import InputSpec, Loss
given = dict(inputs=(InputSpec.parse("x=16x1x8x8"),), loss=Loss("cross_entropy"))
compile_source(Request("net_of_the_test:net", **given, costs="analytic", verify=False, time_limit=2), Path("artifact"))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real artifact with running statistics."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "net_of_the_test.py").write_text(NET)
    python(COMPILE, folder)
    yield folder / "artifact"


def python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_report_of_a_real_artifact(compiled: Path) -> None:
    _, page = page_of(Artifact.load(compiled))
    manifest = json.loads((compiled / "manifest.json").read_text())
    assert f"Budget {format_bytes(manifest['memory']['budget_bytes'])}" in page.text
    assert "net_of_the_test:net" in page.text
    assert str(compiled) not in page.text


def test_the_snippets_of_a_real_artifact_run_and_agree(compiled: Path) -> None:
    artifact = Artifact.load(compiled)
    losses = [float(python(f"{code}\nprint(float(loss))", compiled)) for code in (trainer_snippet(artifact), api_snippet(artifact))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] > 0
    assert (compiled / "trained_checkpoint").is_file()
    assert (compiled / "trained" / "checkpoint").is_file()


def test_a_snippet_with_two_weight_decays_runs_and_steps_both(tmp_path: Path) -> None:
    optimizer = Optimizer("adamw", learning_rate=0.01, weight_decay=0.1, no_decay=("vectors",))
    options: dict[str, Any] = {"inputs": ["x=8x12"], "labels": ["labels=8:int64:4"], "loss": "cross_entropy", "costs": "analytic", "time_limit": 2}
    artifact = compile_model("tests.factories:tiny_mlp", tmp_path / "out", optimizer=optimizer, verify=False, **options)
    snippet = api_snippet(artifact)
    for file in ("optimizer_decay.onnx", "optimizer_no_decay.onnx"):
        assert f'"{file}"' in snippet and file in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    moved = """
fresh = CheckpointState.load_checkpoint("checkpoint")
print([bool(np.abs(state.parameters[n].data - fresh.parameters[n].data).max() > 0) for n in ("0.weight", "0.bias")])
"""
    assert python(snippet + moved, tmp_path / "out").strip() == "[True, True]"
