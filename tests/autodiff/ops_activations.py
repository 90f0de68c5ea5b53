"""Rows of activation and inverse functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.autodiff.support import Row, Sampler, const, given, normal, spread

SINGLE = "the kernel of float64 reckons in float32"
TIES = "ties are kinks: the two one-sided derivatives differ"


def _uniform(low: float, high: float, *shape: int) -> Sampler:
    return lambda rng: rng.uniform(low, high, shape)


def _celu(x: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.clamp(x, min=0) + torch.clamp(alpha * (torch.exp(x / alpha) - 1), max=0)


def _celu_row(function: Callable[[torch.Tensor], torch.Tensor], alpha: float, note: str = "", x: Any = None) -> Row:
    """ONNX has no Celu of float64, and can't infer its type: so it is told."""
    return Row(
        "Celu",
        [spread(3, 4) if x is None else x],
        function,
        note=note,
        build=lambda op, x: op.node("Celu", x[0], alpha=alpha, like=[x[0]]),
        step=4e-3,
    )


def _shrink_row(function: Callable[[torch.Tensor], torch.Tensor], note: str = "", **attributes: float) -> Row:
    return Row("Shrink", [spread(3, 4)], function, attributes, note=note, step=4e-3, float32_only=SINGLE, float32_differences=SINGLE)


def _thresholded(x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    return torch.where(x > alpha, x, 0)


def _shrink(x: torch.Tensor, bias: float = 0.0, limit: float = 0.5) -> torch.Tensor:
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, 0))


ROWS = [
    *[
        Row(op, [_uniform(low, high, 3, 4)], function, step=4e-3)
        for op, low, high, function in (
            ("Acos", -0.9, 0.9, torch.acos),
            ("Asin", -0.9, 0.9, torch.asin),
            ("Atan", -3.0, 3.0, torch.atan),
            ("Acosh", 1.2, 4.0, torch.acosh),
            ("Asinh", -3.0, 3.0, torch.asinh),
            ("Atanh", -0.9, 0.9, torch.atanh),
            ("Sinh", -2.0, 2.0, torch.sinh),
            ("Cosh", -2.0, 2.0, torch.cosh),
            ("Tan", -1.2, 1.2, torch.tan),
        )
    ],
    Row("Acosh", [given(np.array([1.0, 2.0]))], torch.acosh, note="infinite slope at one", no_difference="no point to the left of one"),
    Row("Asin", [given(np.array([0.0, 1.0]))], torch.asin, note="infinite slope at one", no_difference="no point to the right of one"),
    Row("Sinh", [normal(0, 2)], torch.sinh, note="no elements"),
    Row("Atan", [normal()], torch.atan, note="rank 0"),
    # Exponential units, of y where its sign is that of x
    Row("Elu", [spread(3, 2)], lambda x: torch.where(x > 0, x, -0.5 * torch.expm1(x)), {"alpha": -0.5}, note="negative alpha"),
    Row("Elu", [spread(3, 2)], lambda x: torch.where(x > 0, x, 0 * x), {"alpha": 0.0}, note="alpha zero"),
    Row("Elu", [given(np.array([-1.0, 0.0, 1.0]))], lambda x: F.elu(x, 2.0), {"alpha": 2.0}, note="at zero", no_difference=TIES),
    _celu_row(F.celu, 1.0),
    *[_celu_row(lambda x, a=a: _celu(x, a), a, f"alpha {a}") for a in (0.5, 2.0, -1.5)],
    _celu_row(lambda x: F.celu(x, 2.0), 2.0, "at zero", given(np.array([-1.0, 0.0, 1.0]))),
    Row("Selu", [spread(3, 4)], F.selu),
    Row(
        "Selu",
        [spread(3, 4)],
        lambda x: 0.7 * torch.where(x > 0, x, 1.5 * torch.expm1(x)),
        {"alpha": 1.5, "gamma": 0.7},
        note="alpha and gamma",
    ),
    Row(
        "Selu",
        [spread(3, 4)],
        lambda x: -0.7 * torch.where(x > 0, x, 1.5 * torch.expm1(x)),
        {"alpha": 1.5, "gamma": -0.7},
        note="negative gamma",
    ),
    Row("ThresholdedRelu", [spread(3, 4)], _thresholded, step=4e-3),
    Row("ThresholdedRelu", [spread(3, 4)], lambda x: _thresholded(x, 0.0), {"alpha": 0.0}, note="alpha zero", step=4e-3),
    Row("ThresholdedRelu", [spread(3, 4)], lambda x: _thresholded(x, -1.0), {"alpha": -1.0}, note="negative alpha", step=4e-3),
    Row(
        "ThresholdedRelu",
        [given(np.array([0.5, 1.0, 2.0]))],
        lambda x: F.threshold(x, 1.0, 0.0),
        note="on the threshold",
        no_difference=TIES,
    ),
    _shrink_row(_shrink),
    _shrink_row(lambda x: F.hardshrink(x, 1.0), "hard", lambd=1.0),
    _shrink_row(lambda x: F.softshrink(x, 1.0), "soft", lambd=1.0, bias=1.0),
    _shrink_row(lambda x: _shrink(x, 0.2, -0.5), "negative limit", lambd=-0.5, bias=0.2),
    Row("Softsign", [spread(3, 4)], F.softsign),
    Row("Softsign", [given(np.array([-1e4, 0.0, 1e4]))], F.softsign, note="far out and at zero", no_difference="a slope of 1e-8"),
    Row("Mish", [normal(3, 4)], F.mish, normalized=True),
    Row("Mish", [given(np.array([-30.0, 0.0, 30.0]))], F.mish, note="far out", normalized=True),
    # A slope for each channel, or one for all
    Row("PRelu", [spread(2, 3, 4), normal(3, 1)], lambda x, s: torch.where(x > 0, x, x * s), note="of channels", step=4e-3),
    Row("PRelu", [spread(2, 3), normal(1)], lambda x, s: torch.where(x > 0, x, x * s), step=4e-3),
    Row("PRelu", [spread(2, 3), const(np.array(0.25))], lambda x, s: torch.where(x > 0, x, x * s), note="constant slope", step=4e-3),
    Row("PRelu", [spread(2, 3), normal(2, 3)], lambda x, s: torch.where(x > 0, x, x * s), note="of elements", step=4e-3),
    Row("PRelu", [given(np.array([-1.0, 0.0, 1.0])), given(np.array([0.3]))], F.prelu, note="at zero", no_difference=TIES),
]
