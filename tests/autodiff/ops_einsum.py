"""Rows of Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.autodiff.support import Row, Same, normal


def _einsum(equation: str, *shapes: Sequence[int], note: str = "", **options: Any) -> Row:
    return Row(
        "Einsum",
        [normal(*shape) for shape in shapes],
        lambda *x: torch.einsum(equation, *x),
        {"equation": equation},
        note=note or equation.replace("->", " to ").replace(",", " with ").replace(".", "_"),
        # ONNX infers a wrong shape where an axis of size 1 is stretched.
        build=lambda op, v: op.node("Einsum", *v, like=[(torch.einsum(equation, *map(torch.zeros, shapes)).shape, v[0].dtype)], equation=equation),
        normalized=True,
        step=0.25 if len(shapes) == 1 else 2e-2,
        **options,
    )


ROWS = [
    # One operand
    _einsum("ij->ji", (2, 3)),
    _einsum("ij->ij", (2, 3)),
    _einsum("ij->i", (2, 3)),
    _einsum("ij->", (2, 3)),
    _einsum("ba", (2, 3), note="implicit order"),
    _einsum("ii->i", (3, 3)),
    _einsum("ii", (3, 3), note="trace"),
    _einsum("iji->ij", (3, 2, 3)),
    _einsum("iiji->j", (2, 2, 3, 2)),
    _einsum("ijij->ij", (2, 3, 2, 3)),
    _einsum("...ij->...ji", (2, 3, 4)),
    _einsum("...i->...", (2, 3, 4)),
    _einsum("i...->...", (2, 3, 4)),
    _einsum("i -> i", (3,), note="blanks"),
    # Two operands
    _einsum("ij,jk->ik", (2, 3), (3, 4)),
    _einsum("ij,jk", (2, 3), (3, 4), note="implicit product"),
    _einsum("ji,kj->ki", (3, 2), (4, 3)),
    _einsum("ij,kj->ik", (2, 3), (4, 3)),
    _einsum("i,i->", (4,), (4,)),
    _einsum("i,j->ij", (2,), (3,)),
    _einsum("i,j->ji", (2,), (3,)),
    _einsum("ij,j->i", (2, 3), (3,)),
    _einsum("j,ij->i", (3,), (2, 3)),
    _einsum("bij,bjk->bik", (2, 2, 3), (2, 3, 2)),
    _einsum("bij,bjk->kbi", (2, 2, 3), (2, 3, 2)),
    _einsum("bqhd,bkhd->bhqk", (2, 3, 2, 2), (2, 2, 2, 2)),
    _einsum("bhqk,bkhd->bqhd", (2, 2, 3, 2), (2, 2, 2, 2)),
    _einsum("abcd,cdef->abef", (2, 1, 2, 3), (2, 3, 2, 2)),
    _einsum("abcd,dcef->abef", (2, 1, 2, 3), (3, 2, 2, 2)),
    _einsum("bi,bi->b", (2, 3), (2, 3)),
    _einsum("bi,bi->bi", (2, 3), (2, 3)),
    _einsum("ij,kl->", (2, 3), (2, 2)),
    _einsum("ij,jk->k", (2, 3), (3, 2)),
    _einsum("ijk,ilm->jm", (2, 2, 3), (2, 2, 2)),
    _einsum("ii,ij->j", (3, 3), (3, 2)),
    _einsum(
        "...ij,...jk->...ik",
        (2, 1, 2, 3),
        (2, 3, 2),
        note="ellipses of two ranks",
        no_difference="the runtime's kernel refuses ellipses that differ",
    ),
    _einsum("...i,...i->...", (2, 3), (2, 3)),
    _einsum("...,i->i...", (2, 3), (2,)),
    _einsum("bij,bjk->bik", (1, 2, 3), (2, 3, 2), note="batch broadcast"),
    _einsum("ij,jk->ik", (2, 1), (3, 2), note="contracted broadcast"),
    _einsum("ij,ij->ij", (1, 3), (2, 3), note="elementwise broadcast"),
    _einsum("ij,jk->ik", (2, 1), (1, 3), note="contracted 1"),
    _einsum("Ab,bC->AC", (2, 3), (3, 2), note="capitals"),
    Row(
        "Einsum",
        [normal(2, 3), Same(0)],
        lambda x: torch.einsum("ij,kj->ik", x, x),
        {"equation": "ij,kj->ik"},
        note="the same twice",
        normalized=True,
    ),
    # Three and more
    _einsum("ij,jk,kl->il", (2, 3), (3, 2), (2, 2)),
    _einsum("bn,anm,bm->ba", (2, 3), (2, 3, 2), (2, 2)),
    _einsum("i,i,i->i", (3,), (3,), (3,)),
    _einsum("i,j,k->ijk", (2,), (2,), (3,)),
    _einsum("ij,jk,ki->", (2, 3), (3, 2), (2, 2)),
    _einsum("a,ab,bc,cd->d", (2,), (2, 3), (3, 2), (2, 2)),
    _einsum("i,ij,j->", (2,), (2, 3), (3,)),
]
