"""Swapping to disk from end to end: a step that swaps trains the same numbers within a budget that holds, or stops with an error."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxremat import Artifact, Optimizer
from onnxremat.api import compile as compile_model
from onnxremat.artifact import TRAINING
from onnxremat.cli import main
from onnxremat.costs.transfer import Swap, parse_bandwidth
from onnxremat.emit import HELPER, made_names
from onnxremat.errors import SpillFailed, UsageError
from onnxremat.fit import lowered
from onnxremat.runtime import worker
from onnxremat.runtime.trainer import Trainer
from onnxremat.scheduler import evaluate
from onnxremat.spill import Bandwidth, needed

from .factories import MLP_INPUT

#: Of the unscheduled peak: what twelve swapped layers stay below.
SHARE = 0.3


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Twelve layers, everything away that can be."""
    folder = tmp_path_factory.mktemp("swap")
    return compile_model(
        "tests.factories:mlp12",
        folder / "artifact",
        inputs=["x=16384x32"],
        labels=["labels=16384:int64:8"],
        loss="cross_entropy",
        optimizer=Optimizer("sgd"),
        budget=f"{SHARE:.0%}",
        costs="analytic",
        strategy="swap_only",
        swap="disk",
        swap_bandwidth="1GiB/s",
        spill_dir=folder,
        threads=1,
        time_limit=3,
    )


def test_twelve_layers_train_in_under_a_third_and_the_numbers_are_the_same(swapped: Artifact) -> None:
    manifest, plan = swapped.manifest, swapped.plan
    checked = manifest["verification"]
    assert checked["passed"]
    assert checked["bitwise_equal"]
    assert checked["peak_measured_bytes"] <= SHARE * manifest["memory"]["peak_unscheduled_bytes"]
    assert checked["peak_measured_bytes"] <= plan.budget_bytes
    assert (plan.recomputed_ops, manifest["plan"]["swapped_tensors"]) == (0, plan.swapped_tensors)
    assert plan.swapped_tensors >= 9
    assert manifest["target"] == "ort-training+spill"
    assert not manifest["swap"]["portable"]
    assert manifest["swap"]["disk_bytes"] == evaluate(swapped.problem, plan.steps).host_bytes
    assert needed(swapped.file(TRAINING))


def test_tensors_are_called_as_their_nodes_make_them(swapped: Artifact) -> None:
    form = lowered(swapped.problem, swapped.plan)
    names = made_names(swapped.problem, form)
    nodes = [n for n in onnx.load(str(swapped.file(TRAINING))).graph.node if not any(entry.key == HELPER for entry in n.metadata_props)]
    runs: Counter[int] = Counter()
    for node, op in zip(nodes, form.sequence, strict=True):
        made = [names.get((tensor, runs[op])) for tensor in form.problem.ops[op].outputs]
        assert made == ([None] if node.op_type == "SpillOut" else [name for name in node.output if name])
        runs[op] += 1


def test_without_room_on_the_disk_training_does_not_begin(swapped: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpillFailed, match="can't swap to /nowhere: No such file or directory; choose another folder with --spill-dir"):
        Trainer(swapped, spill_dir="/nowhere", capped=False)
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("onnxremat.spill.library.shutil.disk_usage", lambda where: usage)
    with pytest.raises(SpillFailed, match=r"a step swaps [\d.]+ MiB out, and .* has 1.0 MiB free: make room there"):
        Trainer(swapped, spill_dir=tmp_path, capped=False)


def limited_job(artifact: str) -> dict[str, object]:
    """In a worker: two steps in a process whose files may grow to 20 MiB only, then one without that limit."""
    import resource

    trainer = Trainer(artifact, threads=1, capped=False)
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((16384, 32)).astype(np.float32), "labels": np.zeros(16384, np.int64)}
    before = {name: array.copy() for name, array in trainer.parameters.items()}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, hard))
    errors = []
    for _ in range(2):
        try:
            trainer.train_step(batch)
        except SpillFailed as error:
            errors.append(str(error))
    same = all(np.array_equal(before[n], a) for n, a in trainer.parameters.items())
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return {"errors": errors, "same": same, "loss": trainer.train_step(batch)}


def test_a_full_disk_stops_the_step_and_leaves_the_parameters(swapped: Artifact) -> None:
    found = worker.call("tests.test_swap:limited_job", artifact=str(swapped.path))
    assert len(found["errors"]) == 2
    assert "a tensor was not swapped: reserving" in found["errors"][0]
    assert found["same"]
    assert np.isfinite(found["loss"])


def test_the_command_line_tells_of_swaps(swapped: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(swapped.path)]) == 0
    shown = capsys.readouterr().out
    assert "swapped tensors" in shown
    assert "ort-training+spill" in shown
    assert main(["inspect", str(swapped.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["swapped_tensors"] == swapped.plan.swapped_tensors
    assert "Swapped tensors" in (swapped.path / "report.html").read_text(encoding="utf-8")


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="--swap host: on the CPU tensors lie in the host's memory anyway"):
        Swap.parse("host")
    with pytest.raises(UsageError, match="give --swap disk as well"):
        Swap.parse("none", "2GiB/s")
    with pytest.raises(UsageError, match=r"--spill-dir names a folder .* give --swap disk as well"):
        Swap.parse("none", directory="/tmp")
    with pytest.raises(UsageError, match="leaves nowhere to swap to"):
        Swap.parse("disk", None, "0")
    for text in ("2GiB", "fast", "1GiB/s:2GiB/s:3GiB/s", "0MiB/s"):
        with pytest.raises(UsageError, match="bandwidth"):
            parse_bandwidth(text)
    assert parse_bandwidth("2GiB/s") == Bandwidth(2.0**31, 2.0**31)
    assert asdict(parse_bandwidth("1MB/s : 3MB/s")) == {"out": 1e6, "into": 3e6}


def test_swaps_are_not_portable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--swap disk needs operators of its own, which --target onnxruntime does without"):
        compile_model("tests.factories:tiny_mlp", tmp_path / "out", inputs=[MLP_INPUT], loss="cross_entropy", target="onnxruntime", swap="disk")
