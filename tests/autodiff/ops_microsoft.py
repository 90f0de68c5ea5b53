"""Rows of the fused operators of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F

from tests.autodiff.support import Row, Same, const, given, normal, spread

MS = "com.microsoft"
NO_KERNEL = "the runtime's CPU provider has no kernel of the fused operator"


def _row(
    op: str, inputs: Sequence[Any], reference: Callable[..., Any], attributes: dict[str, Any] | None = None, note: str = "", **options: Any
) -> Row:
    return Row(op, inputs, reference, attributes or {}, note=note, domain=MS, normalized=True, **options)


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | None = None, causal: bool = False, scale: float = 0.0) -> Any:
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if added is not None:
        scores = scores + added
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2)
    return y.reshape(y.shape[0], y.shape[1], -1)


def key_mask(kept: Any) -> torch.Tensor:
    """What a mask over (batch, keys) adds to the scores."""
    return (1.0 - torch.tensor(kept, dtype=torch.float64)[:, None, None, :]) * -10000.0


def attention(heads: int, added: torch.Tensor | None = None, causal: bool = False, scale: float = 0.0, sizes: Sequence[int] = ()) -> Any:
    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, *rest: torch.Tensor) -> torch.Tensor:
        joint = x @ w if b is None else x @ w + b
        parts = joint.split(list(sizes) or [w.shape[1] // 3] * 3, -1)
        bias = rest[-1] if rest and rest[-1].dtype == torch.float64 else added
        return attend(*(split_heads(p, heads) for p in parts), bias, causal, scale)

    return reference


def _int32(position: int, op: str, like: Any, **attributes: Any) -> Any:
    """The operator on operands of which the one at ``position`` is int32."""

    def build(builder: Any, values: Sequence[Any]) -> Any:
        values = list(values)
        values[position] = values[position].cast(ir.DataType.INT32)
        shape = like(values) if callable(like) else like
        return builder.node(op, *values, domain=MS, like=[(shape, values[0].dtype)], **attributes)

    return build


def multi_head(heads: int, added: torch.Tensor | None = None, causal: bool = False) -> Any:
    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor | None = None, *rest: torch.Tensor) -> torch.Tensor:
        if b is not None:
            of_q, of_k, of_v = b.split([q.shape[-1], k.shape[-1], v.shape[-1]])
            q, k, v = q + of_q, k + of_k, v + of_v
        bias = rest[-1] if rest and rest[-1].dtype == torch.float64 else added
        return attend(split_heads(q, heads), split_heads(k, heads), split_heads(v, heads), bias, causal)

    return reference


def rotary(interleaved: bool, heads: int, part: int = 0, scale: float = 1.0) -> Any:
    def reference(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        wide = split_heads(x, heads) if x.ndim == 3 else x
        if positions.numel() == 1:
            positions = positions.reshape(1, 1) + torch.arange(wide.shape[2])
        size = part or wide.shape[-1]
        c, s = cos[positions][:, None], sin[positions][:, None]
        turned, rest = wide[..., :size], wide[..., size:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        left, right = a * c - b * s, b * c + a * s
        joined = torch.stack([left, right], -1).flatten(-2) if interleaved else torch.cat([left, right], -1)
        y = torch.cat([joined, rest], -1) * scale
        return y.transpose(1, 2).reshape(shape) if x.ndim == 3 else y

    return reference


CAUSAL_MASK = {"unidirectional": 1}
KEPT = [[1, 1, 0], [1, 1, 1]]
ATTENTION = [normal(2, 3, 4), normal(4, 12), normal(12)]
QKV = [normal(2, 3, 4), normal(2, 3, 4), normal(2, 3, 4)]
TABLES = [normal(5, 2), normal(5, 2)]

ROWS = [
    _row("FastGelu", [normal(3, 4)], fast_gelu),
    _row("FastGelu", [normal(3, 4), normal(4)], lambda x, b: fast_gelu(x + b), note="bias"),
    _row("GemmFastGelu", [normal(2, 3), normal(3, 4), normal(4)], lambda x, w, b: fast_gelu(x @ w + b), no_difference=NO_KERNEL),
    _row("QuickGelu", [normal(3, 4)], lambda x: x * torch.sigmoid(1.702 * x)),
    _row("QuickGelu", [normal(3, 4)], lambda x: F.silu(x), {"alpha": 1.0}, "alpha 1"),
    _row("BiasGelu", [normal(2, 3, 4), normal(4)], lambda x, b: F.gelu(x + b)),
    _row("BiasAdd", [normal(2, 3, 4), normal(4), normal(2, 3, 4)], lambda x, b, s: x + b + s, no_difference=NO_KERNEL),
    _row(
        "BiasSplitGelu",
        [normal(2, 3, 8), normal(8)],
        lambda x, b: (x + b).chunk(2, -1)[0] * F.gelu((x + b).chunk(2, -1)[1]),
        no_difference=NO_KERNEL,
    ),
    _row(
        "BiasSoftmax",
        [normal(2, 3, 4), normal(2, 1, 4)],
        lambda x, b: (x + b).softmax(-1),
        {"axis": 2, "is_inner_broadcast": 0},
        no_difference=NO_KERNEL,
    ),
    _row(
        "BiasSoftmax",
        [normal(2, 3, 2, 2), normal(2, 2, 2)],
        lambda x, b: (x + b[:, None]).flatten(2).softmax(-1).reshape(x.shape),
        {"axis": 2, "is_inner_broadcast": 1},
        "inner broadcast",
        no_difference=NO_KERNEL,
    ),
    *[
        _row(
            op,
            [normal(4, 5), *([normal(5), normal(4, 5)] if "Bias" in op else []), const(np.array(0.0)), const(np.array(True))],
            (lambda x, b, r, *_: x + b + r) if "Bias" in op else (lambda x, *_: x * 1),
            no_difference=NO_KERNEL,
        )
        for op in ("BiasDropout", "BitmaskDropout", "BitmaskBiasDropout")
    ],
    Row(
        "DropoutGrad",
        [normal(3, 4), const(np.arange(12).reshape(3, 4) % 3 > 0), const(np.array(0.5)), const(np.array(True))],
        lambda x, m, r, t: x * m * 2.0,
        domain=MS,
    ),
    Row("Inverse", [given(np.eye(3) * 2 + np.arange(9.0).reshape(3, 3) ** 0.5 / 7)], torch.linalg.inv, domain=MS, tolerance=2e-2),
    Row(
        "Inverse",
        [given(np.eye(2) * 2 + np.arange(8.0).reshape(2, 2, 2) / 9)],
        torch.linalg.inv,
        note="batch",
        domain=MS,
        tolerance=2e-2,
    ),
    _row("Trilu", [normal(3, 4)], torch.triu),
    _row("Trilu", [normal(3, 4), const(np.array(1))], lambda x, k: torch.tril(x, 1), {"upper": 0}, "lower"),
    _row(
        "ExpandDims",
        [normal(3, 4)],
        lambda x: x.unsqueeze(-1),
        build=lambda op, v: op.node("ExpandDims", v[0], np.asarray(-1, np.int32), domain=MS, like=[((3, 4, 1), v[0].dtype)]),
        no_difference="the runtime crashes when it loads the operator",
    ),
    # Fused products
    _row(
        "FusedGemm",
        [normal(2, 3), normal(4, 3), normal(4)],
        lambda a, b, c: F.leaky_relu(0.5 * a @ b.T + 2.0 * c, 0.1),
        {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.1},
    ),
    _row("FusedGemm", [normal(2, 3), normal(3, 4)], lambda a, b: torch.tanh(a @ b), {"activation": "Tanh"}, "no bias"),
    _row(
        "FusedConv",
        [normal(1, 2, 4, 4), normal(2, 2, 3, 3), normal(2), normal(1, 2, 4, 4)],
        lambda x, w, b, z: F.relu(F.conv2d(x, w, b, padding=1) + z),
        {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3], "activation": "Relu"},
        "sum and activation",
        tolerance=2e-2,
    ),
    _row(
        "FusedConv",
        [spread(1, 1, 4, 4), normal(1, 1, 2, 2)],
        lambda x, w: torch.clamp(F.conv2d(x, w), -9.0, 9.0),
        {"pads": [0, 0, 0, 0], "kernel_shape": [2, 2], "activation": "Clip", "activation_params": [-9.0, 9.0]},
        "clip",
    ),
    _row(
        "NhwcFusedConv",
        [normal(1, 4, 4, 2), normal(3, 2, 3, 3), normal(3)],
        lambda x, w, b: torch.tanh(F.conv2d(x.permute(0, 3, 1, 2), w, b, padding=1).permute(0, 2, 3, 1)),
        {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3], "activation": "Tanh"},
        no_difference=NO_KERNEL,
    ),
    _row(
        "NhwcConv",
        [normal(1, 4, 4, 2), normal(3, 3, 3, 2), normal(3)],
        lambda x, w, b: F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), b).permute(0, 2, 3, 1),
        {"pads": [0, 0, 0, 0], "kernel_shape": [3, 3]},
        no_difference=NO_KERNEL,
    ),
    _row(
        "FusedMatMul",
        [normal(3, 2, 4), normal(2, 4, 5)],
        lambda a, b: a.transpose(0, 1) @ b,
        {"transBatchA": 1},
        "transposed batch",
    ),
    _row(
        "FusedMatMul",
        [normal(3, 2, 4), normal(5, 2, 3)],
        lambda a, b: 0.5 * a.permute(1, 2, 0) @ b.permute(1, 2, 0),
        {"transBatchA": 1, "transBatchB": 1, "transA": 1, "transB": 1, "alpha": 0.5},
        "all transposed",
    ),
    _row(
        "FusedMatMulActivation",
        [normal(2, 3), normal(4, 3)],
        lambda a, b: F.elu(a @ b.T, 0.5),
        {"transB": 1, "activation": "Elu", "activation_alpha": 0.5},
        no_difference=NO_KERNEL,
    ),
    # Rotary positions
    *[
        _row(
            "RotaryEmbedding",
            [normal(*shape), given(positions), *TABLES],
            rotary(bool(attributes.get("interleaved")), 2, attributes.get("rotary_embedding_dim", 0)),
            attributes,
            note,
        )
        for note, shape, positions, attributes in (
            ("", (2, 3, 8), [[0, 1, 4], [2, 2, 0]], {}),
            ("interleaved", (2, 3, 8), [[0, 1, 4], [2, 2, 0]], {"interleaved": 1}),
            ("offset", (2, 3, 8), [1], {}),
            ("rank 4", (2, 2, 3, 4), [[0, 1, 2], [1, 2, 3]], {}),
        )
    ],
    _row(
        "RotaryEmbedding",
        [normal(2, 3, 12), given([[0, 1, 4], [2, 2, 0]]), *TABLES],
        rotary(False, 2, 4),
        {"num_heads": 2, "rotary_embedding_dim": 4},
        "part of each head",
    ),
    # Attention
    _row("Attention", ATTENTION, attention(2), {"num_heads": 2}),
    _row("Attention", ATTENTION, attention(2, causal=True), {"num_heads": 2, "unidirectional": 1}, "causal"),
    _row("Attention", ATTENTION, attention(1, scale=0.3), {"num_heads": 1, "scale": 0.3}, "scale"),
    _row(
        "Attention",
        [normal(2, 3, 4), normal(4, 14), normal(14)],
        attention(2, sizes=[4, 4, 6]),
        {"num_heads": 2, "qkv_hidden_sizes": [4, 4, 6]},
        "sizes",
    ),
    _row(
        "Attention",
        [*ATTENTION, given(KEPT)],
        attention(2, key_mask(KEPT)),
        note="mask",
        build=_int32(3, "Attention", (2, 3, 4), num_heads=2),
    ),
    _row(
        "Attention",
        [*ATTENTION, given([2, 3])],
        attention(2, key_mask(KEPT)),
        note="lengths",
        build=_int32(3, "Attention", (2, 3, 4), num_heads=2),
    ),
    _row(
        "Attention",
        [*ATTENTION, given([3, 3, 1, 0])],
        attention(2, key_mask([[0, 1, 1], [1, 1, 1]])),
        note="ends and starts",
        build=_int32(3, "Attention", (2, 3, 4), num_heads=2),
    ),
    _row("Attention", [*ATTENTION, None, None, normal(2, 2, 3, 3)], attention(2), {"num_heads": 2}, "bias"),
    _row("MultiHeadAttention", QKV, multi_head(2), {"num_heads": 2}),
    _row("MultiHeadAttention", [*QKV, normal(12)], multi_head(2), {"num_heads": 2}, "projection bias"),
    _row("MultiHeadAttention", QKV, multi_head(2, causal=True), {"num_heads": 2, "unidirectional": 1}, "causal"),
    _row(
        "MultiHeadAttention",
        [normal(2, 2, 4), normal(2, 5, 4), normal(2, 5, 6)],
        multi_head(2),
        {"num_heads": 2},
        "cross",
    ),
    _row(
        "MultiHeadAttention",
        [normal(2, 3, 4), Same(0), Same(0)],
        lambda x: multi_head(2)(x, x, x),
        {"num_heads": 2},
        "the same thrice",
    ),
    _row(
        "MultiHeadAttention",
        [*QKV, None, given(KEPT)],
        lambda q, k, v, m: multi_head(2, key_mask(KEPT))(q, k, v),
        note="mask",
        build=_int32(4, "MultiHeadAttention", (2, 3, 4), num_heads=2),
    ),
    _row(
        "MultiHeadAttention",
        [*QKV, None, None, normal(1, 2, 3, 3)],
        lambda q, k, v, a: multi_head(2, a)(q, k, v),
        {"num_heads": 2},
        "bias of one sample",
        no_difference="the CPU kernel reads beyond a bias of one sample",
    ),
    _row(
        "MultiHeadAttention",
        [*QKV, None, None, normal(2, 2, 3, 3)],
        lambda q, k, v, a: multi_head(2, a)(q, k, v),
        {"num_heads": 2},
        "bias",
    ),
    _row(
        "MultiHeadAttention",
        [normal(2, 3, 2, 3, 2)],
        lambda x: multi_head(2)(*(x[:, :, :, i].flatten(2) for i in range(3))),
        {"num_heads": 2},
        "packed",
        no_difference=NO_KERNEL,
    ),
    _row(
        "MultiHeadAttention",
        [normal(2, 2, 4), normal(2, 3, 2, 2, 2)],
        lambda q, x: multi_head(2)(q, *(x[:, :, :, i].flatten(2) for i in range(2))),
        {"num_heads": 2},
        "packed keys and values",
        no_difference=NO_KERNEL,
    ),
]
