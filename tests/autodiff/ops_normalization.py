"""Rows of normalizations other than batch and layer normalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F

from tests.autodiff.support import Row, Sampler, const, given, normal, positive

MS = "com.microsoft"


def rms_norm(x: torch.Tensor, scale: torch.Tensor, epsilon: float = 1e-5, axis: int = -1) -> torch.Tensor:
    axes = list(range(axis % x.ndim, x.ndim))
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + epsilon) * scale


def _instance(note: str, shape: tuple[int, ...], epsilon: float = 1e-5) -> Row:
    return Row(
        "InstanceNormalization",
        [normal(*shape), normal(shape[1]), normal(shape[1])],
        lambda x, s, b: F.instance_norm(x, None, None, s, b, True, 0.0, epsilon),
        {"epsilon": epsilon},
        note=note,
        tolerance=1e-2,
    )


def _group(note: str, shape: tuple[int, ...], groups: int, per_group: bool = False, epsilon: float = 1e-5) -> Row:
    """``per_group``: as up to opset 20; the runtime's own form of opset 21 is not what this opset's graphs hold."""

    def reference(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        repeat = shape[1] // groups if per_group else 1
        return F.group_norm(x, groups, s.repeat_interleave(repeat), b.repeat_interleave(repeat), epsilon)

    size = groups if per_group else shape[1]
    return Row(
        "GroupNormalization",
        [normal(*shape), normal(size), normal(size)],
        reference,
        {"num_groups": groups, "epsilon": epsilon},
        note=note,
        # ONNX deprecates the form with one scale per group, and infers nothing for it.
        build=lambda op, v: op.node("GroupNormalization", *v, like=[v[0]], num_groups=groups, epsilon=epsilon),
        normalized=True,
        no_difference="" if per_group else "opset 20 has one scale per group",
        tolerance=1e-2,
    )


def _lrn(note: str, shape: tuple[int, ...], size: int, **attributes: float) -> Row:
    def reference(x: torch.Tensor) -> torch.Tensor:
        below = (size - 1) // 2
        padded = F.pad((x * x).transpose(1, -1), (below, size - 1 - below)).unfold(-1, size, 1).sum(-1).transpose(1, -1)
        return x / (attributes.get("bias", 1.0) + attributes.get("alpha", 1e-4) / size * padded) ** attributes.get("beta", 0.75)

    return Row("LRN", [normal(*shape)], reference, {"size": size, **attributes}, note=note)


def _lp(note: str, x: Sampler | Any, **attributes: int) -> Row:
    def reference(x: torch.Tensor) -> torch.Tensor:
        p, axis = attributes.get("p", 2), attributes.get("axis", -1)
        norm = x.abs().sum(axis, keepdim=True) if p == 1 else (x * x).sum(axis, keepdim=True).sqrt()
        return x / norm

    return Row("LpNormalization", [x], reference, dict(attributes), note=note)


def _mvn(note: str, shape: tuple[int, ...], axes: list[int] | None = None) -> Row:
    def reference(x: torch.Tensor) -> torch.Tensor:
        over = axes or [0, 2, 3]
        return (x - x.mean(over, keepdim=True)) / (x.var(over, keepdim=True, unbiased=False).sqrt() + 1e-9)

    attributes = {} if axes is None else {"axes": axes}
    return Row(
        "MeanVarianceNormalization",
        [normal(*shape)],
        reference,
        note=note,
        build=lambda op, v: op.node("MeanVarianceNormalization", *v, like=[v[0]], **attributes),
        normalized=True,
        tolerance=1e-2,
    )


def _layer_statistics(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return F.layer_norm(x, s.shape, s, b, 1e-5), mean, torch.rsqrt(var + 1e-5)


def _skip(x: torch.Tensor, skip: torch.Tensor, s: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    total = x + skip if bias is None else x + skip + bias
    return F.layer_norm(total, s.shape, s, b, 1e-5)


def _skip_rms(x: torch.Tensor, skip: torch.Tensor, s: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return rms_norm(x + skip if bias is None else x + skip + bias, s)


def _simplified(op: Any, operands: Any, axis: int = -1, epsilon: float = 1e-5) -> Any:
    x, scale = operands
    return op.node("SimplifiedLayerNormalization", x, scale, like=[x], axis=axis, epsilon=epsilon, stash_type=1)


def _simplified_statistics(op: Any, operands: Any) -> Any:
    x, scale = operands
    return op.node(
        "SimplifiedLayerNormalization", x, scale, outputs=2, like=[x, ((*x.shape[:-1], 1), ir.DataType.FLOAT)], axis=-1, epsilon=1e-5, stash_type=1
    )


def _embed(
    ids: torch.Tensor, segments: torch.Tensor, words: torch.Tensor, places: torch.Tensor, kinds: torch.Tensor, s: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    total = words[ids.long()] + places[: ids.shape[1]] + kinds[segments.long()]
    return F.layer_norm(total, s.shape, s, b, 1e-5)


STASHED = "the statistics are float32 (stash_type)"
IDS = given(np.array([[0, 2, 2], [4, 1, 0]]))

ROWS = [
    _instance("", (2, 3, 4, 2)),
    _instance("1-D epsilon", (2, 2, 5), 0.1),
    _instance("3-D", (1, 2, 2, 3, 2)),
    Row(
        "InstanceNormalization",
        [const(np.arange(12.0).reshape(1, 2, 6) ** 2), normal(2), normal(2)],
        lambda x, s, b: F.instance_norm(x, None, None, s, b, True, 0.0, 1e-5),
        note="affine alone",
    ),
    _group("per group", (2, 4, 3, 2), 2, per_group=True),
    _group("per channel", (2, 4, 3, 2), 2, epsilon=0.1),
    _group("per channel 1-D one group", (2, 4, 5), 1),
    _group("every channel its own", (2, 3, 4), 3, per_group=True),
    _lrn("", (2, 5, 2, 2), 3, alpha=0.5),
    _lrn("wide window", (1, 6, 2, 2), 5, alpha=0.7, beta=0.5, bias=2.0),
    _lrn("window beyond the channels", (1, 3, 2, 1), 7, alpha=0.9),
    _lrn("one channel", (2, 4, 1, 3), 1, alpha=0.5),
    _lp("", normal(3, 4)),
    _lp("axis 0", normal(3, 4, 2), axis=0),
    _lp("L1", normal(3, 4), p=1),
    _lp("L1 middle axis", normal(2, 3, 2), p=1, axis=1),
    _mvn("", (2, 3, 3, 2)),
    _mvn("axes", (2, 3, 4), [2]),
    _mvn("negative axes", (2, 3, 2, 2), [-1, -2]),
    Row(
        "LayerNormalization",
        [normal(2, 3, 4), normal(4), normal(4)],
        _layer_statistics,
        note="statistics read",
        outputs=3,
        used=(0, 1, 2),
        normalized=True,
        float32_only=STASHED,
        no_difference=STASHED,
    ),
    Row(
        "SimplifiedLayerNormalization",
        [normal(2, 3, 4), normal(4)],
        rms_norm,
        build=_simplified,
        float32_only=STASHED,
    ),
    Row(
        "SimplifiedLayerNormalization",
        [normal(2, 3, 4), normal(3, 4)],
        lambda x, s: rms_norm(x, s, 0.1, 1),
        note="axis epsilon",
        build=lambda op, operands: _simplified(op, operands, 1, 0.1),
        float32_only=STASHED,
    ),
    Row(
        "SimplifiedLayerNormalization",
        [const(np.arange(8.0).reshape(2, 4)), normal(4)],
        rms_norm,
        note="scale alone",
        build=_simplified,
        float32_only=STASHED,
    ),
    Row(
        "SimplifiedLayerNormalization",
        [normal(2, 4), normal(4)],
        lambda x, s: (rms_norm(x, s), torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
        note="statistics read",
        build=_simplified_statistics,
        normalized=True,
        float32_only=STASHED,
        no_difference=STASHED,
    ),
    *[
        Row("SkipLayerNormalization", inputs, _skip, {"epsilon": 1e-5}, note=note, domain=MS, normalized=True, float32_only=STASHED)
        for note, inputs in (
            ("", [normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4)]),
            ("bias", [normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4), normal(4)]),
            ("skip of one sample", [normal(2, 3, 4), normal(3, 4), normal(4), normal(4)]),
        )
    ],
    Row(
        "SkipLayerNormalization",
        [normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4), normal(4)],
        lambda x, k, s, b, bias: (_skip(x, k, s, b, bias), x + k + bias),
        {"epsilon": 1e-5},
        note="sum read",
        build=lambda op, v: [
            made
            for i, made in enumerate(
                op.node(
                    "SkipLayerNormalization",
                    *v,
                    domain=MS,
                    outputs=[op.fresh("y"), "", "", op.fresh("total")],
                    like=[v[0], None, None, v[0]],
                    epsilon=1e-5,
                )
            )
            if i in (0, 3)
        ],
        domain=MS,
        normalized=True,
        float32_only=STASHED,
    ),
    *[
        Row(
            "SkipSimplifiedLayerNormalization",
            inputs,
            _skip_rms,
            {"epsilon": 1e-5},
            note=note,
            domain=MS,
            normalized=True,
            float32_only=STASHED,
            no_difference="the CPU kernel leaves the bias out of its output" if note else "",
        )
        for note, inputs in (
            ("", [normal(2, 3, 4), normal(2, 3, 4), normal(4)]),
            ("bias", [normal(2, 3, 4), normal(2, 3, 4), normal(4), normal(4)]),
        )
    ],
    Row(
        "EmbedLayerNormalization",
        [IDS, given(np.array([[0, 1, 1], [0, 0, 1]])), normal(5, 4), normal(6, 4), normal(2, 4), positive(4), normal(4)],
        _embed,
        note="",
        domain=MS,
        build=lambda op, v: op.node(
            "EmbedLayerNormalization",
            *(x.cast(ir.DataType.INT32) for x in v[:2]),
            *v[2:],
            domain=MS,
            outputs=2,
            like=[((2, 3, 4), v[2].dtype), ((2,), ir.DataType.INT32)],
            epsilon=1e-5,
        )[:1],
        normalized=True,
        float32_only=STASHED,
    ),
]
