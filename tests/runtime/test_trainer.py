"""The trainer against torch, its memory of where it was, and the batches that it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnxremat import Artifact, OnnxRematError, Optimizer, Trainer
from onnxremat.errors import ArtifactError, UsageError
from onnxremat.exporters import InputSpec, build_module
from onnxremat.runtime.run import file_batches
from onnxremat.runtime.trainer import random_batches
from tests.factories import batch_of


def _trainer(artifact: Artifact) -> Trainer:
    """Uncapped, since one process takes only one size of arena."""
    return Trainer(artifact, threads=1, capped=False)


def _module(artifact: Artifact) -> torch.nn.Module:
    source = artifact.manifest["source"]
    return build_module(source["spec"], source["seed"])


def _torch_optimizer(optimizer: Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    if optimizer.name == "adamw":
        return torch.optim.AdamW(
            module.parameters(), optimizer.learning_rate, (optimizer.beta1, optimizer.beta2), optimizer.epsilon, optimizer.weight_decay
        )
    return torch.optim.SGD(module.parameters(), optimizer.learning_rate, optimizer.momentum, weight_decay=optimizer.weight_decay)


@pytest.mark.parametrize("fixture", ["mlp_artifact", "sgd_artifact", "momentum_mlp_artifact", "norm_artifact"])
def test_five_steps_equal_torch(fixture: str, request: pytest.FixtureRequest) -> None:
    artifact = request.getfixturevalue(fixture)
    trainer, module = _trainer(artifact), _module(artifact)
    optimizer = _torch_optimizer(artifact.optimizer, module)
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(5):
        batch = batch_of(artifact, step)
        loss = F.cross_entropy(module(torch.from_numpy(batch["x"])), torch.from_numpy(batch["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trainer.train_step(batch) == pytest.approx(loss.item(), rel=1e-5)
    assert trainer.steps_done == 5
    for name, parameter in module.named_parameters():
        moved = parameter.detach() - start[name]
        assert moved.abs().max() > 1e-3, f"{name} did not move: the comparison would show nothing"
        assert np.abs(trainer.parameters[name] - parameter.detach().numpy()).max() < 2e-3 * moved.abs().max(), name
    for name, buffer in module.named_buffers():
        np.testing.assert_allclose(trainer.parameters[name], buffer.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


def test_learning_rate_is_the_next_updates(sgd_artifact: Artifact) -> None:
    trainer, batch = _trainer(sgd_artifact), batch_of(sgd_artifact, 0)
    before = {n: a.copy() for n, a in trainer.parameters.items()}
    trainer.learning_rate = 0.0
    trainer.train_step(batch)
    assert all(np.array_equal(before[n], a) for n, a in trainer.parameters.items())
    trainer.learning_rate = 0.5
    trainer.train_step(batch)
    for name, gradient in trainer.gradients.items():
        np.testing.assert_allclose(trainer.parameters[name], before[name] - np.float32(0.5) * gradient, rtol=1e-5, atol=1e-7)


def test_learning_rate_of_an_update_in_the_graph(momentum_mlp_artifact: Artifact) -> None:
    trainer = _trainer(momentum_mlp_artifact)
    names = momentum_mlp_artifact.manifest["roles"]["trainable"]
    before = {n: trainer.parameters[n].copy() for n in names}
    trainer.learning_rate = 0.0
    trainer.train_step(batch_of(momentum_mlp_artifact, 0))
    assert all(np.array_equal(before[n], trainer.parameters[n]) for n in names)
    assert all(np.abs(trainer.parameters[n + ".momentum"]).max() > 0 for n in names)


def test_accumulate_adds(mlp_artifact: Artifact) -> None:
    trainer = _trainer(mlp_artifact)
    one, two = batch_of(mlp_artifact, 1), batch_of(mlp_artifact, 2)
    trainer.accumulate(one)
    first = {n: g.copy() for n, g in trainer.gradients.items()}
    trainer.accumulate(two, fresh=True)
    second = {n: g.copy() for n, g in trainer.gradients.items()}
    assert any(not np.array_equal(first[n], second[n]) for n in first)
    trainer.accumulate(one, fresh=False)
    for name, gradient in trainer.gradients.items():
        assert np.array_equal(gradient, second[name] + first[name])
    assert trainer.steps_done == 0


@pytest.mark.parametrize("fixture", ["mlp_artifact", "momentum_mlp_artifact", "norm_artifact"])
def test_restored_training_continues_bit_for_bit(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    artifact = request.getfixturevalue(fixture)
    straight, other = _trainer(artifact), _trainer(artifact)
    for step in range(2):
        straight.train_step(batch_of(artifact, step))
    straight.save(tmp_path / "saved")
    expected = [straight.train_step(batch_of(artifact, step)) for step in (2, 3)]
    other.restore(tmp_path / "saved")
    assert other.steps_done == 2
    assert [other.train_step(batch_of(artifact, step)) for step in (2, 3)] == expected
    assert other.steps_done == straight.steps_done == 4
    assert all(a.tobytes() == other.parameters[n].tobytes() for n, a in straight.parameters.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]


def test_restore_refuses_what_is_not_its_own(mlp_artifact: Artifact, norm_artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no saved training state"):
        _trainer(mlp_artifact).restore(tmp_path)
    _trainer(norm_artifact).save(tmp_path / "norm")
    with pytest.raises(ArtifactError, match="belongs to another model"):
        _trainer(mlp_artifact).restore(tmp_path / "norm")


def test_restore_refuses_another_shape_and_a_missing_optimizer_state(mlp_artifact: Artifact, tmp_path: Path) -> None:
    trainer = _trainer(mlp_artifact)
    trainer.save(tmp_path / "saved")
    before = {n: a.copy() for n, a in trainer.parameters.items()}
    (tmp_path / "saved" / "optimizer_state.npz").unlink()
    with pytest.raises(ArtifactError, match=r"optimizer_state\.npz"):
        trainer.restore(tmp_path / "saved")
    trainer.save(tmp_path / "other")
    np.savez(tmp_path / "other" / "optimizer_state.npz", steps_done=np.asarray(3))
    with pytest.raises(ArtifactError, match="belongs to another"):
        trainer.restore(tmp_path / "other")
    assert trainer.steps_done == 0
    assert all(np.array_equal(before[n], a) for n, a in trainer.parameters.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("labels"), "lacks 'labels'"),
        (lambda b: b.update(extra=np.zeros(3)), "no input 'extra'; it has x, labels"),
        (lambda b: b.update(x=b["x"][:5]), r"'x' has shape \(5, 12\), the artifact was compiled for \(8, 12\)"),
        (lambda b: b.update(labels=b["labels"].astype(np.float32)), "'labels' has dtype float32, the artifact wants int64"),
        (lambda b: b.update(x=np.full((8, 12), "a")), "'x' has dtype"),
    ],
)
def test_bad_batches_are_refused(mlp_artifact: Artifact, change: object, message: str) -> None:
    trainer, batch = _trainer(mlp_artifact), batch_of(mlp_artifact, 0)
    change(batch)  # type: ignore[operator]
    with pytest.raises(UsageError, match=message):
        trainer.train_step(batch)
    assert trainer.steps_done == 0


def test_evaluate_equals_torch_in_evaluation_mode(norm_artifact: Artifact) -> None:
    trainer = _trainer(norm_artifact)
    for step in range(3):
        trainer.train_step(batch_of(norm_artifact, step))
    module = _module(norm_artifact).eval()
    state = {n: torch.from_numpy(a.copy()) for n, a in trainer.parameters.items()}
    module.load_state_dict({n: state[n].to(t.dtype).reshape(t.shape) for n, t in module.state_dict().items()})
    batch = batch_of(norm_artifact, 9)
    before = {n: a.copy() for n, a in trainer.parameters.items()}
    loss, outputs = trainer.evaluate(batch)
    with torch.no_grad():
        expected = module(torch.from_numpy(batch["x"]))
    assert list(outputs) == norm_artifact.manifest["roles"]["outputs"]
    np.testing.assert_allclose(next(iter(outputs.values())), expected.numpy(), rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(F.cross_entropy(expected, torch.from_numpy(batch["labels"])).item(), rel=1e-5)
    assert all(np.array_equal(before[n], a) for n, a in trainer.parameters.items()), "evaluating changed the state"
    again, _ = trainer.evaluate(batch)
    assert again == loss


def test_evaluate_switches_dropout_off(cnn_artifact: Artifact) -> None:
    trainer, batch = _trainer(cnn_artifact), batch_of(cnn_artifact, 0)
    assert trainer.evaluate(batch)[0] == trainer.evaluate(batch)[0]


def test_the_callers_arrays_stay_as_they_are(momentum_mlp_artifact: Artifact) -> None:
    batch = batch_of(momentum_mlp_artifact, 0)
    before = {n: a.copy() for n, a in batch.items()}
    _trainer(momentum_mlp_artifact).train_step(batch)
    assert all(np.array_equal(before[n], a) for n, a in batch.items())


def test_resident_bytes_are_counted_as_the_manifest_does(mlp_artifact: Artifact, cnn_artifact: Artifact, momentum_artifact: Artifact) -> None:
    for artifact in (mlp_artifact, cnn_artifact, momentum_artifact):
        resident = artifact.manifest["memory"]["resident"]
        counted = sum(size for name, size in resident.items() if name not in ("runtime", "constants"))
        assert _trainer(artifact).resident_bytes == counted


SPECS = [InputSpec.parse("x=4x2"), InputSpec.parse("labels=4:int64:3")]


def _data(path: Path, samples: int) -> Path:
    np.savez(path, x=np.arange(samples * 2, dtype=np.float32).reshape(samples, 2), labels=np.arange(samples) % 3)
    return path


def _seen(batches: Iterator[dict[str, np.ndarray]], count: int) -> list[int]:  # type: ignore[type-arg]
    return [int(row[0]) // 2 for batch in itertools.islice(batches, count) for row in batch["x"]]


def test_file_batches_drop_and_wrap(tmp_path: Path) -> None:
    path = _data(tmp_path / "d.npz", 10)
    dropped = _seen(file_batches(path, SPECS), 4)
    assert len(set(dropped[:8])) == 8 and len(set(dropped[8:])) == 8
    wrapped = _seen(file_batches(path, SPECS, "wrap"), 5)
    assert sorted(wrapped) == sorted([*range(10), *range(10)])
    assert sorted(wrapped[:10]) == list(range(10))
    assert _seen(file_batches(path, SPECS, seed=1), 2) != dropped[:8]
    batch = next(file_batches(path, SPECS))
    assert [int(row[0]) // 2 % 3 for row in batch["x"]] == batch["labels"].tolist(), "labels follow their samples"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((8, 2))}, "must have the arrays x, labels; it has x"),
        ({"x": np.zeros((8, 2)), "labels": np.zeros(7, int)}, "different numbers of samples"),
        ({"x": np.zeros((8, 3)), "labels": np.zeros(8, int)}, r"samples of shape \(3,\)"),
        ({"x": np.zeros((8, 2)), "labels": np.zeros(8)}, "'labels' in .* is float64, the artifact wants int64"),
        ({"x": np.zeros((3, 2)), "labels": np.zeros(3, int)}, "3 samples, fewer than a batch of 4"),
        ({"x": np.zeros((8, 2)), "labels": np.asarray(1)}, "labels"),
    ],
)
def test_bad_data_files(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:  # type: ignore[type-arg]
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        file_batches(tmp_path / "d.npz", SPECS)


def test_labels_that_are_no_class(mlp_artifact: Artifact) -> None:
    """torch refuses them as well; the kernels would count -1 from the end, as the last class."""
    trainer = Trainer(mlp_artifact, capped=False)
    batch = next(random_batches([*mlp_artifact.inputs, *mlp_artifact.labels], 0))
    labels = batch["labels"].copy()
    labels[5] = -1
    for use in (trainer.train_step, trainer.evaluate):
        with pytest.raises(UsageError, match="'labels' has the value -1, which is no class: mend the data, or compile with ignore_index=-1"):
            use({**batch, "labels": labels})
    assert trainer.steps_done == 0
    labels[5] = -100  # of no class: left out of the mean
    logits = trainer.evaluate(batch)[1]
    (scores,) = logits.values()
    log_shares = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    expected = -np.mean([log_shares[i, labels[i]] for i in range(8) if i != 5])
    assert trainer.train_step({**batch, "labels": labels}) == pytest.approx(expected, rel=1e-5)


def test_files_that_hold_no_data(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no data file"):
        file_batches(tmp_path / "none.npz", SPECS)
    (tmp_path / "text.npz").write_text("hello", encoding="utf-8")
    with pytest.raises(UsageError, match=r"not an \.npz file"):
        file_batches(tmp_path / "text.npz", SPECS)
    np.save(tmp_path / "one.npy", np.zeros((8, 2)))
    with pytest.raises(UsageError, match="one array without a name"):
        file_batches(tmp_path / "one.npy", SPECS)
    (tmp_path / "cut.npz").write_bytes(_data(tmp_path / "whole.npz", 8).read_bytes()[:100])
    with pytest.raises(UsageError, match=r"not an \.npz file"):
        file_batches(tmp_path / "cut.npz", SPECS)
    with pytest.raises(UsageError):
        file_batches(tmp_path, SPECS)


def test_one_arena_size_a_process(cnn_artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxremat.runtime import arena

    monkeypatch.setattr(arena, "_registered", 12345)
    assert arena.registered() == 12345
    with pytest.raises(OnnxRematError, match="start a new process"):
        Trainer(cnn_artifact)


def test_a_seed_draws_the_same_masks_again(cnn_artifact: Artifact) -> None:
    batch = next(random_batches([*cnn_artifact.inputs, *cnn_artifact.labels], 0))
    first, again, other = (Trainer(cnn_artifact, capped=False, seed=seed).train_step(batch) for seed in (5, 5, 6))
    assert first == again != other
