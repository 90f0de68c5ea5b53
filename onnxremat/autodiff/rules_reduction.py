"""VJPs of reductions and of operators that normalise along an axis."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..graph import Expr
from .context import Context
from .registry import vjp
from .rules_elementwise import mask
from .rules_indexing import zeros


def _axes(c: Context) -> tuple[int, ...]:
    axes = c.axes(index=1)
    if not axes and c.x0.rank and c.node.op_type in _MORE_THAN_A_SUM:
        raise c.refuse("versions of ONNX and of ONNX Runtime differ in what it does over no axes; apply the elementwise function instead")
    return axes


_MORE_THAN_A_SUM = ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")


def _spread(c: Context, g: Expr) -> Expr:
    """The gradient with the reduced axes put back as 1, ready to broadcast over the input; a scalar broadcasts as it is."""
    axes = _axes(c)
    if not g.rank:
        return g
    return g.reshape([1 if i in axes else d for i, d in enumerate(c.x0.shape)])


def _count(c: Context) -> int:
    return int(np.prod([c.x0.shape[a] for a in _axes(c)], dtype=np.int64))


def _reduce_sum(c: Context, g: Expr) -> Expr:
    return _spread(c, g).expand(c.x0.shape)


def _reduce_mean(c: Context, g: Expr) -> Expr:
    return (_spread(c, g) * (1 / max(1, _count(c)))).expand(c.x0.shape)


def _reduce_extremum(c: Context, g: Expr) -> Expr:
    # Ties share the gradient equally, as torch's amax and amin do.
    axes = _axes(c)
    hit = mask(c.op("Equal", c.x0, _spread(c, c.y)), g.dtype)
    return hit * (_spread(c, g) / hit.sum(axes, keepdims=True))


def _reduce_l2(c: Context, g: Expr) -> Expr:
    # 0 at the origin, as torch has it: x / max(norm, tiny), and only then the gradient, which over tiny would be infinite.
    norm = c.op("Max", _spread(c, c.y), c.op.const(np.finfo(c.y.dtype.numpy()).tiny, c.y.dtype))
    return c.x0 / norm * _spread(c, g)


def _reduce_prod(c: Context, g: Expr) -> Expr | None:
    # The product of the others: with every zero replaced by 1, P / x where no other element is zero.
    axes = _axes(c)
    if not axes:
        return g
    zero = mask(c.op("Equal", c.x0, 0.0), g.dtype)
    safe = c.x0 + zero
    product = c.op("ReduceProd", safe, np.asarray(axes, np.int64), keepdims=1)
    alone = mask(c.op("Equal", zero.sum(axes, keepdims=True), zero), g.dtype)
    return (_spread(c, g) * product) / safe * alone


vjp("ReduceSum", _reduce_sum, None)
vjp("ReduceMean", _reduce_mean, None)
vjp("ReduceMax", _reduce_extremum, None)
vjp("ReduceMin", _reduce_extremum, None)
vjp("ReduceProd", _reduce_prod, None)
vjp("ReduceL2", _reduce_l2, None)
vjp("ReduceL1", lambda c, g: c.op("Sign", c.x0) * _spread(c, g), None)
vjp("ReduceSumSquare", lambda c, g: c.x0 * (_spread(c, g) * 2.0), None)
vjp("ReduceLogSumExp", lambda c, g: c.op("Exp", c.x0 - _spread(c, c.y)) * _spread(c, g), None)
# 1 / sum(x) = exp(-y): of x nothing but its shape is needed.
vjp("ReduceLogSum", lambda c, g: _spread(c, g * c.op("Exp", -c.y)).expand(c.x0.shape), None)


def _softmax(c: Context, g: Expr) -> Expr:
    axis = int(c.attr("axis", -1)) % c.x0.rank
    weighted = g * c.y
    return weighted - c.y * weighted.sum([axis], keepdims=True)


def _log_softmax(c: Context, g: Expr) -> Expr:
    axis = int(c.attr("axis", -1)) % c.x0.rank
    scatter = g.value.producer()
    if scatter is not None and scatter.op_type == "ScatterElements" and scatter.attributes["axis"].as_int() % c.x0.rank == axis:
        # The labels' log-probabilities were picked: G is zero but for a few entries, so add those to the dense part in place
        # instead of holding two more tensors of the size of the logits.
        base, indices, updates = scatter.inputs
        picked = c.op.wrap(updates)  # type: ignore[arg-type]
        # Picks from some of the rows only leave the others without an entry to sum.
        whole = all(i == axis or n == m for i, (n, m) in enumerate(zip(picked.shape, c.x0.shape, strict=True)))
        if whole and base is not None and base.producer() is not None and base.producer().op_type == "ConstantOfShape":  # type: ignore[union-attr]
            dense = c.op("Exp", c.y) * -picked.sum([axis], keepdims=True)
            return c.op("ScatterElements", dense, indices, picked, axis=axis, reduction="add")
    return g - c.op("Exp", c.y) * g.sum([axis], keepdims=True)


vjp("Softmax", _softmax)
vjp("LogSoftmax", _log_softmax)


def _cumsum(c: Context, g: Expr) -> Expr:
    return c.op("CumSum", g, c.input(1), exclusive=c.attr("exclusive", 0), reverse=1 - int(c.attr("reverse", 0)))


vjp("CumSum", _cumsum, None)


def _top_k(c: Context, g: Expr) -> Expr:
    indices = c.saved(1, c.y.shape, ir.DataType.INT64, "topk_indices")
    return c.op("ScatterElements", zeros(c, c.x0.shape, g.dtype), indices, g, axis=int(c.attr("axis", -1)))


vjp("TopK", _top_k, None)
