"""Training kernels of ONNX Runtime in standard operators, one function a kernel.

Each takes the context of one node and returns a replacement for each of its outputs.  ``benchmarks/lowerings.py`` times both forms: where
the standard operators are the faster ones (:func:`unpooled`, :func:`.weight_gradient.threaded_weight_gradient`), every target of the CPU
has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..autodiff.context import Context
from ..graph import Expr
from .weight_gradient import weight_gradient

MS = "com.microsoft"


def unpooled(c: Context) -> Sequence[Expr | None] | None:
    """MaxPoolGrad of windows that do not overlap: each output's gradient is put where its maximum was.

    None for others, and where the last windows reach beyond the input (ceil_mode): MaxUnpool wants an output that holds every window whole.
    """
    target = c.node.outputs[0]
    kernel, strides = c.attr("kernel_shape"), c.attr("strides", [1] * len(c.attr("kernel_shape")))
    if len(kernel) > 3 or any(s < k for s, k in zip(strides, kernel, strict=True)):
        return None
    assert target.shape is not None
    sizes, pads = np.asarray(target.shape.numpy(), np.int64), c.attr("pads", [0] * 2 * len(kernel))
    around = [pads[a] + pads[a + len(kernel)] for a in range(len(kernel))]
    covered = [(n - 1) * s + k - p for n, s, k, p in zip(c.x0.shape[2:], strides, kernel, around, strict=True)]
    if any(full > size for full, size in zip(covered, sizes[2:], strict=True)):
        return None
    return c.op.node("MaxUnpool", c.x0, c.x1, sizes, like=[target], kernel_shape=kernel, strides=strides, pads=pads)


def max_pool_gradient(c: Context) -> Sequence[Expr | None]:
    """MaxPoolGrad: each output's gradient goes to where its maximum was; windows that overlap add up."""
    put = unpooled(c)
    if put is not None:
        return put
    g, indices, target = c.x0, c.x1, c.node.outputs[0]
    assert target.shape is not None
    shape = [int(d) for d in target.shape.numpy()]
    zeros = c.op("ConstantOfShape", np.asarray([math.prod(shape)], np.int64), value=ir.tensor(np.zeros(1, g.dtype.numpy())))
    count = math.prod(g.shape)
    made = c.op("ScatterElements", zeros, indices.reshape([count]), g.reshape([count]), axis=0, reduction="add")
    return [made.reshape(shape)]


def fused_matmul(c: Context) -> Sequence[Expr | None]:
    """FusedMatMul: one Gemm of two matrices; of batches, the transposes by themselves and the factor on the smallest operand."""
    if c.attr("transBatchA", 0) or c.attr("transBatchB", 0):
        raise c.refuse("FusedMatMul with transposed batch dimensions is not written in standard operators")
    a, b, alpha = c.x0, c.x1, float(c.attr("alpha", 1.0))
    flip_a, flip_b = bool(c.attr("transA", 0)) and a.rank > 1, bool(c.attr("transB", 0)) and b.rank > 1
    if a.rank == b.rank == 2:
        return [c.op("Gemm", a, b, transA=int(flip_a), transB=int(flip_b), alpha=alpha)]
    smallest = min((math.prod(v.shape), i) for i, v in enumerate((a, b)))
    output = c.node.outputs[0]
    assert output.shape is not None
    scale_output = alpha != 1.0 and math.prod(int(d) for d in output.shape.numpy()) < smallest[0]
    if alpha != 1.0 and not scale_output:
        a, b = (a * alpha, b) if smallest[1] == 0 else (a, b * alpha)
    product = c.op("MatMul", _swap(a) if flip_a else a, _swap(b) if flip_b else b)
    return [product * alpha if scale_output else product]


def _swap(x: Expr) -> Expr:
    return x.transpose([*range(x.rank - 2), x.rank - 1, x.rank - 2])


def batch_norm(c: Context) -> Sequence[Expr | None]:
    """BatchNormInternal fed scratch with momentum 0: the standard operator's running statistics are then those of the batch."""
    x, epsilon, momentum = c.x0, float(c.attr("epsilon", 1e-5)), float(c.attr("momentum", 0.9))
    if momentum:
        raise c.refuse("BatchNormInternal with a momentum is not written in standard operators")
    operands = [c.input(i) for i in range(5)]
    y, mean, variance = c.op.node(
        "BatchNormalization", *operands, outputs=3, like=[x, operands[1], operands[1]], epsilon=epsilon, momentum=0.0, training_mode=1
    )
    used = [bool(v.name and (v.uses() or v.is_graph_output())) for v in c.node.outputs]
    inverse = c.op("Reciprocal", c.op("Sqrt", variance + epsilon)) if used[4] else None
    return [y, mean, variance, mean if used[3] else None, inverse]


def batch_norm_gradient(c: Context) -> Sequence[Expr | None]:
    """BatchNormalizationGrad: ``dX = a G + b (X - mean) + e`` with three numbers a channel (Ioffe and Szegedy 2015, section 3)."""
    g, x, scale, mean, inverse = (c.input(i) for i in range(5))
    channel = [1, x.shape[1], *[1] * (x.rank - 2)]
    axes = [0, *range(2, x.rank)]
    count = math.prod(x.shape) / x.shape[1]
    centred = x - mean.reshape(channel)
    dbias = g.sum(axes)
    dot = (g * centred).sum(axes)
    dscale = dot * inverse
    factor = scale * inverse
    slope = factor * inverse * dscale * (-1.0 / count)
    shift = factor * dbias * (-1.0 / count)
    dx = g * factor.reshape(channel) + (centred * slope.reshape(channel) + shift.reshape(channel))
    return [dx, dscale, dbias]


def masked_scale(c: Context) -> Sequence[Expr | None]:
    """DropoutGrad: what the mask keeps, scaled up by 1 / (1 - ratio)."""
    g, kept = c.x0, c.x1
    if c.has(3) and not bool(c.const(3)):
        return [g]
    ratio = float(c.const(2)) if c.has(2) else 0.5
    return [g * kept.cast(g.dtype) * (1.0 / (1.0 - ratio))]


def rms_norm(c: Context) -> Sequence[Expr | None]:
    """SimplifiedLayerNormalization, which ONNX Runtime registers among the standard operators: ``x / rms(x) * scale``."""
    x, scale = c.x0, c.x1
    axis = int(c.attr("axis", -1)) % x.rank
    squares = c.op("ReduceMean", x * x, np.asarray(range(axis, x.rank), np.int64), keepdims=1)
    inverse = c.op("Reciprocal", c.op("Sqrt", squares + float(c.attr("epsilon", 1e-5))))
    second = c.node.outputs[1] if len(c.node.outputs) > 1 else None
    kept = None
    if second is not None and second.name:
        assert second.dtype is not None
        kept = inverse.cast(second.dtype)
    return [x * inverse * scale, kept]


def random_like(c: Context) -> Sequence[Expr | None]:
    """RandomNormal and RandomUniform, which read nothing and so hang on nothing, over a tensor of zeros of their shape."""
    output = c.node.outputs[0]
    assert output.shape is not None and output.dtype is not None
    zeros = c.op("ConstantOfShape", np.asarray([int(d) for d in output.shape.numpy()], np.int64), value=ir.tensor(np.zeros(1, output.dtype.numpy())))
    attributes: dict[str, Any] = {a.name: a.value for a in c.node.attributes.values() if a.name not in ("shape", "dtype")}
    return c.op.node(f"{c.node.op_type}Like", zeros, like=[output], dtype=int(output.dtype), **attributes)


LOWERINGS = {
    (MS, "ConvGrad"): weight_gradient,
    ("", "MaxPoolGrad"): max_pool_gradient,
    (MS, "FusedMatMul"): fused_matmul,
    (MS, "BatchNormInternal"): batch_norm,
    (MS, "BatchNormalizationGrad"): batch_norm_gradient,
    (MS, "DropoutGrad"): masked_scale,
    ("", "SimplifiedLayerNormalization"): rms_norm,
    ("", "RandomNormal"): random_like,
    ("", "RandomUniform"): random_like,
}
