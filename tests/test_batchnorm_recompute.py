"""A batch normalization that runs twice in a step: planned, emitted, trained, and its running statistics counted once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from onnxremat.api import compile as compile_model
from onnxremat.artifact import TRAINING
from onnxremat.emit import CLONE_OF
from onnxremat.scheduler import Problem
from onnxremat.verification import verify_artifact


@pytest.mark.slow
def test_a_resnet_is_brought_into_its_budget_by_repeating_batch_normalizations(tmp_path: Path) -> None:
    artifact = compile_model(
        "zoo:resnet18_digits",
        tmp_path / "digits",
        inputs=["x=16x3x64x64"],
        labels=["labels=16:int64:10"],
        loss="cross_entropy",
        activation_budget="70%",
        costs="analytic",
        threads=1,
        time_limit=20,
        verify=False,
    )
    problem = Problem.load(artifact.file("problem.json"))
    runs = Counter(artifact.plan.sequence)
    repeated = [o for o, count in runs.items() if count > 1 and problem.ops[o].op_type == "BatchNormInternal"]
    assert repeated
    model = onnx.load(str(artifact.file(TRAINING)), load_external_data=False)
    clones = Counter(p.value for node in model.graph.node for p in node.metadata_props if p.key == CLONE_OF)
    assert all(clones[problem.ops[o].name] == runs[o] - 1 for o in repeated)
    # Bit for bit: the loss of every step, all parameters, all running statistics.
    found = verify_artifact(artifact, steps=2, threads=1)
    assert found.passed and found.bitwise_equal and found.state_equal and found.within_budget, found.reason
