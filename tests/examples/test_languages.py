"""The JavaScript and C examples train an artifact as Python does, within its budget as measured from outside."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxremat import Artifact, Optimizer
from onnxremat.api import compile as compile_model
from onnxremat.artifact import MANIFEST
from onnxremat.runtime import worker
from onnxremat.safetensors import load_tensors, save_tensors

from ..factories import CNN_INPUT, CNN_LABEL
from ..portable.stock import in_stock
from .programs import c_program, javascript, library_of_node, library_of_wheel, run

pytestmark = pytest.mark.slow

STEPS = 5
#: Batches in the data file, fewer than steps: the programs start over.
BATCHES = 3


@dataclass(frozen=True)
class Case:
    """A model and how it is compiled."""

    source: str
    input: str
    label: str
    optimizer: Optimizer
    budget: str = "100%"


CASES = {
    "fused": Case("tests.portable.models:cnn", "x=6x3x24x24", "labels=6:int64:5", Optimizer("adamw", 0.01, weight_decay=0.1, update="fused")),
    # Two optimizer models, one parameter of several slices.
    "separate": Case(
        "tests.portable.models:wide_mlp", "x=256x12", "labels=256:int64:4", Optimizer("adamw", 0.01, weight_decay=0.1, no_decay=("vectors",))
    ),
    "recomputes": Case(
        "tests.factories:tiny_cnn_without_dropout", CNN_INPUT, CNN_LABEL, Optimizer("sgd", 0.02, momentum=0.9, clip_grad_norm=0.5), "80%"
    ),
}


@dataclass(frozen=True)
class Trained:
    """An artifact, data for it, and what Python makes of both."""

    artifact: Artifact
    data: Path
    losses: list[float]

    @property
    def arguments(self) -> list[str]:
        return [str(self.artifact.path), "--data", str(self.data), "--steps", str(STEPS), "--threads", "1"]

    def check(self, command: list[str], saved: Path) -> tuple[list[float], dict[str, Any]]:
        """Run a program; its losses and the tensors that it saved."""
        found = run([*command, *self.arguments, "--save", str(saved)])
        assert found.losses == pytest.approx(self.losses, rel=1e-5)
        memory = self.artifact.manifest["memory"]
        arrays = memory["resident_bytes"] - memory["runtime_bytes"]  # which were there before the first step
        assert arrays + found.grown_bytes <= memory["budget_bytes"]
        return found.losses, load_tensors(saved)


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    artifact = compile_model(
        case.source,
        folder / "artifact",
        inputs=[case.input],
        labels=[case.label],
        loss="cross_entropy",
        optimizer=case.optimizer,
        activation_budget=case.budget,
        target="onnxruntime",
        costs="analytic",
        threads=1,
        time_limit=5,
        verify=False,
    )
    assert bool(artifact.plan.recomputed_ops) == (request.param == "recomputes")
    rng = np.random.default_rng(0)
    batches = [{spec.name: spec.sample(rng) for spec in (*artifact.inputs, *artifact.labels)} for _ in range(BATCHES)]
    save_tensors({name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, folder / "data.safetensors")
    there = {"path": str(artifact.path), "data": str(folder / "data.safetensors")}
    reference = worker.call("tests.portable.jobs:follow", **there, steps=STEPS, saved=str(folder / "reference"))
    assert len(set(reference["losses"])) == STEPS
    yield Trained(artifact, folder / "data.safetensors", reference["losses"])


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_javascript_and_c_agree(trained: Trained, tmp_path: Path) -> None:
    losses, tensors = trained.check(javascript(), tmp_path / "javascript.safetensors")
    program = [c_program(tmp_path), "--library", str(library_of_node())]
    same_losses, same_tensors = trained.check(program, tmp_path / "c.safetensors")
    assert same_losses == losses
    _assert_same(same_tensors, tensors)
    start, trainable = trained.artifact.parameters(), trained.artifact.manifest["roles"]["trainable"]
    moved = [name for name in trainable if not np.array_equal(tensors[name], start[name])]
    assert len(moved) > 0.8 * len(trainable)  # a bias in front of a batch normalization has no gradient


def test_c_equals_python_bit_for_bit(trained: Trained, tmp_path: Path) -> None:
    program = [c_program(tmp_path), "--library", str(library_of_wheel())]
    losses, tensors = trained.check(program, tmp_path / "c.safetensors")
    saved = tmp_path / "python"
    python = in_stock("current", "follow", str(trained.artifact.path), str(trained.data), str(STEPS), str(saved))
    if trained.artifact.optimizer.clip_grad_norm:  # a sum over all gradients, whose order is each program's own
        assert losses == pytest.approx(python["losses"], rel=1e-6)
        return
    assert [np.float32(loss) for loss in losses] == [np.float32(loss) for loss in python["losses"]]
    _assert_same(tensors, load_tensors(saved / "checkpoint.safetensors"))


def test_c_trains_in_an_arena_beyond_two_gibibytes(tmp_path: Path) -> None:
    """The runtime would make two regions of it, of which neither holds what is alive."""
    rows = 2**20
    artifact = compile_model(
        "tests.portable.models:tall",
        tmp_path / "artifact",
        inputs=[f"x={rows}x4"],
        labels=[f"labels={rows}:int64:4"],
        loss="cross_entropy",
        optimizer=Optimizer("sgd", 0.5, update="fused"),
        target="onnxruntime",
        costs="analytic",
        time_limit=5,
        verify=False,
    )
    memory, claim = artifact.manifest["memory"], artifact.manifest["arena_claim"]
    capacity = artifact.manifest["arena"]["max_mem"]
    assert capacity == memory["arena_bytes"] > 2**31
    assert capacity - 1024 < 4 * claim["shape"][0] * claim["shape"][1] <= capacity
    rng, data = np.random.default_rng(0), tmp_path / "data.safetensors"
    save_tensors({spec.name: spec.sample(rng) for spec in (*artifact.inputs, *artifact.labels)}, data)
    reference = worker.call("tests.portable.jobs:follow", path=str(artifact.path), data=str(data), steps=2, saved=str(tmp_path / "reference"))

    program = [c_program(tmp_path), "--library", str(library_of_wheel())]
    arguments = ["--data", str(data), "--steps", "2"]
    found = run([*program, str(artifact.path), *arguments])
    assert found.losses == pytest.approx(reference["losses"], rel=1e-5)
    arrays = memory["resident_bytes"] - memory["runtime_bytes"]
    assert arrays + found.grown_bytes <= memory["budget_bytes"]
    assert found.grown_bytes > 0.9 * capacity, "what is claimed is not resident before it is used"

    manifest = artifact.manifest | {"arena_claim": None}
    (artifact.path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    done = subprocess.run([*program, str(artifact.path), *arguments], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1 and "Available memory" in done.stderr


@pytest.mark.parametrize("trained", ["fused"], indirect=True)
@pytest.mark.parametrize("language", ["javascript", "c"])
def test_what_does_not_fit_is_refused(trained: Trained, language: str, tmp_path: Path) -> None:
    program = javascript() if language == "javascript" else [c_program(tmp_path), "--library", str(library_of_wheel())]
    name, label = trained.artifact.inputs[0].name, trained.artifact.labels[0].name
    samples = load_tensors(trained.data)

    def refused(data: Path) -> str:
        done = subprocess.run([*program, str(trained.artifact.path), "--data", str(data)], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr

    wrong = tmp_path / "wrong.safetensors"
    assert "wrong.safetensors" in refused(wrong)
    save_tensors({name: samples[name]}, wrong)
    assert f"no '{label}'" in refused(wrong)
    save_tensors({name: samples[name][:, :, :5], label: samples[label]}, wrong)
    assert f"'{name}'" in refused(wrong)
    save_tensors({name: samples[name][:3], label: samples[label][:3]}, wrong)
    assert "fewer samples than a batch" in refused(wrong)
    assert subprocess.run(program, capture_output=True, check=False, timeout=60).returncode == 2
