"""Elementwise operators and reductions that the runtime would write out by itself, or that do nothing."""

from __future__ import annotations

from ..autodiff.context import Context
from ..graph import Expr
from .registry import rewrite


@rewrite("Mish")
def _mish(c: Context) -> Expr:
    return c.x0 * c.op("Tanh", c.op("Softplus", c.x0))


@rewrite("ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd", has_rule=True)
def _reduce_nothing(c: Context) -> Expr | None:
    """Over no axes these are the input itself; ONNX Runtime 1.19.2 refuses that where the axes are not constant."""
    if not int(c.attr("noop_with_empty_axes", 0)) or (c.has(1) and c.x1.shape != (0,)):
        return None
    return c.op("Identity", c.x0)


@rewrite("Bernoulli", has_rule=True)
def _bernoulli(c: Context) -> Expr:
    """1 where a uniform number lies below the probability; ONNX's own definition, which ONNX Runtime inlines, has it the other way round."""
    p = c.x0
    output = c.node.outputs[0].dtype or p.dtype
    seed = {"seed": float(c.attr("seed"))} if c.attr("seed") is not None else {}
    return c.op("Less", c.op("RandomUniformLike", p, low=0.0, high=1.0, **seed), p).cast(output)
