"""``onnxruntime.training.api`` loads and trains the same artifacts, in a process of its own (it imports torch)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxremat import Artifact, Trainer
from tests.factories import batch_of, json_of

STEPS = 4


def _train(artifact: Artifact, rate: float) -> dict[str, Any]:
    """Losses, evaluation and state of some steps with the training API, which sees nothing of onnxremat but the files."""
    code = f"""
import json, sys
import numpy as np
from tests.factories import batch_of
from onnxremat import Artifact
from onnxruntime.training.api import CheckpointState, Module, Optimizer
from pathlib import Path
folder = Path({str(artifact.path)!r})
artifact = Artifact.load(folder)
state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
module = Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
optimizer = None
if (folder / "optimizer_model.onnx").exists():
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate({rate})
losses = []
for step in range({STEPS}):
    batch = batch_of(artifact, step)
    feeds = [batch[s.name] for s in (*artifact.inputs, *artifact.labels)]
    if optimizer is None:
        feeds.append(np.asarray([{rate}], np.float32))
    module.train()
    out = module(*feeds)
    losses.append(float(np.asarray(out[0] if isinstance(out, (list, tuple)) else out).reshape(())))
    if optimizer is not None:
        optimizer.step()
        module.lazy_reset_grad()
module.eval()
batch = batch_of(artifact, 99)
found = module(*[batch[s.name] for s in (*artifact.inputs, *artifact.labels)])
found = list(found) if isinstance(found, (list, tuple)) else [found]
CheckpointState.save_checkpoint(state, str(folder.parent / "after"))
names = [n for group in ("trainable", "frozen", "state") for n in artifact.manifest["roles"][group]]
values = {{n: np.asarray(state.parameters[n].data).reshape(-1).tolist() for n in names}}
print(json.dumps({{"losses": losses, "eval": [np.asarray(f).reshape(-1).tolist() for f in found], "values": values}}))
"""
    return dict(json_of(code))


def _close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    a, b = np.asarray(found, np.float64).reshape(-1), np.asarray(expected, np.float64).reshape(-1)
    assert a.shape == b.shape, what
    assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-2), what


@pytest.mark.parametrize(
    "fixture", ["norm_artifact", "sgd_artifact", "momentum_mlp_artifact", pytest.param("momentum_artifact", marks=pytest.mark.slow)]
)
def test_the_training_api_trains_as_our_trainer(fixture: str, request: pytest.FixtureRequest) -> None:
    artifact: Artifact = request.getfixturevalue(fixture)
    rate = artifact.optimizer.learning_rate
    theirs = _train(artifact, rate)
    trainer = Trainer(artifact, threads=1, capped=False)
    # The convolutional model adds in another order with another number of threads.
    tolerance = 1e-6 if fixture != "momentum_artifact" else 1e-4
    losses = [trainer.train_step(batch_of(artifact, step)) for step in range(STEPS)]
    assert theirs["losses"] == pytest.approx(losses, rel=tolerance)
    assert len(set(losses)) == STEPS
    start = artifact.parameters()
    roles = artifact.manifest["roles"]
    for name in (*roles["trainable"], *roles["state"]):
        assert np.abs(start[name] - np.asarray(theirs["values"][name]).reshape(start[name].shape)).max() > 0, f"{name} did not change"
        _close(theirs["values"][name], trainer.parameters[name], 1e3 * tolerance if fixture == "momentum_artifact" else 1e-5, name)
    loss, outputs = trainer.evaluate(batch_of(artifact, 99))
    assert len(theirs["eval"]) == 1 + len(outputs)
    _close(theirs["eval"][0], loss, 1e3 * tolerance if fixture == "momentum_artifact" else 1e-5, "loss")
    for found, expected in zip(theirs["eval"][1:], outputs.values(), strict=True):
        _close(found, expected, 1e-2 if fixture == "momentum_artifact" else 1e-4, "output")


@pytest.mark.slow
def test_an_artifact_with_dropout_loads_and_learns(cnn_artifact: Artifact) -> None:
    found = _train(cnn_artifact, 1e-3)
    assert all(0 < loss < 5 for loss in found["losses"])
    state = cnn_artifact.manifest["roles"]["state"]
    trainer = Trainer(cnn_artifact, threads=1, capped=False)
    for step in range(STEPS):
        trainer.train_step(batch_of(cnn_artifact, step))
    for name in state:
        # The first layer sees the batch alone; deeper ones depend on weights that dropout moved.
        if name.startswith("norm."):
            _close(found["values"][name], trainer.parameters[name], 0.1, name)
