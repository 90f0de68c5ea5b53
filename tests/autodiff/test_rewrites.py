"""Rewrites into operators with rules: what they refuse, and what they leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat.autodiff import differentiate
from onnxremat.errors import DifferentiationError
from onnxremat.graph import Expr, GraphBuilder
from onnxremat.normalize import normalize
from onnxremat.ops import MS
from onnxremat.rewrites.einsum import parse
from onnxremat.runtime.session import Options, make_session
from tests.autodiff.support import add_input, new_builder


def _lstm(op: GraphBuilder, x: Expr, **attributes: Any) -> Expr:
    w, r = (op.const(np.ones((1, 8, n), np.float32)) for n in (x.shape[2], 2))
    return op.node("LSTM", x, w, r, outputs=3, hidden_size=2, **attributes)[0]


def _attention(op: GraphBuilder, x: Expr, **attributes: Any) -> Expr:
    weight, past = op.const(np.ones((4, 12), np.float32)), op.const(np.ones((2, 2, 2, 1, 2), np.float32))
    return op.node("Attention", x, weight, None, None, past, domain=MS, like=[x], num_heads=2, **attributes)[0]


def _einsum(op: GraphBuilder, x: Expr) -> Expr:
    return op.node("Einsum", x, like=[((2,), x.dtype)], equation="ijj->i")[0]


def _quantized(op: GraphBuilder, x: Expr) -> Expr:
    return op.node("MatMulNBits", x, domain=MS, like=[x])[0]


CASES = {
    "activation": (lambda op, x: _lstm(op, x, activations=["Sigmoid", "Sine", "Tanh"]), r"LSTM node .*'Sine' is unknown; use one of .*tanh"),
    "activations": (lambda op, x: _lstm(op, x, activations=["Sigmoid"]), "names 1 activations where 3 belong"),
    "past": (_attention, "Attention node .*past states .*without a cache"),
    "diagonal": (_einsum, r"Einsum node .*axes of different sizes \(2, 3, 4\)"),
    "quantized": (_quantized, "MatMulNBits node .*train the float model"),
}


@pytest.mark.parametrize(("build", "reason"), CASES.values(), ids=CASES.keys())
def test_what_cannot_be_rewritten_is_refused_only_where_a_gradient_passes(build: Any, reason: str) -> None:
    for frozen in (False, True):
        op = new_builder()
        x = add_input(op, "x", (2, 3, 4))
        weight = add_input(op, "w", (1,))
        y = build(op, x)
        op.graph.outputs[:] = [op("ReduceSum", y * weight, keepdims=0).value]
        normalize(op.graph)
        (loss,) = op.graph.outputs
        if frozen:
            assert list(differentiate(GraphBuilder(op.graph), loss, [weight.value])) == ["w"]
        else:
            with pytest.raises(DifferentiationError, match=reason):
                differentiate(GraphBuilder(op.graph), loss, [x.value])


def test_a_value_that_was_there_before_keeps_its_name() -> None:
    op = new_builder()
    x = op("Abs", add_input(op, "x", (2, 3)))
    y = op("Einsum", x, equation="ij->ij")
    op.graph.outputs[:] = [x.value, y.value]
    names = [v.name for v in op.graph.outputs]
    normalize(op.graph)
    assert [v.name for v in op.graph.outputs] == names
    assert [n.op_type for n in op.graph] == ["Abs", "Identity"]


def test_shapes_behind_a_stretched_axis_are_inferred_again() -> None:
    op = new_builder()
    a, b = add_input(op, "a", (1, 2, 3)), add_input(op, "b", (4, 3, 2))
    product = op("Einsum", a, b, equation="bij,bjk->bik")
    assert product.shape == (1, 2, 2)  # what ONNX says
    y = op("Transpose", product * 2.0, perm=[2, 1, 0])
    op.graph.outputs[:] = [y.value]
    normalize(op.graph)
    assert [int(d) for d in op.graph.outputs[0].shape or ()] == [2, 2, 4]


def test_products_move_transposes_into_the_kernel() -> None:
    op = new_builder()
    q, k = (add_input(op, name, (2, 3, 4, 5)) for name in "qk")
    op.graph.outputs[:] = [op("Einsum", q, k, equation="bhid,bhjd->bhij").value]
    normalize(op.graph)
    assert sorted(n.op_type for n in op.graph if n.op_type != "Reshape") == ["FusedMatMul"]


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij", "ijkl"])
def test_an_equation_that_does_not_fit_is_refused(equation: str) -> None:
    with pytest.raises(ValueError, match="equation"):
        parse(equation, [3])


def test_padding_of_constant_lengths_costs_nothing_where_none_is_short() -> None:
    op = new_builder()
    x = add_input(op, "x", (2, 3, 4))
    w, r = (op.const(np.ones((1, 8, n), np.float32)) for n in (4, 2))
    lengths = op.const(np.full(3, 2, np.int32))
    op.graph.outputs[:] = [op.node("LSTM", x, w, r, None, lengths, outputs=3, hidden_size=2)[0].value]
    normalize(op.graph)
    assert not {"Where", "Greater"} & {n.op_type for n in op.graph}
    assert all(isinstance(v.dtype, ir.DataType) for n in op.graph for v in n.outputs if v.name)


def test_bernoulli_draws_ones_with_the_probability_given() -> None:
    """ONNX Runtime's own gives them with one minus that."""
    op = new_builder()
    p = add_input(op, "p", (2, 10000))
    drawn = op.node("Bernoulli", p, like=[p])[0]
    op.graph.outputs[:] = [drawn.value]
    normalize(op.graph)
    model = ir.Model(op.graph, ir_version=10)
    session = make_session(ir.serde.serialize_model(model).SerializeToString(), Options(threads=1))
    (found,) = session.run(None, {"p": np.repeat(np.asarray([[0.1], [0.7]], np.float32), 10000, 1)})
    np.testing.assert_allclose(found.mean(1), [0.1, 0.7], atol=0.03)
