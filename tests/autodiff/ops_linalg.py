"""Rows of matrix products."""

from __future__ import annotations

from itertools import product

import torch

from tests.autodiff.support import Row, Same, const, normal

MS = "com.microsoft"
RANKS = {
    "matrix by matrix": ((2, 3), (3, 4)),
    "vector by vector": ((3,), (3,)),
    "vector by matrix": ((3,), (3, 4)),
    "matrix by vector": ((2, 3), (3,)),
    "vector by batch": ((3,), (2, 3, 4)),
    "batch by vector": ((2, 4, 3), (3,)),
    "batch by matrix": ((2, 4, 3), (3, 5)),
    "two batch axes by matrix": ((2, 2, 4, 3), (3, 5)),
    "matrix by batch": ((4, 3), (2, 3, 5)),
    "batch by batch": ((2, 4, 3), (2, 3, 5)),
    "batches broadcast": ((2, 1, 2, 3), (3, 3, 2)),
    "batch of one": ((1, 2, 3), (4, 3, 2)),
    "column": ((2, 3), (3, 1)),
}


def _t(x: torch.Tensor, transposed: int) -> torch.Tensor:
    return x.transpose(-1, -2) if transposed else x


def _shape(shape: tuple[int, ...], transposed: int) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


ROWS = [
    *[Row("MatMul", [normal(*a), normal(*b)], torch.matmul, note=note) for note, (a, b) in RANKS.items()],
    Row("MatMul", [normal(3, 3), Same(0)], lambda x: x @ x, note="same tensor twice"),
    Row("MatMul", [normal(2, 3), const([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]])], torch.matmul, note="constant right"),
    Row("MatMul", [const([[1.0, 2.0, 0.5]]), normal(3, 2)], torch.matmul, note="constant left"),
    *[
        Row(
            "FusedMatMul",
            [normal(*_shape(a, ta)), normal(*_shape(b, tb))],
            lambda x, y, ta=ta, tb=tb: 0.5 * (_t(x, ta) @ _t(y, tb)),
            {"transA": ta, "transB": tb, "alpha": 0.5},
            domain=MS,
            note=f"{note} transA {ta} transB {tb}",
            step=0.1,
        )
        for note, (a, b) in RANKS.items()
        for ta, tb in product((0, 1), (0, 1))
        if "vector" not in note
    ],
    *[
        Row("FusedMatMul", [normal(*a), normal(*b)], lambda x, y: 0.5 * (x @ y), {"alpha": 0.5}, domain=MS, note=note, step=0.1)
        for note, (a, b) in RANKS.items()
        if "vector" in note
    ],
    Row(
        "FusedMatMul",
        [normal(3), normal(4, 3)],
        lambda x, y: x @ y.T,
        {"transB": 1},
        domain=MS,
        note="vector by transposed matrix",
        step=0.1,
    ),
    Row("FusedMatMul", [normal(3, 2), Same(0)], lambda x: x @ x.T, {"transB": 1}, domain=MS, note="Gram matrix", step=1e-2),
    *[
        Row(
            "Gemm",
            [normal(*_shape((2, 3), ta)), normal(*_shape((3, 4), tb)), normal(*c)],
            lambda x, y, z, ta=ta, tb=tb: 0.5 * (_t(x, ta) @ _t(y, tb)) + 1.5 * z,
            {"transA": ta, "transB": tb, "alpha": 0.5, "beta": 1.5},
            note=f"transA {ta} transB {tb} C {c}".replace("(", "").replace(")", "").replace(",", ""),
        )
        for ta, tb, c in [(0, 0, (4,)), (0, 1, (2, 1)), (1, 0, ()), (1, 1, (2, 4)), (0, 1, (1, 4)), (0, 1, (1,))]
    ],
    Row("Gemm", [normal(2, 3), normal(4, 3)], lambda x, y: x @ y.T, {"transB": 1}, note="no C"),
    Row("Gemm", [normal(2, 3), normal(3, 4), normal(4)], lambda x, y, z: x @ y + z, note="defaults"),
    Row("Gemm", [normal(3, 3), Same(0), Same(0)], lambda x: x @ x + x, note="same tensor thrice"),
    Row("Gemm", [const([[1.0, 2.0]]), const([[1.0], [2.0]]), normal(1)], lambda x, y, z: x @ y + z, note="bias alone"),
]
