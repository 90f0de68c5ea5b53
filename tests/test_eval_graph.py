"""The evaluation model of a file equals the one of the module it was exported from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onnxremat import Optimizer, Trainer
from onnxremat.api import compile as compile_model
from onnxremat.exporters import InputSpec, Loss, export_torch


def net() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(8 * 64, 5))
    with torch.no_grad():  # statistics that differ from the ones a fresh module has
        body[1].running_mean.normal_()
        body[1].running_var.uniform_(0.5, 2.0)
    return body


@pytest.mark.parametrize("optimizer", [Optimizer("adamw"), Optimizer("sgd", 0.01, momentum=0.9)], ids=["adamw", "momentum"])
def test_a_file_and_its_module_evaluate_alike(tmp_path: Path, optimizer: Optimizer) -> None:
    loss = Loss.parse("cross_entropy")
    forward = export_torch(net(), [InputSpec.parse("x=4x3x8x8")], loss=loss)
    forward.save(tmp_path / "forward.onnx")
    artifact = compile_model(str(tmp_path / "forward.onnx"), tmp_path / "out", optimizer=optimizer, costs="analytic", time_limit=2)
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((4, 3, 8, 8)).astype(np.float32), "labels": rng.integers(0, 5, 4)}
    found, outputs = Trainer(artifact, capped=False).evaluate(batch)
    module = net().eval()
    with torch.no_grad():
        wanted = module(torch.from_numpy(batch["x"]))
    np.testing.assert_allclose(outputs["output"], wanted.numpy(), rtol=1e-4, atol=1e-5)
    assert found == pytest.approx(float(loss.torch(wanted, torch.from_numpy(batch["labels"]))), rel=1e-5)
