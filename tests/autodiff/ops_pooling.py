"""Rows of pooling beyond the plain: rounded up, column-major, norms, whole maps, and unpooling; and of blocks put into images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.autodiff.ops_nn import AVERAGE_POOLS, MAX_POOLS, torch_pads
from tests.autodiff.support import Row, given, normal, spread

TIES = "ties are kinks: the two one-sided derivatives differ"


def _ceil_average(note: str, x: tuple[int, ...], kernel: list[int], strides: list[int], pads: list[int], counted: bool) -> Row:
    """Against torch's own rounding up, whose pads are the same on both sides."""
    rank = len(x) - 2

    def reference(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = AVERAGE_POOLS[rank](x, kernel, strides, pads, True, counted)
        return result

    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads * 2, "ceil_mode": 1, "count_include_pad": int(counted)}
    # The kernel of the runtime divides the last window by another number.
    wrong = "ONNX Runtime 1.19.2 counts entries beyond the pads" if counted else ""
    return Row("AveragePool", [normal(*x)], reference, attributes, note=note, step=0.25, normalized=True, no_difference=wrong)


def _lp(x: torch.Tensor, p: int, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]) -> torch.Tensor:
    """By unfolding every axis in turn."""
    padded = F.pad(x, torch_pads(pads)).abs() ** p
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        length = (padded.shape[axis] - d * (k - 1) - 1) // s + 1
        at = torch.arange(length)[:, None] * s + torch.arange(k) * d
        padded = padded.index_select(axis, at.reshape(-1)).unflatten(axis, (length, k)).sum(axis + 1)
    return padded ** (1 / p)


def _lp_pool(note: str, x: tuple[int, ...], kernel: list[int], p: int | None = None, **attributes: Any) -> Row:
    rank = len(x) - 2
    geometry = {"strides": [1] * rank, "pads": [0] * 2 * rank, "dilations": [1] * rank, **attributes}
    given_attributes = {"kernel_shape": kernel, **attributes, **({} if p is None else {"p": p})}
    return Row("LpPool", [spread(*x)], lambda x: _lp(x, p or 2, kernel, **geometry), given_attributes, note=note, step=4e-3)


def _column_major(x: torch.Tensor) -> torch.Tensor:
    """The maxima, times the positions of the maxima counted along columns."""
    y, at = F.max_pool2d(x, 2, 1, return_indices=True)
    height, width = x.shape[2:]
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[0], x.shape[1], 1, 1) * height * width
    return y * (planes + at // width + at % width * height)


def _unpool(x: torch.Tensor, indices: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(int(np.prod(shape)), dtype=x.dtype).index_put((indices.reshape(-1),), x.reshape(-1)).reshape(shape)


UNPOOL = np.array([[[[1, 2], [8, 15]], [[16, 22], [24, 31]]]])


def _fold(size: Sequence[int], block: Sequence[int], **attributes: Any) -> Callable[..., torch.Tensor]:
    return lambda x, *_: F.fold(x, size, block, **attributes)


ROWS = [
    *[
        _ceil_average(f"ceil {note} {'counted' if counted else 'not counted'}", x, kernel, strides, pads, counted)
        for counted in (False, True)
        for note, x, kernel, strides, pads in (
            ("2x2", (1, 2, 5, 5), [2, 2], [2, 2], [0, 0]),
            ("3x3 padded", (2, 1, 6, 7), [3, 3], [2, 2], [1, 1]),
            ("3x2", (1, 1, 8, 5), [3, 2], [2, 2], [1, 0]),
            ("exact", (1, 1, 6, 4), [2, 2], [2, 2], [0, 0]),
            ("1-D", (1, 2, 6), [3], [2], [1]),
            ("3-D", (1, 1, 3, 4, 5), [2, 2, 2], [2, 2, 2], [0, 1, 0]),
        )
    ],
    Row(
        "AveragePool",
        [normal(1, 1, 8)],
        lambda x: (
            F.conv1d(F.pad(x, [1, 1]), torch.ones(1, 1, 3, dtype=x.dtype), None, 2, 0, 2)
            / F.conv1d(F.pad(torch.ones_like(x), [1, 1]), torch.ones(1, 1, 3, dtype=x.dtype), None, 2, 0, 2)
        ),
        {"kernel_shape": [3], "strides": [2], "dilations": [2], "pads": [1, 1]},
        note="dilated stride pads not counted",
        step=0.25,
    ),
    Row(
        "MaxPool",
        [spread(1, 2, 3, 4)],
        lambda x: F.max_pool2d(x, 2, 1),
        {"kernel_shape": [2, 2], "storage_order": 1},
        note="column-major",
        normalized=True,
        step=4e-3,
    ),
    Row(
        "MaxPool",
        [spread(2, 2, 3, 4)],
        _column_major,
        {},
        note="column-major indices read",
        normalized=True,
        build=lambda op, x: [(parts := op.node("MaxPool", x[0], outputs=2, kernel_shape=[2, 2], storage_order=1))[0] * parts[1].cast(x[0].dtype)],
        step=2e-3,
    ),
    Row(
        "MaxPool",
        [spread(1, 1, 7, 8)],
        lambda x: F.max_pool2d(x, 3, 2, 1, 2, True),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "dilations": [2, 2], "ceil_mode": 1},
        note="ceil dilated padded",
        step=4e-3,
    ),
    Row(
        "MaxPool",
        [given(-np.arange(1.0, 10.0).reshape(1, 1, 3, 3))],
        lambda x: F.max_pool2d(x, 3, 2, 1),
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        note="all below the padding",
    ),
    *[
        Row("GlobalMaxPool", [spread(*shape)], lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True), note=note, normalized=True, step=4e-3)
        for note, shape in (("2-D", (2, 3, 4, 2)), ("1-D", (2, 2, 5)), ("3-D", (1, 2, 2, 3, 2)))
    ],
    Row(
        "GlobalMaxPool",
        [given(np.array([[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]]))],
        lambda x: F.adaptive_max_pool1d(x, 1),
        note="ties",
        normalized=True,
        no_difference=TIES,
    ),
    _lp_pool("2x2", (1, 2, 4, 4), [2, 2], strides=[2, 2]),
    _lp_pool("pads dilated", (1, 1, 6, 7), [2, 3], pads=[1, 0, 0, 1], dilations=[2, 1], strides=[1, 2]),
    _lp_pool("p 1", (1, 1, 5, 5), [3, 2], p=1, strides=[2, 1]),
    _lp_pool("p 3", (2, 1, 6), [3], p=3, pads=[1, 1]),
    _lp_pool("3-D", (1, 1, 3, 3, 2), [2, 2, 2]),
    Row(
        "LpPool",
        [spread(1, 1, 6)],
        lambda x: _lp(F.pad(x, [0, 1]), 2, [3], [2], [0, 0], [1]),
        {"kernel_shape": [3], "strides": [2], "ceil_mode": 1},
        note="ceil",
        step=4e-3,
    ),
    Row(
        "LpPool",
        [given(np.array([[[0.0, 0.0, 3.0, 4.0]]]))],
        lambda x: torch.linalg.vector_norm(x.reshape(1, 1, 2, 2), dim=3),
        {"kernel_shape": [2], "strides": [2]},
        note="empty window",
        no_difference="the norm has a kink at the origin",
    ),
    *[
        Row(
            "GlobalLpPool",
            [spread(2, 2, 3, 2)],
            lambda x, p=p: (x.abs() ** p).sum((2, 3), keepdim=True) ** (1 / p),
            {"p": p},
            note=f"p {p}",
            step=4e-3,
        )
        for p in (1, 2, 3)
    ],
    Row("GlobalLpPool", [spread(1, 2, 5)], lambda x: torch.linalg.vector_norm(x, dim=2, keepdim=True), note="default"),
    Row(
        "GlobalLpPool",
        [given(np.array([[[0.0, 0.0], [3.0, 4.0]]]))],
        lambda x: torch.linalg.vector_norm(x, dim=2, keepdim=True),
        note="at the origin",
        no_difference="the norm has a kink at the origin",
    ),
    Row(
        "MaxUnpool",
        [normal(1, 2, 2, 2), given(UNPOOL)],
        lambda x, i: _unpool(x, i, (1, 2, 4, 4)),
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        step=0.25,
    ),
    Row(
        "MaxUnpool",
        [normal(1, 2, 2, 2), given(UNPOOL), given(np.array([1, 2, 5, 5]))],
        lambda x, i, _: _unpool(x, i, (1, 2, 5, 5)),
        note="output shape",
        build=lambda op, x: op.node("MaxUnpool", *x, kernel_shape=[2, 2], strides=[2, 2], like=[((1, 2, 5, 5), x[0].dtype)]),
        step=0.25,
    ),
    Row(
        "MaxUnpool",
        [spread(1, 1, 4, 4)],
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        note="of a pooling",
        build=lambda op, x: [
            op("MaxUnpool", *op.node("MaxPool", x[0], outputs=2, kernel_shape=[2, 2], strides=[2, 2]), kernel_shape=[2, 2], strides=[2, 2])
        ],
        step=4e-3,
    ),
    Row("MaxPool", [spread(1, 1, 6)], lambda x: MAX_POOLS[1](x, 2, 2), {"kernel_shape": [2], "strides": [2]}, note="1-D 2", step=4e-3),
    # Blocks
    *[
        Row(
            "Col2Im",
            [normal(*x), given(np.array(size)), given(np.array(block))],
            _fold(size, block, **torch_attributes),
            attributes,
            note=note,
            step=0.25,
            build=lambda op, x, size=size, block=block, attributes=attributes: [
                op("Col2Im", x[0], np.asarray(size), np.asarray(block), **attributes)
            ],
        )
        for note, x, size, block, torch_attributes, attributes in (
            ("overlapping", (1, 8, 6), (3, 4), (2, 2), {}, {}),
            ("apart", (2, 4, 4), (4, 4), (2, 2), {"stride": 2}, {"strides": [2, 2]}),
            (
                "padded and dilated",
                (1, 6, 10),
                (4, 5),
                (2, 3),
                {"dilation": (2, 1), "padding": 1, "stride": (2, 1)},
                {"dilations": [2, 1], "pads": [1, 1, 1, 1], "strides": [2, 1]},
            ),
        )
    ],
]
