"""Every loss, in ONNX and in torch's own functions."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxremat.exporters import ExportError, InputSpec, Loss, export_torch
from onnxremat.exporters.cleanup import infer_shapes
from onnxremat.exporters.losses import append_loss
from tests.exporters.support import close, run_onnx, sample_all


@cache
def exported(shape: tuple[int, ...]) -> Any:
    return export_torch(nn.Hardtanh(-1e9, 1e9), [InputSpec("x", shape)])


def identity_graph(shape: tuple[int, ...], loss: Any, labels: Any = ()) -> Any:
    """A model that returns its input, exported once per shape, with a loss."""
    graph = copy.copy(exported(shape))
    graph.model = ir.serde.deserialize_model(ir.serde.serialize_model(graph.model))
    graph.source = {}
    append_loss(graph, Loss.of(loss), labels)
    infer_shapes(graph.model)
    return graph


WEIGHTS = np.array([0.5, 1.0, 2.0, 0.1, 3.0], np.float32)


@pytest.mark.parametrize("shape", [(6, 5), (3, 5, 4), (2, 5, 3, 4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore", [-100, 2])
def test_cross_entropy(shape: tuple[int, ...], smoothing: float, weighted: bool, reduction: str, ignore: int) -> None:
    loss = Loss("cross_entropy", reduction, None, ignore, smoothing, WEIGHTS if weighted else None, 1)
    graph = identity_graph(shape, loss)
    feeds = sample_all(graph)
    feeds["labels"].flat[0] = ignore
    logits, labels = torch.from_numpy(feeds["x"]), torch.from_numpy(feeds["labels"])
    weight = torch.from_numpy(WEIGHTS) if weighted else None
    wanted = F.cross_entropy(logits, labels, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing)
    close(run_onnx(graph, feeds)["loss"], wanted, 1e-5)
    close(loss.torch(logits, labels).numpy(), wanted, 1e-6)


def test_cross_entropy_of_rank_three_without_labels_asks_for_the_class_axis() -> None:
    with pytest.raises(ExportError, match="class_axis=1 or class_axis=-1"):
        Loss("cross_entropy").label_spec((2, 8, 16), "float32")
    assert Loss("cross_entropy", class_axis=-1).label_spec((2, 8, 16), "float32").high == 16


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("name", "function"), [("mse", F.mse_loss), ("l1", F.l1_loss), ("bce_with_logits", F.binary_cross_entropy_with_logits)])
def test_elementwise_losses(name: str, function: Any, reduction: str) -> None:
    graph = identity_graph((4, 3), f"{name}:reduction={reduction}")
    assert [str(spec) for spec in graph.labels] == ["target=4x3"]
    feeds = sample_all(graph)
    feeds["x"] *= 20  # a sigmoid in float32 is 0 or 1 here
    feeds["target"] = (feeds["target"] > 0).astype(np.float32)
    output, target = torch.from_numpy(feeds["x"]), torch.from_numpy(feeds["target"])
    wanted = function(output, target, reduction=reduction)
    close(run_onnx(graph, feeds)["loss"], wanted, 1e-5)
    close(Loss(name, reduction).torch(output, target).numpy(), wanted, 1e-6)


def test_language_model_labels_take_the_last_axis() -> None:
    graph = identity_graph((2, 6, 9), "cross_entropy", [InputSpec("labels", (2, 6), "int64", 9)])
    feeds = sample_all(graph)
    logits, labels = torch.from_numpy(feeds["x"]), torch.from_numpy(feeds["labels"])
    wanted = F.cross_entropy(logits.reshape(-1, 9), labels.reshape(-1))
    close(run_onnx(graph, feeds)["loss"], wanted, 1e-5)
    close(Loss("cross_entropy").torch(logits, labels).numpy(), wanted, 1e-6)


def test_class_axis_decides_derived_labels_and_ambiguity() -> None:
    assert identity_graph((2, 6, 9), "cross_entropy:class_axis=1").labels[0] == InputSpec("labels", (2, 9), "int64", 6)
    assert identity_graph((2, 6, 9), "cross_entropy:class_axis=-1").labels[0] == InputSpec("labels", (2, 6), "int64", 9)
    with pytest.raises(ExportError, match="class_axis=1 or class_axis=-1"):
        identity_graph((2, 5, 5), "cross_entropy", [InputSpec("labels", (2, 5), "int64", 5)])
    identity_graph((2, 5, 5), "cross_entropy:class_axis=-1", [InputSpec("labels", (2, 5), "int64", 5)])


def test_log_probabilities_are_kept_for_the_gradient() -> None:
    graph = identity_graph((4, 3), "cross_entropy")
    node = next(node for node in graph.model.graph if node.op_type == "SoftmaxCrossEntropyLoss")
    assert len(node.outputs) == 2 and node.outputs[1].name


def test_text_form_and_options_round_trip(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", WEIGHTS)
    loss = Loss.parse(f"cross_entropy:ignore_index=-1,label_smoothing=0.1,weights={tmp_path / 'w.npy'},reduction=sum")
    again = Loss.from_options(loss.name, loss.options())
    assert (
        again.options()
        == loss.options()
        == {
            "ignore_index": -1,
            "label_smoothing": 0.1,
            "reduction": "sum",
            "weights": WEIGHTS.tolist(),
        }
    )


def test_labels_named_as_an_inner_value_or_an_input() -> None:
    class Labels(nn.Module):
        def forward(self, target: torch.Tensor) -> torch.Tensor:
            return target * 2

    graph = export_torch(Labels(), [InputSpec("target", (2, 3))], (), "mse")
    assert graph.labels[0].name == "target_1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hinge", "no such loss"),
        ("cross_entropy:gamma=2", "gamma=2"),
        ("cross_entropy:ignore_index=x", "ignore_index=x"),
        ("cross_entropy:label_smoothing=2", "out of range"),
        ("cross_entropy:weights=/nowhere.npy", "no such file"),
        ("mse:reduction=none", "scalar"),
        ("mse:label_smoothing=0.1", "not understood"),
        ("mse:output=nothing", "no such output"),
        ("output", "no float scalar"),
    ],
)
def test_bad_losses(text: str, message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        identity_graph((4, 3), text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (InputSpec("labels", (5,), "int64", 3), r"do not fit logits \(4, 3\); labels of shape \(4,\) do"),
        (InputSpec("labels", (4,), "float32"), "not a class index"),
        (InputSpec("labels", (4,), "int64", 4), "exceed 3 classes"),
        (InputSpec("x", (4,), "int64", 3), "same name"),
        (InputSpec("output", (4,), "int64", 3), "same name"),
    ],
)
def test_bad_labels(label: InputSpec, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        identity_graph((4, 3), "cross_entropy", [label])


def test_weights_of_another_length() -> None:
    with pytest.raises(ExportError, match="does not fit 3 classes"):
        identity_graph((4, 3), Loss("cross_entropy", weights=WEIGHTS))
