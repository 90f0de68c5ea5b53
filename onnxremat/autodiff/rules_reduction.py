"""VJPs of reductions and of operators that normalise along an axis."""

from __future__ import annotations

import numpy as np

from ..graph import Expr
from .context import Context
from .registry import vjp
from .rules_elementwise import mask


def _axes(c: Context) -> tuple[int, ...]:
    return c.axes(index=1)


def _spread(c: Context, g: Expr) -> Expr:
    """The gradient with the reduced axes put back as 1, ready to broadcast over the input."""
    axes = _axes(c)
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
    # 0 at the origin, as torch has it: x / max(norm, tiny)
    norm = c.op("Max", _spread(c, c.y), c.op.const(np.finfo(c.y.dtype.numpy()).tiny, c.y.dtype))
    return c.x0 * (_spread(c, g) / norm)


vjp("ReduceSum", _reduce_sum, None)
vjp("ReduceMean", _reduce_mean, None)
vjp("ReduceMax", _reduce_extremum, None)
vjp("ReduceMin", _reduce_extremum, None)
vjp("ReduceL2", _reduce_l2, None)
vjp("ReduceL1", lambda c, g: c.op("Sign", c.x0) * _spread(c, g), None)
vjp("ReduceSumSquare", lambda c, g: c.x0 * (_spread(c, g) * 2.0), None)
vjp("ReduceLogSumExp", lambda c, g: c.op("Exp", c.x0 - _spread(c, c.y)) * _spread(c, g), None)
vjp("ReduceLogSum", lambda c, g: (_spread(c, g) / c.x0.sum(_axes(c), keepdims=True)).expand(c.x0.shape), None)


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
