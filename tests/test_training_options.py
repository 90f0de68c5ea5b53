"""What torch users set beside the model: weight-decay groups, clipping, accumulation, schedules, frozen parameters; against torch.optim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onnxremat import Artifact, Optimizer
from onnxremat.api import compile as compile_model
from onnxremat.cli import main
from onnxremat.errors import OnnxRematError, UsageError
from onnxremat.exporters import ExportError, build_module
from onnxremat.runtime.rates import rate_schedule
from onnxremat.runtime.trainer import Trainer
from tests.factories import MLP_INPUT, MLP_LABEL, batch_of

SOURCE = "tests.factories:tiny_mlp"


def compiled(path: Path, optimizer: Optimizer, **options: Any) -> Artifact:
    return compile_model(
        SOURCE,
        path / "artifact",
        inputs=[MLP_INPUT],
        labels=[MLP_LABEL],
        loss="cross_entropy",
        optimizer=optimizer,
        costs="analytic",
        threads=1,
        verify=False,
        time_limit=1,
        **options,
    )


def torch_optimizer(module: nn.Module, optimizer: Optimizer) -> torch.optim.Optimizer:
    named = dict(module.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if optimizer.name == "adamw":
        return torch.optim.AdamW(groups, lr=optimizer.learning_rate)
    return torch.optim.SGD(groups, lr=optimizer.learning_rate, momentum=optimizer.momentum)


@pytest.mark.parametrize(
    ("optimizer", "accumulate"),
    [
        (Optimizer("adamw", learning_rate=0.02, weight_decay=0.5, no_decay=("vectors",), clip_grad_norm=0.05), 1),
        (Optimizer("adamw", learning_rate=0.02, weight_decay=0.5, no_decay=("vectors",), clip_grad_norm=0.05), 3),
        (Optimizer("sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.3, no_decay=("*.bias",), clip_grad_norm=0.2), 1),
    ],
    ids=["adamw", "adamw-accumulated", "sgd-in-graph"],
)
def test_updates_equal_torch(tmp_path: Path, optimizer: Optimizer, accumulate: int) -> None:
    artifact = compiled(tmp_path, optimizer)
    schedule = rate_schedule("cosine", optimizer.learning_rate, 6, warmup=2)
    trainer = Trainer(artifact, threads=1, schedule=schedule)
    module = build_module(SOURCE, 0)
    reference = torch_optimizer(module, optimizer)
    for step in range(4):
        batches = [batch_of(artifact, 10 * step + i) for i in range(accumulate)]
        loss = trainer.train_step(*batches)
        reference.zero_grad()
        total = 0.0
        for batch in batches:
            value = nn.functional.cross_entropy(module(torch.from_numpy(batch["x"])), torch.from_numpy(batch["labels"])) / accumulate
            value.backward()
            total += float(value.detach())
        norm = nn.utils.clip_grad_norm_(module.parameters(), optimizer.clip_grad_norm)
        assert float(norm) > optimizer.clip_grad_norm, "clipping must bite"
        for group in reference.param_groups:
            group["lr"] = schedule(step)
        reference.step()
        assert loss == pytest.approx(total, rel=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_two_groups_have_no_model_that_would_decay_both(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, Optimizer("adamw", weight_decay=0.1, no_decay=("vectors",)))
    names = {f.name for f in artifact.path.iterdir()}
    assert {"optimizer_decay.onnx", "optimizer_no_decay.onnx"} <= names and "optimizer_model.onnx" not in names
    assert artifact.optimizer.no_decay == ("0.bias", "2.bias", "4.bias")


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, Optimizer("sgd", momentum=0.9))
    trainer = Trainer(artifact, threads=1)
    batch = batch_of(artifact, 0)
    with pytest.raises(UsageError, match="can't be accumulated"):
        trainer.train_step(batch, batch)
    with pytest.raises(UsageError, match="needs a batch"):
        trainer.train_step()
    with pytest.raises(UsageError, match="--clip-grad-norm"):
        Trainer(artifact, threads=1, clip_grad_norm=1.0)
    with pytest.raises(UsageError, match="norm of -1"):
        Optimizer(clip_grad_norm=-1)
    with pytest.raises(OnnxRematError, match=r"'conv\*'"):
        compiled(tmp_path / "other", Optimizer(weight_decay=0.1, no_decay=("conv*",)))


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    artifact = compiled(tmp_path, Optimizer("adamw", learning_rate=0.1), freeze=["0.*", "2.bias"])
    assert artifact.manifest["roles"]["trainable"] == ["2.weight", "4.weight", "4.bias"]
    trainer = Trainer(artifact, threads=1)
    before = {n: a.copy() for n, a in trainer.parameters.items()}
    trainer.train_step(batch_of(artifact, 0))
    moved = {n for n, a in trainer.parameters.items() if not np.array_equal(a, before[n])}
    assert moved == {"2.weight", "4.weight", "4.bias"}
    with pytest.raises(ExportError, match="freeze 'backbone"):
        compiled(tmp_path / "other", Optimizer(), freeze=["backbone.*"])


class Scalars(nn.Module):
    """A parameter and a counter without axes, both used where one axis more would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.scale = nn.Linear(4, 2), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen[0] = self.count
        return self.out(x) * torch.stack([self.scale, self.scale.exp()]) + self.seen


def test_scalars_keep_their_shape(tmp_path: Path) -> None:
    artifact = compile_model(Scalars(), tmp_path / "a", inputs=["x=3x4"], loss="mse", costs="analytic", time_limit=1)
    assert {name: artifact.parameters()[name].shape for name in ("scale", "count")} == {"scale": (), "count": ()}
    assert artifact.manifest["verification"]["passed"]


def test_schedules() -> None:
    assert [rate_schedule("constant", 2.0, 4)(i) for i in range(4)] == [2.0] * 4
    assert [rate_schedule("linear", 2.0, 5, 1)(i) for i in range(5)] == [2.0, 2.0, 1.5, 1.0, 0.5]
    cosine = rate_schedule("cosine", 1.0, 12, 2)
    assert [cosine(i) for i in (0, 1, 2, 7, 12)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    with pytest.raises(UsageError, match="warm-up"):
        rate_schedule("linear", 1.0, 4, 4)
    with pytest.raises(UsageError, match="no learning-rate schedule"):
        rate_schedule("steps", 1.0, 4)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "artifact")
    plan = ["--input", MLP_INPUT, "--loss", "cross_entropy", "--costs", "analytic", "--no-verify", "--time-limit", "1", "-q"]
    options = ["--weight-decay", "0.1", "--no-decay", "vectors", "--clip-grad-norm", "1", "--freeze", "0.*"]
    assert main(["compile", SOURCE, "-o", folder, *plan, *options]) == 0
    run = ["run", folder, "--steps", "3", "--accumulate", "2", "--lr-schedule", "cosine", "--warmup", "1", "--clip-grad-norm", "0.5", "-q"]
    assert main(run) == 0
    assert main([*run[:3], "0"]) == 2
    assert main([*run[:4], "--accumulate", "0"]) == 2
    assert main(["compile", SOURCE, "-o", f"{folder}2", *plan, "--train-mode"]) == 1
    assert "--train-mode is for .onnx files" in capsys.readouterr().err
