"""Training kernels of ONNX Runtime in standard operators, one function a kernel.

Each takes the context of one node and returns a replacement for each of its outputs.  ``benchmarks/lowerings.py`` times both forms: where
the standard operators are the faster ones (:func:`unpooled`, :func:`threaded_weight_gradient`), every target of the CPU has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..autodiff.context import Context
from ..graph import Expr

MS = "com.microsoft"


#: From so many input channels and output positions of a batch on, dW as one convolution is faster than its kernel (benchmarks/lowerings.py).
_CHANNELS, _POSITIONS = 8, 256


def weight_gradient(c: Context) -> Sequence[Expr | None]:
    """ConvGrad's dW: a convolution of X with G as the kernel, in which images are what channels were.

    ``dW[o, i, k] = sum over n, j of G[n, o, j] X[n, i, s j + d k - p]``: the stride becomes the dilation, the dilation the stride.
    """
    if c.node.outputs[0].name or any(v.name for v in c.node.outputs[2:]):
        raise c.refuse("of ConvGrad only the gradient of the weights is written in standard operators")
    g, x, w = c.input(0), c.x1, c.input(2)
    spatial, group = w.rank - 2, int(c.attr("group", 1))
    strides, dilations = c.attr("strides", [1] * spatial), c.attr("dilations", [1] * spatial)
    pads = c.attr("pads", [0] * 2 * spatial)
    if _is_product(w.shape[2:], strides, pads, group):
        return [None, _pointwise_weight_gradient(g, x, w)]
    if group == 1 and spatial <= 2:  # the runtime's convolutions have three dimensions at most
        # The channels of X are one more dimension, the last: its pixels are unfolded by rows of them, piece by piece on all threads.
        images, row = x.transpose([0, *range(2, x.rank), 1]).reshape([1, x.shape[0], *x.shape[2:], x.shape[1]]), [1]
    else:
        images, row = _images_as_channels(x, group), []
    kernel = g.transpose([1, 0, *range(2, g.rank)])
    ends = [
        (g.shape[2 + i] - 1) * strides[i] + (w.shape[2 + i] - 1) * dilations[i] + 1 - x.shape[2 + i] - pads[i] for i in range(spatial)
    ]
    made: Expr = c.op(
        "Conv",
        images,
        kernel.reshape([*kernel.shape, *row]),
        kernel_shape=[*g.shape[2:], *row],
        strides=[*dilations, *row],
        dilations=[*strides, *row],
        pads=[*pads[:spatial], *[0] * len(row), *[max(0, end) for end in ends], *[0] * len(row)],
        group=group,
    )
    axes = [2 + i for i in range(spatial) if ends[i] < 0 and made.shape[2 + i] != w.shape[2 + i]]
    if axes:  # pixels that no window reaches
        made = made.slice([0] * len(axes), [w.shape[a] for a in axes], axes)
    if row:
        outs, ins = w.shape[:2]
        return [None, made.reshape([outs, math.prod(w.shape[2:]), ins]).transpose([0, 2, 1]).reshape(w.shape)]
    return [None, made.transpose([1, 0, *range(2, 2 + spatial)])]


def _images_as_channels(x: Expr, group: int) -> Expr:
    """Images and channels exchanged; the images of a group are its channels."""
    batch, ins = x.shape[0], x.shape[1] // group
    if group == 1:
        return x.transpose([1, 0, *range(2, x.rank)])
    images = x.reshape([batch, group, ins, *x.shape[2:]]).transpose([2, 1, 0, *range(3, x.rank + 1)])
    return images.reshape([ins, group * batch, *x.shape[2:]])


def threaded_weight_gradient(c: Context) -> Sequence[Expr | None] | None:
    """ConvGrad's dW as one convolution where that is faster: the kernel unfolds every image in one thread, and waits for memory."""
    g, w = c.input(0), c.input(2)
    taps, positions = math.prod(w.shape[2:]), g.shape[0] * math.prod(g.shape[2:])
    if w.rank != 4 or taps == 1 or int(c.attr("group", 1)) != 1 or w.shape[1] < _CHANNELS or positions < _POSITIONS:
        return None
    # Of fewer results than filters the convolution would unfold all of a batch at once.
    return weight_gradient(c) if w.shape[0] <= w.shape[1] * taps else None


def _is_product(kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], group: int) -> bool:
    return group == 1 and math.prod(kernel) == 1 and all(s == 1 for s in strides) and not any(pads)


def _pointwise_weight_gradient(g: Expr, x: Expr, w: Expr) -> Expr:
    """Of a convolution with windows of one pixel: a product over images and pixels."""
    rows = [math.prod(v.shape[:1]) * math.prod(v.shape[2:]) for v in (g, x)]
    left = g.transpose([1, 0, *range(2, g.rank)]).reshape([g.shape[1], rows[0]])
    right = x.transpose([1, 0, *range(2, x.rank)]).reshape([x.shape[1], rows[1]])
    return g.op("Gemm", left, right, transB=1).reshape(w.shape)


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
    zeros = c.op(
        "ConstantOfShape", np.asarray([int(d) for d in output.shape.numpy()], np.int64), value=ir.tensor(np.zeros(1, output.dtype.numpy()))
    )
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
