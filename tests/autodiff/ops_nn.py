"""Rows of convolution, pooling, normalization and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.autodiff.support import Row, const, given, normal, positive, spread

MS = "com.microsoft"
CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def torch_pads(pads: Sequence[int]) -> list[int]:
    """ONNX's (begins, ends) in torch's order: last axis first, begin and end together."""
    half = len(pads) // 2
    return [p for i in reversed(range(half)) for p in (pads[i], pads[half + i])]


def _conv(note: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, **attributes: Any) -> Row:
    rank = len(x) - 2

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        padded = F.pad(x, torch_pads(attributes.get("pads", [0, 0] * rank)))
        return CONVS[rank](padded, w, b, attributes.get("strides", 1), 0, attributes.get("dilations", 1), attributes.get("group", 1))

    operands = [normal(*x), normal(*w)] + ([normal(w[0])] if bias else [])
    return Row("Conv", operands, reference, attributes, note=note, step=0.25)


def _conv_transpose(note: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, **attributes: Any) -> Row:
    rank, group = len(x) - 2, attributes.get("group", 1)

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        pads, extra = attributes.get("pads", [0, 0] * rank), attributes.get("output_padding", [0] * rank)
        full = TRANSPOSED[rank](x, w, None, attributes.get("strides", 1), 0, 0, group, attributes.get("dilations", 1))
        full = F.pad(full, torch_pads([*[-p for p in pads[:rank]], *[e - p for e, p in zip(extra, pads[rank:], strict=True)]]))
        return full if b is None else full + b.reshape(-1, *[1] * rank)

    operands = [normal(*x), normal(*w)] + ([normal(w[1] * group)] if bias else [])
    return Row("ConvTranspose", operands, reference, attributes, note=note, step=0.25)


def _max_pool(note: str, x: tuple[int, ...], **attributes: Any) -> Row:
    rank = len(x) - 2

    def reference(x: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x, torch_pads(attributes.get("pads", [0, 0] * rank)), value=-np.inf)
        return MAX_POOLS[rank](
            padded,
            attributes["kernel_shape"],
            attributes.get("strides", 1),
            0,
            attributes.get("dilations", 1),
            bool(attributes.get("ceil_mode", 0)),
        )

    return Row("MaxPool", [spread(*x)], reference, attributes, note=note, step=4e-3)


def _average_pool(note: str, x: tuple[int, ...], **attributes: Any) -> Row:
    rank = len(x) - 2

    def reference(x: torch.Tensor) -> torch.Tensor:
        pads = torch_pads(attributes.get("pads", [0, 0] * rank))
        pool, kernel, strides = AVERAGE_POOLS[rank], attributes["kernel_shape"], attributes.get("strides", [1] * rank)
        mean = pool(F.pad(x, pads), kernel, strides)
        if attributes.get("count_include_pad", 0):
            return mean
        return mean / pool(F.pad(torch.ones_like(x), pads), kernel, strides)

    return Row("AveragePool", [normal(*x)], reference, attributes, note=note, step=0.25)


def _dilated_average(x: torch.Tensor) -> torch.Tensor:
    weight = torch.full((2, 1, 2, 2), 0.25, dtype=x.dtype)
    return F.conv2d(x, weight, None, 1, 0, 2, 2)


def _batch_norm(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, *_: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    return F.batch_norm(x, None, None, scale, bias, True, 0.1, epsilon)


def _layer_norm(axis: int, epsilon: float = 1e-5) -> Any:
    def reference(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.layer_norm(x, x.shape[axis % x.ndim :], scale, bias, epsilon)

    return reference


STATISTICS = [const(np.array([0.1, -0.2, 0.3])), const(np.array([0.9, 1.2, 0.5]))]
STASHED = "the saved statistics are float32 (stash_type)"
DRAWN = "every run draws another mask"

ROWS = [
    # Convolution
    _conv("1x1", (2, 3, 4, 4), (2, 3, 1, 1)),
    _conv("3x3 same", (2, 2, 5, 4), (3, 2, 3, 3), pads=[1, 1, 1, 1]),
    _conv("no bias", (1, 2, 4, 4), (2, 2, 2, 2), bias=False),
    # Few channels come out of many: dW is that of the adjoint convolution.
    _conv("narrowing", (2, 6, 10, 9), (2, 6, 3, 3), pads=[1, 1, 1, 1]),
    _conv("narrowing, uneven window and pads", (2, 5, 12, 13), (1, 5, 2, 4), pads=[1, 0, 0, 2], bias=False),
    _conv("narrowing, dilated", (1, 4, 14, 15), (1, 4, 3, 2), dilations=[2, 3], pads=[2, 1, 3, 1]),
    _conv("narrowing, one axis", (2, 4, 40), (1, 4, 3), pads=[1, 1]),
    _conv("stride", (1, 2, 7, 6), (2, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1]),
    _conv("stride leaves a rest", (1, 1, 6, 8), (1, 1, 3, 2), strides=[2, 3]),
    _conv("strides differ", (1, 2, 5, 7), (2, 2, 3, 3), strides=[1, 2], pads=[1, 0, 1, 0]),
    _conv("dilated", (1, 2, 6, 6), (2, 2, 2, 3), dilations=[2, 2], pads=[1, 1, 1, 1]),
    _conv("asymmetric pads", (1, 2, 4, 5), (2, 2, 3, 3), pads=[0, 1, 2, 1]),
    _conv("asymmetric pads and stride", (1, 2, 5, 5), (2, 2, 3, 3), pads=[1, 0, 0, 2], strides=[2, 2]),
    _conv("asymmetric pads dilated stride", (1, 1, 6, 7), (1, 1, 2, 2), pads=[1, 0, 0, 2], strides=[2, 2], dilations=[2, 3]),
    _conv("pads beyond the kernel", (1, 1, 3, 3), (1, 1, 2, 2), pads=[2, 2, 2, 2]),
    _conv("grouped", (1, 4, 4, 4), (2, 2, 3, 3), group=2, pads=[1, 1, 1, 1]),
    _conv("grouped stride", (2, 4, 5, 5), (6, 2, 3, 3), group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
    _conv("depthwise", (2, 3, 4, 4), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1], bias=False),
    _conv("depthwise multiplier", (1, 2, 4, 4), (4, 1, 3, 3), group=2, strides=[2, 2], pads=[1, 1, 1, 1]),
    _conv("depthwise dilated", (1, 2, 5, 5), (2, 1, 2, 2), group=2, dilations=[2, 2]),
    # Large maps take the way of flipped weights.
    _conv("large map", (1, 1, 20, 21), (2, 1, 3, 3), pads=[1, 1, 1, 1]),
    _conv("large map asymmetric", (1, 2, 22, 21), (1, 2, 3, 2), pads=[0, 1, 1, 0]),
    _conv("large map dilated", (1, 1, 22, 22), (1, 1, 2, 2), dilations=[2, 1]),
    _conv("large map 1x1", (1, 2, 20, 20), (3, 2, 1, 1)),
    _conv("large map grouped", (1, 4, 20, 21), (2, 2, 2, 1), group=2),
    _conv("large map pads beyond the kernel", (1, 1, 20, 20), (1, 1, 2, 2), pads=[2, 0, 0, 2]),
    _conv("1-D", (2, 3, 7), (4, 3, 3), pads=[1, 1]),
    _conv("1-D stride dilated asymmetric", (1, 2, 9), (2, 2, 3), strides=[2], dilations=[2], pads=[1, 2]),
    _conv("1-D grouped", (2, 4, 6), (4, 2, 2), group=2, bias=False),
    _conv("1-D depthwise", (1, 3, 6), (3, 1, 3), group=3, pads=[2, 0]),
    _conv("1-D large", (1, 1, 410), (1, 1, 3), pads=[1, 1]),
    _conv("3-D", (1, 2, 4, 3, 3), (2, 2, 2, 2, 2), pads=[1, 0, 0, 0, 1, 0]),
    _conv("3-D stride grouped", (1, 2, 4, 5, 4), (2, 1, 2, 2, 2), group=2, strides=[2, 2, 1]),
    _conv("empty batch", (0, 2, 4, 4), (2, 2, 3, 3)),
    # Transposed convolution
    _conv_transpose("2x2 stride 2", (2, 3, 3, 2), (3, 2, 2, 2), strides=[2, 2]),
    _conv_transpose("no bias", (1, 2, 3, 3), (2, 3, 3, 3), bias=False),
    _conv_transpose("pads", (1, 2, 3, 3), (2, 2, 3, 3), pads=[1, 1, 1, 1]),
    _conv_transpose("output padding", (1, 2, 3, 3), (2, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    _conv_transpose("output padding on one axis", (1, 2, 3, 2), (2, 1, 3, 3), strides=[2, 3], pads=[1, 0, 1, 0], output_padding=[0, 2]),
    _conv_transpose("grouped", (1, 4, 3, 3), (4, 2, 2, 2), group=2, strides=[2, 2]),
    _conv_transpose("depthwise", (1, 3, 3, 3), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1]),
    _conv_transpose("dilated", (1, 2, 3, 3), (2, 2, 2, 2), dilations=[2, 2]),
    _conv_transpose("asymmetric pads", (1, 1, 4, 4), (1, 2, 3, 3), pads=[1, 0, 0, 2], strides=[2, 2]),
    _conv_transpose("no elements", (0, 2, 3, 3), (2, 1, 2, 2)),
    _conv_transpose("1-D", (2, 2, 4), (2, 3, 3), strides=[2], pads=[1, 0], output_padding=[1]),
    _conv_transpose("1-D grouped", (1, 4, 3), (4, 1, 2), group=2, dilations=[2]),
    _conv_transpose("3-D", (1, 2, 2, 2, 3), (2, 1, 2, 2, 2), strides=[2, 1, 1]),
    # Pooling
    _max_pool("2x2", (2, 2, 4, 4), kernel_shape=[2, 2], strides=[2, 2]),
    _max_pool("overlapping", (1, 2, 5, 5), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    _max_pool("stride 1", (1, 1, 4, 4), kernel_shape=[2, 2]),
    _max_pool("asymmetric pads", (1, 1, 4, 5), kernel_shape=[3, 2], strides=[2, 2], pads=[0, 1, 1, 0]),
    _max_pool("dilated", (1, 1, 5, 5), kernel_shape=[2, 2], dilations=[2, 2]),
    _max_pool("ceil mode", (1, 1, 5, 5), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    _max_pool("1-D", (2, 2, 7), kernel_shape=[3], strides=[2], pads=[1, 1]),
    _max_pool("3-D", (1, 1, 4, 2, 4), kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    Row(
        "MaxPool",
        [given(np.array([[[[1.0, 1.0, 0.0], [1.0, 1.0, 2.0], [2.0, 0.0, 2.0]]]]))],
        lambda x: F.max_pool2d(x, 2, 1),
        {"kernel_shape": [2, 2]},
        note="ties",
        no_difference="ties are kinks: the first of the equal inputs gets all",
    ),
    _average_pool("2x2", (2, 2, 4, 4), kernel_shape=[2, 2], strides=[2, 2]),
    _average_pool("pads counted", (1, 2, 5, 5), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1),
    _average_pool("pads not counted", (1, 2, 5, 5), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    _average_pool("asymmetric pads counted", (1, 1, 4, 5), kernel_shape=[2, 3], pads=[1, 0, 0, 2], count_include_pad=1),
    _average_pool("asymmetric pads not counted", (1, 1, 4, 5), kernel_shape=[2, 3], pads=[1, 0, 0, 2]),
    _average_pool("stride leaves a rest", (1, 1, 6, 7), kernel_shape=[2, 2], strides=[3, 3]),
    _average_pool("whole image", (2, 3, 3, 4), kernel_shape=[3, 4]),
    _average_pool("1-D", (2, 2, 6), kernel_shape=[2], strides=[2]),
    _average_pool("1-D pads not counted", (1, 2, 5), kernel_shape=[3], pads=[1, 1]),
    _average_pool("3-D", (1, 1, 4, 4, 2), kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    Row("AveragePool", [normal(1, 2, 5, 4)], _dilated_average, {"kernel_shape": [2, 2], "dilations": [2, 2]}, note="dilated", step=0.25),
    Row("GlobalAveragePool", [normal(2, 3, 4, 2)], lambda x: x.mean((2, 3), keepdim=True)),
    Row("GlobalAveragePool", [normal(2, 3, 5)], lambda x: x.mean(2, keepdim=True), note="1-D"),
    # Batch normalization
    *[
        Row(
            "BatchNormalization",
            [normal(*shape), normal(3), normal(3), *STATISTICS],
            lambda x, s, b, m, v, e=epsilon: F.batch_norm(x, m, v, s, b, False, 0.0, e),
            {"epsilon": epsilon},
            note=note,
        )
        for note, shape, epsilon in (("eval", (2, 3, 4, 2), 1e-5), ("eval epsilon", (2, 3, 2), 0.1), ("eval of vectors", (4, 3), 1e-3))
    ],
    *[
        Row(
            "BatchNormalization",
            [normal(*shape), positive(3), normal(3), *STATISTICS],
            lambda x, s, b, m, v, e=epsilon: _batch_norm(x, s, b, epsilon=e),
            {"training_mode": 1, "epsilon": epsilon, "momentum": 0.9},
            note=note,
            outputs=3,
            normalized=True,
            step=2e-2,
            tolerance=1e-2,
        )
        for note, shape, epsilon in (
            ("training", (2, 3, 4, 2), 1e-5),
            ("training epsilon", (2, 3, 4, 3), 0.1),
            ("training 1-D", (3, 3, 4), 1e-5),
            ("training vectors", (6, 3), 1e-3),
        )
    ],
    # Layer normalization
    Row("LayerNormalization", [normal(2, 3, 4), normal(4), normal(4)], _layer_norm(-1), float32_only=STASHED),
    Row("LayerNormalization", [normal(2, 3, 4), normal(4)], _layer_norm(-1), note="no bias", float32_only=STASHED),
    Row(
        "LayerNormalization",
        [normal(2, 3, 4), normal(3, 4), normal(3, 4)],
        _layer_norm(-2),
        {"axis": -2},
        note="axis -2",
        float32_only=STASHED,
    ),
    Row(
        "LayerNormalization",
        [normal(2, 3, 4), normal(3, 4), normal(3, 4)],
        _layer_norm(1),
        {"axis": 1},
        note="axis 1",
        float32_only=STASHED,
    ),
    Row("LayerNormalization", [normal(3, 4), normal(3, 4), normal(3, 4)], _layer_norm(0), {"axis": 0}, note="axis 0", float32_only=STASHED),
    Row(
        "LayerNormalization",
        [normal(2, 4), normal(4), normal(4)],
        _layer_norm(-1, 0.1),
        {"epsilon": 0.1},
        note="epsilon",
        float32_only=STASHED,
    ),
    Row(
        "LayerNormalization",
        [normal(2, 4), const(np.ones(4)), const(np.zeros(4))],
        lambda x, *_: F.layer_norm(x, (4,)),
        note="constant affine",
        float32_only=STASHED,
    ),
    Row(
        "LayerNormalization",
        [const(np.arange(8.0).reshape(2, 4) ** 2), normal(4), normal(4)],
        _layer_norm(-1),
        note="affine alone",
        float32_only=STASHED,
    ),
    # Dropout
    *[
        Row(
            "Dropout",
            [normal(5, 7), const(np.array(ratio)), const(np.array(True))],
            lambda x, r, t, m, keep=1 / (1 - ratio): x * m * keep,
            note=f"ratio {ratio}",
            outputs=2,
            fetch=(1,),
            no_difference=DRAWN,
        )
        for ratio in (0.25, 0.5, 0.0)
    ],
    Row(
        "Dropout",
        [normal(5, 7), None, const(np.array(True))],
        lambda x, t, m: x * m * 2.0,
        note="default ratio",
        outputs=2,
        fetch=(1,),
        no_difference=DRAWN,
    ),
    Row("Dropout", [normal(5, 7), const(np.array(0.5)), const(np.array(False))], lambda x, *_: x * 1, note="switched off"),
    Row("Dropout", [normal(5, 7)], lambda x: x * 1, note="no mode"),
]
