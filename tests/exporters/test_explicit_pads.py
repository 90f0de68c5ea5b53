"""Padding modes and asked-for output sizes of transposed convolutions as explicit pads: the same numbers from the runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxremat.exporters import ExportError
from onnxremat.exporters.explicit_pads import make_pads_explicit

X = np.random.default_rng(0).standard_normal((1, 2, 4, 3)).astype(np.float32)


def _model(kernel: tuple[int, int], **attributes: Any) -> ir.Model:
    weight = np.random.default_rng(1).standard_normal((2, 1, *kernel)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ConvTranspose", ["x", "w"], ["y"], name="up", **attributes)],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    return ir.serde.deserialize_model(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10))


def _run(model: ir.Model) -> npt.NDArray[Any]:
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), providers=["CPUExecutionProvider"])
    result: npt.NDArray[Any] = session.run(None, {"x": X})[0]
    return result


@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("kernel", [(3, 2), (4, 3)])
@pytest.mark.parametrize("strides", [[3, 2], [2, 2]])
@pytest.mark.parametrize("shape", [None, [9, 6], [8, 7], [7, 5]])
def test_the_same_numbers(mode: str, kernel: tuple[int, int], strides: list[int], shape: list[int] | None) -> None:
    asked = {} if shape is None else {"output_shape": shape}
    model = _model(kernel, auto_pad=mode, strides=strides, **asked)
    expected = _run(model)
    make_pads_explicit(model)
    (node,) = model.graph
    assert "pads" in node.attributes and not {"auto_pad", "output_shape"} & set(node.attributes)
    np.testing.assert_allclose(_run(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attributes", [{"output_shape": [9, 9]}, {"output_shape": [6, 4]}, {"auto_pad": "SAME_UPPER", "strides": [3, 3]}])
def test_an_output_beyond_the_windows_is_refused(attributes: dict[str, Any]) -> None:
    with pytest.raises(ExportError, match=r"ConvTranspose up.*beyond its windows"):
        make_pads_explicit(_model((2, 2), **attributes))
