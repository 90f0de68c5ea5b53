"""Operators of com.microsoft that ONNX Runtime's optimizer or exporters emit, in standard ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..autodiff.context import Context
from ..autodiff.rules_linalg import matmul
from ..graph import Expr
from ..ops import MS
from .normalization import used
from .registry import rewrite

#: Activations of fused products: name -> the attributes that it takes from ``activation_alpha``/``_beta``/``_gamma`` or ``_params``.
_ACTIVATIONS = {
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Elu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "Softplus": (),
    "Softsign": (),
    "ThresholdedRelu": ("alpha",),
}


def _activate(c: Context, x: Expr) -> Expr:
    """The activation that a fused operator ends in."""
    name = c.attr("activation", "")
    if not name:
        return x
    params = c.attr("activation_params", [])
    if name == "Clip" and len(params) == 2:
        return c.op("Clip", x, *map(float, params))
    if name not in _ACTIVATIONS:
        raise c.refuse(f"its activation '{name}' is unknown; export the model without fusing")
    given = {key: params[i] if i < len(params) else c.attr(f"activation_{key}") for i, key in enumerate(_ACTIVATIONS[name])}
    return c.op(name, x, **{key: float(value) for key, value in given.items() if value is not None})


@rewrite("FusedGemm", domain=MS)
def _fused_gemm(c: Context) -> Expr:
    attributes = {name: c.attr(name) for name in ("alpha", "beta", "transA", "transB")}
    return _activate(c, c.op("Gemm", *c.x, **attributes))


def _conv(c: Context, x: Expr) -> Expr:
    attributes = {name: c.attr(name) for name in ("group", "strides", "dilations", "pads", "kernel_shape")}
    if c.attr("auto_pad", "NOTSET") == "VALID":
        attributes["pads"] = [0] * 2 * (x.rank - 2)
    elif c.attr("auto_pad", "NOTSET") != "NOTSET":
        raise c.refuse("auto_pad has to be made explicit; give pads")
    return c.op("Conv", x, c.x1, *([c.input(2)] if c.has(2) else []), **attributes)


@rewrite("FusedConv", domain=MS)
def _fused_conv(c: Context) -> Expr:
    """act(conv(x) + z)."""
    y = _conv(c, c.x0)
    return _activate(c, y + c.input(3) if c.has(3) else y)


@rewrite("NhwcConv NhwcFusedConv", domain=MS)
def _nhwc_conv(c: Context) -> Expr:
    """The convolution of a tensor whose channels come last; its weights are laid out as usual, or likewise in NhwcConv."""
    rank = c.x0.rank
    to_front, to_back = [0, rank - 1, *range(1, rank - 1)], [0, *range(2, rank), 1]
    if c.node.op_type == "NhwcConv":
        c.x[1] = c.x1.transpose(to_front)
    y = _conv(c, c.x0.transpose(to_front)).transpose(to_back)
    return _activate(c, y + c.input(3) if c.has(3) else y)


@rewrite("FusedMatMul", domain=MS, has_rule=True)
@rewrite("FusedMatMulActivation TransposeMatMul", domain=MS)
def _fused_matmul(c: Context) -> Expr | None:
    """Products with transposed batch axes or an activation; the plain FusedMatMul stays."""
    if c.node.op_type == "FusedMatMul" and not c.attr("transBatchA", 0) and not c.attr("transBatchB", 0):
        return None
    operands = []
    for index, name in ((0, "A"), (1, "B")):
        x = c.input(index)
        if c.attr(f"transBatch{name}", 0) and x.rank > 2:
            # (rows, *batch, columns), by the transposition of both (columns, *batch, rows): the batch axes come first.
            x = x.transpose([*range(1, x.rank - 1), 0, x.rank - 1])
        operands.append(x)
    a, b = operands
    product = matmul(a, b, bool(c.attr("transA", 0)) and a.rank > 1, bool(c.attr("transB", 0)) and b.rank > 1, float(c.attr("alpha", 1.0)))
    return _activate(c, product)


@rewrite("FastGelu GemmFastGelu", domain=MS)
def _fast_gelu(c: Context) -> Expr:
    """GELU's tanh form of x + bias, or of x @ w + bias."""
    gemm = c.node.op_type == "GemmFastGelu"
    x, bias = (c.op("MatMul", c.x0, c.x1), 2) if gemm else (c.x0, 1)
    return c.op("Gelu", x + c.input(bias) if c.has(bias) else x, approximate="tanh")


@rewrite("QuickGelu", domain=MS)
def _quick_gelu(c: Context) -> Expr:
    return c.x0 * c.op("Sigmoid", c.x0 * float(c.attr("alpha", 1.702)))


@rewrite("BiasGelu", domain=MS)
def _bias_gelu(c: Context) -> Expr:
    return c.op("Gelu", c.x0 + c.x1)


@rewrite("BiasAdd", domain=MS)
def _bias_add(c: Context) -> Expr:
    return c.x0 + c.x1 + c.input(2)


@rewrite("BiasSplitGelu", domain=MS)
def _bias_split_gelu(c: Context) -> Expr:
    """The first half of x + bias times the GELU of the second."""
    left, right = c.op.node("Split", c.x0 + c.x1, outputs=2, axis=-1, num_outputs=2)
    return left * c.op("Gelu", right)


@rewrite("BiasSoftmax", domain=MS)
def _bias_softmax(c: Context) -> Expr:
    """softmax(x + bias) over all axes from ``axis`` on; the bias lacks either inner or outer batch axes."""
    x, bias = c.x0, c.x1
    axis = int(c.attr("axis", 1)) % x.rank
    if bias.rank == x.rank or int(c.attr("is_inner_broadcast", 0)) == 0:
        total = x + bias
    else:
        missing = x.rank - bias.rank
        lead = axis - missing
        total = x + bias.reshape([*bias.shape[:lead], *[1] * missing, *bias.shape[lead:]])
    rows = [int(np.prod(x.shape[:axis], dtype=np.int64)), int(np.prod(x.shape[axis:], dtype=np.int64))]
    return c.op("Softmax", total.reshape(rows), axis=1).reshape(x.shape)


@rewrite("BiasDropout BitmaskDropout BitmaskBiasDropout", domain=MS)
def _bias_dropout(c: Context) -> Sequence[Expr | None]:
    """dropout(x + bias) + residual; a mask of single bits is an inner matter of its kernels."""
    biased = "Bias" in c.node.op_type
    x = c.x0 + c.x1 if biased else c.x0
    ratio, mode = (3, 4) if biased else (1, 2)
    if used(c, 1) and "Bitmask" in c.node.op_type:
        raise c.refuse("the model reads its mask of single bits; use Dropout")
    y, mask = c.op.node("Dropout", x, *(c.x[i] if c.has(i) else None for i in (ratio, mode)), outputs=2)
    return [y + c.input(2) if biased and c.has(2) else y, mask]


@rewrite("Trilu", domain=MS)
def _trilu(c: Context) -> Expr:
    return c.op("Trilu", c.x0, *([c.x1] if c.has(1) else []), upper=c.attr("upper", 1))


@rewrite("ExpandDims", domain=MS)
def _expand_dims(c: Context) -> Expr:
    axis = int(c.const(1).reshape(()))
    axis += c.x0.rank + 1 if axis < 0 else 0
    return c.op("Unsqueeze", c.x0, np.asarray([axis], np.int64))


@rewrite("RotaryEmbedding", domain=MS)
def _rotary_embedding(c: Context) -> Expr:
    """x cos + rotated(x) sin on the first ``rotary_embedding_dim`` entries of each head (Su et al. 2021, RoFormer)."""
    if int(c.attr("is_packed_batching", 0)):
        raise c.refuse("packed batches have sequences of unknown lengths; use padded ones")
    x, positions, cos, sin = c.x0, c.x1, c.input(2), c.input(3)
    scale = float(c.attr("scale", 1.0))
    heads, part = int(c.attr("num_heads", 0)), int(c.attr("rotary_embedding_dim", 0))
    shape = x.shape
    if x.rank == 3:  # (batch, sequence, hidden); of rank 4 it is (batch, heads, sequence, head size)
        heads = heads if heads and part else shape[2] // (2 * cos.shape[1])
        x = x.reshape([shape[0], shape[1], heads, shape[2] // heads]).transpose([0, 2, 1, 3])
    batch, _, length, size = x.shape
    part = part or size
    if positions.value.shape is not None and int(np.prod(positions.shape)) == 1 and (batch, length) != (1, 1):
        # One offset for all: the positions count on from it.
        positions = positions.reshape([1, 1]) + np.arange(length, dtype=np.int64).reshape(1, length)
    angles = [c.op("Gather", table, positions).reshape([positions.shape[0], 1, length, part // 2]) for table in (cos, sin)]
    rotated, rest = (x, None) if part == size else c.op.node("Split", x, np.asarray([part, size - part], np.int64), outputs=2, axis=-1)
    if int(c.attr("interleaved", 0)):
        pairs = rotated.reshape([*rotated.shape[:-1], part // 2, 2])
        a, b = (h.reshape([*rotated.shape[:-1], part // 2]) for h in c.op.node("Split", pairs, outputs=2, axis=-1, num_outputs=2))
    else:
        a, b = c.op.node("Split", rotated, outputs=2, axis=-1, num_outputs=2)
    halves = [a * angles[0] - b * angles[1], b * angles[0] + a * angles[1]]
    if int(c.attr("interleaved", 0)):
        wide = [h.reshape([*h.shape, 1]) for h in halves]
        y = c.op("Concat", *wide, axis=-1).reshape(rotated.shape)
        y = y if rest is None else c.op("Concat", y, rest, axis=-1)
    else:
        y = c.op("Concat", *halves, *([] if rest is None else [rest]), axis=-1)
    y = y if scale == 1.0 else y * scale
    return y.transpose([0, 2, 1, 3]).reshape(shape) if len(shape) == 3 else y


@rewrite("SoftmaxCrossEntropyLossInternal", domain=MS)
def _internal_cross_entropy(c: Context) -> Sequence[Expr | None]:
    """SoftmaxCrossEntropyLoss whose ``ignore_index`` is an input."""
    ignore = int(c.const(3).reshape(())) if c.has(3) else c.attr("ignore_index")
    return c.op.node(
        "SoftmaxCrossEntropyLoss",
        *(c.x[:3] if c.has(2) else c.x[:2]),
        outputs=2,
        reduction=c.attr("reduction", "mean"),
        ignore_index=None if ignore is None else int(ignore),
    )


def as_float_mask(condition: Expr, dtype: ir.DataType, filler: float) -> Expr:
    """0 where the condition holds, else ``filler``."""
    return (1.0 - condition.cast(dtype)) * filler
