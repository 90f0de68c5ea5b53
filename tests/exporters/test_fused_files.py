"""Files that ONNX Runtime's transformer optimizer wrote: fused operators, without a record of their shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxremat.exporters import InputSpec, import_onnx
from onnxremat.optimizers import Optimizer
from onnxremat.runtime.session import BoundSession, Options, make_session
from onnxremat.training_graph import GRADIENT_BUFFER, build_training_graph
from tests.models.training import _arrays

TEXT = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> encoder (int32[N, 4] ids, int32[N, 4] segments) => (float[N, 4, 12] y) {
  embedded, _ = com.microsoft.EmbedLayerNormalization(ids, segments, words, places, kinds, scale, shift)
  attended = com.microsoft.Attention<num_heads = 2>(embedded, qkv, qkv_bias)
  normal = com.microsoft.SkipLayerNormalization(attended, embedded, scale, shift, out_bias)
  wide = com.microsoft.FusedMatMul<transB = 1>(normal, up)
  active = com.microsoft.BiasGelu(wide, up_bias)
  narrow = MatMul(active, down)
  fast = com.microsoft.FastGelu(narrow, down_bias)
  rms = com.microsoft.SkipSimplifiedLayerNormalization(fast, normal, scale)
  quick = com.microsoft.QuickGelu(rms)
  y = MatMul(quick, head)
}"""
WEIGHTS = {
    "words": (20, 8),
    "places": (6, 8),
    "kinds": (2, 8),
    "scale": (8,),
    "shift": (8,),
    "qkv": (8, 24),
    "qkv_bias": (24,),
    "out_bias": (8,),
    "up": (16, 8),
    "up_bias": (16,),
    "down": (16, 8),
    "down_bias": (8,),
    "head": (8, 12),
}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(TEXT)
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            node.output[i] = "" if name == "_" else name
    rng = np.random.default_rng(0)
    for name, shape in WEIGHTS.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 2, name))
    return model


def test_they_train(tmp_path: Path, model: onnx.ModelProto) -> None:
    """Every weight does; the loss is that of the file as ONNX Runtime runs it, and falls along the gradients as they say."""
    onnx.save(model, tmp_path / "m.onnx")
    specs = [InputSpec(name, (2, 4), "int32", high) for name, high in (("ids", 20), ("segments", 2))]
    training = build_training_graph(import_onnx(tmp_path / "m.onnx", specs, loss="mse"), Optimizer("sgd"))
    assert set(training.trainable) == set(WEIGHTS)
    arrays = _arrays(training)
    rng = np.random.default_rng(1)
    for spec in (*training.inputs, *training.labels):
        arrays[spec.name][...] = spec.sample(rng)
    session = BoundSession(make_session(ir.serde.serialize_model(training.model).SerializeToString(), Options(threads=1)))
    session.bind(arrays)

    def loss_of_file(step: float) -> float:
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        for weight in moved.graph.initializer:
            array = onnx.numpy_helper.to_array(weight) - step * arrays[weight.name + GRADIENT_BUFFER]
            weight.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), weight.name))
        runtime = ort.InferenceSession(moved.SerializeToString(), providers=["CPUExecutionProvider"])
        (y,) = runtime.run(None, {spec.name: arrays[spec.name] for spec in training.inputs})
        (label,) = training.labels
        return float(np.mean(np.square(y.astype(np.float64) - arrays[label.name])))

    loss = float(session.run()[0])
    assert loss == pytest.approx(loss_of_file(0.0), rel=1e-5)
    squares = sum(float(np.sum(np.square(arrays[name + GRADIENT_BUFFER], dtype=np.float64))) for name in WEIGHTS)
    step = 1e-3 / squares**0.5
    slope = (loss_of_file(-step) - loss_of_file(step)) / (2 * step)
    assert slope == pytest.approx(squares, rel=1e-2)
