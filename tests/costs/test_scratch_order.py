"""Which kernels take their scratch memory before their outputs, and so change where these end up in the arena."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxremat.ops import MS, traits
from onnxremat.runtime import worker

MAP, MATRIX = (2, 32, 64, 64), (512, 512)
ONES = {"pads": [1] * 4, "kernel_shape": [3, 3], "strides": [1, 1], "dilations": [1, 1], "group": 1}

#: Operator -> domain, shape of its first input and output, constants that it reads as well, attributes.
KERNELS: dict[str, tuple[str, tuple[int, ...], list[Any], dict[str, Any]]] = {
    "Where": ("", MATRIX, [np.ones(MATRIX, np.float32)], {}),
    "Softmax": ("", MATRIX, [], {"axis": 0}),
    "LogSoftmax": ("", MATRIX, [], {"axis": 0}),
    "SoftmaxGrad_13": (MS, MATRIX, [np.ones(MATRIX, np.float32)], {"axis": 0}),
    "LogSoftmaxGrad_13": (MS, MATRIX, [np.ones(MATRIX, np.float32)], {"axis": 0}),
    "Conv": ("", MAP, [np.ones((32, 32, 3, 3), np.float32)], ONES),
    "ConvTranspose": ("", MAP, [np.ones((32, 32, 3, 3), np.float32)], ONES),
    "ScatterElements": ("", MATRIX, [np.zeros((64, 512), np.int64), np.ones((64, 512), np.float32)], {"axis": 0}),
    "GatherElements": ("", MATRIX, [np.zeros(MATRIX, np.int64)], {"axis": 0}),
    "CumSum": ("", MATRIX, [np.asarray(0)], {}),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_op_table_says_what_comes_first(tmp_path: Path, kernel: str) -> None:
    """There is a hole as large as the output; what comes after both is so large that it fits only if the output went into the hole."""
    domain, shape, constants, attributes = KERNELS[kernel]
    names = [f"c{i}" for i in range(len(constants))]
    arrays = [numpy_helper.from_array(a, name) for a, name in zip(constants, names, strict=True)]
    reads = ["b", *names]
    if kernel == "Where":
        arrays.append(numpy_helper.from_array(np.ones(shape, np.bool_), "condition"))
        reads = ["condition", *reads]
    size = 4 * math.prod(shape)
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["b"]),
        helper.make_node("ReduceMax", ["a"], ["first"], keepdims=0),  # the last read of a, which leaves the hole
        helper.make_node(kernel, reads, ["y"], domain=domain, name="kernel", **attributes),
        helper.make_node("Neg", ["large"], ["z"]),
        helper.make_node("ReduceMax", ["b"], ["second"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), helper.make_tensor_value_info("large", TensorProto.FLOAT, [size])]
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("y", "z", "first", "second")]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(MS, 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, arrays), opset_imports=imports, ir_version=9)
    onnx.save(model, str(tmp_path / "m.onnx"))
    # Constants, the hole, b and z, which is four of them; scratch is less than z and a half of b, where it comes after.
    held = sum(-(-array.nbytes // 256) * 256 for array in (numpy_helper.to_array(a) for a in arrays))
    answer = worker.call("tests.test_placement:chain_job", model=str(tmp_path / "m.onnx"), capacity=held + 6 * size + size * 3 // 4)
    assert (answer == "ok") == (traits(kernel, domain).scratch_first == 0), answer
