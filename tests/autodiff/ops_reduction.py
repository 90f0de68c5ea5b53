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


def _log_softmax_gather(op: GraphBuilder, x: Sequence[Any], axis: int) -> list[Expr]:
    return [op("GatherElements", op("LogSoftmax", x[0], axis=axis), x[1], axis=axis)]


ROWS = [
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
