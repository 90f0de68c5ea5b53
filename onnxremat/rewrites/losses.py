"""Cross-entropy losses as a gather of log-probabilities: the fused kernels are single-threaded and hold a second copy of the logits."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..autodiff.context import Context
from ..graph import Expr
from .registry import rewrite


@rewrite("SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss")
def _cross_entropy(c: Context) -> Sequence[Expr | None]:
    """Minus the weighted mean of the labels' log-probabilities."""
    op, logits = c.op, c.x0
    log_prob = op("LogSoftmax", logits, axis=1) if c.node.op_type == "SoftmaxCrossEntropyLoss" else logits
    shape = list(c.x1.shape)
    column = [shape[0], 1, *shape[1:]]
    target = c.x1.cast(ir.DataType.INT64).reshape(column)
    ignore = c.attr("ignore_index")
    weight = None
    if ignore is not None:
        ignored = op("Equal", target, int(ignore))
        weight = op("Where", ignored, op.const(0.0, logits.dtype), op.const(1.0, logits.dtype))
        # An ignored label may lie outside the classes: class 0 stands in for it.
        target = op("Where", ignored, op.const(0, ir.DataType.INT64), target)
    picked = op("GatherElements", log_prob, target, axis=1)
    if c.has(2):
        of_class = op("Gather", c.input(2), target)
        weight = of_class if weight is None else of_class * weight
    weighted = picked if weight is None else picked * weight
    reduction = c.attr("reduction", "mean")
    if reduction == "none":
        return [-weighted.reshape(shape), log_prob]
    if reduction == "mean" and weight is None:
        return [-op("ReduceMean", weighted, keepdims=0), log_prob]
    total = op("ReduceSum", weighted, keepdims=0)
    return [total / -op("ReduceSum", weight, keepdims=0) if reduction == "mean" else -total, log_prob]
