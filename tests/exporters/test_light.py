"""Forward files of other exporters: the topologies of onnx's wheel, both exporters of torch, and what ONNX Runtime makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from onnxremat.exporters import ExportError, InputSpec, import_onnx
from onnxremat.optimizers import Optimizer
from onnxremat.runtime.session import BoundSession, Options, make_session
from onnxremat.training_graph import GRADIENT_BUFFER, build_training_graph
from tests.models.training import _arrays

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
#: File -> trainable parameters, running statistics and dropouts in training form.
EXPECTED = {
    "bvlc_alexnet": (16, 0, 2),
    "densenet121": (606, 242, 0),
    "inception_v1": (116, 0, 1),
    "inception_v2": (347, 138, 0),
    "resnet50": (161, 106, 0),
    "shufflenet": (150, 98, 0),
    "squeezenet": (52, 0, 1),
    "vgg19": (38, 0, 2),
    "zfnet512": (16, 0, 0),
}

LARGE = {"vgg19", "densenet121", "inception_v2", "zfnet512", "bvlc_alexnet"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in EXPECTED])
@pytest.mark.parametrize("train_mode", [False, True], ids=["inference", "train-mode"])
def test_light_topologies(name: str, train_mode: bool) -> None:
    """They build, and a step on random weights gives a finite loss and gradients (the large ones are run in one of the two forms)."""
    graph = import_onnx(LIGHT / f"light_{name}.onnx", loss="cross_entropy", train_mode=train_mode)
    trainable, state, dropouts = EXPECTED[name]
    training = build_training_graph(graph, Optimizer("sgd"))
    assert len(training.trainable) == trainable
    assert len(training.state) == (state if train_mode else 0)
    assert sum(n.op_type == "Dropout" for n in training.graph) == (dropouts if train_mode else 0)
    if name in LARGE and train_mode:
        return
    rng = np.random.default_rng(0)
    arrays = _arrays(training)
    for spec in (*training.inputs, *training.labels):
        arrays[spec.name][...] = spec.sample(rng)
    for weight in (arrays[n] for n in training.trainable if training.weights[n].ndim > 1):  # the files hold one number throughout
        fan_in = weight.size // weight.shape[0] if weight.ndim == 4 else max(weight.shape)
        rng.standard_normal(weight.shape, np.float32, weight)
        weight *= np.float32(np.sqrt(2 / fan_in))
    session = BoundSession(make_session(ir.serde.serialize_model(training.model).SerializeToString(), Options(threads=2)))
    session.bind(arrays)
    loss = float(session.run()[0])
    gradients = [arrays[n + GRADIENT_BUFFER] for n in training.trainable]
    assert 0 < loss < np.inf
    assert all(np.isfinite(g).all() for g in gradients)
    assert sum(bool(g.any()) for g in gradients) > len(gradients) / 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv(x)).mean((2, 3))
        return self.out(self.norm(nn.functional.gelu(self.hidden(y))))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("level", ["", "BASIC", "EXTENDED"])
def test_exports_of_torch_and_their_optimized_forms(tmp_path: Path, dynamo: bool, level: str) -> None:
    torch.default_generator.manual_seed(0)
    module, x = Net().eval(), torch.randn(2, 3, 8, 8)
    file = tmp_path / "net.onnx"
    if dynamo:
        torch.onnx.export(module, (x,), file, dynamo=True, input_names=["x"], dynamic_shapes={"x": {0: torch.export.Dim("n")}}, verbose=False)
    else:
        torch.onnx.export(module, (x,), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}}, opset_version=17)
    if level:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        file = tmp_path / "optimized.onnx"
    training = build_training_graph(import_onnx(file, [InputSpec("x", (2, 3, 8, 8))], loss="cross_entropy"), Optimizer("sgd"))
    session = BoundSession(make_session(ir.serde.serialize_model(training.model).SerializeToString(), Options(threads=1)))
    arrays = _arrays(training)
    arrays["x"][...], arrays["labels"][...] = x.numpy(), [1, 3]
    session.bind(arrays)
    loss = float(session.run()[0])
    value = nn.functional.cross_entropy(module(x), torch.tensor([1, 3]))
    value.backward()
    assert loss == pytest.approx(float(value.detach()), rel=1e-5)
    # Names and orientations are the exporter's; the norms of the gradients are the model's.
    wanted = sorted(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)
    found = sorted(float(np.linalg.norm(arrays[name + GRADIENT_BUFFER])) for name in training.trainable)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_half_precision_is_refused_by_name(tmp_path: Path) -> None:
    from onnxremat.exporters import export_torch

    with pytest.raises(ExportError, match=r"parameter weight: bfloat16 .*float\(\)"):
        export_torch(nn.Linear(3, 3).bfloat16(), [InputSpec("x", (2, 3))])
    with pytest.raises(ExportError, match="TorchScript"):
        export_torch(torch.jit.script(nn.Linear(3, 3)), [InputSpec("x", (2, 3))])
