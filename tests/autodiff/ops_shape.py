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


def _pad_like(note: str, shape: tuple[int, ...], pads: list[int], mode: str, axes: list[int] | None = None) -> Row:
    """Cropped where the pads are negative, and padded as NumPy does."""
    operands = [normal(*shape), const(np.array(pads))] + ([None, const(np.array(axes))] if axes is not None else [])

    def reference(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        half = len(pads) // 2
        for axis, begin, end in zip(axes or range(x.ndim), pads[:half], pads[half:], strict=True):
            kept = np.arange(x.shape[axis])[max(0, -begin) : x.shape[axis] - max(0, -end)]
            source = np.pad(kept, (max(0, begin), max(0, end)), mode=mode)  # type: ignore[call-overload]
            x = x.index_select(axis, torch.from_numpy(source))
        return x

    return Row("Pad", operands, reference, {"mode": mode}, note=f"{mode} {note}", step=0.25)


def _to_depth(x: torch.Tensor, b: int) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


def _to_space(x: torch.Tensor, b: int) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)


def _center(x: torch.Tensor, to: tuple[int, ...]) -> torch.Tensor:
    for axis, size in enumerate(to):
        missing = size - x.shape[axis]
        if missing < 0:
            x = x.narrow(axis, -missing // 2, size)
        else:
            pads = [0] * (2 * x.ndim)
            pads[2 * (x.ndim - 1 - axis)], pads[2 * (x.ndim - 1 - axis) + 1] = missing // 2, missing - missing // 2
            x = F.pad(x, pads)
    return x


ROWS = [
    *[
        _pad_like(note, shape, pads, mode)
        for mode in ("reflect", "edge", "wrap")
        for note, shape, pads in (
            ("both ends", (4, 5), [1, 2, 2, 1]),
            ("one end", (3, 4), [0, 0, 0, 3]),
            ("image", (1, 2, 4, 3), [0, 0, 2, 1, 0, 0, 1, 2]),
            ("nothing", (2, 3), [0, 0, 0, 0]),
            ("cropped", (5, 4), [-1, 0, 2, -2]),
            ("widest", (3, 2), [2, 1, 2, 1]),
        )
    ],
    _pad_like("on given axes", (2, 3, 4), [1, 2], "reflect", [-1]),
    _pad_like("far", (2, 3), [0, 9, 3, 4], "edge"),
    Row("SpaceToDepth", [normal(2, 2, 4, 6)], lambda x: _to_depth(x, 2), {"blocksize": 2}, step=0.25),
    Row("SpaceToDepth", [normal(1, 1, 3, 6)], lambda x: _to_depth(x, 3), {"blocksize": 3}, note="3", step=0.25),
    Row("DepthToSpace", [normal(2, 8, 2, 3)], lambda x: _to_space(x, 2), {"blocksize": 2}, step=0.25),
    Row("DepthToSpace", [normal(2, 8, 2, 3)], lambda x: F.pixel_shuffle(x, 2), {"blocksize": 2, "mode": "CRD"}, note="column first", step=0.25),
    *[
        Row(
            "CenterCropPad",
            [normal(4, 5)],
            lambda x, to=to: _center(x, to),
            note=f"to {to}",
            normalized=True,
            build=lambda op, x, to=to: op.node("CenterCropPad", x[0], np.array(to), like=[(to, x[0].dtype)]),
            step=0.25,
        )
        for to in ((2, 8), (3, 4), (7, 2), (4, 5), (1, 6))
    ],
    Row(
        "CenterCropPad",
        [normal(2, 3, 4)],
        lambda x: _center(x.transpose(0, 2), (2, 3, 3)).transpose(0, 2),
        note="on given axes",
        normalized=True,
        build=lambda op, x: op.node("CenterCropPad", x[0], np.array([3, 2]), axes=[0, -1], like=[((3, 3, 2), x[0].dtype)]),
        step=0.25,
    ),
    Row("Expand", [normal(2, 1), const(np.array([2, 0]))], lambda x, _: x.expand(2, 0), note="to no elements"),
    Row("Tile", [normal(2, 3), const(np.array([0, 1]))], lambda x, _: x.repeat(0, 1), note="no copies"),
    Row("Transpose", [normal(0, 3)], lambda x: x.T, note="no elements"),
    Row("Slice", [normal(0, 3), const(np.array([0])), const(np.array([2])), const(np.array([1]))], lambda x, *_: x[:, :2], note="of no rows"),
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
    _pad("shifts", (4, 5), [1, -2, -1, 2], torch_pads=[-2, 2, 1, -1]),
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
