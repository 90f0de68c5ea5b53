"""The evaluation model of a file equals the one of the module it was exported from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxremat import Artifact, Optimizer, Trainer
from onnxremat.api import compile as compile_model
from onnxremat.errors import UsageError
from onnxremat.eval_batch import open_batch
from onnxremat.eval_graph import eval_model
from onnxremat.exporters import InputSpec, Loss, export_torch
from onnxremat.models.zoo import zoo_entry
from onnxremat.runtime.session import Options, make_session
from onnxremat.training_graph import build_training_graph
from tests.models.test_zoo import factory


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


def evaluated(module: nn.Module, inputs: list[str], loss: str, labels: Sequence[str] = ()) -> tuple[object, str, dict[str, Any]]:
    """The evaluation model, why its batch is fixed where it is, and its weights."""
    specs = [InputSpec.parse(text) for text in inputs]
    training = build_training_graph(export_torch(module.train(), specs, [InputSpec.parse(t) for t in labels], loss), Optimizer("sgd"))
    evaluation = export_torch(module.eval(), specs, training.labels, loss)
    summed = "reduction=sum" in loss
    found = open_batch(eval_model(evaluation, training), (*training.inputs, *training.labels), training.weights, training.loss, summed)
    return found.model, found.reason, training.weights


@pytest.mark.parametrize("name", ["cnn", "sum", "gpt2", "bert_mlm", "vit_b16"])
def test_any_batch(name: str) -> None:
    torch.default_generator.manual_seed(0)
    if name in ("cnn", "sum"):
        module, inputs, targets, loss = net(), ["x=4x3x8x8"], (), "cross_entropy" + (":reduction=sum" if name == "sum" else "")
    else:
        entry = zoo_entry(name)
        module, inputs, targets, loss = factory(entry)(**entry.quick.arguments), list(entry.quick.inputs), entry.quick.labels, entry.loss
    model, reason, weights = evaluated(module, inputs, loss, targets)
    assert not reason
    assert isinstance(model, ir.Model)
    session = make_session(ir.to_proto(model).SerializeToString(), Options(threads=1))
    taken = {i.name for i in session.get_inputs()}
    rng = np.random.default_rng(3)
    spec = InputSpec.parse(inputs[0])
    for batch in (1, 3, spec.shape[0], 9):
        x = InputSpec(spec.name, (batch, *spec.shape[1:]), spec.dtype, spec.high).sample(rng)
        with torch.no_grad():
            wanted = module(torch.from_numpy(np.asarray(x)))
        chosen = Loss.parse(loss)
        labels = rng.integers(0, wanted.shape[-1], wanted.shape[:-1])
        feeds = {n: a for n, a in weights.items() if n in taken} | {spec.name: x, "labels": labels}
        value, output = session.run(None, feeds)[:2]
        np.testing.assert_allclose(output, wanted.numpy(), rtol=1e-4, atol=1e-5)
        assert float(value) == pytest.approx(float(chosen.torch(wanted, torch.from_numpy(labels))), rel=1e-5)


class Across(nn.Module):
    """Its rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x - x.mean(0, keepdim=True))


class Flat(nn.Module):
    """The batch becomes features."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.reshape(1, 24)).expand(4, 4)


@pytest.mark.parametrize(("module", "words"), [(Across, "differs for another batch"), (Flat, "Gemm|Expand")])
def test_a_batch_that_cannot_be_another_stays(module: type[nn.Module], words: str) -> None:
    model, reason, _ = evaluated(module(), ["x=4x6"], "cross_entropy")
    assert isinstance(model, ir.Model)
    assert re.search(words, reason)
    assert next(v for v in model.graph.inputs if v.name == "x").shape == ir.Shape([4, 6])


def test_the_trainer_evaluates_other_batches(norm_artifact: Artifact) -> None:
    assert norm_artifact.manifest["eval_batch"] == {"open": True, "reason": ""}
    trainer = Trainer(norm_artifact, capped=False)
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((20, 12)).astype(np.float32), rng.integers(0, 4, 20)
    whole, outputs = trainer.evaluate({"x": x, "labels": labels})
    parts = [trainer.evaluate({"x": x[i : i + 8], "labels": labels[i : i + 8]}) for i in (0, 8, 16)]
    assert whole == pytest.approx((8 * parts[0][0] + 8 * parts[1][0] + 4 * parts[2][0]) / 20, rel=1e-5)
    np.testing.assert_allclose(outputs["output"], np.concatenate([p[1]["output"] for p in parts]), rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="has shape"):
        trainer.evaluate({"x": x, "labels": labels[:7]})
    with pytest.raises(UsageError, match="has shape"):
        trainer.train_step({"x": x, "labels": labels})
