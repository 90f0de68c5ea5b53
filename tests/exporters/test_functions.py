"""Files with functions of their own: nested, with attributes handed on and defaults, their values named as those around them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxremat.exporters import ExportError, InputSpec, import_onnx
from onnxremat.optimizers import Optimizer
from onnxremat.runtime.session import BoundSession, Options, make_session
from onnxremat.training_graph import GRADIENT_BUFFER, build_training_graph
from tests.models.training import TOLERANCE, _arrays

HEADER = '<ir_version: 8, opset_import: ["": 18, "own": 1, "other": 1]>'
MODEL = """ net (float[N, 6] x) => (float[N, 3] y) {
  h = own.Block <slope: float = 0.2> (x, w1, b1)
  s = own.Block <slope: float = 0.7, factor: float = 2.0> (h, w2, b2)
  p = other.Block (s, h)
  y = MatMul(p, w3)
}
"""
FUNCTIONS = """
<domain: "own", opset_import: ["": 18, "own": 1]>
Affine <factor> (x, w, b) => (y) {
  p = MatMul(x, w)
  s = Constant <value_float: float = @factor> ()
  h = Mul(p, s)
  y = Add(h, b)
}
<domain: "own", opset_import: ["": 18, "own": 1]>
Block <slope, factor: float = 0.5> (x, w, b) => (y) {
  h = own.Affine <factor: float = @factor> (x, w, b)
  y = LeakyRelu <alpha: float = @slope> (h)
}
<domain: "other", opset_import: ["": 18, "own": 1]>
Block (x, y) => (p) {
  h, s = Split <axis = 1, num_outputs = 2> (x)
  both = Concat <axis = 1> (s, h)
  m = own.Block <slope: float = 0.1, factor: float = 1.5> (both, y_square, x)
  y_square = MatMul(y_turned, y)
  y_turned = Transpose <perm = [1, 0]> (y)
  p = Tanh(m)
}
"""
SHAPES = {"w1": (6, 8), "b1": (8,), "w2": (8, 8), "b2": (8,), "w3": (8, 3)}


def written(folder: Path, functions: str) -> tuple[Path, dict[str, np.ndarray]]:
    model = onnx.parser.parse_model(HEADER + MODEL + functions)
    for function in model.functions:  # the parser takes nodes in any order, a file has them sorted
        nodes = {node.output[0]: node for node in function.node}
        if "y_square" in nodes:
            order = [nodes[name] for name in ("h", "both", "y_turned", "y_square", "m", "p")]
            copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
            del function.node[:]
            function.node.extend(copies)
    rng = np.random.default_rng(0)
    weights = {name: (rng.standard_normal(shape) / 2).astype(np.float32) for name, shape in SHAPES.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx", weights


def in_torch(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    h = F.leaky_relu(x @ w["w1"] * 0.5 + w["b1"], 0.2)
    s = F.leaky_relu(h @ w["w2"] * 2.0 + w["b2"], 0.7)
    both = torch.cat([s[:, 4:], s[:, :4]], 1)
    return torch.tanh(F.leaky_relu(both @ (h.T @ h) * 1.5 + s, 0.1)) @ w["w3"]


def test_they_train_as_torch(tmp_path: Path) -> None:
    path, weights = written(tmp_path, FUNCTIONS)
    training = build_training_graph(import_onnx(path, [InputSpec("x", (4, 6))], loss="mse"), Optimizer("sgd"))
    assert set(training.trainable) == set(SHAPES) and not training.model.functions
    arrays = _arrays(training)
    rng = np.random.default_rng(1)
    for spec in (*training.inputs, *training.labels):
        arrays[spec.name][...] = spec.sample(rng)
    session = BoundSession(make_session(ir.serde.serialize_model(training.model).SerializeToString(), Options(threads=1)))
    session.bind(arrays)
    loss = float(dict(zip(session.outputs, session.run(), strict=True))[training.loss])
    leaves = {name: torch.from_numpy(array).double().requires_grad_() for name, array in weights.items()}
    wanted = F.mse_loss(in_torch(torch.from_numpy(arrays["x"]).double(), leaves), torch.from_numpy(arrays[training.labels[0].name]).double())
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=TOLERANCE)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        exact = leaf.grad.numpy()
        np.testing.assert_allclose(arrays[name + GRADIENT_BUFFER], exact, rtol=0, atol=TOLERANCE * np.abs(exact).max(), err_msg=name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"other", opset_import: ["": 18', '"another", opset_import: ["": 18', "Block in .*: operator domain other is unknown"),
        ("m = own.Block <", "m = strange.Block <", "Block .*: operator domain strange is unknown"),
        ('"other", opset_import: ["": 18', '"other", opset_import: ["": 13', "functions cannot be inlined: .*version 18 .*one opset for all"),
        ("p = MatMul(x, w)", "p = own.Affine <factor: float = 1.0> (x, w, b)", "functions cannot be inlined: .*own"),
    ],
    ids=["missing", "unknown inside", "other opset", "recursive"],
)
def test_functions_that_cannot_be_inlined_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path, _ = written(tmp_path, FUNCTIONS.replace(old, new))
    with pytest.raises(ExportError, match=message) as caught:
        import_onnx(path, [InputSpec("x", (4, 6))], loss="mse")
    assert "\n" not in str(caught.value)
