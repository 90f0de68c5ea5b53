"""VJPs of convolution, pooling, normalization and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph import Expr
from ..ops import MS
from .context import Context
from .registry import joint_vjp, vjp

#: From this many output positions per image on, a convolution with flipped weights computes dX faster than a transposed one
#: (benchmarks/kernels.py).
_FLIPPED_CONV_POSITIONS = 400


def _geometry(c: Context, weight: Expr) -> dict[str, Any]:
    """The window attributes, all explicit (ConvGrad silently ignores auto_pad and absent ones)."""
    spatial = weight.rank - 2
    if c.attr("auto_pad", "NOTSET") != "NOTSET":
        raise c.refuse(f"auto_pad={c.attr('auto_pad')} should have been made explicit before")
    return {
        "kernel_shape": list(weight.shape[2:]),
        "strides": c.attr("strides", [1] * spatial),
        "pads": c.attr("pads", [0] * 2 * spatial),
        "dilations": c.attr("dilations", [1] * spatial),
        "group": int(c.attr("group", 1)),
    }


def _conv_weight_gradient(op: Any, g: Expr, x: Expr, w: Expr, geometry: dict[str, Any]) -> Expr:
    result: Expr = op.node("ConvGrad", g, x, w, domain=MS, outputs=["", op.fresh("conv_dw")], like=[None, w], **geometry)[1]
    return result


def _conv_input_gradient(op: Any, g: Expr, x: Expr, w: Expr, geometry: dict[str, Any]) -> Expr:
    """dX: a convolution of G with the flipped, transposed weights where the stride is 1 and maps are large, else a transposed one."""
    spatial = w.rank - 2
    kernel, strides, pads, dilations = (geometry[k] for k in ("kernel_shape", "strides", "pads", "dilations"))
    full = [d * (k - 1) - p for d, k, p in zip(dilations * 2, kernel * 2, pads, strict=True)]
    unit = all(s == 1 for s in strides) and geometry["group"] == 1 and min(full) >= 0
    if unit and np.prod(g.shape[2:]) >= _FLIPPED_CONV_POSITIONS:
        axes = list(range(2, 2 + spatial))
        flipped = w.transpose([1, 0, *axes])
        if any(k > 1 for k in kernel):
            flipped = flipped.slice([-1] * spatial, [-(2**31)] * spatial, axes, [-1] * spatial)
        result: Expr = op("Conv", g, flipped, kernel_shape=kernel, dilations=dilations, pads=full)
        return result
    covered = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(g.shape[2:], strides, dilations, kernel, strict=True)]
    missing = [x.shape[2 + i] + pads[i] + pads[spatial + i] - covered[i] for i in range(spatial)]
    result = op("ConvTranspose", g, w, **geometry, output_padding=missing)
    return result


def _channel_sum(g: Expr) -> Expr:
    return g.sum([0, *range(2, g.rank)])


@joint_vjp("Conv")
def _conv(c: Context) -> Sequence[Expr | None]:
    g, x, w = c.g[0], c.x0, c.x1
    assert g is not None
    geometry = _geometry(c, w)
    if x.rank == 3:
        return _conv_1d(c, g, x, w, geometry)
    dw = _conv_weight_gradient(c.op, g, x, w, geometry) if c.wants(1) else None
    dx = _conv_input_gradient(c.op, g, x, w, geometry) if c.wants(0) else None
    return [dx, dw, _channel_sum(g) if c.wants(2) else None]


def _conv_1d(c: Context, g: Expr, x: Expr, w: Expr, geometry: dict[str, Any]) -> Sequence[Expr | None]:
    """A 1-D convolution as a 2-D one of height 1 (ConvGrad's kernel is written for images)."""
    flat = _lift_geometry(geometry)
    dw = _conv_weight_gradient(c.op, _lift(g), _lift(x), _lift(w), flat).reshape(w.shape) if c.wants(1) else None
    dx = _conv_input_gradient(c.op, _lift(g), _lift(x), _lift(w), flat).reshape(x.shape) if c.wants(0) else None
    return [dx, dw, _channel_sum(g) if c.wants(2) else None]


def _lift(value: Expr) -> Expr:
    return value.reshape([*value.shape[:2], 1, value.shape[2]])


def _lift_geometry(geometry: dict[str, Any]) -> dict[str, Any]:
    begin, end = geometry["pads"]
    ones = {key: [1, *geometry[key]] for key in ("kernel_shape", "strides", "dilations")}
    return {**ones, "pads": [0, begin, 0, end], "group": geometry["group"]}


@joint_vjp("ConvTranspose")
def _conv_transpose(c: Context) -> Sequence[Expr | None]:
    # The adjoint of a convolution: dX is that convolution, dW its weight gradient with the roles of input and output exchanged.
    g, x, w = c.g[0], c.x0, c.x1
    assert g is not None
    if "output_shape" in c.node.attributes:
        raise c.refuse("ConvTranspose with output_shape has no rule; give pads and output_padding instead")
    geometry = _geometry(c, w)
    dw = None
    if c.wants(1):
        if x.rank == 3:
            dw = _conv_weight_gradient(c.op, _lift(x), _lift(g), _lift(w), _lift_geometry(geometry)).reshape(w.shape)
        else:
            dw = _conv_weight_gradient(c.op, x, g, w, geometry)
    dx = c.op("Conv", g, w, **geometry) if c.wants(0) else None
    return [dx, dw, _channel_sum(g) if c.wants(2) else None]


def _max_pool(c: Context, g: Expr) -> Expr:
    if int(c.attr("storage_order", 0)):
        raise c.refuse("storage_order=1 has no rule; export the pooling in row-major order")
    indices = c.saved(1, c.y.shape, ir.DataType.INT64, "maxpool_indices")
    spatial = c.x0.rank - 2
    return c.op.node(
        "MaxPoolGrad",
        g,
        indices,
        like=[c.x0],
        kernel_shape=c.attr("kernel_shape"),
        strides=c.attr("strides", [1] * spatial),
        pads=c.attr("pads", [0] * 2 * spatial),
    )[0]


vjp("MaxPool", _max_pool)


def _average_pool(c: Context, g: Expr) -> Expr:
    # Each input gets the sum over the windows that contain it: a depthwise transposed convolution with a constant kernel.
    if int(c.attr("ceil_mode", 0)) or c.attr("auto_pad", "NOTSET") != "NOTSET":
        raise c.refuse("AveragePool with ceil_mode or auto_pad has no rule yet; give explicit pads")
    x, spatial = c.x0, c.x0.rank - 2
    kernel = c.attr("kernel_shape")
    strides = c.attr("strides", [1] * spatial)
    pads = c.attr("pads", [0] * 2 * spatial)
    dilations = c.attr("dilations", [1] * spatial)
    size = int(np.prod(kernel))
    if any(pads) and not int(c.attr("count_include_pad", 0)):
        ones = np.ones((1, 1, *x.shape[2:]), x.dtype.numpy())
        counts = _window_counts(ones, kernel, strides, pads, dilations)
        g = g * c.op.const((1.0 / counts).astype(x.dtype.numpy()))
    else:
        g = g * (1 / size)
    channels = x.shape[1]
    weight = c.op.const(np.ones((1, 1, *kernel), x.dtype.numpy()))
    folded = g.reshape([g.shape[0] * channels, 1, *g.shape[2:]])
    covered = [(g.shape[2 + i] - 1) * strides[i] + dilations[i] * (kernel[i] - 1) + 1 - pads[i] - pads[spatial + i] for i in range(spatial)]
    extra = [x.shape[2 + i] - covered[i] for i in range(spatial)]
    spread = c.op(
        "ConvTranspose", folded, weight, kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations, output_padding=extra
    )
    return spread.reshape(x.shape)


def _window_counts(ones: Any, kernel: list[int], strides: list[int], pads: list[int], dilations: list[int]) -> Any:
    """How many real (unpadded) positions each window covers, separable over the axes; shape (1, 1, *output)."""
    spatial = len(kernel)
    counts = np.ones((1, 1), np.float64)
    for i in range(spatial):
        size = ones.shape[2 + i]
        length = (size + pads[i] + pads[spatial + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1
        starts = np.arange(length) * strides[i] - pads[i]
        inside = [sum(0 <= s + k * dilations[i] < size for k in range(kernel[i])) for s in starts]
        counts = counts[..., None] * np.asarray(inside, np.float64)
    return counts


vjp("AveragePool", _average_pool)


def _global_average_pool(c: Context, g: Expr) -> Expr:
    size = int(np.prod(c.x0.shape[2:], dtype=np.int64))
    return (g * (1 / size)).expand(c.x0.shape)


vjp("GlobalAveragePool", _global_average_pool)


@joint_vjp("BatchNormalization")
def _batch_normalization(c: Context) -> Sequence[Expr | None]:
    g, x, scale = c.g[0], c.x0, c.x1
    if g is None:
        raise c.refuse("a gradient flows into its running statistics only")
    channel = (1, x.shape[1]) + (1,) * (x.rank - 2)
    if not int(c.attr("training_mode", 0)):
        factor = c.op("Reciprocal", c.op("Sqrt", c.input(4) + float(c.attr("epsilon", 1e-5))))
        dx = g * (scale * factor).reshape(channel) if c.wants(0) else None
        centred = (x - c.input(3).reshape(channel)) * factor.reshape(channel) if c.wants(1) else None
        dscale = _channel_sum(g * centred) if centred is not None else None
        if c.wants(3) or c.wants(4):
            raise c.refuse("its running statistics are to be trained; freeze them")
        return [dx, dscale, _channel_sum(g) if c.wants(2) else None]
    raise c.refuse("its training form should have been normalized to BatchNormInternal before")


@joint_vjp("BatchNormInternal", domain=MS)
def _batch_norm_internal(c: Context) -> Sequence[Expr | None]:
    if any(g is not None for g in c.g[1:]):
        raise c.refuse("the loss depends on its running statistics; use the normalized output instead")
    g, x, scale = c.g[0], c.x0, c.x1
    saved_mean, saved_inv_std = (c.op.wrap(v) for v in c.node.outputs[3:5])
    return c.op.node(
        "BatchNormalizationGrad",
        *(g, x, scale, saved_mean, saved_inv_std),
        domain=MS,
        outputs=3,
        like=[x, scale, scale],
        epsilon=float(c.attr("epsilon", 1e-5)),
    )


@joint_vjp("LayerNormalization")
def _layer_normalization(c: Context) -> Sequence[Expr | None]:
    # com.microsoft.LayerNormalizationGrad would need four times its input as workspace.
    g, x, scale = c.g[0], c.x0, c.x1
    if g is None or any(other is not None for other in c.g[1:]):
        raise c.refuse("the loss depends on its mean or deviation; compute them with ReduceMean")
    axis = int(c.attr("axis", -1)) % x.rank
    axes = list(range(axis, x.rank))
    dbias = g.sum(range(axis)).reshape(c.input(2).shape) if c.wants(2) else None
    if not c.wants(0) and not c.wants(1):
        return [None, None, dbias]
    statistics = [*x.shape[:axis], *[1] * len(axes)]
    stash = ir.DataType(int(c.attr("stash_type", 1)))
    mean = c.saved(1, statistics, stash, "layernorm_mean").cast(x.dtype)
    inv_std = c.saved(2, statistics, stash, "layernorm_inv_std").cast(x.dtype)
    normal = (x - mean) * inv_std
    dscale = (g * normal).sum(range(axis)).reshape(scale.shape) if c.wants(1) else None
    if not c.wants(0):
        return [None, dscale, dbias]
    h = g * scale

    def mean_of(value: Expr) -> Expr:
        return c.op("ReduceMean", value, np.asarray(axes, np.int64), keepdims=1)

    return [(h - mean_of(h) - normal * mean_of(h * normal)) * inv_std, dscale, dbias]


@joint_vjp("Dropout")
def _dropout(c: Context) -> Sequence[Expr | None]:
    g = c.g[0]
    assert g is not None
    if not c.has(2) or not bool(c.const(2)):
        return [g]
    kept = c.saved(1, c.x0.shape, ir.DataType.BOOL, "dropout_mask")
    return c.op.node("DropoutGrad", g, kept, c.x[1], c.input(2), domain=MS, like=[c.x0])
