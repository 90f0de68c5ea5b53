"""The ONNX form of each loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from .roles import unique_name

if TYPE_CHECKING:
    from .losses import Loss

__all__ = ["BUILDERS"]


class _Builder:
    """Appends nodes to a graph under fresh ``loss...`` names."""

    def __init__(self, model: ir.Model, names: set[str]) -> None:
        self.graph = model.graph
        self.names = names

    def __call__(self, op_type: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any) -> ir.Value:
        return self.many(op_type, inputs, outputs, attributes)[0]

    def many(self, op_type: str, inputs: Sequence[ir.Value], outputs: int, attributes: dict[str, Any]) -> Sequence[ir.Value]:
        node = ir.node(op_type, list(inputs), attributes=attributes, num_outputs=outputs)
        for i, value in enumerate(node.outputs):
            value.name = unique_name(f"loss.{op_type}" + (f"_{i}" if i else ""), self.names)
        node.name = unique_name(f"node_{node.outputs[0].name}", self.names)
        self.graph.append(node)
        return node.outputs

    def constant(self, array: np.ndarray[Any, Any], role: str) -> ir.Value:
        name = unique_name(f"loss.{role}", self.names)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def reduce(self, value: ir.Value, reduction: str) -> ir.Value:
        return self("ReduceMean" if reduction == "mean" else "ReduceSum", value, keepdims=0)


def _dims(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [int(d) for d in value.shape.numpy()]


def _mse(model: ir.Model, loss: Loss, output: ir.Value, label: ir.Value, names: set[str]) -> ir.Value:
    build = _Builder(model, names)
    difference = build("Sub", output, label)
    return build.reduce(build("Mul", difference, difference), loss.reduction)


def _l1(model: ir.Model, loss: Loss, output: ir.Value, label: ir.Value, names: set[str]) -> ir.Value:
    build = _Builder(model, names)
    return build.reduce(build("Abs", build("Sub", output, label)), loss.reduction)


def _bce_with_logits(model: ir.Model, loss: Loss, output: ir.Value, label: ir.Value, names: set[str]) -> ir.Value:
    """-t log s(x) - (1-t) log(1-s(x)) = softplus(x) - t x, stable for any x."""
    build = _Builder(model, names)
    return build.reduce(build("Sub", build("Softplus", output), build("Mul", label, output)), loss.reduction)


def _cross_entropy(model: ir.Model, loss: Loss, logits: ir.Value, labels: ir.Value, names: set[str]) -> ir.Value:
    """SoftmaxCrossEntropyLoss; with label smoothing e: (1-e) nll + e/C * smooth, both over the labels that are not ignored.

    torch divides the smooth sum by the same denominator as the nll: the count, or the sum of the label's class weights.
    """
    build = _Builder(model, names)
    shape, label_shape = _dims(logits), _dims(labels)
    if loss.axis(shape, label_shape) == -1 and len(shape) > 2:
        rows, classes = math.prod(shape[:-1]), shape[-1]
        logits = build("Reshape", logits, build.constant(np.array([rows, classes], np.int64), "logits_shape"))
        labels = build("Reshape", labels, build.constant(np.array([rows], np.int64), "labels_shape"))
        shape = [rows, classes]
    dtype = np.dtype(np.float32) if logits.dtype is None else logits.dtype.numpy()
    classes = shape[1]
    weights = None if loss.weights is None else build.constant(np.asarray(loss.weights, dtype), "weights")
    inputs = [logits, labels] if weights is None else [logits, labels, weights]
    attributes = {"ignore_index": loss.ignore_index, "reduction": loss.reduction}
    nll, log_prob = build.many("SoftmaxCrossEntropyLoss", inputs, 2, attributes)
    if loss.label_smoothing == 0.0:
        return nll
    e = loss.label_smoothing
    float_type = int(ir.DataType.from_numpy(dtype))
    ignored = build.constant(np.array(loss.ignore_index, labels.dtype.numpy() if labels.dtype else np.int64), "ignore_index")
    kept = build("Not", build("Equal", labels, ignored))
    mask = build("Cast", kept, to=float_type)
    weighted = log_prob
    if loss.weights is not None:
        column = np.asarray(loss.weights, dtype).reshape(1, classes, *(1,) * (len(shape) - 2))
        weighted = build("Mul", log_prob, build.constant(column, "weights_column"))
    per_label = build("ReduceSum", weighted, build.constant(np.array([1], np.int64), "class_axis"), keepdims=0)
    smooth = build("ReduceSum", build("Mul", per_label, mask), keepdims=0)
    if loss.reduction == "mean":
        count = mask
        if weights is not None:
            zero = build.constant(np.array(0, labels.dtype.numpy() if labels.dtype else np.int64), "zero")
            count = build("Mul", build("Gather", weights, build("Where", kept, labels, zero)), mask)
        smooth = build("Div", smooth, build("ReduceSum", count, keepdims=0))
    hard = build("Mul", nll, build.constant(np.array(1.0 - e, dtype), "hard_share"))
    return build("Sub", hard, build("Mul", smooth, build.constant(np.array(e / classes, dtype), "smooth_share")))


BUILDERS: dict[str, Callable[[ir.Model, Loss, ir.Value, ir.Value, set[str]], ir.Value]] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "l1": _l1,
    "bce_with_logits": _bce_with_logits,
}
