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
    target = c.x1.cast(ir.DataType.INT64)
    ignore = c.attr("ignore_index")
    valid = None
    if ignore is not None:
        valid = op("Not", op("Equal", target, int(ignore))).cast(logits.dtype)
        # An ignored label may lie outside the classes: class 0 stands in for it.
        target = target * valid.cast(ir.DataType.INT64)
    shape = list(target.shape)
    column = target.reshape([shape[0], 1, *shape[1:]])
    picked = op("GatherElements", log_prob, column, axis=1).reshape(shape)
    weight = valid
    if c.has(2):
        of_class = op("Gather", c.input(2), target)
        weight = of_class if valid is None else of_class * valid
    losses = -picked if weight is None else -(picked * weight)
    reduction = c.attr("reduction", "mean")
    if reduction == "none":
        return [losses, log_prob]
    if reduction == "mean" and weight is None:
        return [op("ReduceMean", losses, keepdims=0), log_prob]
    total = op("ReduceSum", losses, keepdims=0)
    return [total / op("ReduceSum", weight, keepdims=0) if reduction == "mean" else total, log_prob]
