"""Convolutions in the blocked layout against the plain ones."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat import nchwc
from onnxremat.autodiff.rules_conv import adjoint_weights
from onnxremat.errors import UsageError
from onnxremat.graph import GraphBuilder
from onnxremat.nchwc import NCHWC, block_convolutions, resolve_layout
from onnxremat.runtime.session import BoundSession, Options, make_session

pytestmark = pytest.mark.skipif(resolve_layout("auto") != "nchwc", reason="the blocked kernels exist on x86-64 only")

Shape = tuple[int, ...]


def conv_graph(x: Shape, w: Shape, bias: bool = False, pad: int = 1, count: int = 1, **attributes: Any) -> ir.Model:
    """``count`` convolutions of one input, and their sum."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="conv")
    op = GraphBuilder(graph)

    def operand(name: str, shape: Shape) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        graph.inputs.append(value)
        return value

    image = operand("x", x)
    rank = len(w) - 2
    results = []
    for number in range(count):
        inputs = [image, operand(f"w{number}", w), *([operand(f"b{number}", w[:1])] if bias else [])]
        results.append(op("Conv", *inputs, kernel_shape=list(w[2:]), pads=[pad] * 2 * rank, **attributes))
    total = sum(results[1:], start=results[0])
    graph.outputs.append(total.value)
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model) -> Any:
    session = make_session(ir.serde.serialize_model(model).SerializeToString(), Options(threads=1))
    rng = np.random.default_rng(0)
    bound = BoundSession(session)
    bound.bind({v.name: rng.standard_normal(v.shape.numpy()).astype(np.float32) for v in model.graph.inputs if v.name and v.shape})
    return bound.run()[0]


def kinds(model: ir.Model) -> list[str]:
    return [f"{n.domain}:{n.op_type}" for n in model.graph]


BLOCKED: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "3x3": ((2, 32, 14, 14), (48, 32, 3, 3), {}),
    "strided": ((2, 16, 28, 28), (32, 16, 3, 3), {"strides": [2, 2]}),
    "dilated": ((2, 16, 20, 20), (32, 16, 3, 3), {"dilations": [2, 2]}),
    "uneven pads": ((2, 16, 20, 20), (16, 16, 3, 2), {"strides": [2, 1]}),
    "bias": ((2, 32, 14, 14), (16, 32, 3, 3), {"bias": True}),
    "image": ((2, 3, 32, 32), (32, 3, 7, 7), {"pad": 3, "strides": [2, 2]}),
    "image with bias": ((2, 1, 32, 32), (16, 1, 8, 8), {"bias": True}),
    "depthwise": ((2, 32, 14, 14), (32, 1, 3, 3), {"group": 32}),
    "depthwise strided": ((2, 64, 28, 28), (64, 1, 5, 5), {"group": 64, "pad": 2, "strides": [2, 2], "bias": True}),
}
PLAIN: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "few positions": ((1, 32, 8, 8), (32, 32, 3, 3), {}),
    "odd outputs": ((2, 32, 16, 16), (24, 32, 3, 3), {}),
    "odd inputs": ((2, 24, 16, 16), (32, 24, 3, 3), {}),
    "image, small window": ((2, 3, 32, 32), (32, 3, 3, 3), {}),
    "pointwise": ((2, 64, 16, 16), (32, 64, 1, 1), {"pad": 0}),
    "pointwise strided": ((2, 64, 32, 32), (32, 64, 1, 1), {"pad": 0, "strides": [2, 2]}),
    "grouped": ((2, 32, 16, 16), (32, 16, 3, 3), {"group": 2}),
    "depthwise multiplier": ((2, 32, 16, 16), (64, 1, 3, 3), {"group": 32}),
    "1-D": ((4, 32, 128), (32, 32, 3), {}),
}


@pytest.mark.parametrize("case", list(BLOCKED))
def test_a_blocked_convolution_equals_the_plain_one(case: str) -> None:
    x, w, options = BLOCKED[case]
    plain, blocked = conv_graph(x, w, **options), conv_graph(x, w, **options)
    block_convolutions(GraphBuilder(blocked.graph))
    assert f"{NCHWC}:Conv" in kinds(blocked) and ":Conv" not in kinds(blocked)
    assert [v.name for v in blocked.graph.outputs] == [v.name for v in plain.graph.outputs]
    expected, found = run(plain), run(blocked)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("case", list(PLAIN))
def test_what_gains_nothing_stays_plain(case: str) -> None:
    x, w, options = PLAIN[case]
    model = conv_graph(x, w, **options)
    before = kinds(model)
    block_convolutions(GraphBuilder(model.graph))
    assert kinds(model) == before
    assert NCHWC not in model.graph.opset_imports


def test_convolutions_of_one_input_share_its_reorder() -> None:
    model = conv_graph((2, 32, 16, 16), (32, 32, 3, 3), count=2)
    expected = run(model)
    block_convolutions(GraphBuilder(model.graph))
    # One of the input, two of each weight.
    assert kinds(model).count(f"{NCHWC}:ReorderInput") == 5
    np.testing.assert_allclose(run(model), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("window", [(3, 3), (3, 2), (1, 5)])
def test_the_weights_of_an_adjoint_convolution_take_no_detour(group: int, window: tuple[int, int]) -> None:
    def graph(blocked: bool) -> ir.Model:
        model = conv_graph((2, 32, 16, 16), (32, 32 // group, *window), group=group)
        (conv,) = model.graph
        op = GraphBuilder(model.graph, before=conv)
        conv.replace_input_with(1, adjoint_weights(op.wrap(model.graph.inputs[1]), group).value)
        if blocked:
            block_convolutions(op)
        return model

    plain, blocked = graph(False), graph(True)
    assert f"{NCHWC}:Conv" in kinds(blocked)
    # Straight from the reversed rows to the blocks (depthwise weights have one input channel: nothing to order).
    assert kinds(blocked).count(":Transpose") == (1 if group == 1 else 2)
    expected, found = run(plain), run(blocked)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_every_value_keeps_a_static_shape() -> None:
    model = conv_graph((2, 32, 14, 14), (48, 32, 3, 3))
    block_convolutions(GraphBuilder(model.graph))
    for node in model.graph:
        for value in node.outputs:
            assert value.shape is not None and all(isinstance(d, int) for d in value.shape), value.name


@pytest.mark.parametrize(("machine", "layout"), [("x86_64", "nchwc"), ("AMD64", "nchwc"), ("aarch64", "nchw"), ("arm64", "nchw")])
def test_auto_is_what_suits_the_machine(machine: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert nchwc.resolve_layout("auto") == layout


def test_a_layout_is_named() -> None:
    choices: Sequence[str] = [resolve_layout(name) for name in ("nchw", "nchwc")]
    assert choices == ["nchw", "nchwc"]
    with pytest.raises(UsageError, match="'nhwc' is unknown: use auto, nchwc or nchw"):
        resolve_layout("nhwc")
