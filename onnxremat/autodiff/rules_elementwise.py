"""VJPs of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..graph import Expr
from .context import Context
from .registry import joint_vjp, not_differentiable, refused, vjp


def mask(condition: Expr, dtype: ir.DataType) -> Expr:
    """A condition as 0 and 1 of the gradient's dtype."""
    return condition.cast(dtype)


def heaviside(x: Expr) -> Expr:
    """1 where x > 0, else 0, without a boolean in between (a float HardSigmoid runs five times as fast as Greater and Cast)."""
    if x.dtype != ir.DataType.FLOAT:
        return mask(x.op("Greater", x, 0.0), x.dtype)
    return x.op("HardSigmoid", x, alpha=float(np.finfo(np.float32).max), beta=0.0)


vjp("Add", lambda c, g: g, lambda c, g: g)
vjp("Sub", lambda c, g: g, lambda c, g: -g)
vjp("Mul", lambda c, g: g * c.x1, lambda c, g: g * c.x0)
vjp("Div", lambda c, g: g / c.x1, lambda c, g: -(g * c.y / c.x1))
vjp("Neg", lambda c, g: -g)
vjp("Reciprocal", lambda c, g: -(g * c.y * c.y))
vjp("Sqrt", lambda c, g: g * 0.5 / c.y)
vjp("Exp", lambda c, g: g * c.y)
vjp("Log", lambda c, g: g / c.x0)
vjp("Abs", lambda c, g: g * c.op("Sign", c.x0))
vjp("Sin", lambda c, g: g * c.op("Cos", c.x0))
vjp("Cos", lambda c, g: -(g * c.op("Sin", c.x0)))
vjp("Tanh", lambda c, g: g * (1.0 - c.y * c.y))
vjp("Sigmoid", lambda c, g: g * (c.y * (1.0 - c.y)))
vjp("Erf", lambda c, g: g * (c.op("Exp", -(c.x0 * c.x0)) * (2 / math.sqrt(math.pi))))
vjp("Relu", lambda c, g: g * heaviside(c.y))
vjp("Softplus", lambda c, g: g * c.op("Sigmoid", c.x0))
vjp("Identity", lambda c, g: g)
vjp("Cast", lambda c, g: g.cast(c.x0.dtype))
vjp("CastLike", lambda c, g: g.cast(c.x0.dtype), None)
# y = a - b trunc(a / b)
vjp("Mod", lambda c, g: g, lambda c, g: g * ((c.y - c.x0) / c.x1))


@joint_vjp("Pow")
def _pow(c: Context) -> Sequence[Expr | None]:
    g, x, p = c.g[0], c.x0, c.x1
    assert g is not None
    if p.value.const_value is not None and p.value.const_value.size == 1 and not c.wants(1):
        exponent = float(p.value.const_value.numpy().reshape(()))
        if exponent == 1:
            return [g]
        if exponent == 2:
            return [g * (x * 2.0)]
        if exponent == 3:
            return [g * (x * x * 3.0)]
        return [g * (c.op("Pow", x, c.op.const(exponent - 1, x.dtype)) * exponent)]
    exponents = p.cast(x.dtype)
    dx = g * (exponents * c.op("Pow", x, exponents - 1.0)) if c.wants(0) else None
    if not c.wants(1):
        return [dx]
    # 0 ** p does not depend on p for p > 0: the logarithm is replaced by zero there, as torch does.
    safe = x + mask(c.op("Equal", x, 0.0), x.dtype)
    return [dx, g * (c.y * c.op("Log", safe))]


def _leaky(c: Context, g: Expr) -> Expr:
    alpha = float(c.attr("alpha", 0.01))
    return g * (heaviside(c.x0) * (1.0 - alpha) + alpha)


def _elu(c: Context, g: Expr) -> Expr:
    alpha = float(c.attr("alpha", 1.0))
    positive = mask(c.op("Greater", c.x0, 0.0), g.dtype)
    return g * (positive + (1.0 - positive) * (c.y + alpha))


def _hard_sigmoid(c: Context, g: Expr) -> Expr:
    inside = c.op("And", c.op("Greater", c.y, 0.0), c.op("Less", c.y, 1.0))
    return g * (mask(inside, g.dtype) * float(c.attr("alpha", 0.2)))


def _hard_swish(c: Context, g: Expr) -> Expr:
    # x * h(x) with h(x) = clip(x / 6 + 1/2, 0, 1): h + x * h'
    h = c.op("HardSigmoid", c.x0, alpha=1 / 6, beta=0.5)
    inside = c.op("And", c.op("Greater", c.x0, -3.0), c.op("Less", c.x0, 3.0))
    return g * (h + c.x0 * mask(inside, g.dtype) * (1 / 6))


def _gelu(c: Context, g: Expr) -> Expr:
    x = c.x0
    if c.attr("approximate", "none") == "tanh":
        # With v = 2u, u the argument of tanh: y = x s, s = sigmoid(v), y' = s (1 + (1 - s) x v'), x v' = x (2k + 6 k a x^2).
        k, a = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        s = c.op("Sigmoid", x * (square * (2 * k * a) + 2 * k))
        slope = x * (square * (6 * k * a) + 2 * k)
        return g * (s * ((1.0 - s) * slope + 1.0))
    cdf = (c.op("Erf", x * math.sqrt(0.5)) + 1.0) * 0.5
    pdf = c.op("Exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * (cdf + x * pdf)


def _clip(c: Context, g: Expr) -> Expr:
    # torch passes the gradient on the bounds of clamp, but not on those of relu6 and hardtanh, where y tells as much as x does (and is
    # read by what follows anyway).  Channels that are zero throughout make the difference: BatchNorm gives exactly its bias, at first 0.
    origin = c.node.metadata_props.get("pkg.torch.onnx.fx_node", "")
    hard = "aten.relu6." in origin or "aten.hardtanh." in origin
    x = c.y if hard else c.x0
    inside: Expr | None = None
    for index, comparison in ((1, "Greater"), (2, "Less")):
        if c.has(index):
            within = c.op(comparison if hard else f"{comparison}OrEqual", x, c.input(index))
            inside = within if inside is None else c.op("And", inside, within)
    return g if inside is None else g * mask(inside, g.dtype)


def _clip_low(c: Context, g: Expr) -> Expr:
    # y = min(max(x, low), high): where low exceeds high, high wins.
    picked = c.op("Less", c.x0, c.x1)
    return g * mask(c.op("And", picked, c.op("Less", c.x1, c.input(2))) if c.has(2) else picked, g.dtype)


def _clip_high(c: Context, g: Expr) -> Expr:
    high = c.input(2)
    picked = c.op("Greater", c.x0, high)
    return g * mask(c.op("Or", picked, c.op("Greater", c.x1, high)) if c.has(1) else picked, g.dtype)


vjp("LeakyRelu", _leaky)
vjp("Elu", _elu)
vjp("HardSigmoid", _hard_sigmoid)
vjp("HardSwish", _hard_swish)
vjp("Gelu", _gelu)
vjp("Gelu", _gelu, domain="com.microsoft")
vjp("Clip", _clip, _clip_low, _clip_high)


def _where(c: Context, g: Expr, picked: bool) -> Expr:
    condition = c.x0 if picked else c.op("Not", c.x0)
    return g * mask(condition, g.dtype)


vjp("Where", None, lambda c, g: _where(c, g, True), lambda c, g: _where(c, g, False))


@joint_vjp("Sum", "Mean")
def _sum(c: Context) -> Sequence[Expr | None]:
    g = c.g[0]
    assert g is not None
    if c.node.op_type == "Mean":
        g = g * (1 / len(c.x))
    return [g] * len(c.x)


@joint_vjp("Max", "Min")
def _extremum(c: Context) -> Sequence[Expr | None]:
    # Ties share the gradient equally, as torch's maximum and minimum do.
    g = c.g[0]
    assert g is not None
    if len(c.x) == 1:
        return [g]
    hits = [mask(c.op("Equal", c.input(i), c.y), g.dtype) for i in range(len(c.x))]
    count = hits[0]
    for hit in hits[1:]:
        count = count + hit
    share = g / count
    return [share * hit if c.wants(i) else None for i, hit in enumerate(hits)]


not_differentiable(
    "Sign Floor Ceil Round Not And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual IsNaN IsInf Shape Size ArgMax ArgMin NonZero "
    "ConstantOfShape Constant EyeLike RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli "
    "BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor"
)
refused("OneHot Range", "its values depend on a trainable parameter, for which there is no rule yet; make them constants")
