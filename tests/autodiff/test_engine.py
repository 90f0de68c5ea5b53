"""The engine: what it builds, what it leaves out, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat.autodiff import differentiate
from onnxremat.autodiff.broadcast import unbroadcast
from onnxremat.errors import DifferentiationError
from onnxremat.graph import Expr, GraphBuilder
from onnxremat.runtime.session import Options, make_session
from tests.autodiff.support import Array, add_input, model_of, new_builder


def total(y: Expr) -> Expr:
    return y.op("ReduceSum", y, keepdims=0)


def gradients(op: GraphBuilder, loss: Expr, *targets: Expr, stop: Sequence[str] = ()) -> dict[str, Expr]:
    return differentiate(op, loss.value, [t.value for t in targets], stop)


def backward_nodes(op: GraphBuilder, loss: Expr, *targets: Expr, stop: Sequence[str] = ()) -> list[ir.Node]:
    """The nodes that differentiation adds."""
    before = len(list(op.graph))
    gradients(op, loss, *targets, stop=stop)
    return list(op.graph)[before:]


def run(op: GraphBuilder, outputs: Sequence[Expr], feeds: dict[str, Array]) -> list[Array]:
    op.graph.outputs[:] = [e.value for e in outputs]
    session = make_session(ir.serde.serialize_model(model_of(op)).SerializeToString(), Options(threads=1))
    result: list[Array] = session.run([str(e.value.name) for e in outputs], feeds)
    return result


def counts(nodes: Sequence[ir.Node]) -> Counter[str]:
    return Counter(node.op_type for node in nodes)


# Sums


def test_gradients_of_several_readers_are_summed() -> None:
    op = new_builder()
    x = add_input(op, "x", (3,))
    loss = total(op("Exp", x) + x * 2.0 - op("Sin", x))
    (gradient,) = gradients(op, loss, x).values()
    data = np.array([0.1, -0.4, 1.3], np.float32)
    (found,) = run(op, [gradient], {"x": data})
    np.testing.assert_allclose(found, np.exp(data) + 2 - np.cos(data), rtol=1e-6)


def test_an_operand_read_twice_by_one_node_gets_both_gradients() -> None:
    op = new_builder()
    x = add_input(op, "x", (2,))
    (gradient,) = gradients(op, total(x * x), x).values()
    (found,) = run(op, [gradient], {"x": np.array([3.0, -2.0], np.float32)})
    np.testing.assert_array_equal(found, [6.0, -4.0])


def test_a_value_between_is_differentiated_once() -> None:
    """The gradient of a value with many readers is complete before it goes on: one VJP of its producer."""
    op = new_builder()
    x = add_input(op, "x", (4,))
    y = op("Tanh", x)
    added = backward_nodes(op, total(y * 2.0 + op("Exp", y) + op("Sin", y)), x)
    (square,) = [n for n in added if n.op_type == "Mul" and list(n.inputs) == [y.value, y.value]]
    assert counts(added)["Sub"] == 1 and square is not None


# Symbolic zeros


def test_nothing_is_built_for_a_branch_without_a_target() -> None:
    op = new_builder()
    x, w = add_input(op, "x", (2, 3)), add_input(op, "w", (3, 4))
    added = backward_nodes(op, total(op("MatMul", op("Exp", x), w)), w)
    # dW alone: the seed spread over the output, and one product; neither dX nor the Exp.
    assert counts(added) == {"Expand": 1, "FusedMatMul": 1}


def test_only_the_gradients_that_are_needed_are_built() -> None:
    op = new_builder()
    x, scale, bias = add_input(op, "x", (2, 3)), add_input(op, "scale", (3,)), add_input(op, "bias", (3,))
    y = op("LayerNormalization", x, scale, bias)
    assert list(gradients(op, total(y), bias)) == ["bias"]
    assert not [n for n in op.graph if n.op_type in ("Mul", "Sub", "ReduceMean")]
    assert len(next(n for n in op.graph if n.op_type == "LayerNormalization").outputs) == 1


def test_a_zero_gradient_is_never_added() -> None:
    """What reaches the loss only through an operator without gradient adds nothing to a sum."""
    op = new_builder()
    x = add_input(op, "x", (3,))
    loss = total(op("Exp", x) * op("Floor", x))
    added = backward_nodes(op, loss, x)
    assert counts(added) == {"Expand": 1, "Mul": 2}


def test_unused_outputs_of_a_node_are_zero() -> None:
    op = new_builder()
    x = add_input(op, "x", (6,))
    parts = op.node("Split", x, outputs=3, axis=0, num_outputs=3)
    (gradient,) = gradients(op, total(parts[1] * 3.0), x).values()
    (found,) = run(op, [gradient], {"x": np.zeros(6, np.float32)})
    np.testing.assert_array_equal(found, [0, 0, 3, 3, 0, 0])


def test_a_target_beside_the_loss_has_no_entry() -> None:
    op = new_builder()
    x, idle, beside = (add_input(op, name, (3,)) for name in ("x", "idle", "beside"))
    op("Exp", beside)
    assert list(gradients(op, total(x), x, idle, beside)) == ["x"]


# Cuts


def test_stop_gradient_cuts_one_path() -> None:
    op = new_builder()
    x = add_input(op, "x", (2,))
    held = op("Identity", x)
    (gradient,) = gradients(op, total(x * held), x, stop=[str(held.value.name)]).values()
    data = np.array([3.0, -2.0], np.float32)
    (found,) = run(op, [gradient], {"x": data})
    np.testing.assert_array_equal(found, data)


def test_stop_gradient_leaves_no_node_behind_it() -> None:
    op = new_builder()
    x, w = add_input(op, "x", (2,)), add_input(op, "w", (2,))
    held = op("Exp", op("Sin", x))
    added = backward_nodes(op, total(held * w), x, w, stop=[str(held.value.name)])
    assert "Cos" not in counts(added)


def test_integers_cut_the_gradient() -> None:
    op = new_builder()
    x, table = add_input(op, "x", (3,)), add_input(op, "table", (5, 2))
    index = op("Cast", x, to=int(ir.DataType.INT64))
    found = gradients(op, total(op("Gather", table, index)), x, table)
    assert list(found) == ["table"]


@pytest.mark.parametrize("cut", ["detach", "integers", "floor", "frozen"])
def test_a_loss_that_no_parameter_reaches_is_refused(cut: str) -> None:
    op = new_builder()
    x, w = add_input(op, "x", (3,)), add_input(op, "w", (3,))
    stop: list[str] = []
    if cut == "detach":
        y = op("Identity", w)
        stop = [str(y.value.name)]
    elif cut == "integers":
        y = w.cast(ir.DataType.INT64).cast(ir.DataType.FLOAT)
    else:
        y = op("Floor", w) if cut == "floor" else x
    why = {"detach": "a detach or no_grad .* Identity", "integers": "passes Cast", "floor": "passes Floor", "frozen": "computed from none"}[cut]
    with pytest.raises(DifferentiationError, match=f"no trainable parameter reaches the loss: .*{why}"):
        gradients(op, total(y * 2.0), w, stop=stop)


# Refusals


def test_an_operator_without_a_rule_is_named_with_module_and_line() -> None:
    op = new_builder()
    x = add_input(op, "x", (3,))
    op.metadata = {
        "pkg.torch.onnx.name_scopes": "['', 'encoder', 'encoder.act', 'acosh']",
        "pkg.torch.onnx.stack_trace": 'File "base.py", line 1, in call\n    return f(x)\nFile "net.py", line 42, in forward\n    acosh(x)',
    }
    y = op.node("Unheard", x, domain="org.example", like=[x])[0]
    op.metadata = {}
    with pytest.raises(DifferentiationError) as caught:
        gradients(op, total(y), x)
    message = str(caught.value)
    assert "no gradient rule for org.example.Unheard" in message and "encoder.act" in message
    assert "at net.py:42 (acosh(x))" in message and "base.py" not in message and "\n" not in message


def test_an_operator_without_a_rule_beside_the_path_does_no_harm() -> None:
    op = new_builder()
    x, w = add_input(op, "x", (3,)), add_input(op, "w", (3,))
    unheard = op.node("Unheard", x, domain="org.example", like=[x])[0]
    assert list(gradients(op, total(unheard * w), w)) == ["w"]


def test_an_operator_of_another_domain_is_named_with_it() -> None:
    op = new_builder()
    x = add_input(op, "x", (3,))
    y = op.node("Unheard", x, domain="com.microsoft", like=[x])[0]
    with pytest.raises(DifferentiationError, match=r"com\.microsoft\.Unheard"):
        gradients(op, total(y), x)


@pytest.mark.parametrize(
    "case",
    [
        *("pool", "pad", "scatter", "statistics", "no axes", "grid", "aspect", "determinant", "range"),
        "transposed matrix by vector",
    ],
)
def test_refusals_name_the_node_and_the_reason(case: str) -> None:
    op = new_builder()
    reason = ""
    if case == "pool":
        x = add_input(op, "x", (1, 1, 5, 5))
        y, reason = op("AveragePool", x, kernel_shape=[2, 2], auto_pad="SAME_UPPER"), "auto_pad"
    elif case == "pad":
        x = add_input(op, "x", (4,))
        y, reason = op("Pad", x, np.array([4, 1]), mode="reflect"), "reflect"
    elif case == "scatter":
        x = add_input(op, "x", (2, 3))
        y, reason = op("ScatterND", x, np.array([[0], [1]]), np.ones((2, 3), np.float32), reduction="mul"), "mul"
    elif case == "statistics":
        data, scale = add_input(op, "data", (2, 3)), add_input(op, "scale", (3,))
        x = add_input(op, "x", (3,))
        y, reason = op("BatchNormalization", data, scale, scale, x, scale), "running statistics"
    elif case == "no axes":
        x = add_input(op, "x", (2,))
        y = op.node("ReduceL1", x, np.zeros(0, np.int64), noop_with_empty_axes=1, like=[x])[0]
        reason = "over no axes"
    elif case == "grid":
        x = add_input(op, "x", (1, 1, 3, 3))
        y, reason = op("GridSample", x, np.zeros((1, 2, 2, 2), np.float32), mode="quintic"), "use linear or cubic"
    elif case == "aspect":
        x = add_input(op, "x", (1, 1, 3, 4))
        y = op.node("Resize", x, None, None, np.array([6, 6]), axes=[2, 3], keep_aspect_ratio_policy="not_larger", like=[((1, 1, 4, 6), x.dtype)])[0]
        reason = "keep_aspect_ratio_policy"
    elif case == "determinant":
        x = add_input(op, "x", (3, 3))
        y, reason = op("Det", x), "inverse of a matrix"
    elif case == "range":
        x = add_input(op, "x", ())
        y, reason = op.node("Range", x, x, x, like=[((2,), x.dtype)])[0], "trainable parameter"
    else:
        x = add_input(op, "x", (3, 2))
        vector = add_input(op, "vector", (3,))
        y = op.node("FusedMatMul", x, vector, domain="com.microsoft", transA=1, like=[((2,), x.dtype)])[0]
        reason = "transposed matrix"
    producer = y.value.producer()
    assert producer is not None
    with pytest.raises(DifferentiationError) as caught:
        gradients(op, total(y), x)
    assert reason in str(caught.value) and f"'{producer.name}'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("output", [1, 2])
def test_a_loss_of_layer_normalization_statistics_is_refused(output: int) -> None:
    op = new_builder()
    x, scale = add_input(op, "x", (2, 3)), add_input(op, "scale", (3,))
    outputs = op.node("LayerNormalization", x, scale, outputs=3)
    with pytest.raises(DifferentiationError, match="mean or deviation"):
        gradients(op, total(outputs[0]) + total(outputs[output]), x)


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_the_loss_must_be_one_number(shape: tuple[int, ...]) -> None:
    op = new_builder()
    x = add_input(op, "x", shape)
    with pytest.raises(DifferentiationError, match="must be one floating-point number"):
        gradients(op, op("Exp", x), x)


def test_the_loss_must_be_floating_point() -> None:
    op = new_builder()
    x = add_input(op, "x", ())
    with pytest.raises(DifferentiationError, match="must be one floating-point number"):
        gradients(op, x.cast(ir.DataType.INT64), x)


def test_a_loss_of_one_element_keeps_its_shape() -> None:
    op = new_builder()
    x = add_input(op, "x", (1, 1))
    (gradient,) = gradients(op, op("Exp", x), x).values()
    assert gradient.shape == (1, 1)


def test_operands_that_do_not_fit_raise_a_value_error() -> None:
    op = new_builder()
    x, y = add_input(op, "x", (2, 3)), add_input(op, "y", (4,))
    with pytest.raises(ValueError, match="operands of Add"):
        x + y


# Completion


def test_each_gradient_is_handed_over_once_and_as_soon_as_it_is_complete() -> None:
    op = new_builder()
    x, first, shared, last = (add_input(op, name, (3,)) for name in ("x", "first", "shared", "last"))
    y = op("Tanh", op("Tanh", x * first * shared) * shared) * last
    seen: list[tuple[str, int]] = []
    loss = total(y)
    before = len(list(op.graph))
    found = differentiate(op, loss.value, [v.value for v in (first, shared, last)], (), lambda v, g: seen.append((str(v.name), len(list(op.graph)))))
    # Shared is read first by the multiplication that also reads what x * first gave: its last piece comes there.
    assert [name for name, _ in seen] == ["last", "shared", "first"] and list(found) == ["last", "shared", "first"]
    sizes = [size for _, size in seen]
    assert before < sizes[0] < sizes[1] <= sizes[2] == len(list(op.graph))


# The graph that is left


def _block(op: GraphBuilder) -> tuple[Expr, list[Expr]]:
    x, w, b = add_input(op, "x", (4, 3)), add_input(op, "w", (3, 5)), add_input(op, "b", (5,))
    scale = add_input(op, "scale", (5,))
    hidden = op("Gelu", op("LayerNormalization", op("MatMul", x, w) + b, scale))
    logs = op("LogSoftmax", hidden, axis=1)
    picked = op("GatherElements", logs, np.array([[0], [4], [2], [2]]), axis=1)
    return total(-picked), [w, b, scale]


def test_every_value_has_a_type_and_every_node_its_origin() -> None:
    op = new_builder()
    loss, targets = _block(op)
    forward = list(op.graph)
    gradients(op, loss, *targets)
    for node in op.graph:
        for value in node.outputs:
            assert value.name and value.dtype is not None
            assert value.shape is not None and value.shape.is_static()
    names = {node.name for node in forward}
    origins = [node.metadata_props.get("onnxremat.gradient_of") for node in list(op.graph)[len(forward) :]]
    # A sum of gradients and the seed belong to no node alone.
    assert origins and {o for o in origins if o} <= names and origins.count(None) <= 2


def test_gradients_have_the_shapes_and_types_of_their_targets() -> None:
    op = new_builder()
    loss, targets = _block(op)
    found = gradients(op, loss, *targets)
    assert list(found) == ["scale", "b", "w"]
    for target in targets:
        gradient = found[str(target.value.name)]
        assert gradient.shape == target.shape and gradient.dtype == target.dtype


def test_two_builds_are_equal_byte_for_byte() -> None:
    texts = []
    for _ in range(2):
        op = new_builder()
        loss, targets = _block(op)
        gradients(op, loss, *targets)
        op.graph.outputs[:] = [loss.value]
        texts.append(ir.serde.serialize_model(model_of(op)).SerializeToString(deterministic=True))
    assert texts[0] == texts[1]


def test_names_are_unique() -> None:
    op = new_builder()
    loss, targets = _block(op)
    gradients(op, loss, *targets)
    names = [v.name for n in op.graph for v in n.outputs] + [v.name for v in op.graph.inputs] + list(op.graph.initializers)
    assert len(names) == len(set(names))


def test_equal_expressions_are_built_once() -> None:
    op = new_builder()
    x = add_input(op, "x", (3,))
    assert (x * 2.0).value is (x * 2.0).value
    assert op("Softmax", x, axis=0).value is not op("Softmax", x, axis=-1).value
    random = [op.node("RandomUniformLike", x)[0].value for _ in range(2)]
    assert random[0] is not random[1]


@pytest.mark.parametrize("shape", [(2, 3, 4), (4,), (3, 1), (1, 1, 4), (), (1,), (2, 1, 1)])
def test_unbroadcast_sums_over_what_was_broadcast(shape: tuple[int, ...]) -> None:
    op = new_builder()
    g = add_input(op, "g", (2, 3, 4))
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    result = unbroadcast(g, shape)
    assert result.shape == shape
    (found,) = run(op, [result * 1.0], {"g": data})
    expected = np.zeros(shape, np.float32)
    for index in np.ndindex(2, 3, 4):
        expected[tuple(i if n > 1 else 0 for i, n in zip(index[3 - len(shape) :], shape, strict=True))] += data[index]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3, 4), (2, 2, 4)])
def test_unbroadcast_refuses_what_does_not_broadcast(shape: tuple[int, ...]) -> None:
    g = add_input(new_builder(), "g", (2, 3, 4))
    with pytest.raises(ValueError, match="can't belong"):
        unbroadcast(g, shape)
