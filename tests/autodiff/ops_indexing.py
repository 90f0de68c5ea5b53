"""Rows of operators that pick by index."""

from __future__ import annotations

import numpy as np
import torch

from tests.autodiff.support import Row, const, given, normal, positive, spread


def _scatter_nd(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor, add: bool = False) -> torch.Tensor:
    return x.index_put(tuple(i.movedim(-1, 0)), u, accumulate=add)


def _combine(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int, how: str) -> torch.Tensor:
    reduce = {"mul": "prod", "max": "amax", "min": "amin"}[how]
    return x.scatter_reduce(axis, indices % x.shape[axis], updates, reduce, include_self=True)


def _combine_rows(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, how: str) -> torch.Tensor:
    rows = (indices[:, 0] % x.shape[0])[:, None].expand(updates.shape)
    return _combine(x, rows, updates, 0, how)


def _one_hot(indices: torch.Tensor, values: torch.Tensor, depth: int, axis: int = -1) -> torch.Tensor:
    hot = (indices.unsqueeze(axis) % depth).eq(
        torch.arange(depth).reshape([-1 if a == axis % (indices.ndim + 1) else 1 for a in range(indices.ndim + 1)])
    )
    return torch.where(hot, values[1], values[0])


def _reversed(x: torch.Tensor, lengths: torch.Tensor, time: int) -> torch.Tensor:
    parts = []
    for i, n in enumerate(lengths.tolist()):
        row = x.select(1 - time, i)
        parts.append(torch.cat([row[:n].flip(0), row[n:]]))
    return torch.stack(parts, 1 - time)


ROWS = [
    *[
        Row(
            "GatherND",
            [normal(*shape), given(np.array(indices))],
            function,
            {"batch_dims": batch},
            note=note,
        )
        for note, shape, indices, batch, function in (
            ("batch of rows", (2, 3, 4), [[1], [-1]], 1, lambda x, i: torch.stack([x[b, i[b, 0]] for b in range(2)])),
            ("batch repeated", (2, 3), [[[1], [1], [0]], [[2], [2], [2]]], 1, lambda x, i: torch.gather(x, 1, i[..., 0])),
            (
                "two batch axes",
                (2, 2, 3, 2),
                [[[1, 0], [2, 1]], [[0, 0], [-1, -1]]],
                2,
                lambda x, i: torch.stack([torch.stack([x[a, b][tuple(i[a, b])] for b in range(2)]) for a in range(2)]),
            ),
        )
    ],
    *[
        Row(
            "ScatterElements",
            [sampler(3, 4), given(np.array([[1, 0, 1], [3, -2, 3]])), sampler(2, 3)],
            lambda x, i, u, how=how: _combine(x, i, u, 1, how),
            {"axis": 1, "reduction": how},
            note=f"{how} repeated",
            step=1e-3,
        )
        for how, sampler in (("mul", positive), ("max", spread), ("min", spread))
    ],
    Row(
        "ScatterElements",
        [given(np.array([0.0, 2.0, 0.0, 3.0])), given(np.array([0, 1, 1, 2, 3])), given(np.array([2.0, 0.0, 3.0, 0.0, 1.5]))],
        lambda x, i, u: _combine(x, i, u, 0, "mul"),
        {"reduction": "mul"},
        note="mul zeros",
    ),
    Row(
        "ScatterElements",
        [normal(4), given(np.array([1, 1])), const(np.array([0.0, 2.0]))],
        lambda x, i, u: _combine(x, i, u, 0, "mul"),
        {"reduction": "mul"},
        note="mul by constants",
    ),
    *[
        Row(
            "ScatterElements",
            [given(np.array([1.0, 2.0, 3.0])), given(np.array([0, 0, 1, 2])), given(np.array([1.0, 1.0, 2.0, 3.0]))],
            lambda x, i, u, how=how: _combine(x, i, u, 0, how),
            {"reduction": how},
            note=f"{how} ties",
            no_difference="ties are kinks: the two one-sided derivatives differ",
        )
        for how in ("max", "min")
    ],
    *[
        Row(
            "ScatterND",
            [sampler(4, 3), given(np.array([[2], [-2], [0]])), sampler(3, 3)],
            lambda x, i, u, how=how: _combine_rows(x, i, u, how),
            {"reduction": how},
            note=f"{how} repeated",
            normalized=True,
            step=1e-3,
        )
        for how, sampler in (("mul", positive), ("max", spread), ("min", spread))
    ],
    *[
        Row(
            "OneHot",
            [given(np.array([[0, 2], [-1, 1]])), const(np.array(depth)), normal(2)],
            lambda i, _, v, depth=depth, axis=axis: _one_hot(i, v, depth, axis),
            {"axis": axis},
            note=f"depth {depth} axis {axis}",
            step=0.25,
        )
        for depth, axis in ((3, -1), (4, 1), (3, 0))
    ],
    *[
        Row(
            "ReverseSequence",
            [normal(4, 4, 2), given(np.array([1, 4, 2, 3]))],
            lambda x, n, t=time: _reversed(x, n, t),
            {"time_axis": time, "batch_axis": 1 - time},
            note=f"time axis {time}",
            step=0.25,
        )
        for time in (0, 1)
    ],
    *[
        Row(
            "Compress",
            [normal(3, 4)],
            function,
            note=note,
            normalized=True,
            build=lambda op, x, c=condition, a=axis, s=shape: op.node("Compress", x[0], np.array(c), axis=a, like=[(s, x[0].dtype)]),
            step=0.25,
        )
        for note, condition, axis, shape, function in (
            ("rows", [True, False, True], 0, (2, 4), lambda x: x[[0, 2]]),
            ("shorter condition", [False, True], -1, (3, 1), lambda x: x[:, 1:2]),
            ("flat", [True, False, False, False, True, True], None, (3,), lambda x: x.reshape(-1)[[0, 4, 5]]),
        )
    ],
    Row("Gather", [normal(3, 0), given(np.array([2, 0]))], lambda x, i: x[i], note="empty rows"),
    Row("GatherElements", [normal(3, 4), given(np.zeros((3, 0), np.int64))], lambda x, i: torch.gather(x, 1, i), {"axis": 1}, note="nothing picked"),
    *[
        Row("Gather", [normal(*shape), place(np.array(indices))], lambda x, i, a=axis: _gather(x, i, a), {"axis": axis}, note=note)
        for note, shape, place, indices, axis in (
            ("rows", (4, 3), given, [2, 0], 0),
            ("repeated rows", (4, 3), given, [1, 1, 3, 1], 0),
            ("matrix of indices", (5, 3), given, [[1, 1, 0], [4, 2, 1]], 0),
            ("inner axis", (2, 5, 3), given, [4, 0, 4], 1),
            ("last axis", (2, 5), given, [[4, 0], [4, 4]], -1),
            ("negative indices", (4, 3), given, [-1, 0, -4, -1], 0),
            ("constant indices", (2, 4, 3), const, [3, 3, 1], 1),
            ("constant scalar", (2, 4, 3), const, 2, 1),
            ("constant negative scalar", (2, 4), const, -1, -1),
            ("constant single", (4, 3), const, [[1]], 0),
            ("scalar not constant", (4, 3), given, 1, 0),
            ("from a vector", (5,), given, [3, 3, 0], 0),
        )
    ],
    Row("Gather", [normal(4, 3), given(np.zeros((0,), np.int64))], lambda x, i: x[i], note="nothing picked"),
    *[
        Row(
            "GatherElements",
            [normal(*shape), given(np.array(indices))],
            lambda x, i, a=axis: torch.gather(x, a, i % x.shape[a]),
            {"axis": axis},
            note=note,
        )
        for note, shape, indices, axis in (
            ("last axis", (2, 4), [[3, 0], [1, 2]], 1),
            ("repeated", (2, 4), [[3, 3, 3], [0, 1, 0]], -1),
            ("first axis", (3, 2), [[0, 2], [2, 2]], 0),
            ("fewer rows", (3, 4), [[1, 0]], 1),
            ("negative indices", (2, 4), [[-1, 0], [-4, -1]], 1),
        )
    ],
    Row("GatherND", [normal(3, 4), given(np.array([[0, 1], [2, 3], [0, 1]]))], lambda x, i: x[i[:, 0], i[:, 1]], note="elements repeated"),
    Row("GatherND", [normal(3, 4), given(np.array([[[2]], [[0]]]))], lambda x, i: x[i[..., 0]], note="slices"),
    *[
        Row(
            "ScatterElements",
            [normal(3, 4), given(np.array([[1, 0], [3, 2]])), normal(2, 2)],
            lambda x, i, u, f=function: f(x, 1, i, u),
            {"axis": 1, **attributes},
            note=note,
        )
        for note, attributes, function in (("overwrite", {}, torch.scatter), ("add", {"reduction": "add"}, torch.scatter_add))
    ],
    Row("ScatterElements", [normal(3, 2), given(np.array([[2, 0]])), normal(1, 2)], lambda x, i, u: x.scatter(0, i, u), note="default axis"),
    Row(
        "ScatterElements",
        [normal(2, 3), given(np.array([[1, 1, 1]])), normal(1, 3)],
        lambda x, i, u: x.scatter_add(-1, i, u),
        {"axis": -1, "reduction": "add"},
        note="add repeated",
    ),
    Row("ScatterND", [normal(4, 3), given(np.array([[2], [0]])), normal(2, 3)], _scatter_nd, note="slices"),
    Row("ScatterND", [normal(4, 3), given(np.array([[-1], [0]])), normal(2, 3)], _scatter_nd, note="negative indices"),
    Row("GatherND", [normal(3, 4), given(np.array([[-1, 1], [0, -4]]))], lambda x, i: x[i[:, 0], i[:, 1]], note="negative indices"),
    Row("ScatterND", [normal(4, 3), given(np.array([[2, 1], [0, 0]])), normal(2)], _scatter_nd, note="elements"),
    Row(
        "ScatterND",
        [normal(4, 3), given(np.array([[2], [2], [0]])), normal(3, 3)],
        lambda x, i, u: _scatter_nd(x, i, u, True),
        {"reduction": "add"},
        note="add repeated",
    ),
    Row("ScatterND", [const(np.zeros((4, 3))), given(np.array([[2], [0]])), normal(2, 3)], _scatter_nd, note="into a constant"),
    Row("Trilu", [normal(3, 4)], torch.triu, note="upper"),
    Row("Trilu", [normal(2, 3, 3)], torch.tril, {"upper": 0}, note="lower batch"),
    Row("Trilu", [normal(3, 4), const(np.array(1))], lambda x, k: torch.tril(x, 1), {"upper": 0}, note="lower diagonal 1"),
    Row("Trilu", [normal(3, 4), const(np.array(-1))], lambda x, k: torch.triu(x, -1), note="upper diagonal -1"),
]


def _gather(x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    axis %= x.ndim
    picked = torch.index_select(x, axis, indices.reshape(-1) % x.shape[axis])
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
