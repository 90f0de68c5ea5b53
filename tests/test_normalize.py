"""The rewrites before differentiation: the same function, in the operators that were meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxremat.exporters import InputSpec, export_torch
from onnxremat.graph import Expr, GraphBuilder
from onnxremat.normalize import broadcast_expands, constant_bytes, merge_casts, normalize, remove_dead
from onnxremat.ops import MS
from onnxremat.runtime.session import Options, make_session
from tests.autodiff.support import add_input, model_of, new_builder

Array = npt.NDArray[Any]
Feeds = dict[str, Array]


def run(op: GraphBuilder, feeds: Feeds) -> Feeds:
    """All graph outputs; kernels that write into what they are fed get copies."""
    session = make_session(ir.serde.serialize_model(model_of(op)).SerializeToString(), Options(threads=1))
    names = [o.name for o in session.get_outputs()]
    wanted = {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {n: a.copy() for n, a in feeds.items() if n in wanted}), strict=True))


def before_and_after(op: GraphBuilder, outputs: Sequence[Expr], feeds: Feeds) -> tuple[list[Array], list[Array]]:
    """The outputs by name, of the graph as built and as normalized."""
    op.graph.outputs[:] = [e.value for e in outputs]
    names = [str(e.value.name) for e in outputs]
    first = run(op, feeds)
    normalize(op.graph)
    assert [v.name for v in op.graph.outputs] == names
    second = run(op, feeds)
    return [first[n] for n in names], [second[n] for n in names]


def same(op: GraphBuilder, outputs: Sequence[Expr], feeds: Feeds, tolerance: float = 1e-6) -> None:
    for left, right in zip(*before_and_after(op, outputs, feeds), strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        np.testing.assert_allclose(right, left, rtol=tolerance, atol=tolerance)


def counts(op: GraphBuilder) -> Counter[str]:
    return Counter(node.op_type for node in op.graph)


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Cross-entropy


@pytest.mark.parametrize("op_type", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("ignore", [None, 2, -100], ids=lambda i: f"ignore {i}")
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3)], ids=["2-D", "3-D"])
def test_cross_entropy_decomposes(op_type: str, reduction: str, weighted: bool, ignore: int | None, shape: tuple[int, ...]) -> None:
    op = new_builder()
    scores = add_input(op, "scores", shape)
    label_shape = (shape[0], *shape[2:])
    labels = add_input(op, "labels", label_shape, ir.DataType.INT64)
    operands: list[Any] = [scores, labels]
    if weighted:
        operands.append(op.const(np.array([0.5, 1.0, 2.0, 0.25], np.float32)))
    result = op(op_type, *operands, reduction=reduction, ignore_index=ignore)
    values = np.arange(6, dtype=np.int64).reshape(label_shape) % 4
    if ignore is not None:
        values.reshape(-1)[[1, 4]] = ignore
    same(op, [result], {"scores": floats(*shape), "labels": values})
    assert not {op_type} & set(counts(op)) and counts(op)["GatherElements"] == 1


def test_cross_entropy_keeps_its_log_probabilities() -> None:
    op = new_builder()
    scores, labels = add_input(op, "scores", (5, 3)), add_input(op, "labels", (5,), ir.DataType.INT64)
    loss, logs = op.node("SoftmaxCrossEntropyLoss", scores, labels, outputs=["loss", "log_prob"])
    same(op, [loss, logs], {"scores": floats(5, 3), "labels": np.array([0, 1, 2, 1, 0])})
    assert counts(op)["LogSoftmax"] == 1


def test_cross_entropy_of_int32_labels() -> None:
    op = new_builder()
    scores, labels = add_input(op, "scores", (3, 3)), add_input(op, "labels", (3,), ir.DataType.INT32)
    loss = op("SoftmaxCrossEntropyLoss", scores, labels)
    same(op, [loss], {"scores": floats(3, 3), "labels": np.array([2, 0, 1], np.int32)})


def test_cross_entropy_over_nothing_is_not_a_number_as_in_torch() -> None:
    op = new_builder()
    scores, labels = add_input(op, "scores", (2, 3)), add_input(op, "labels", (2,), ir.DataType.INT64)
    op.graph.outputs[:] = [op("SoftmaxCrossEntropyLoss", scores, labels, ignore_index=-100).value]
    normalize(op.graph)
    (found,) = run(op, {"scores": floats(2, 3), "labels": np.full(2, -100, np.int64)}).values()
    wanted = torch.nn.functional.cross_entropy(torch.from_numpy(floats(2, 3)), torch.full((2,), -100))
    assert np.isnan(found) and torch.isnan(wanted)


# GELU


def _exported(module: nn.Module, *shape: int) -> GraphBuilder:
    return GraphBuilder(export_torch(module, [InputSpec("x", shape)]).model.graph)


def _new_gelu() -> nn.Module:
    from transformers.activations import NewGELUActivation

    module: nn.Module = NewGELUActivation()
    return module


def test_new_gelu_of_transformers_becomes_one_node() -> None:
    op = _exported(_new_gelu(), 3, 5)
    assert counts(op)["Tanh"] == 1
    (output,) = [op.wrap(v) for v in op.graph.outputs]
    same(op, [output], {"x": floats(3, 5) * 2}, tolerance=2e-6)
    (node,) = op.graph
    assert node.op_type == "Gelu" and node.attributes["approximate"].as_string() == "tanh"


def test_new_gelu_between_other_nodes_takes_its_place() -> None:
    op = _exported(nn.Sequential(nn.Linear(5, 4), _new_gelu(), nn.Linear(4, 2)), 3, 5)
    (output,) = [op.wrap(v) for v in op.graph.outputs]
    same(op, [output], {"x": floats(3, 5)}, tolerance=2e-6)
    assert [n.op_type for n in op.graph] == ["Gemm", "Gelu", "Gemm"]


def _gelu_like(op: GraphBuilder, x: Expr, half: float = 0.5, one: float = 1.0, cube: float = 0.044715, power: float = 3.0) -> Expr:
    inner = (x + op("Pow", x, op.const(np.float32(power))) * cube) * float(np.sqrt(2 / np.pi))
    return (x * half) * (op("Tanh", inner) + one)


@pytest.mark.parametrize("change", [{"half": 0.4}, {"one": 1.5}, {"cube": 0.05}, {"power": 2.0}], ids=lambda c: next(iter(c)))
def test_what_is_not_quite_gelu_is_left_alone(change: dict[str, float]) -> None:
    op = new_builder()
    y = _gelu_like(op, add_input(op, "x", (2, 3)), **change)
    same(op, [y], {"x": floats(2, 3)}, tolerance=0)
    assert counts(op)["Tanh"] == 1 and "Gelu" not in counts(op)


def test_gelu_of_another_operand_is_left_alone() -> None:
    op = new_builder()
    x, z = add_input(op, "x", (2, 3)), add_input(op, "z", (2, 3))
    inner = (x + op("Pow", x, op.const(np.float32(3))) * 0.044715) * float(np.sqrt(2 / np.pi))
    y = (z * 0.5) * (op("Tanh", inner) + 1.0)
    same(op, [y], {"x": floats(2, 3), "z": floats(2, 3, seed=1)}, tolerance=0)
    assert "Gelu" not in counts(op)


@pytest.mark.parametrize("reader", ["an output", "a node"])
def test_a_tanh_that_others_read_stays_for_them(reader: str) -> None:
    op = new_builder()
    x = add_input(op, "x", (2, 3))
    y = _gelu_like(op, x)
    (tanh,) = [n for n in op.graph if n.op_type == "Tanh"]
    other = op.wrap(tanh.outputs[0])
    same(op, [y, other if reader == "an output" else op("Exp", other)], {"x": floats(2, 3)}, tolerance=0)
    assert "Gelu" not in counts(op)


# Transposed operands


TRANSPOSED: dict[str, Callable[[GraphBuilder, Expr, Expr], Expr]] = {
    "right": lambda op, a, b: op("MatMul", a, b.transpose([0, 2, 1])),
    "left": lambda op, a, b: op("MatMul", a.transpose([0, 2, 1]), b),
    "both": lambda op, a, b: op("MatMul", a.transpose([0, 2, 1]), b.transpose([0, 2, 1])),
}


@pytest.mark.parametrize("which", TRANSPOSED)
def test_transposes_fold_into_the_product(which: str) -> None:
    op = new_builder()
    a, b = add_input(op, "a", (2, 3, 3)), add_input(op, "b", (2, 3, 3))
    same(op, [TRANSPOSED[which](op, a, b)], {"a": floats(2, 3, 3), "b": floats(2, 3, 3, seed=1)})
    assert counts(op) == {"FusedMatMul": 1}


def test_a_transposed_weight_folds_into_the_product() -> None:
    op = new_builder()
    x, w = add_input(op, "x", (2, 4, 3)), add_input(op, "w", (5, 3))
    same(op, [op("MatMul", x, op("Transpose", w))], {"x": floats(2, 4, 3), "w": floats(5, 3)})
    assert counts(op) == {"FusedMatMul": 1}


def test_a_transpose_that_others_read_stays_for_them() -> None:
    op = new_builder()
    x, w = add_input(op, "x", (4, 3)), add_input(op, "w", (5, 3))
    turned = op("Transpose", w, perm=[1, 0])
    same(op, [op("MatMul", x, turned), op("Exp", turned)], {"x": floats(4, 3), "w": floats(5, 3)})
    assert counts(op) == {"Transpose": 1, "FusedMatMul": 1, "Exp": 1}


def test_a_batch_by_one_matrix_stays_one_large_product() -> None:
    op = new_builder()
    x, w = add_input(op, "x", (2, 3, 4)), add_input(op, "w", (3, 5))
    same(op, [op("MatMul", x.transpose([0, 2, 1]), w)], {"x": floats(2, 3, 4), "w": floats(3, 5)})
    assert counts(op) == {"Transpose": 1, "MatMul": 1}


@pytest.mark.parametrize("perm", [[1, 0, 2], [2, 1, 0], [1, 2, 0]])
def test_other_permutations_are_left_alone(perm: list[int]) -> None:
    op = new_builder()
    a, b = add_input(op, "a", (3, 3, 3)), add_input(op, "b", (3, 3, 3))
    same(op, [op("MatMul", a, b.transpose(perm))], {"a": floats(3, 3, 3), "b": floats(3, 3, 3, seed=1)}, tolerance=0)
    assert counts(op) == {"Transpose": 1, "MatMul": 1}


def test_products_with_vectors_are_left_alone() -> None:
    op = new_builder()
    w, v = add_input(op, "w", (3, 4)), add_input(op, "v", (3,))
    same(op, [op("MatMul", w.transpose([1, 0]), v)], {"w": floats(3, 4), "v": floats(3)}, tolerance=0)
    assert counts(op) == {"Transpose": 1, "MatMul": 1}


# Functions that the runtime would inline


def test_hard_swish_is_written_out() -> None:
    op = new_builder()
    y = op("HardSwish", add_input(op, "x", (4, 5)))
    same(op, [y], {"x": floats(4, 5) * 4})
    assert counts(op) == {"HardSigmoid": 1, "Mul": 1}


def test_cast_like_becomes_a_cast() -> None:
    op = new_builder()
    x, like = add_input(op, "x", (3,), ir.DataType.INT64), add_input(op, "like", (1,))
    same(op, [op("CastLike", x, like) * 2.0], {"x": np.array([1, 2, 3]), "like": floats(1)})
    assert counts(op) == {"Cast": 1, "Mul": 1}


def test_a_cast_like_of_the_same_type_leaves_the_names_of_others() -> None:
    """The input may go by its name as a role: a stop-gradient point, an output."""
    op = new_builder()
    x, like = add_input(op, "x", (3,)), add_input(op, "like", (1,))
    held = op.node("Identity", x, outputs=["held"])[0]
    y = op.node("CastLike", held, like, outputs=["y"])[0]
    same(op, [held, y], {"x": floats(3), "like": floats(1)}, tolerance=0)


# Batch normalization


def _batch_norm(op: GraphBuilder, x: Expr, *, used: bool = True) -> list[Expr]:
    scale, bias, mean, var = (add_input(op, n, (3,)) for n in ("scale", "bias", "mean", "var"))
    outputs = op.node("BatchNormalization", x, scale, bias, mean, var, outputs=["y", "mean_out", "var_out"], training_mode=1, momentum=0.8)
    return outputs if used else outputs[:1]


def _batch_norm_feeds() -> Feeds:
    rng = np.random.default_rng(3)
    positive = {n: rng.uniform(0.5, 2, 3).astype(np.float32) for n in ("scale", "var")}
    return {"x": floats(4, 3, 5), "bias": floats(3, seed=1), "mean": floats(3, seed=2), **positive}


def test_training_batch_norm_is_decoupled_from_running_statistics() -> None:
    op = new_builder()
    outputs = _batch_norm(op, add_input(op, "x", (4, 3, 5)))
    same(op, outputs, _batch_norm_feeds())
    assert "BatchNormalization" not in counts(op)
    (node,) = [n for n in op.graph if n.op_type == "BatchNormInternal"]
    running = {v.name for v in op.graph.inputs if v.name in ("mean", "var")}
    assert running == {"mean", "var"} and not running & {v.name for v in node.inputs if v is not None}
    # The kernel writes into them: two buffers, each with no other reader.
    scratch = node.inputs[3:]
    assert scratch[0] is not scratch[1] and all(v is not None and len(v.uses()) == 1 for v in scratch)


def test_training_batch_norm_leaves_its_running_statistics_as_they_were() -> None:
    """The original kernel overwrites what it is fed; the rewritten form must not, or a recompute counts a batch twice."""
    op = new_builder()
    op.graph.outputs[:] = [e.value for e in _batch_norm(op, add_input(op, "x", (4, 3, 5)))]
    normalize(op.graph)
    feeds = _batch_norm_feeds()
    session = make_session(ir.serde.serialize_model(model_of(op)).SerializeToString(), Options(threads=1))
    kept = {n: a.copy() for n, a in feeds.items()}
    first = session.run(None, feeds)
    second = session.run(None, feeds)
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, kept[name])
    for left, right in zip(first, second, strict=True):
        np.testing.assert_array_equal(left, right)


def test_unread_running_statistics_are_not_computed() -> None:
    op = new_builder()
    op.graph.outputs[:] = [_batch_norm(op, add_input(op, "x", (4, 3, 5)), used=False)[0].value]
    normalize(op.graph)
    assert counts(op) == {"ConstantOfShape": 2, "BatchNormInternal": 1}


def test_evaluating_batch_norm_is_left_alone() -> None:
    op = new_builder()
    x = add_input(op, "x", (4, 3, 5))
    operands = [add_input(op, n, (3,)) for n in ("scale", "bias", "mean", "var")]
    same(op, [op("BatchNormalization", x, *operands)], _batch_norm_feeds(), tolerance=0)
    assert counts(op) == {"BatchNormalization": 1}


# Housekeeping


def test_dead_nodes_and_initializers_are_removed() -> None:
    op = new_builder()
    x = add_input(op, "x", (3,))
    kept = x * 2.0
    op("Exp", x + np.ones(3, np.float32))
    op.graph.outputs[:] = [kept.value]
    assert constant_bytes(op.graph) == 16
    remove_dead(op.graph, [kept.value])
    assert counts(op) == {"Mul": 1} and constant_bytes(op.graph) == 4


def test_rewritten_nodes_keep_their_origin() -> None:
    op = new_builder()
    scores, labels = add_input(op, "scores", (5, 3)), add_input(op, "labels", (5,), ir.DataType.INT64)
    op.metadata = {"pkg.torch.onnx.name_scopes": "head"}
    op.graph.outputs[:] = [op("SoftmaxCrossEntropyLoss", scores, labels).value]
    normalize(op.graph)
    assert {n.metadata_props.get("pkg.torch.onnx.name_scopes") for n in op.graph} == {"head"}


def test_normalizing_twice_changes_nothing_more() -> None:
    op = new_builder()
    x = add_input(op, "x", (4, 3))
    y = op("HardSwish", op("MatMul", _gelu_like(op, x), op("Transpose", add_input(op, "w", (3, 3)))))
    op.graph.outputs[:] = [y.value]
    normalize(op.graph)
    first = ir.serde.serialize_model(model_of(op)).SerializeToString(deterministic=True)
    normalize(op.graph)
    assert ir.serde.serialize_model(model_of(op)).SerializeToString(deterministic=True) == first
    assert {n.domain for n in op.graph} == {"", MS}


def test_a_cast_of_a_cast_reads_what_was_cast_first_where_nothing_is_lost() -> None:
    op = new_builder()
    mask = op("Not", add_input(op, "x", (4,), ir.DataType.BOOL))
    shown = mask.cast(ir.DataType.FLOAT)
    count = shown.cast(ir.DataType.INT64)
    whole = add_input(op, "y", (4,)).cast(ir.DataType.INT32)
    rounded = whole.cast(ir.DataType.FLOAT)
    op.graph.outputs[:] = [e.value for e in (shown * shown, op("Neg", count), op("Neg", rounded))]
    merge_casts(op.graph)
    assert [str(e.value.producer().inputs[0].name) for e in (shown, count, whole, rounded)] == [  # type: ignore[union-attr]
        *(str(e.value.name) for e in (mask, mask)),
        "y",
        str(whole.value.name),
    ]
    session = make_session(ir.serde.serialize_model(model_of(op)).SerializeToString(), Options(threads=1))
    _, second, third = session.run(None, {"x": np.array([True, False, True, False]), "y": np.array([0.5, 1.5, -2.5, 3], np.float32)})
    assert second.tolist() == [0, -1, 0, -1] and third.tolist() == [0, -1, 2, -3]


# Products


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("place", ["operand", "product"])
def test_a_factor_of_a_product_moves_into_it(place: str, divides: bool) -> None:
    op = new_builder()
    a, b = add_input(op, "a", (2, 3, 4)), add_input(op, "b", (2, 5, 4))

    def scaled(x: Expr) -> Expr:
        return x / 3.0 if divides else x * 0.3

    turned = b.transpose([0, 2, 1])
    y = op("MatMul", scaled(a), turned) if place == "operand" else scaled(op("MatMul", a, turned))
    same(op, [y], {"a": floats(2, 3, 4), "b": floats(2, 5, 4, seed=1)})
    assert counts(op) == {"FusedMatMul": 1}


def test_a_factor_that_others_read_too_stays() -> None:
    op = new_builder()
    a, b = add_input(op, "a", (3, 4)), add_input(op, "b", (4, 5))
    scaled = a * 0.5
    product = op("MatMul", scaled, b)
    same(op, [product, scaled, product * 2.0], {"a": floats(3, 4), "b": floats(4, 5)})
    assert counts(op) == {"Mul": 2, "MatMul": 1}


def test_arithmetic_broadcasts_instead_of_an_expand() -> None:
    op = new_builder()
    x, row, scalar = add_input(op, "x", (2, 3)), add_input(op, "row", (1, 3)), add_input(op, "s", ())
    wide = row.expand((2, 3))
    outputs = [wide * x, x - scalar.expand((2, 3)), wide + wide, wide]
    feeds = {"x": floats(2, 3), "row": floats(1, 3), "s": floats()}
    op.graph.outputs[:] = [e.value for e in outputs]
    before = run(op, feeds)
    broadcast_expands(op.graph)
    remove_dead(op.graph, list(op.graph.outputs))
    for name, array in run(op, feeds).items():
        np.testing.assert_array_equal(array, before[name])
    assert counts(op) == {"Expand": 1, "Mul": 1, "Sub": 1, "Add": 1}
