"""Artifacts for target onnxruntime, compiled here, run on stock ONNX Runtimes that know nothing of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx
import pytest

from onnxremat import Artifact, Optimizer
from onnxremat.api import compile as compile_model
from onnxremat.ops import traits
from onnxremat.runtime.session import LEVELS

from ..factories import CNN_INPUT, CNN_LABEL
from .stock import VERSIONS, in_stock

pytestmark = pytest.mark.slow

IMAGES = {"inputs": ["x=6x3x24x24"], "labels": ["labels=6:int64:5"], "loss": "cross_entropy"}


@dataclass(frozen=True)
class Case:
    """A model and how it is compiled."""

    model: str
    options: dict[str, Any]
    optimizer: Optimizer = Optimizer("adamw", learning_rate=0.01, weight_decay=0.1, no_decay=("vectors",))  # noqa: RUF009


FUSED = Optimizer("adamw", learning_rate=0.01, weight_decay=0.1, update="fused")
CASES = {
    "recomputes": Case(
        "tests.factories:tiny_cnn",
        {"inputs": [CNN_INPUT], "labels": [CNN_LABEL], "loss": "cross_entropy", "activation_budget": "80%", "time_limit": 10},
    ),
    "mlp": Case("mlp_dropout", {"inputs": ["x=256x12"], "labels": ["labels=256:int64:4"], "loss": "cross_entropy"}),
    "cnn": Case("cnn", IMAGES),
    "cnn-fused": Case("cnn", IMAGES, FUSED),
    "cnn-momentum": Case("cnn", IMAGES, Optimizer("sgd", learning_rate=0.02, momentum=0.9, weight_decay=1e-3, clip_grad_norm=1.0)),
    "unet": Case("unet", {"inputs": ["x=4x1x32x32"], "labels": ["y=4x1x32x32"], "loss": "mse"}),
    "transformer": Case("transformer", {"inputs": ["ids=8x12:int64:50"], "labels": ["labels=8x12:int64:50"], "loss": "cross_entropy"}),
    "transformer-fused": Case(
        "transformer",
        {"inputs": ["ids=8x12:int64:50"], "labels": ["labels=8x12:int64:50"], "loss": "cross_entropy"},
        Optimizer("sgd", learning_rate=0.1, momentum=0.9, update="fused"),
    ),
    "lstm": Case("lstm", {"inputs": ["x=32x5x6"], "labels": ["labels=32:int64:4"], "loss": "cross_entropy"}),
}


@pytest.fixture(scope="module", params=CASES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Artifact]]:
    """An artifact, verified when compiled; of the case ``recomputes`` one with recomputes."""
    case = CASES[request.param]
    artifact = compile_model(
        case.model if ":" in case.model else f"tests.portable.models:{case.model}",
        tmp_path_factory.mktemp("portable") / request.param,
        optimizer=case.optimizer,
        target="onnxruntime",
        costs="analytic",
        threads=1,
        **{"time_limit": 5, **case.options},
    )
    assert artifact.manifest["plan"]["clones"] or request.param != "recomputes"
    yield request.param, artifact


def _planned(artifact: Artifact) -> list[str]:
    """Names of the kernels in the order of the plan; views take no part in it."""
    runs: dict[int, int] = {}
    names = []
    outputs = {o.name for o in onnx.load(artifact.file("training_model.onnx")).graph.output}
    for op in artifact.plan.sequence:
        runs[op] = runs.get(op, -1) + 1
        spec = artifact.problem.ops[op]
        shown = {artifact.problem.tensors[t].name for t in spec.outputs} & outputs
        if not traits(spec.op_type).view or shown:
            names.append(spec.name + (f"@{runs[op]}" if runs[op] else ""))
    return names


def test_it_holds_standard_operators_only_and_was_verified(compiled: tuple[str, Artifact]) -> None:
    _, artifact = compiled
    checked = artifact.manifest["verification"]
    assert checked["bitwise_equal"] and checked["state_equal"] and checked["within_budget"]
    assert checked["max_relative_error_torch"] < 1e-3
    for file in sorted(artifact.path.glob("*.onnx")):
        model = onnx.load(file)
        assert {entry.domain for entry in model.opset_import} == {""}, file
        assert all(node.domain == "" and onnx.defs.has(node.op_type, 20) for node in model.graph.node), file
        onnx.checker.check_model(str(file))


@pytest.mark.parametrize("version", VERSIONS)
def test_any_level_keeps_numbers_order_and_clones(compiled: tuple[str, Artifact], version: str) -> None:
    _, artifact = compiled
    result = in_stock(version, "levels", str(artifact.path))
    planned = _planned(artifact)
    assert result["version"] == "1.19.2" or version != "1.19.2"
    first = result[LEVELS[0]]["training_model.onnx"]["losses"]
    for level in LEVELS:
        rows = result[level]
        assert rows["training_model.onnx"] == rows["unscheduled_model.onnx"], level
        assert rows["training_model.onnx"]["losses"] == pytest.approx(first, rel=1e-4), level
        ran = [n for n in rows["order"] if not n.startswith("order_")]
        assert [n for n in ran if not n.startswith("pen_")] == planned, level
        # Small buffers have their place only if its fence is there before all else, and until the end.
        assert ran[:2] == ["pen_ConstantOfShape_node", "pen_Gather_node"] and ran[-1] == "pen_Neg_node", level
        assert set(artifact.manifest["plan"]["clones"]) <= set(rows["order"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_trainer_trains_as_on_the_training_package(compiled: tuple[str, Artifact], version: str) -> None:
    from onnxremat.runtime import worker

    name, artifact = compiled
    found = in_stock(version, "train", str(artifact.path))
    assert found["foreign"] == [] and found["restored"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["peak"] <= artifact.manifest["memory"]["budget_bytes"]
    here = worker.call("tests.portable.jobs:train", path=str(artifact.path))
    assert found["losses"] == pytest.approx(here["losses"], rel=2e-3), name
    assert found["evaluated"] == pytest.approx(here["evaluated"], rel=5e-3)
