"""VJPs of operators that sample their input at other places: resizing, affine grids, discrete Fourier transforms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ..graph import Expr
from ..runtime.session import Options, make_session
from .context import Context
from .registry import refused, vjp
from .rules_linalg import matmul

Array = npt.NDArray[Any]


def _resize(c: Context, g: Expr) -> Expr:
    # y = W1 (x) W2 (x) ... x, one matrix an axis: its transpose takes the gradient back.
    if c.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise c.refuse("keep_aspect_ratio_policy has no rule; give the sizes or scales of every axis")
    changed = {axis: _axis_matrix(c, axis) for axis in _resized_axes(c)}
    changed = {axis: w for axis, w in changed.items() if w.shape[0] != w.shape[1] or (w != np.eye(len(w))).any()}
    repeats = {axis: len(w) // w.shape[1] for axis, w in changed.items() if np.array_equal(w, np.repeat(np.eye(w.shape[1]), len(w) // w.shape[1], 0))}
    if changed and repeats.keys() == changed.keys():
        # Every entry was repeated: sum over its copies.
        sizes: list[int] = []
        summed: list[int] = []
        for axis, size in enumerate(c.x0.shape):
            sizes.append(size)
            if axis in repeats:
                summed.append(len(sizes))
                sizes.append(repeats[axis])
        return g.reshape(sizes).sum(summed)
    for axis, w in changed.items():
        before, after = g.shape[:axis], g.shape[axis + 1 :]
        matrix = c.op.const(w.astype(g.dtype.numpy()))
        if math.prod(after) == 1:
            g = c.op("MatMul", g.reshape([math.prod(before), len(w)]), matrix)
        else:
            g = matmul(matrix, g.reshape([math.prod(before), len(w), math.prod(after)]), True)
        g = g.reshape([*before, w.shape[1], *after])
    return g


def _resized_axes(c: Context) -> list[int]:
    if "axes" in c.node.attributes:
        return [int(a) % c.x0.rank for a in c.attr("axes")]
    return list(range(c.x0.rank))


def _axis_matrix(c: Context, axis: int) -> Array:
    """The matrix (output size, input size) of a Resize along one axis, as the kernel answers to unit vectors.

    Every mode is linear in the input and separable over the axes, and only the kernel knows how it rounds its coordinates.
    """
    rank, size = c.x0.rank, c.x0.shape[axis]
    axes = _resized_axes(c)
    position = axes.index(axis)
    given: list[Array] = [np.zeros(0, np.float32), np.zeros(0, np.float32)]
    if c.has(1) and c.const(1).size:
        roi = np.repeat(np.asarray([0, 1], np.float32), rank)
        roi[[axis, rank + axis]] = c.const(1)[[position, len(axes) + position]]
        given[0] = roi
    if c.has(3) and c.const(3).size:
        sizes = np.ones(rank, np.int64)
        sizes[axis] = c.const(3)[position]
        given.append(sizes)
    else:
        given[1] = np.ones(rank, np.float32)
        given[1][axis] = c.const(2)[position]
    shape = [size if i == axis else 1 for i in range(rank)]
    names = ["x", "roi", "scales", "sizes"][: 1 + len(given)]
    node = onnx.helper.make_node("Resize", ["x", *(n if a.size else "" for n, a in zip(names[1:], given, strict=True))], ["y"])
    for key, attribute in c.node.attributes.items():
        if key not in ("axes", "keep_aspect_ratio_policy"):
            node.attribute.append(ir.serde.serialize_attribute(attribute))
    graph = onnx.helper.make_graph(
        [node],
        "resize",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(a, n) for n, a in zip(names[1:], given, strict=True) if a.size],
    )
    opset = onnx.helper.make_opsetid("", c.op.graph.opset_imports[""])
    session = make_session(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString(), Options(threads=1))

    def answer(x: Array) -> Array:
        result: Array = session.run(["y"], {"x": x.reshape(shape)})[0].reshape(-1)
        return result

    # Outside of the input there may be a constant (extrapolation_value), which has no gradient.
    constant = answer(np.zeros(size, np.float32))
    return np.stack([answer(unit) - constant for unit in np.eye(size, dtype=np.float32)], axis=1)


vjp("Resize", _resize, None, None, None)
refused("Upsample", "ONNX replaced it by Resize in opset 10; convert the file")


def _affine_grid(c: Context, g: Expr) -> Expr:
    # y = theta (x, y, [z,] 1) at the points of a fixed grid.
    sizes = [int(n) for n in c.const(1)[2:]]
    align = bool(c.attr("align_corners", 0))
    lines = [(2 * np.arange(n) / max(1, n - 1) - 1) if align else ((2 * np.arange(n) + 1) / n - 1) for n in sizes]
    points = np.stack([*reversed(np.meshgrid(*lines, indexing="ij")), np.ones(sizes)], axis=-1).reshape(-1, len(sizes) + 1)
    rows = g.reshape([g.shape[0], len(points), len(sizes)])
    return matmul(rows, c.op.const(points.astype(g.dtype.numpy())), True)


vjp("AffineGrid", _affine_grid, None)


def _dft(c: Context, g: Expr) -> Expr:
    # The adjoint of F is N times the inverse transform, and that of the inverse is F / N.
    shape = list(c.x0.shape)
    axis = int(c.const(2).reshape(())) % len(shape) if c.has(2) else len(shape) - 2
    length = int(c.const(1).reshape(())) if c.has(1) else shape[axis]
    inverse = int(c.attr("inverse", 0))
    if g.shape[axis] != length:  # of a one-sided transform the other half was left out
        if inverse:
            raise c.refuse("a one-sided inverse transform has no rule; transform both sides")
        g = _fit(c, g, axis, length)
    g = c.op("DFT", g, None, np.asarray(axis, np.int64), inverse=1 - inverse)
    g = g * (1 / length if inverse else float(length))
    g = _fit(c, g, axis, shape[axis])
    return g.slice([0], [1], [len(shape) - 1]) if shape[-1] == 1 else g


def _fit(c: Context, g: Expr, axis: int, size: int) -> Expr:
    """Cut or padded with zeros at the end of an axis."""
    if g.shape[axis] > size:
        return g.slice([0], [size], [axis])
    pads = [0] * (2 * g.rank)
    pads[g.rank + axis] = size - g.shape[axis]
    return c.op("Pad", g, np.asarray(pads, np.int64), c.op.const(0, g.dtype)) if any(pads) else g


vjp("DFT", _dft, None, None)
refused("Det", "its gradient needs the inverse of a matrix, which ONNX does not have; write it out for the size at hand")
refused("RoiAlign", "regions of interest have no rule; sample with GridSample instead")
