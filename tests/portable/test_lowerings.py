"""Training kernels against what is written in their place, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat.errors import DifferentiationError, UsageError
from onnxremat.graph import GraphBuilder
from onnxremat.nchwc import resolve_layout
from onnxremat.ops import MS
from onnxremat.optimizers import Optimizer
from onnxremat.runtime.session import Options, make_session
from onnxremat.targets import ONNXRUNTIME, lower, target_named


def _conv(batch: int, channels: int, size: tuple[int, ...], outs: int, kernel: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    rank, group = len(size), options.get("group", 1)
    attributes = {
        "kernel_shape": list(kernel),
        "strides": options.get("strides", [1] * rank),
        "dilations": options.get("dilations", [1] * rank),
        "pads": options.get("pads", [0] * 2 * rank),
        "group": group,
    }
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, attributes["dilations"], strict=True)]
    out = [(n + attributes["pads"][i] + attributes["pads"][rank + i] - reach[i]) // attributes["strides"][i] + 1 for i, n in enumerate(size)]
    shapes = [(batch, outs, *out), (batch, channels, *size), (outs, channels // group, *kernel)]
    return "ConvGrad", shapes, [None, shapes[2]], attributes


CONVS = {
    "plain": _conv(3, 8, (7, 9), 8, (3, 3), pads=[1, 1, 1, 1]),
    "strided, pixels left over": _conv(2, 3, (8, 10), 4, (3, 2), strides=[2, 3]),
    "dilated, uneven pads": _conv(2, 3, (9, 9), 4, (3, 3), dilations=[2, 1], pads=[2, 0, 1, 1]),
    "grouped": _conv(2, 6, (6, 6), 4, (3, 3), group=2, pads=[1, 1, 1, 1]),
    "depthwise, strided": _conv(3, 4, (9, 9), 8, (5, 5), group=4, strides=[2, 2], pads=[2, 2, 2, 2]),
    "pads beyond the window": _conv(2, 3, (6, 6), 4, (2, 3), pads=[3, 2, 2, 4]),
    "three dimensions": _conv(2, 3, (5, 4, 6), 4, (3, 2, 3), pads=[1, 0, 1, 1, 1, 1]),
    "images as groups": _conv(3, 4, (7, 9), 5, (3, 3), pads=[1, 1, 1, 1]),
    "images as groups, strided": _conv(3, 2, (11, 12), 5, (3, 3), strides=[2, 2], pads=[1, 1, 1, 1]),
    "narrowing": _conv(3, 12, (5, 6), 8, (3, 3), pads=[1, 1, 1, 1]),
    "narrowing, images as groups": _conv(3, 12, (13, 13), 8, (3, 3), pads=[1, 1, 1, 1]),
    "narrowing, dilated, uneven": _conv(2, 12, (13, 14), 8, (3, 2), dilations=[2, 3], pads=[2, 0, 1, 3]),
    "narrowing, pads beyond the window": _conv(2, 12, (6, 6), 8, (2, 3), pads=[3, 2, 2, 4]),
    "narrowing, one dimension": _conv(3, 12, (40,), 8, (3,), pads=[1, 1]),
    "pointwise": _conv(2, 5, (4, 3), 6, (1, 1)),
    "pointwise, strided": _conv(2, 5, (5, 5), 6, (1, 1), strides=[2, 2]),
}


def _answers(kind: str, domain: str, shapes: Any, outputs: Any, attributes: Any) -> list[list[np.ndarray[Any, Any]]]:
    """What the kernel computes, and what is written in its place."""
    rng = np.random.default_rng(0)
    arrays = {f"x{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    results = []
    for lowered in (False, True):
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, MS: 1}, name="kernel")
        op = GraphBuilder(graph)
        for name, array in arrays.items():
            graph.inputs.append(ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT)))
        names = ["" if shape is None else f"y{i}" for i, shape in enumerate(outputs)]
        like = [None if shape is None else (shape, ir.DataType.FLOAT) for shape in outputs]
        made = op.node(kind, *graph.inputs, domain=domain, outputs=names, like=like, **attributes)
        graph.outputs.extend(v.value for v in made if v.value.name)
        if lowered:
            lower(graph, ONNXRUNTIME)
            assert all(node.domain == "" for node in graph)
        model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        results.append(make_session(model, Options(arena=False)).run([n for n in names if n], arrays))
    return results


@pytest.mark.parametrize("name", CONVS)
def test_the_weight_gradient_is_the_kernels(name: str) -> None:
    kernel, written = _answers(CONVS[name][0], MS, *CONVS[name][1:])
    np.testing.assert_allclose(written[0], kernel[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trans_a, trans_b", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_products_with_transposes_and_a_factor(batch: tuple[int, ...], trans_a: int, trans_b: int) -> None:
    shapes = [(*batch, *((4, 5) if not trans_a else (5, 4))), (*batch, *((5, 6) if not trans_b else (6, 5)))]
    kernel, written = _answers("FusedMatMul", MS, shapes, [(*batch, 4, 6)], {"transA": trans_a, "transB": trans_b, "alpha": 0.5})
    np.testing.assert_allclose(written[0], kernel[0], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_batch_normalization_is_the_kernels() -> None:
    shapes = [(4, 3, 5, 5), (4, 3, 5, 5), (3,), (3,), (3,)]
    kernel, written = _answers("BatchNormalizationGrad", MS, shapes, [(4, 3, 5, 5), (3,), (3,)], {"epsilon": 1e-5})
    for found, expected in zip(written, kernel, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_what_has_neither_kernel_nor_lowering_is_refused_by_name() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, MS: 1}, name="refused")
    graph.inputs.append(ir.Value(name="x", shape=ir.Shape([2, 2]), type=ir.TensorType(ir.DataType.FLOAT)))
    graph.outputs.append(GraphBuilder(graph).node("Inverse", graph.inputs[0], domain=MS, like=[graph.inputs[0]])[0].value)
    with pytest.raises(DifferentiationError, match=r"onnxruntime has no kernel for com\.microsoft\.Inverse.*--target ort-training"):
        lower(graph, ONNXRUNTIME)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="clipping needs every gradient"):
        Optimizer("adamw", clip_grad_norm=1.0, update="fused")
    with pytest.raises(UsageError, match="no standard operators"):
        resolve_layout("nchwc", blocked_kernels=False)
    with pytest.raises(UsageError, match="no target 'tensorrt'"):
        target_named("tensorrt")
