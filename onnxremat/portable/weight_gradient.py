"""The gradient of a convolution's weights as a convolution: with standard operators, and on all threads.

``dW[o, i, k] = sum over n, j of G[n, o, j] X[n, i, s j + d k - p]``: a convolution of X with G as the kernel, whose stride is the dilation
and whose dilation is the stride.  ONNX Runtime's kernel ConvGrad unfolds (im2col) each image in one thread and waits for memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..autodiff.context import Context
from ..graph import Expr

#: From so many unfolded channels and output positions of a batch on, the convolution is faster than the kernel (benchmarks/lowerings.py).
_CHANNELS, _POSITIONS = 8, 256


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Window, stride and dilation of each spatial axis; pads at its begin and end."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, c: Context) -> _Geometry:
        window = tuple(c.input(2).shape[2:])
        spatial = len(window)
        pads, ones = tuple(c.attr("pads", [0] * 2 * spatial)), [1] * spatial
        strides, dilations = tuple(c.attr("strides", ones)), tuple(c.attr("dilations", ones))
        return cls(window, strides, dilations, pads[:spatial], pads[spatial:])

    @property
    def taps(self) -> int:
        return math.prod(self.window)

    @property
    def pointwise(self) -> bool:
        return self.taps == 1 and all(s == 1 for s in self.strides) and not any(self.begins + self.ends)

    def exchanged(self) -> _Geometry:
        """With G and X in each other's place, for strides of 1: ``j' = j + d k - p`` is ``j = j' + d (K - 1 - k) - (d (K - 1) - p)``."""
        begins, ends = (
            tuple(d * (k - 1) - p for d, k, p in zip(self.dilations, self.window, pads, strict=True)) for pads in (self.begins, self.ends)
        )
        return replace(self, begins=begins, ends=ends)


def weight_gradient(c: Context) -> Sequence[Expr | None]:
    """ConvGrad's dW in standard operators."""
    if c.node.outputs[0].name or any(v.name for v in c.node.outputs[2:]):
        raise c.refuse("of ConvGrad only the gradient of the weights is written in standard operators")
    g, x, w = c.input(0), c.x1, c.input(2)
    geometry, group = _Geometry.of(c), int(c.attr("group", 1))
    if group == 1 and geometry.pointwise:
        return [None, _pointwise(g, x, w)]
    if group > 1 or w.rank > 4:  # the runtime's convolutions have three dimensions at most
        return [None, _over_images(g, x, w, geometry, group)]
    return [None, _over_channels(g, x, w, geometry)]


def threaded_weight_gradient(c: Context) -> Sequence[Expr | None] | None:
    """ConvGrad's dW as one convolution of images where that is faster than the kernel; None elsewhere."""
    g, w, geometry = c.input(0), c.input(2), _Geometry.of(c)
    if w.rank != 4 or geometry.taps == 1 or int(c.attr("group", 1)) != 1 or g.shape[0] * math.prod(g.shape[2:]) < _POSITIONS:
        return None
    filters, unfolded = sorted(w.shape[:2], reverse=True) if _narrows(w, geometry) else w.shape[:2]
    # Of fewer results than filters the convolution would unfold all of a batch at once.
    return weight_gradient(c) if unfolded >= _CHANNELS and filters <= unfolded * geometry.taps else None


def _narrows(w: Expr, geometry: _Geometry) -> bool:
    """Whether there is less to unfold of G than of X."""
    outs, ins = w.shape[:2]
    turned = geometry.exchanged()
    return _CHANNELS <= outs < ins and all(s == 1 for s in geometry.strides) and min(turned.begins + turned.ends) >= 0


def _over_channels(g: Expr, x: Expr, w: Expr, geometry: _Geometry) -> Expr:
    """Channels become one more dimension, the last: pixels are unfolded by rows of channels, piece by piece on all threads.

    Images are what channels were, and summed over.  Where a filter has no more weights than an image has positions, they are groups instead,
    and the sum is taken afterwards: an image stays in a cache, and the kernel of the convolution needs no transposed copy.
    """
    (outs, ins), exchanged = w.shape[:2], _narrows(w, geometry)
    kernel, unfolded, geometry = (x, g, geometry.exchanged()) if exchanged else (g, x, geometry)
    (images, filters, *positions), (_, channels, *pixels) = kernel.shape, unfolded.shape
    groups = images if images == 1 or channels * geometry.taps <= math.prod(positions) else 1
    rows = unfolded.transpose([0, *range(2, unfolded.rank), 1]).reshape([1, images, *pixels, channels])
    if groups < images:
        kernel = kernel.transpose([1, 0, *range(2, kernel.rank)])
    made = _convolved(rows, kernel.reshape([groups * filters, images // groups, *positions, 1]), geometry, groups)
    made = made.reshape([groups, filters, geometry.taps, channels])
    made = made.sum([0]) if groups > 1 else made.reshape([filters, geometry.taps, channels])
    if exchanged:
        made = made.op("Gather", made, np.arange(geometry.taps)[::-1].copy(), axis=1)
    return made.transpose([2, 0, 1] if exchanged else [0, 2, 1]).reshape([outs, ins, *geometry.window])


def _over_images(g: Expr, x: Expr, w: Expr, geometry: _Geometry, group: int) -> Expr:
    """Images and channels exchanged; the images of a group are its channels."""
    images, channels, *pixels = x.shape
    ins = channels // group
    swapped = [1, 0, *range(2, g.rank)]
    if group == 1:
        rows = x.transpose(swapped)
    else:
        rows = x.reshape([images, group, ins, *pixels]).transpose([2, 1, 0, *range(3, x.rank + 1)]).reshape([ins, group * images, *pixels])
    return _convolved(rows, g.transpose(swapped), geometry, group).transpose(swapped)


def _convolved(x: Expr, kernel: Expr, geometry: _Geometry, group: int) -> Expr:
    """The convolution whose window is the map of ``kernel``, and whose result is ``geometry.window``; further axes are left as they are."""
    spatial = len(geometry.window)
    rest = x.rank - 2 - spatial
    ends = [
        (size - 1) * s + (window - 1) * d + 1 - pixels - begin
        for size, s, window, d, pixels, begin in zip(
            kernel.shape[2:], geometry.strides, geometry.window, geometry.dilations, x.shape[2:], geometry.begins, strict=False
        )
    ]
    made = x.op(
        "Conv",
        x,
        kernel,
        kernel_shape=kernel.shape[2:],
        strides=[*geometry.dilations, *[1] * rest],
        dilations=[*geometry.strides, *[1] * rest],
        pads=[*geometry.begins, *[0] * rest, *[max(0, end) for end in ends], *[0] * rest],
        group=group,
    )
    axes = [2 + i for i in range(spatial) if ends[i] < 0 and made.shape[2 + i] != geometry.window[i]]
    # Pixels that no window reaches.
    return made.slice([0] * len(axes), [geometry.window[a - 2] for a in axes], axes) if axes else made


def _pointwise(g: Expr, x: Expr, w: Expr) -> Expr:
    """Of windows of one pixel: a product over images and pixels."""
    left, right = (v.transpose([1, 0, *range(2, v.rank)]).reshape([v.shape[1], v.shape[0] * math.prod(v.shape[2:])]) for v in (g, x))
    return g.op("Gemm", left, right, transB=1).reshape(w.shape)
