"""Rows of operators that only move data."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.autodiff.support import Row, Same, const, given, normal

LARGE = 2**63 - 1
SMALL = -(2**63) + 1


def _slice(
    note: str, shape: tuple[int, ...], starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None, cut: object
) -> Row:
    """``cut`` is the same in NumPy's notation."""
    lists = [const(np.array(v)) if v is not None else None for v in (starts, ends, axes, steps)]
    while lists[-1] is None:
        lists.pop()

    def reference(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        # torch has no negative steps: index with what NumPy picks.
        picked = np.arange(x.numel()).reshape(x.shape)[cut]  # type: ignore[call-overload]
        return x.reshape(-1)[torch.from_numpy(picked.copy())]

    return Row("Slice", [normal(*shape), *lists], reference, note=note, step=0.25)


def _pad(note: str, shape: tuple[int, ...], pads: list[int], *rest: object, torch_pads: list[int], value: float = 0.0) -> Row:
    return Row("Pad", [normal(*shape), const(np.array(pads)), *rest], lambda x, *_: F.pad(x, torch_pads, value=value), note=note, step=0.25)  # type: ignore[list-item]


ROWS = [
    Row("Reshape", [normal(2, 6), const(np.array([3, -1]))], lambda x, _: x.reshape(3, 4)),
    Row("Reshape", [normal(2, 6), const(np.array([0, 2, 3]))], lambda x, _: x.reshape(2, 2, 3), note="zero copies"),
    Row("Reshape", [normal(1, 1), const(np.array([], np.int64))], lambda x, _: x.reshape(()), note="to rank 0"),
    Row("Reshape", [normal(3, 0), const(np.array([0, 3]))], lambda x, _: x.reshape(0, 3), {"allowzero": 1}, note="no elements"),
    *[
        Row("Flatten", [normal(2, 3, 4)], lambda x, s=shape: x.reshape(s), {"axis": axis}, note=f"axis {axis}")
        for axis, shape in ((0, (1, 24)), (1, (2, 12)), (-1, (6, 4)), (3, (24, 1)))
    ],
    Row("Squeeze", [normal(2, 1, 3, 1)], lambda x: x.squeeze(), note="all"),
    Row("Squeeze", [normal(2, 1, 3, 1), const(np.array([-1]))], lambda x, _: x.squeeze(-1), note="negative axis"),
    Row("Unsqueeze", [normal(2, 3), const(np.array([0, -1]))], lambda x, _: x[None, ..., None]),
    *[
        Row("Expand", [normal(*shape), const(np.array(to))], lambda x, _, r=result: x.expand(r), note=note)
        for note, shape, to, result in (
            ("leading axis", (3,), [2, 3], (2, 3)),
            ("inner axis", (2, 1, 3), [2, 4, 3], (2, 4, 3)),
            ("both sides", (2, 1), [3, 1, 4], (3, 2, 4)),
            ("smaller rank", (2, 3), [1], (2, 3)),
            ("scalar", (), [2, 2], (2, 2)),
        )
    ],
    Row("Transpose", [normal(2, 3, 4)], lambda x: x.permute(2, 1, 0), note="default"),
    Row("Transpose", [normal(2, 3, 4)], lambda x: x.permute(1, 2, 0), {"perm": [1, 2, 0]}, note="cycle"),
    Row("Concat", [normal(2, 1), normal(2, 3), normal(2, 2)], lambda *x: torch.cat(x, 1), {"axis": 1}),
    Row("Concat", [normal(2, 3), Same(0)], lambda x: torch.cat([x, x], -2), {"axis": -2}, note="same tensor twice"),
    Row("Concat", [normal(1, 3), const(np.ones((2, 3))), normal(2, 3)], lambda *x: torch.cat(x, 0), {"axis": 0}, note="constant between"),
    Row("Concat", [normal(2, 3)], lambda x: x * 1, {"axis": 0}, note="one operand"),
    Row("Concat", [normal(2, 0), normal(2, 3)], lambda *x: torch.cat(x, 1), {"axis": 1}, note="one without elements"),
    Row("Split", [normal(6, 2)], lambda x: x.split(2, 0), {"num_outputs": 3}, outputs=3, used=(0, 1, 2), note="equal parts"),
    Row("Split", [normal(7, 2)], lambda x: x.split(3, 0), {"num_outputs": 3}, outputs=3, used=(0, 1, 2), note="smaller last part"),
    Row(
        "Split",
        [normal(2, 6), const(np.array([1, 2, 3]))],
        lambda x, _: [x[:, :1], x[:, 3:]],
        {"axis": -1},
        outputs=3,
        used=(0, 2),
        note="one output unused",
    ),
    Row(
        "Split",
        [normal(2, 6), const(np.array([1, 5]))],
        lambda x, _: x[:, 1:],
        {"axis": 1},
        outputs=2,
        used=(1,),
        note="first output unused",
    ),
    _slice("plain", (5, 4), [1], [4], None, None, np.s_[1:4]),
    _slice("negative axis and ends", (5, 4), [-3], [-1], [-1], None, np.s_[:, -3:-1]),
    _slice("ends beyond", (5, 4), [1], [LARGE], [0], None, np.s_[1:]),
    _slice("two axes", (5, 4), [1, 0], [5, 3], [0, 1], None, np.s_[1:5, 0:3]),
    _slice("step 2", (5, 4), [0], [5], [0], [2], np.s_[::2]),
    _slice("step 2 not to the end", (6, 4), [1], [6], [0], [2], np.s_[1:6:2]),
    _slice("step 3 inner axis", (2, 8, 2), [1], [8], [1], [3], np.s_[:, 1:8:3]),
    _slice("step 7 takes one", (5,), [2], [5], [0], [7], np.s_[2:5:7]),
    _slice("reversed", (5,), [-1], [SMALL], [0], [-1], np.s_[::-1]),
    _slice("step -1 partly", (6,), [4], [0], [0], [-1], np.s_[4:0:-1]),
    _slice("step -2", (7, 2), [5], [-8], [0], [-2], np.s_[5::-2]),
    _slice("steps on two axes", (5, 6), [4, 0], [SMALL, 6], [0, 1], [-2, 3], np.s_[4::-2, 0:6:3]),
    _slice("starts beyond with step -1", (4,), [100], [1], [0], [-1], np.s_[100:1:-1]),
    _slice("nothing taken", (4, 2), [3], [1], [0], None, np.s_[3:1]),
    _slice("axes out of order", (4, 5), [1, 2], [4, 4], [1, 0], None, np.s_[2:4, 1:4]),
    _pad("all axes", (2, 3), [0, 1, 2, 0], torch_pads=[1, 0, 0, 2]),
    _pad("with a value", (2, 3), [1, 1, 1, 1], const(np.array(0.5)), torch_pads=[1, 1, 1, 1], value=0.5),
    _pad("given axes", (2, 3, 4), [1, 2], None, const(np.array([-1])), torch_pads=[1, 2]),
    _pad("negative crops", (4, 5), [-1, 0, -2, -1], torch_pads=[0, -1, -1, -2]),
    _pad("crops and pads", (4, 5), [-1, 2, 3, -1], torch_pads=[2, -1, -1, 3]),
    _pad("nothing", (2, 3), [0, 0, 0, 0], torch_pads=[0, 0, 0, 0]),
    Row(
        "Pad",
        [normal(2, 3), const(np.array([1, -1, 0, 2])), given(np.array(0.5))],
        lambda x, _, v: torch.where(F.pad(torch.ones_like(x), [-1, 2, 1, 0]) > 0, F.pad(x, [-1, 2, 1, 0]), v),
        note="value differentiated",
    ),
    Row("Tile", [normal(2, 3), const(np.array([2, 3]))], lambda x, _: x.repeat(2, 3)),
    Row("Tile", [normal(2, 1, 3), const(np.array([1, 4, 1]))], lambda x, _: x.repeat(1, 4, 1), note="one axis"),
]
