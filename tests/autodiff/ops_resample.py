"""Rows of operators that sample between the entries of a map, and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.autodiff.support import Given, Row, Sampler, const, normal

NONE = const(np.zeros(0, np.float32))


def _resize(note: str, x: tuple[int, ...], scales: list[float], reference: Callable[..., torch.Tensor], **attributes: Any) -> Row:
    return Row(
        "Resize",
        [normal(*x), None, const(np.array(scales))],
        lambda x, *_: reference(x),
        attributes,
        note=note,
        step=0.25,
        build=_float_scales(scales, attributes),
    )


def _float_scales(scales: list[float], attributes: dict[str, Any]) -> Any:
    """Scales are float32 whatever the input is."""
    return lambda op, x: [op("Resize", x[0], None, np.asarray(scales, np.float32), **attributes)]


def _sized(note: str, x: tuple[int, ...], sizes: list[int], reference: Callable[..., torch.Tensor], **attributes: Any) -> Row:
    return Row("Resize", [normal(*x), None, None, const(np.array(sizes))], lambda x, _: reference(x), attributes, note=note, step=0.25)


def _to(mode: str, size: tuple[int, ...], align: bool | None = None, **more: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, size, mode=mode, align_corners=align, **more)


FLOOR = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
CUBIC = {"mode": "cubic", "cubic_coeff_a": -0.75}
PYTORCH = {"coordinate_transformation_mode": "pytorch_half_pixel"}
CORNERS = {"coordinate_transformation_mode": "align_corners"}
SINGLE = "the waves of the kernel are float32"


def _grid_row(note: str, x: tuple[int, ...], grid: Sampler | Given, **attributes: Any) -> Row:
    mode = attributes.get("mode", "linear")

    def reference(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(
            x,
            grid,
            {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode),
            attributes.get("padding_mode", "zeros"),
            bool(attributes.get("align_corners", 0)),
        )

    return Row("GridSample", [normal(*x), grid], reference, attributes, note=note, step=1e-3, tolerance=2e-2)


def _scattered(*shape: int) -> Sampler:
    """Points inside and outside of the map, away from its entries for any of the sizes here."""
    return lambda rng: np.round(rng.uniform(-1.6, 1.6, shape) * 20) / 20 + 0.0137


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.contiguous())


def _pair(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj())


ROWS = [
    # Nearest
    _resize("nearest twice", (1, 2, 3, 4), [1, 1, 2, 2], lambda x: F.interpolate(x, scale_factor=2), **FLOOR),
    _resize("nearest three times one axis", (1, 2, 3, 2), [1, 1, 3, 1], lambda x: F.interpolate(x, (9, 2)), **FLOOR),
    _sized("nearest uneven", (1, 2, 3, 4), [1, 2, 7, 5], _to("nearest", (7, 5)), **FLOOR),
    _sized("nearest smaller", (1, 1, 7, 6), [1, 1, 3, 4], _to("nearest", (3, 4)), **FLOOR),
    _sized("nearest 1-D", (1, 2, 4), [1, 2, 8], _to("nearest", (8,)), **FLOOR),
    _sized("nearest 3-D", (1, 1, 2, 3, 2), [1, 1, 4, 4, 2], _to("nearest", (4, 4, 2)), **FLOOR),
    _sized("nearest nothing changes", (1, 1, 3, 3), [1, 1, 3, 3], lambda x: x * 1, **FLOOR),
    _resize("nearest half pixel", (1, 1, 4, 3), [1, 1, 2, 2], lambda x: F.interpolate(x, scale_factor=2), mode="nearest"),
    _sized("nearest on given axes", (1, 2, 3, 4), [6, 4], _to("nearest", (6, 4)), axes=[2, 3], **FLOOR),
    _sized("nearest rank 1", (4,), [8], lambda x: x.repeat_interleave(2), **FLOOR),
    # Linear
    _resize("linear twice", (1, 2, 3, 4), [1, 1, 2, 2], lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), mode="linear"),
    _sized("linear uneven", (2, 1, 3, 5), [2, 1, 7, 4], _to("bilinear", (7, 4)), mode="linear", **PYTORCH),
    _sized("linear to one", (1, 1, 4, 5), [1, 1, 1, 3], _to("bilinear", (1, 3)), mode="linear"),
    _sized("linear align corners", (1, 2, 3, 4), [1, 2, 5, 9], _to("bilinear", (5, 9), True), mode="linear", **CORNERS),
    _sized("linear 1-D", (1, 2, 5), [1, 2, 8], _to("linear", (8,)), mode="linear", **PYTORCH),
    _sized("linear 3-D", (1, 1, 2, 3, 4), [1, 1, 3, 5, 6], _to("trilinear", (3, 5, 6)), mode="linear", **PYTORCH),
    _sized(
        "linear antialiased",
        (1, 1, 8, 9),
        [1, 1, 3, 4],
        _to("bilinear", (3, 4), False, antialias=True),
        mode="linear",
        antialias=1,
        exclude_outside=1,
        **PYTORCH,
    ),
    # Cubic
    _resize("cubic twice", (1, 1, 4, 5), [1, 1, 2, 2], lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), **CUBIC),
    _sized("cubic uneven", (1, 2, 4, 5), [1, 2, 6, 3], _to("bicubic", (6, 3)), **CUBIC, **PYTORCH),
    _sized("cubic align corners", (1, 1, 3, 4), [1, 1, 5, 7], _to("bicubic", (5, 7), True), **CUBIC, **CORNERS),
    # Outside of the input there is a constant
    Row(
        "Resize",
        [normal(1, 1, 2, 3), const(np.array([0.0, 0, 0, 0, 1, 1, 1, 2])), None, const(np.array([1, 1, 2, 5]))],
        lambda x, *_: torch.cat([x, torch.full((1, 1, 2, 2), 5.0, dtype=x.dtype)], 3),
        note="cropped beyond the end",
        build=lambda op, x: [
            op(
                "Resize",
                x[0],
                np.asarray([0, 0, 0, 0, 1, 1, 1, 2], np.float32),
                None,
                np.asarray([1, 1, 2, 5]),
                mode="linear",
                coordinate_transformation_mode="tf_crop_and_resize",
                extrapolation_value=5.0,
            )
        ],
        step=0.25,
    ),
    # Grids
    *[
        Row(
            "AffineGrid",
            [normal(2, 2, 3), const(np.array([2, 1, 3, 4]))],
            lambda t, _, a=align: F.affine_grid(t, [2, 1, 3, 4], bool(a)),
            {"align_corners": align},
            note=f"align corners {align}",
            step=0.25,
        )
        for align in (0, 1)
    ],
    Row(
        "AffineGrid",
        [normal(1, 3, 4), const(np.array([1, 2, 2, 3, 4]))],
        lambda t, _: F.affine_grid(t, [1, 2, 2, 3, 4], False),
        note="3-D",
        step=0.25,
    ),
    *[
        _grid_row(f"{padding} align {align}", (2, 2, 4, 3), _scattered(2, 3, 4, 2), padding_mode=padding, align_corners=align)
        for padding in ("zeros", "border", "reflection")
        for align in (0, 1)
    ],
    _grid_row("3-D", (1, 2, 3, 4, 2), _scattered(1, 2, 2, 3, 3), padding_mode="zeros"),
    _grid_row("3-D border", (1, 1, 3, 2, 4), _scattered(1, 2, 3, 2, 3), padding_mode="border", align_corners=1),
    _grid_row("nearest", (1, 2, 4, 3), _scattered(1, 3, 3, 2), mode="nearest"),
    _grid_row("nearest border", (1, 2, 4, 3), _scattered(1, 3, 3, 2), mode="nearest", padding_mode="border", align_corners=1),
    *[
        _grid_row(f"cubic {padding} align {align}", (2, 2, 4, 3), _scattered(2, 3, 4, 2), mode="cubic", padding_mode=padding, align_corners=align)
        for padding in ("zeros", "border", "reflection")
        for align in (0, 1)
    ],
    _grid_row("cubic of one entry", (1, 2, 1, 3), _scattered(1, 3, 3, 2), mode="cubic", padding_mode="reflection", align_corners=1),
    _grid_row("constant grid", (1, 2, 4, 3), const(np.linspace(-1.1, 1.2, 12).reshape(1, 3, 2, 2))),
    # Fourier transforms
    Row("DFT", [normal(2, 6, 2)], lambda x: _pair(torch.fft.fft(_complex(x), dim=1)), note="complex", step=0.25, float32_only=SINGLE),
    Row(
        "DFT", [normal(2, 6, 2)], lambda x: _pair(torch.fft.ifft(_complex(x), dim=1)), {"inverse": 1}, note="inverse", step=0.25, float32_only=SINGLE
    ),
    Row("DFT", [normal(2, 5, 1)], lambda x: _pair(torch.fft.fft(x[..., 0], dim=1)), note="real", step=0.25, float32_only=SINGLE),
    *[
        Row(
            "DFT",
            [normal(2, n, 1)],
            lambda x: _pair(torch.fft.rfft(x[..., 0], dim=1)),
            {"onesided": 1},
            note=f"one-sided {n}",
            step=0.25,
            float32_only=SINGLE,
        )
        for n in (6, 7)
    ],
    *[
        Row(
            "DFT",
            [normal(2, 6, 3, 2), const(np.array(n)), const(np.array(-3))],
            lambda x, *_, n=n: _pair(torch.fft.fft(_complex(x), n=n, dim=1)),
            note=f"of length {n} along an axis",
            step=0.25,
            float32_only=SINGLE,
        )
        for n in (4, 8)
    ],
    *[
        Row(
            "STFT",
            [normal(2, 10, 1), const(np.array(3)), normal(4)],
            lambda x, _, w, o=onesided: _pair(torch.fft.fft(x[..., 0].unfold(1, 4, 3) * w, dim=2))[:, :, : 3 if o else 4],
            {"onesided": onesided},
            note=f"window one-sided {onesided}",
            normalized=True,
            step=0.25,
        )
        for onesided in (0, 1)
    ],
    Row(
        "STFT",
        [normal(1, 9, 1), const(np.array(2)), None, const(np.array(5))],
        lambda x, *_: _pair(torch.fft.rfft(x[..., 0].unfold(1, 5, 2), dim=2)),
        build=lambda op, x: op.node("STFT", x[0], np.asarray(2), None, np.asarray(5), like=[((1, 3, 3, 2), x[0].dtype)]),
        note="no window",
        normalized=True,
        step=0.25,
    ),
]
