"""Rows of reductions and of operators that normalise along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from onnxremat.graph import Expr, GraphBuilder
from tests.autodiff.support import Row, Sampler, const, given, normal, positive, spread

TIES = "ties are kinks: the two one-sided derivatives differ"
Reduce = Callable[[torch.Tensor, Sequence[int], bool], torch.Tensor]

REDUCTIONS: dict[str, tuple[Callable[..., Sampler], Reduce]] = {
    "ReduceSum": (normal, lambda x, a, k: x.sum(a, keepdim=k)),
    "ReduceMean": (normal, lambda x, a, k: x.mean(a, keepdim=k)),
    "ReduceMax": (spread, lambda x, a, k: x.amax(a, keepdim=k)),
    "ReduceMin": (spread, lambda x, a, k: x.amin(a, keepdim=k)),
    "ReduceProd": (positive, lambda x, a, k: _product(x, a, k)),
    "ReduceL2": (normal, lambda x, a, k: (x * x).sum(a, keepdim=k).sqrt()),
    "ReduceL1": (spread, lambda x, a, k: x.abs().sum(a, keepdim=k)),
    "ReduceSumSquare": (normal, lambda x, a, k: (x * x).sum(a, keepdim=k)),
    "ReduceLogSumExp": (normal, lambda x, a, k: x.logsumexp(a, keepdim=k)),
    "ReduceLogSum": (positive, lambda x, a, k: x.sum(a, keepdim=k).log()),
}
FORMS: list[tuple[str, list[int], int]] = [
    ("one axis dropped", [1], 0),
    ("one axis kept", [1], 1),
    ("negative axis", [-1], 1),
    ("two axes", [0, -1], 0),
    ("axes out of order", [2, 0], 0),
]


def _product(x: torch.Tensor, axes: Sequence[int], keep: bool) -> torch.Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _reduce_twice(op: GraphBuilder, x: Sequence[Any]) -> list[Expr]:
    """What one reduction gives, reduced by another, and the operand read again."""
    return [op("ReduceMax", x[0] * op("ReduceL2", x[0], np.array([-1]), keepdims=1), np.array([0]), keepdims=0)]


def _log_softmax_gather(op: GraphBuilder, x: Sequence[Any], axis: int) -> list[Expr]:
    return [op("GatherElements", op("LogSoftmax", x[0], axis=axis), x[1], axis=axis)]


def _over_no_axes(op: GraphBuilder, x: Expr, op_type: str) -> Expr:
    return op.node(op_type, x, np.zeros(0, np.int64), noop_with_empty_axes=1, like=[x])[0]


def _top_k(x: torch.Tensor, k: int, axis: int, largest: bool = True) -> torch.Tensor:
    return torch.topk(x, k, axis, largest, True).values


ROWS = [
    *[
        Row(
            "TopK",
            [spread(3, 4, 2), const(np.array([k]))],
            lambda x, _, k=k, axis=axis, largest=largest: _top_k(x, k, axis, bool(largest)),
            {"axis": axis, "largest": largest},
            note=f"{k} on axis {axis} largest {largest}",
            outputs=2,
            step=4e-3,
        )
        for k, axis, largest in ((2, 1, 1), (1, -1, 0), (3, 0, 1), (0, 1, 1))
    ],
    Row(
        "TopK",
        [given(np.array([[1.0, 2.0, 2.0, 0.0]])), const(np.array([1]))],
        lambda x, _: x[:, 1:2],
        note="ties",
        outputs=2,
        no_difference=TIES,
    ),
    Row(
        "TopK",
        [spread(2, 5)],
        lambda x: [torch.sort(x, 1, descending=True).values, x * 2],
        note="a sort read beside its operand",
        build=lambda op, x: [op.node("TopK", x[0], np.array([5]), outputs=2)[0], x[0] * 2.0],
        step=4e-3,
    ),
    Row(
        "TopK",
        [spread(2, 5)],
        lambda x: torch.topk(x, 2, 1).values * torch.topk(x, 2, 1).indices,
        note="indices read",
        build=lambda op, x: [(parts := op.node("TopK", x[0], np.array([2]), outputs=2))[0] * parts[1].cast(x[0].dtype)],
        step=4e-3,
    ),
    *[
        Row(
            op,
            [sampler(2, 3, 4), const(np.array(axes))],
            lambda x, _, f=function, a=axes, k=keep: f(x, a, bool(k)),
            {"keepdims": keep},
            note=note,
        )
        for op, (sampler, function) in REDUCTIONS.items()
        for note, axes, keep in FORMS
    ],
    *[
        Row(op, [sampler(2, 3)], lambda x, f=function, k=keep: f(x, [0, 1], bool(k)), {"keepdims": keep}, note=f"all axes keepdims {keep}")
        for op, (sampler, function) in REDUCTIONS.items()
        for keep in (0, 1)
    ],
    Row(
        "ReduceSum",
        [normal(2, 3), const(np.array([], np.int64))],
        lambda x, _: x * 1,
        {"noop_with_empty_axes": 1},
        note="no axes means nothing",
    ),
    Row("ReduceSum", [normal(2, 3), const(np.array([], np.int64))], lambda x, _: x.sum().reshape(1, 1), note="no axes means all"),
    *[
        Row(op, [sampler(3)], lambda x: x * 1, note="of no axes", normalized=True, build=lambda b, x, op=op: [_over_no_axes(b, x[0], op)])
        for op, sampler in (("ReduceSum", normal), ("ReduceMean", normal), ("ReduceMax", spread), ("ReduceMin", spread), ("ReduceProd", normal))
    ],
    *[
        Row(op, [sampler()], lambda x, f=function: f(x.reshape(1), [0], False), {"keepdims": keep}, note=f"of rank 0 keepdims {keep}")
        for op, (sampler, function) in REDUCTIONS.items()
        for keep in (0, 1)
    ],
    *[
        Row(op, [sampler(2, 3), const(np.array([], np.int64))], lambda x, _, f=function: f(x, [0, 1], True), note="empty axes mean all")
        for op, (sampler, function) in REDUCTIONS.items()
        if op != "ReduceSum"
    ],
    *[
        Row(op, [sampler(2, 1, 3), const(np.array([1]))], lambda x, _, f=function: f(x, [1], False), {"keepdims": 0}, note="axis of one entry")
        for op, (sampler, function) in REDUCTIONS.items()
        if op not in ("ReduceL1", "ReduceL2")
    ],
    *[
        Row(op, [sampler(0, 3), const(np.array([1]))], lambda x, _, f=function: f(x, [1], True), note="no rows")
        for op, (sampler, function) in REDUCTIONS.items()
        if op not in ("ReduceMax", "ReduceMin")
    ],
    *[
        Row(
            "ReduceProd",
            [given(np.array(values)), const(np.array([-1]))],
            lambda x, _: x.prod(-1),
            {"keepdims": 0},
            note=note,
        )
        for note, values in (
            ("one zero", [[2.0, 0.0, 3.0], [-1.5, 2.0, -0.5]]),
            ("two zeros", [[0.0, 2.0, 0.0], [1.0, 2.0, 3.0]]),
            ("zeros alone", [[0.0], [2.0]]),
        )
    ],
    Row(
        "ReduceProd",
        [given(np.array([[[2.0, 0.0], [3.0, 1.5]], [[0.0, 1.0], [0.0, 2.0]]])), const(np.array([0, 2]))],
        lambda x, _: _product(x, [0, 2], True),
        note="zeros over two axes",
    ),
    Row(
        "ReduceL2",
        [given(np.array([[0.0, 0.0], [3.0, 4.0]])), const(np.array([1]))],
        lambda x, _: torch.linalg.vector_norm(x, dim=1) * 1e3,
        note="a large gradient at the origin",
        build=lambda op, x: [op("ReduceL2", x[0], np.array([1]), keepdims=0) * 1e3],
        no_difference="the norm has a kink at the origin",
    ),
    Row(
        "ReduceMax",
        [spread(2, 3)],
        lambda x: (x * torch.linalg.vector_norm(x, dim=-1, keepdim=True)).amax(0),
        note="after another",
        build=_reduce_twice,
        step=1e-3,
    ),
    Row("ReduceMean", [normal(1, 3), const(np.array([0]))], lambda x, _: x * 1, note="axis of size one"),
    Row("ReduceSum", [normal(0, 3), const(np.array([0]))], lambda x, _: x.sum(0), {"keepdims": 0}, note="no elements"),
    Row(
        "ReduceMax",
        [given(np.array([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]])), const(np.array([1]))],
        lambda x, _: x.amax(1),
        {"keepdims": 0},
        note="ties",
        no_difference=TIES,
    ),
    Row(
        "ReduceMin",
        [given(np.array([[1.0, 1.0, 2.0], [3.0, 3.0, 3.0]])), const(np.array([1]))],
        lambda x, _: x.amin(1),
        {"keepdims": 0},
        note="ties",
        no_difference=TIES,
    ),
    Row(
        "ReduceL2",
        [given(np.array([[0.0, 0.0], [3.0, 4.0]])), const(np.array([1]))],
        lambda x, _: torch.linalg.vector_norm(x, dim=1),
        {"keepdims": 0},
        note="at the origin",
        no_difference="the norm has a kink at the origin",
    ),
    Row(
        "ReduceL1",
        [given(np.array([[0.0, -1.0], [3.0, 4.0]])), const(np.array([1]))],
        lambda x, _: x.abs().sum(1),
        {"keepdims": 0},
        note="at zero",
        no_difference=TIES,
    ),
    Row(
        "ReduceLogSumExp",
        [given(np.array([[90.0, 91.0, -90.0]])), const(np.array([1]))],
        lambda x, _: x.logsumexp(1),
        {"keepdims": 0},
        note="large",
        tolerance=1e-2,
    ),
    *[
        Row(op, [normal(2, 3, 4)], lambda x, f=function, a=axis: f(x, dim=a), {"axis": axis}, note=f"axis {axis}")
        for op, function in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax))
        for axis in (0, 1, 2, -1, -2)
    ],
    *[
        Row(op, [normal(2, 3)], lambda x, f=function: f(x, dim=-1), note="default axis")
        for op, function in (("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax))
    ],
    Row("Softmax", [given(np.array([[90.0, 91.0, -90.0]]))], lambda x: torch.softmax(x, -1), note="large"),
    # The labels' log-probabilities: the gradient takes the sparse way
    *[
        Row(
            "LogSoftmax",
            [normal(2, 4, 3), given(np.array([[[0, 2, 3]], [[1, 1, 0]]]))],
            lambda x, i: torch.gather(torch.log_softmax(x, 1), 1, i),
            note=f"picked on axis {axis}",
            build=lambda op, x, axis=axis: _log_softmax_gather(op, x, axis=axis),
        )
        for axis in (1, -2)
    ],
    Row(
        "LogSoftmax",
        [normal(2, 4), given(np.array([[0, 2, 0], [1, 3, 1]]))],
        lambda x, i: torch.gather(torch.log_softmax(x, 1), 1, i),
        note="picked repeatedly",
        build=lambda op, x: _log_softmax_gather(op, x, axis=1),
    ),
    *[
        Row(
            "LogSoftmax",
            [normal(3, 4), given(np.array(indices))],
            lambda x, i: torch.gather(torch.log_softmax(x, 1), 1, i),
            note=f"picked in {len(indices)} of 3 rows",
            build=lambda op, x: _log_softmax_gather(op, x, axis=1),
        )
        for indices in ([[2]], [[2, 1], [0, 3]])
    ],
    Row(
        "LogSoftmax",
        [normal(3, 4), given(np.array([[2], [0], [1]]))],
        lambda x, i: [torch.gather(y := torch.log_softmax(x, 1), 1, i), y],
        note="picked and read whole",
        build=lambda op, x: [op("GatherElements", y := op("LogSoftmax", x[0], axis=1), x[1], axis=1), y],
    ),
    Row(
        "LogSoftmax",
        [normal(3, 3), given(np.array([[2, 0, 1]]))],
        lambda x, i: torch.gather(torch.log_softmax(x, 1), 0, i),
        note="picked on another axis",
        build=lambda op, x: [op("GatherElements", op("LogSoftmax", x[0], axis=1), x[1], axis=0)],
    ),
    *[
        Row(
            "CumSum",
            [normal(2, 3), const(np.array(axis))],
            function,
            {"exclusive": exclusive, "reverse": reverse},
            note=f"axis {axis} exclusive {exclusive} reverse {reverse}",
        )
        for axis, exclusive, reverse, function in (
            (1, 0, 0, lambda x, _: x.cumsum(1)),
            (-2, 0, 0, lambda x, _: x.cumsum(0)),
            (1, 1, 0, lambda x, _: x.cumsum(1) - x),
            (1, 0, 1, lambda x, _: x.flip(1).cumsum(1).flip(1)),
            (1, 1, 1, lambda x, _: x.flip(1).cumsum(1).flip(1) - x),
        )
    ],
]
