"""Rows of operators that pick by index."""

from __future__ import annotations

import numpy as np
import torch

from tests.autodiff.support import Row, const, given, normal


def _scatter_nd(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor, add: bool = False) -> torch.Tensor:
    return x.index_put(tuple(i.movedim(-1, 0)), u, accumulate=add)


ROWS = [
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
    Row(
        "ScatterElements", [normal(3, 2), given(np.array([[2, 0]])), normal(1, 2)], lambda x, i, u: x.scatter(0, i, u), note="default axis"
    ),
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
