"""Rows of elementwise operators."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from onnxremat.graph import Expr, GraphBuilder
from tests.autodiff.support import Row, Same, const, given, normal, positive, spread

MS = "com.microsoft"
TIES = "ties are kinks: the two one-sided derivatives differ"
UNARY = [
    ("Neg", normal(2, 3), torch.neg),
    ("Reciprocal", positive(2, 3), torch.reciprocal),
    ("Sqrt", positive(2, 3), torch.sqrt),
    ("Exp", normal(2, 3), torch.exp),
    ("Log", positive(2, 3), torch.log),
    ("Abs", spread(2, 3), torch.abs),
    ("Sin", normal(2, 3), torch.sin),
    ("Cos", normal(2, 3), torch.cos),
    ("Tanh", normal(2, 3), torch.tanh),
    ("Sigmoid", normal(2, 3), torch.sigmoid),
    ("Erf", normal(2, 3), torch.erf),
    ("Relu", spread(2, 3), torch.relu),
    ("Softplus", normal(2, 3), F.softplus),
    ("Identity", normal(2, 3), lambda x: x * 1),
    ("LeakyRelu", spread(2, 3), F.leaky_relu),
    ("Elu", spread(2, 3), F.elu),
    ("Gelu", normal(2, 3), F.gelu),
]
BINARY = [
    ("Add", normal, torch.add),
    ("Sub", normal, torch.sub),
    ("Mul", normal, torch.mul),
    ("Div", positive, torch.div),
]
BROADCASTS = {
    "no broadcast": ((2, 3), (2, 3)),
    "leading axis": ((2, 3), (3,)),
    "inner axis": ((2, 3, 4), (2, 1, 4)),
    "scalar right": ((2, 3), ()),
    "scalar left": ((), (2, 3)),
    "both sides": ((2, 1, 3), (4, 1)),
    "left of lower rank": ((1, 3), (2, 2, 3)),
    "ones only": ((1,), (1, 1)),
}


def _hard_sigmoid(x: torch.Tensor, alpha: float = 0.2, beta: float = 0.5) -> torch.Tensor:
    return torch.clamp(alpha * x + beta, 0, 1)


def _clip_from(op: GraphBuilder, x: Expr, aten: str, low: float, high: float) -> list[Expr]:
    """A Clip with the exporter's note of where it comes from."""
    op.metadata = {"pkg.torch.onnx.fx_node": f"%y : [num_users=1] = call_function[target=torch.ops.aten.{aten}.default](args = (%x,), kwargs = {{}})"}
    y = op("Clip", x, low, high)
    op.metadata = {}
    return [y]


ROWS = [
    *[Row(op, [sampler], function) for op, sampler, function in UNARY],
    *[
        Row(op, [sampler(*left), sampler(*right)], function, note=note)
        for op, sampler, function in BINARY
        for note, (left, right) in BROADCASTS.items()
    ],
    *[Row(op, [sampler(2, 3), Same(0)], lambda x, f=function: f(x, x), note="same tensor twice") for op, sampler, function in BINARY],
    Row("Exp", [normal()], torch.exp, note="rank 0"),
    Row("Mul", [normal(0, 3), normal(3)], torch.mul, note="no elements"),
    Row("Relu", [given(np.array([-1.0, 0.0, 2.0, 0.0]))], torch.relu, note="at zero", no_difference=TIES),
    Row("Abs", [given(np.array([-1.0, 0.0, 2.0]))], torch.abs, note="at zero", no_difference=TIES),
    Row("Sqrt", [given(np.array([0.0, 4.0]))], torch.sqrt, note="infinite slope at zero", no_difference="no point to the left of zero"),
    Row("Sigmoid", [given(np.array([-30.0, 30.0, 0.0]))], torch.sigmoid, note="saturated"),
    Row("Softplus", [given(np.array([-40.0, 12.0, 0.5]))], lambda x: F.softplus(x, threshold=1e9), note="far out"),
    Row("LeakyRelu", [spread(3, 2)], lambda x: F.leaky_relu(x, 0.3), {"alpha": 0.3}, note="alpha"),
    Row("LeakyRelu", [given(np.array([-1.0, 0.0, 1.0]))], F.leaky_relu, note="at zero", no_difference=TIES),
    Row("Elu", [spread(3, 2)], lambda x: F.elu(x, 0.5), {"alpha": 0.5}, note="alpha"),
    Row("HardSigmoid", [spread(3, 4, low=-4, high=4)], _hard_sigmoid),
    Row("HardSigmoid", [spread(3, 4, low=-4, high=4)], F.hardsigmoid, {"alpha": 1 / 6, "beta": 0.5}, note="as torch"),
    Row("HardSwish", [spread(3, 4, low=-4, high=4)], F.hardswish),
    Row("HardSwish", [spread(3, 4, low=-4, high=4)], F.hardswish, note="normalized", normalized=True),
    Row("Gelu", [normal(2, 3)], lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}, note="tanh"),
    Row(
        "Gelu",
        [given(np.array([-20.0, 20.0, -5.0]))],
        lambda x: F.gelu(x, approximate="tanh"),
        {"approximate": "tanh"},
        note="tanh far out",
    ),
    Row("Gelu", [normal(2, 3)], F.gelu, domain=MS),
    # Casts
    Row(
        "Cast",
        [normal(2, 3)],
        lambda x: x * 1,
        {"to": 1},
        note="to float32",
        no_difference="float64 is rounded away",
        float32_only="rounds to float32",
    ),
    Row(
        "Cast",
        [spread(2, 3)],
        lambda x: torch.trunc(x) + x,
        note="integers cut the gradient",
        build=lambda op, x: [op("Cast", op("Cast", x[0], to=7), to=int(x[0].dtype)) + x[0]],
        float32_only="",
    ),
    Row("CastLike", [normal(2, 3), normal(1)], lambda x, like: x * 1),
    # Powers
    *[Row("Pow", [positive(2, 3), const(np.array(p))], lambda x, p: x**p, note=f"to the {p}") for p in (1.0, 2.0, 3.0, 0.5, -1.0, -2.5, 4.0)],
    *[Row("Pow", [spread(2, 3), const(np.array(p))], lambda x, p: x**p, note=f"any sign to the {p}") for p in (1.0, 2.0, 3.0, 4.0)],
    Row("Pow", [normal(2, 3), const(np.array(2))], lambda x, p: x**p, note="integer exponent"),
    Row("Pow", [positive(2, 3), const(np.array([2.0, 0.5, 3.0]))], lambda x, p: x**p, note="constant exponents"),
    Row("Pow", [positive(2, 3), normal(3)], torch.pow, note="exponent differentiated"),
    Row("Pow", [positive(3), normal(2, 1)], torch.pow, note="both broadcast"),
    Row("Pow", [given(np.array(2.0)), normal(2, 3)], torch.pow, note="scalar base"),
    Row(
        "Pow",
        [given(np.array([0.0, 2.0])), given(np.array([2.0, 3.0]))],
        torch.pow,
        note="zero base",
        no_difference="0 ** p is constant only for p > 0",
    ),
    Row(
        "Pow",
        [given(np.array([0.0, 0.0, 0.0, 2.0])), given(np.array([0.0, 1.0, 2.0, 0.0]))],
        torch.pow,
        note="zero base and exponents",
        no_difference="0 ** p is constant only for p > 0",
    ),
    Row(
        "Pow",
        [given(np.array([0.0, 2.0])), given(np.array([-1.0, -1.0]))],
        torch.pow,
        note="zero base negative exponent",
        no_difference="infinite at zero",
    ),
    Row("Pow", [given(np.array([0.0, -1.5, 2.0])), const(np.array([0.0, 0.0, 3.0]))], lambda x, p: x**p, note="constant exponents with zero"),
    Row("Pow", [given(np.array([0.0, -1.5]))], lambda x: x**0 + x, note="to the 0", build=lambda op, x: [op("Pow", x[0], 0.0) + x[0]]),
    Row("Pow", [spread(2, 3), given(np.array([2, 3, 0]))], lambda x, p: x**p, note="integer exponents not constant", step=1e-3),
    Row("Pow", [positive(2, 2), Same(0)], lambda x: x**x, note="same tensor twice"),
    Row("Pow", [given(np.array([[0.0, 1.5]])), const(np.array(1.0))], lambda x, p: x**p, note="zero to the first"),
    # Bounds
    Row("Clip", [spread(3, 4), const(np.array(-1.0)), const(np.array(1.0))], lambda x, a, b: x.clamp(a, b)),
    Row("Clip", [spread(3, 4), const(np.array(-1.0))], lambda x, a: x.clamp(min=a), note="lower bound"),
    Row("Clip", [spread(3, 4), None, const(np.array(1.0))], lambda x, b: x.clamp(max=b), note="upper bound"),
    Row("Clip", [spread(3, 4)], lambda x: x * 1, note="no bound"),
    Row("Clip", [spread(3, 4), given(np.array(-1.0)), given(np.array(0.75))], lambda x, a, b: x.clamp(a, b), note="bounds differentiated"),
    Row(
        "Clip",
        [given(np.array([-1.0, 0.0, 1.0, 2.0])), const(np.array(-1.0)), const(np.array(1.0))],
        lambda x, a, b: x.clamp(a, b),
        note="on the bounds",
        no_difference=TIES,
    ),
    *[
        Row(
            "Clip",
            [given(np.array([-1.0, 0.0, 1.0, 5.0, 6.0, 7.0]))],
            function,
            note=f"{name} on its bounds",
            no_difference=TIES,
            build=lambda op, x, name=name, low=low, high=high: _clip_from(op, x[0], name, low, high),
        )
        for name, low, high, function in (
            ("relu6", 0.0, 6.0, F.relu6),
            ("hardtanh", -1.0, 1.0, F.hardtanh),
            ("clamp", -1.0, 1.0, lambda x: x.clamp(-1, 1)),
        )
    ],
    Row("HardSwish", [given(np.array([-3.5, -2.9, 0.0, 2.9, 3.5]))], F.hardswish, note="near its bounds"),
    # Choices
    Row("Where", [given(np.array([[True, False, True]])), normal(2, 3), normal(3)], torch.where),
    Row("Where", [given(np.array([[True], [False]])), normal(1, 3), normal(2, 3)], torch.where, note="all broadcast"),
    Row(
        "Where",
        [given(np.array([True, False])), normal(2), const(np.array(-np.inf))],
        torch.where,
        note="masked by infinity",
        no_difference="the loss is infinite",
    ),
    *[
        Row(op, [spread(2, 3), spread(3, low=-1.7, high=1.9)], function, note="broadcast")
        for op, function in (("Max", torch.maximum), ("Min", torch.minimum))
    ],
    *[
        Row(op, [given(np.array([1.0, 2.0, 3.0])), given(np.array([1.0, 3.0, 2.0]))], function, note="tie", no_difference=TIES)
        for op, function in (("Max", torch.maximum), ("Min", torch.minimum))
    ],
    Row("Max", [spread(2, 3)], lambda x: x * 1, note="one operand"),
    Row("Max", [spread(4), Same(0)], lambda x: x * 1, note="same tensor twice", step=1e-2),
    Row(
        "Max",
        [spread(2, 3), spread(3, low=-1.7, high=1.9), spread(2, 1, low=-1, high=1)],
        lambda *x: torch.maximum(torch.maximum(x[0], x[1]), x[2]),
        note="three",
    ),
    Row(
        "Min",
        [spread(2, 3), spread(3, low=-1.7, high=1.9), spread(2, 1, low=-1, high=1)],
        lambda *x: torch.minimum(torch.minimum(x[0], x[1]), x[2]),
        note="three",
    ),
    *[
        Row(
            op,
            [given(np.array([1.0, 2.0, 3.0, 1.0])), given(np.array([1.0, 2.0, 1.0, 3.0])), given(np.array([1.0, 0.0, 3.0, 3.0]))],
            lambda *x, f=function: f(f(x[0], x[1]), x[2]),
            note="three ties",
            no_difference=TIES,
        )
        for op, function in (("Max", torch.maximum), ("Min", torch.minimum))
    ],
    Row(
        "Max",
        [spread(2, 3), const(np.array(0.1)), spread(3, low=-1.7, high=1.9), const(np.array([[-0.3]]))],
        lambda *x: torch.maximum(torch.maximum(torch.maximum(x[0], x[1]), x[2]), x[3]),
        note="constants between",
        step=4e-3,
    ),
    Row("Min", [const(np.array(0.1)), spread(2, 3)], lambda a, x: torch.minimum(a, x), note="a constant first", step=4e-3),
    Row("Max", [given(np.array([-np.inf, 1.0])), given(np.array([-np.inf, np.inf]))], torch.maximum, note="infinities", no_difference=TIES),
    Row("Where", [const(np.array([True, False])), normal(2), Same(1)], lambda c, x: x * 1, note="same tensor twice"),
    # A relu6 by constants
    Row("Max", [spread(3, 2), const(np.array(0.0))], lambda x, b: x.clamp(min=b), note="with a constant"),
    Row("Sum", [normal(2, 3), normal(3), normal()], lambda a, b, c: a + b + c, note="broadcast"),
    Row("Sum", [normal(2, 3)], lambda a: a * 1, note="one operand"),
    Row("Sum", [normal(2, 3), Same(0), normal(3)], lambda a, b: a + a + b, note="same tensor twice"),
    Row("Mean", [normal(2, 3), normal(3), normal(1, 1)], lambda a, b, c: (a + b + c) / 3, note="broadcast"),
    Row("Mod", [spread(3, 4, low=-4, high=4), const(np.array(1.5))], torch.fmod, {"fmod": 1}, note="constant divisor", step=1e-3),
    Row(
        "Mod",
        [spread(2, 3, low=-4, high=4), given(np.array([0.7, 1.1, 0.9]))],
        torch.fmod,
        {"fmod": 1},
        note="divisor differentiated",
        step=1e-3,
    ),
    # Operators without a gradient beside one with
    *[
        Row("Mul", [spread(2, 3)], lambda x, f=function: x * f(x), note=f"by its {op}", build=lambda b, x, op=op: [x[0] * b(op, x[0])])
        for op, function in (("Sign", torch.sign), ("Floor", torch.floor), ("Ceil", torch.ceil), ("Round", torch.round))
    ],
    *[
        Row(
            "Mul",
            [spread(2, 3)],
            lambda x, f=function: x * f(x),
            note=f"by its {op}",
            build=lambda b, x, op=op: [x[0] * b(op, x[0]).cast(x[0].dtype)],
        )
        for op, function in (("IsNaN", torch.isnan), ("IsInf", torch.isinf), ("Hardmax", lambda x: F.one_hot(x.argmax(-1), x.shape[-1])))
    ],
]
