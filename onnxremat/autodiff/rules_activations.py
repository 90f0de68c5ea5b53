"""VJPs of activation functions."""

from __future__ import annotations

import math

from ..graph import Expr
from .context import Context
from .registry import vjp
from .rules_elementwise import heaviside, mask

vjp("Sigmoid", lambda c, g: g * (c.y * (1.0 - c.y)))
vjp("Relu", lambda c, g: g * heaviside(c.y))
vjp("Softplus", lambda c, g: g * c.op("Sigmoid", c.x0))


def _prelu(c: Context, g: Expr) -> Expr:
    positive = heaviside(c.x0)
    return g * (positive + (1.0 - positive) * c.x1)


def _softsign(c: Context, g: Expr) -> Expr:
    denominator = c.op("Abs", c.x0) + 1.0
    return g / (denominator * denominator)


def _leaky(c: Context, g: Expr) -> Expr:
    alpha = float(c.attr("alpha", 0.01))
    return g * (heaviside(c.x0) * (1.0 - alpha) + alpha)


def _exponential(c: Context, g: Expr, scale: float, alpha: float, rate: float) -> Expr:
    """Of ``y = scale x`` for x > 0, else ``scale alpha (exp(rate x) - 1)``, whose slope is ``rate (y + scale alpha)``."""
    # Where y has the sign of x, x itself need not be kept.
    positive = heaviside(c.y if alpha * rate > 0 and scale > 0 else c.x0)
    return g * (positive * scale + (1.0 - positive) * ((c.y + scale * alpha) * rate))


def _elu(c: Context, g: Expr) -> Expr:
    return _exponential(c, g, 1.0, float(c.attr("alpha", 1.0)), 1.0)


def _celu(c: Context, g: Expr) -> Expr:
    alpha = float(c.attr("alpha", 1.0))
    return _exponential(c, g, 1.0, alpha, 1 / alpha)


def _selu(c: Context, g: Expr) -> Expr:
    return _exponential(c, g, float(c.attr("gamma", 1.0507009873554805)), float(c.attr("alpha", 1.6732632423543772)), 1.0)


def _thresholded_relu(c: Context, g: Expr) -> Expr:
    alpha = float(c.attr("alpha", 1.0))
    return g * (heaviside(c.y) if alpha >= 0 else mask(c.op("Greater", c.x0, alpha), g.dtype))


def _shrink(c: Context, g: Expr) -> Expr:
    limit = float(c.attr("lambd", 0.5))
    return g * mask(c.op("Or", c.op("Less", c.x0, -limit), c.op("Greater", c.x0, limit)), g.dtype)


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


vjp("Softsign", _softsign)
vjp("LeakyRelu", _leaky)
vjp("PRelu", _prelu, lambda c, g: g * c.op("Min", c.x0, 0.0))
vjp("Elu", _elu)
vjp("Celu", _celu)
vjp("Selu", _selu)
vjp("ThresholdedRelu", _thresholded_relu)
vjp("Shrink", _shrink)
vjp("HardSigmoid", _hard_sigmoid)
vjp("HardSwish", _hard_swish)
vjp("Gelu", _gelu)
vjp("Gelu", _gelu, domain="com.microsoft")
