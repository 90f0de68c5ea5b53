"""The verifier must see what it is for: each sabotage is detected, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from onnxremat import Artifact
from onnxremat.artifact import TRAINING, UNSCHEDULED
from onnxremat.drawn import given_draws
from onnxremat.errors import OnnxRematError
from onnxremat.exporters import build_module
from onnxremat.verification import compare_schedules, compare_with_torch, torch_error, verify_artifact

from .factories import TinyCNN, alter_model


def _copy(artifact: Artifact, folder: Path) -> Path:
    shutil.copytree(artifact.path, folder / "copy")
    return folder / "copy"


def _scale_gradient(parameter: str, factor: float) -> Any:
    """A change that multiplies the accumulated gradient of one parameter."""

    def change(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "InPlaceAccumulatorV2" and n.input[0].startswith(parameter + "_grad"))
        at = list(model.graph.node).index(node)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(factor, np.float32), "sabotage"))
        model.graph.node.insert(at, helper.make_node("Mul", [node.input[1], "sabotage"], ["sabotaged"], name="sabotaged"))
        model.graph.node[at + 1].input[1] = "sabotaged"

    return change


def _no_state_update(model: onnx.ModelProto) -> None:
    """A change by which the first running mean keeps its value: loss and gradients are as before."""
    node = next(n for n in model.graph.node if n.op_type == "InPlaceAccumulatorV2" and n.input[0].endswith("running_mean"))
    node.input[1] = node.input[0]


def test_an_honest_artifact_passes(norm_artifact: Artifact) -> None:
    found = verify_artifact(norm_artifact, steps=3, threads=1, measure=False)
    assert found.passed and found.bitwise_equal and found.state_equal and found.reason == ""
    assert found.max_relative_error_torch is not None and 0 < found.max_relative_error_torch <= found.tolerance_torch
    assert found.peak_measured_bytes is None and found.within_budget is None and found.steps == 3


def test_the_figures_of_compile_time_are_kept(cnn_artifact: Artifact) -> None:
    kept = cnn_artifact.manifest["verification"]
    assert kept["passed"] and kept["bitwise_equal"] and kept["state_equal"] and kept["within_budget"]
    assert 0 < kept["peak_measured_bytes"] <= cnn_artifact.manifest["memory"]["budget_bytes"]


@pytest.mark.parametrize("parameter", ["0.weight", "3.bias"])
def test_a_wrong_scheduled_gradient_is_seen(norm_artifact: Artifact, tmp_path: Path, parameter: str) -> None:
    folder = _copy(norm_artifact, tmp_path)
    alter_model(folder, TRAINING, _scale_gradient(parameter, 1 + 2.0**-20))
    artifact = Artifact.load(folder)
    assert any(name.startswith(parameter + "_grad") for name in compare_schedules(artifact, 1, 1))
    found = verify_artifact(artifact, steps=1, threads=1, measure=False)
    assert not found.passed and not found.bitwise_equal and parameter in found.reason


def test_a_wrong_scheduled_state_is_seen(norm_artifact: Artifact, tmp_path: Path) -> None:
    folder = _copy(norm_artifact, tmp_path)
    alter_model(folder, TRAINING, _no_state_update)
    found = verify_artifact(Artifact.load(folder), steps=1, threads=1, measure=False)
    assert not found.passed and not found.state_equal and "running_mean" in found.reason


@pytest.mark.parametrize("factor", [1.01, 0.0, -1.0])
def test_a_gradient_that_is_wrong_in_both_graphs_is_seen_against_torch(norm_artifact: Artifact, tmp_path: Path, factor: float) -> None:
    folder = _copy(norm_artifact, tmp_path)
    for name in (TRAINING, UNSCHEDULED):
        alter_model(folder, name, _scale_gradient("3.weight", factor))
    found = verify_artifact(Artifact.load(folder), steps=1, threads=1, measure=False)
    assert found.bitwise_equal and not found.passed
    assert found.max_relative_error_torch == pytest.approx(abs(1 - factor), rel=0.05)
    assert "'3.weight'" in found.reason and "torch" in found.reason


def test_a_state_that_is_wrong_in_both_graphs_is_seen_against_torch(norm_artifact: Artifact, tmp_path: Path) -> None:
    folder = _copy(norm_artifact, tmp_path)
    for name in (TRAINING, UNSCHEDULED):
        alter_model(folder, name, _no_state_update)
    found = verify_artifact(Artifact.load(folder), steps=1, threads=1, measure=False)
    assert found.bitwise_equal and not found.passed and not found.state_equal and "running_mean" in found.reason


def test_a_wrong_update_in_the_graph_is_seen_against_torch(momentum_mlp_artifact: Artifact, tmp_path: Path) -> None:
    assert verify_artifact(momentum_mlp_artifact, steps=1, threads=1, measure=False).passed
    folder = _copy(momentum_mlp_artifact, tmp_path)

    def change(model: onnx.ModelProto) -> None:
        """The momentum's decay as a rate of decay of the weights: both graphs wrong in one way."""
        node = next(n for n in model.graph.node if n.op_type == "InPlaceAccumulatorV2" and n.input[0].endswith(".momentum"))
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(1.5, np.float32), "sabotage"))
        at = list(model.graph.node).index(node)
        model.graph.node.insert(at, helper.make_node("Mul", [node.input[1], "sabotage"], ["sabotaged"], name="sabotaged"))
        model.graph.node[at + 1].input[1] = "sabotaged"

    for name in (TRAINING, UNSCHEDULED):
        alter_model(folder, name, change)
    found = verify_artifact(Artifact.load(folder), steps=1, threads=1, measure=False)
    assert found.bitwise_equal and not found.passed


def test_another_model_is_seen(norm_artifact: Artifact) -> None:
    source = norm_artifact.manifest["source"]
    module = build_module(source["spec"], int(source["seed"]))
    error, _, tolerance, _ = compare_with_torch(norm_artifact, module, threads=1)
    assert error <= tolerance
    with torch.no_grad():
        next(module.parameters()).mul_(1.1)
    before = {n: p.clone() for n, p in module.state_dict().items()}
    error, _, tolerance, _ = compare_with_torch(norm_artifact, module, threads=1)
    assert error > tolerance
    assert all(torch.equal(before[n], p) for n, p in module.state_dict().items()), "the module is left as it was"


def test_a_source_that_can_not_be_imported_is_not_compared(norm_artifact: Artifact) -> None:
    manifest = {**norm_artifact.manifest, "source": {"kind": "onnx", "path": "f.onnx"}}
    error, state_error, _, why = torch_error(Artifact(norm_artifact.path, manifest))
    assert error is None and state_error is None and "not an importable" in why
    moved = {**norm_artifact.manifest, "source": {**norm_artifact.manifest["source"], "spec": "tests.factories:gone"}}
    error, _, _, why = torch_error(Artifact(norm_artifact.path, moved))
    assert error is None and "gone" in why


class _TwoDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Dropout(0.5), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.one(x), self.two(x)])


def test_masks_are_injected_in_order() -> None:
    rng = np.random.default_rng(0)
    masks = [rng.random((3, 4)) < 0.5 for _ in range(2)]
    x = torch.ones(3, 4)
    with given_draws(masks):
        found = _TwoDropouts()(x)
    np.testing.assert_allclose(found[0], masks[0] / 0.5)
    np.testing.assert_allclose(found[1], masks[1] / 0.75, rtol=1e-6)
    with pytest.raises(OnnxRematError, match="more dropouts than the graph"), given_draws(masks[:1]):
        _TwoDropouts()(x)
    with pytest.raises(OnnxRematError, match="1 dropouts more than torch"), given_draws([*masks, masks[0]]):
        _TwoDropouts()(x)
    with given_draws([]):
        assert torch.equal(_TwoDropouts().eval()(x), torch.stack([x, x])), "off in evaluation mode"
    with pytest.raises(OnnxRematError, match=r"torch\.rand"), given_draws([]):
        torch.rand(3)


def test_masks_of_attention_are_injected() -> None:
    rng = np.random.default_rng(1)
    query, key, value = (torch.from_numpy(rng.standard_normal((2, 3, 5, 4)).astype(np.float32)) for _ in range(3))
    keep = np.ones((2, 3, 5, 5), np.bool_)
    plain = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with given_draws([keep]):
        found = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
    torch.testing.assert_close(found, plain / 0.8)


def test_dropout_masks_of_the_runtime_reach_torch(cnn_artifact: Artifact) -> None:
    """With the masks the comparison holds; with the dropout off in torch, it does not."""
    source = cnn_artifact.manifest["source"]
    module = build_module(source["spec"], int(source["seed"]))
    assert isinstance(module, TinyCNN)
    assert len(cnn_artifact.manifest["roles"]["dropout_masks"]) == 1
    error, _, tolerance, _ = compare_with_torch(cnn_artifact, module, threads=1)
    assert error <= tolerance
    module.drop.p = 0.0
    with pytest.raises(OnnxRematError, match="dropouts more than torch"):
        compare_with_torch(cnn_artifact, module, threads=1)


def test_random_numbers_of_the_runtime_reach_torch(noisy_artifact: Artifact) -> None:
    found = verify_artifact(noisy_artifact, steps=2, threads=1, measure=False)
    assert len(noisy_artifact.manifest["roles"]["random_values"]) == 3
    assert found.passed and found.bitwise_equal and found.reason == ""
    assert found.max_relative_error_torch is not None and found.max_relative_error_torch < 1e-5


def test_random_values_are_handed_out_in_order_and_shape() -> None:
    uniform = np.asarray([[0.1, 0.6], [0.9, 0.3]], np.float32)
    with given_draws([], [uniform, uniform, uniform]):
        assert torch.equal(torch.rand(2, 2), torch.from_numpy(uniform))
        assert torch.empty(2, 2).bernoulli_(0.5).tolist() == [[1, 0], [0, 1]]
        assert torch.bernoulli(torch.full((2, 2), 0.2)).tolist() == [[1, 0], [0, 0]]
    with pytest.raises(OnnxRematError, match=r"torch\.rand draws \(3,\), the graph \(2, 2\)"), given_draws([], [uniform]):
        torch.rand(3)
    with pytest.raises(OnnxRematError, match="draws 1 times more"), given_draws([], [uniform]):
        pass


def test_each_seed_draws_other_masks_and_batches(cnn_artifact: Artifact) -> None:
    assert compare_schedules(cnn_artifact, 1, 1, seed=0) == []
    assert compare_schedules(cnn_artifact, 1, 1, seed=5) == []
