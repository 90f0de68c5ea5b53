"""What normalization can't rewrite is named, with the reason, where a gradient has to pass through it, and harmless elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat.autodiff import differentiate
from onnxremat.errors import DifferentiationError
from onnxremat.graph import Expr, GraphBuilder
from onnxremat.normalize import normalize
from tests.autodiff.ops_sequences import add_sequence
from tests.autodiff.support import add_input, new_builder


def _compress(op: GraphBuilder, x: Expr) -> Expr:
    condition = add_input(op, "condition", (2,), ir.DataType.BOOL)
    return op.node("Compress", x, condition, axis=0, like=[((1, 3), x.dtype)])[0]


def _sequence_at(op: GraphBuilder, x: Expr) -> Expr:
    position = add_input(op, "position", (), ir.DataType.INT64)
    return op.node("SequenceAt", add_sequence(op, "SequenceConstruct", x, x), position, like=[x])[0]


def _beyond_the_sequence(op: GraphBuilder, x: Expr) -> Expr:
    return op.node("SequenceAt", add_sequence(op, "SequenceConstruct", x, x), np.asarray(2), like=[x])[0]


def _part_sizes(op: GraphBuilder, x: Expr) -> Expr:
    sizes = add_input(op, "sizes", (2,), ir.DataType.INT64)
    return op.node("SequenceAt", add_sequence(op, "SplitToSequence", x, sizes, axis=1), np.asarray(0), like=[((2, 1), x.dtype)])[0]


def _last_window_beyond(op: GraphBuilder, x: Expr) -> Expr:
    wide = x.reshape([1, 1, 6])
    return op.node("AveragePool", wide, kernel_shape=[2], strides=[3], ceil_mode=1, like=[((1, 1, 3), x.dtype)])[0]


def _complex_signal(op: GraphBuilder, x: Expr) -> Expr:
    signal = x.reshape([1, 3, 2])
    return op.node("STFT", signal, np.asarray(1), None, np.asarray(2), onesided=0, like=[((1, 2, 2, 2), x.dtype)])[0]


def _quantized(op: GraphBuilder, x: Expr) -> Expr:
    """Integers between two floats: were they taken for a cut, the path would be lost beside the direct one."""
    scale = np.asarray(0.1, np.float32)
    integers = op("QuantizeLinear", x, scale, np.asarray(0, np.int8))
    return op("DequantizeLinear", integers, scale, np.asarray(0, np.int8))


CASES: Sequence[tuple[str, Callable[[GraphBuilder, Expr], Expr], str]] = [
    ("Compress", _compress, "not a constant"),
    ("SequenceAt", _sequence_at, "not a constant"),
    ("SequenceAt", _beyond_the_sequence, "element 2 of a sequence of 2"),
    ("SequenceAt", _part_sizes, "'sizes' of the parts"),
    ("AveragePool", _last_window_beyond, "ceil_mode"),
    ("DequantizeLinear", _quantized, "quantized arithmetic has no gradient"),
    ("STFT", _complex_signal, "complex"),
]


def _graph(build: Callable[[GraphBuilder, Expr], Expr]) -> tuple[GraphBuilder, ir.Value, ir.Value]:
    """The loss, which reads what was built and a parameter beside it."""
    op = new_builder()
    x, w = add_input(op, "x", (2, 3)), add_input(op, "w", ())
    loss = op("ReduceSum", build(op, x) * w, keepdims=0)
    op.graph.outputs.append(loss.value)
    normalize(op.graph)
    return GraphBuilder(op.graph), x.value, w.value


@pytest.mark.parametrize(("op_type", "build", "reason"), CASES, ids=[build.__name__ for _, build, _ in CASES])
def test_a_gradient_through_it_is_refused(op_type: str, build: Callable[[GraphBuilder, Expr], Expr], reason: str) -> None:
    op, x, _ = _graph(build)
    with pytest.raises(DifferentiationError) as caught:
        differentiate(op, op.graph.outputs[0], [x])
    message = str(caught.value)
    assert op_type in message and reason in message and "\n" not in message


@pytest.mark.parametrize("build", [build for _, build, _ in CASES], ids=[build.__name__ for _, build, _ in CASES])
def test_a_gradient_beside_it_is_not(build: Callable[[GraphBuilder, Expr], Expr]) -> None:
    op, _, w = _graph(build)
    assert list(differentiate(op, op.graph.outputs[0], [w])) == ["w"]
