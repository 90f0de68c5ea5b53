"""VJPs of convolutions of any rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph import Expr
from ..ops import MS
from .context import Context
from .registry import joint_vjp, refused

#: From this many output positions per image, or in a batch, on, a convolution with flipped weights computes dX faster than a transposed
#: one (benchmarks/kernels.py).
_FLIPPED_CONV_POSITIONS, _FLIPPED_CONV_BATCH_POSITIONS = 400, 512


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
    if 0 in g.shape:  # the kernel divides by the number of images
        zero: Expr = op.const(0.0, w.dtype).expand(w.shape)
        return zero
    result: Expr = op.node("ConvGrad", g, x, w, domain=MS, outputs=["", op.fresh("conv_dw")], like=[None, w], **geometry)[1]
    return result


def adjoint_weights(w: Expr, group: int) -> Expr:
    """The weights of the adjoint convolution: input and output channels of each group exchanged, the window reversed.

    While the window is reversed, the channels that become input channels are the last axis: Gather moves rows of them (a Slice with negative
    steps goes element by element), and blocked convolutions can take them from there.
    """
    outs, ins, window = w.shape[0] // group, w.shape[1], w.shape[2:]
    taps = math.prod(window)
    if group == taps == 1:
        return w.transpose([1, 0, *range(2, w.rank)])
    if group == 1:
        rows = w.reshape([outs, ins, taps]).transpose([1, 2, 0])
    else:
        rows = w.reshape([group, outs, ins, taps]).transpose([0, 2, 3, 1]).reshape([group * ins, taps, outs])
    if taps > 1:
        rows = rows.op("Gather", rows, np.arange(taps)[::-1].copy(), axis=1)
    return rows.transpose([0, 2, 1]).reshape([group * ins, outs, *window])


def _conv_input_gradient(op: Any, g: Expr, x: Expr, w: Expr, geometry: dict[str, Any]) -> Expr:
    """dX: a convolution of G with the adjoint weights where the stride is 1 and maps are large, else a transposed one."""
    spatial = w.rank - 2
    kernel, strides, pads, dilations = (geometry[k] for k in ("kernel_shape", "strides", "pads", "dilations"))
    group = int(geometry["group"])
    full = [d * (k - 1) - p for d, k, p in zip(dilations * 2, kernel * 2, pads, strict=True)]
    positions = np.prod(g.shape[2:])
    large = positions >= _FLIPPED_CONV_POSITIONS or g.shape[0] * positions >= _FLIPPED_CONV_BATCH_POSITIONS
    if all(s == 1 for s in strides) and min(full) >= 0 and large:
        adjoint = adjoint_weights(w, group)
        result: Expr = op("Conv", g, adjoint, kernel_shape=kernel, strides=strides, dilations=dilations, pads=full, group=group)
        return result
    covered = [(n - 1) * s + d * (k - 1) + 1 for n, s, d, k in zip(g.shape[2:], strides, dilations, kernel, strict=True)]
    missing = [x.shape[2 + i] + pads[i] + pads[spatial + i] - covered[i] for i in range(spatial)]
    result = op("ConvTranspose", g, w, **geometry, output_padding=missing)
    return result


def channel_sum(g: Expr) -> Expr:
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
    return [dx, dw, channel_sum(g) if c.wants(2) else None]


def _conv_1d(c: Context, g: Expr, x: Expr, w: Expr, geometry: dict[str, Any]) -> Sequence[Expr | None]:
    """A 1-D convolution as a 2-D one of height 1 (ConvGrad's kernel is written for images)."""
    flat = _lift_geometry(geometry)
    dw = _conv_weight_gradient(c.op, _lift(g), _lift(x), _lift(w), flat).reshape(w.shape) if c.wants(1) else None
    dx = _conv_input_gradient(c.op, _lift(g), _lift(x), _lift(w), flat).reshape(x.shape) if c.wants(0) else None
    return [dx, dw, channel_sum(g) if c.wants(2) else None]


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
        raise c.refuse("output_shape should have been made explicit before")
    geometry = _geometry(c, w)
    if any(e >= s for e, s in zip(c.attr("output_padding", []), geometry["strides"], strict=False)):
        raise c.refuse("ONNX Runtime computes output_padding of the stride and more wrongly; pad the output with Pad instead")
    dw = None
    if c.wants(1):
        if x.rank == 3:
            dw = _conv_weight_gradient(c.op, _lift(x), _lift(g), _lift(w), _lift_geometry(geometry)).reshape(w.shape)
        else:
            dw = _conv_weight_gradient(c.op, x, g, w, geometry)
    dx = c.op("Conv", g, w, **geometry) if c.wants(0) else None
    return [dx, dw, channel_sum(g) if c.wants(2) else None]


refused("DeformConv", "ONNX Runtime 1.19.2 has no kernel for it; sample with GridSample and convolve with Conv instead")


@joint_vjp("Col2Im")
def _col2im(c: Context) -> Sequence[Expr | None]:
    # The adjoint of adding blocks into an image is cutting them out: a convolution of each channel with the unit blocks.
    g, shape = c.g[0], c.x0.shape
    assert g is not None
    block = [int(n) for n in c.const(2).tolist()]
    spatial, size = len(block), math.prod(block)
    units = c.op.const(np.eye(size, dtype=g.dtype.numpy()).reshape(size, 1, *block))
    cut = c.op(
        "Conv",
        g.reshape([math.prod(g.shape[:2]), 1, *g.shape[2:]]),
        units,
        kernel_shape=block,
        strides=c.attr("strides", [1] * spatial),
        pads=c.attr("pads", [0] * 2 * spatial),
        dilations=c.attr("dilations", [1] * spatial),
    )
    return [cut.reshape(shape)]
