"""VJPs of operators that pick by index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..exporters.forward_graph import PADDING_INDEX
from ..graph import Expr
from ..graph.scatter import add_nd, add_rows
from .context import Context, inverse
from .registry import joint_vjp, not_differentiable, refused, vjp
from .rules_elementwise import mask


def zeros(c: Context, shape: tuple[int, ...], dtype: ir.DataType) -> Expr:
    return c.op("ConstantOfShape", np.asarray(shape, np.int64), value=ir.tensor(np.zeros(1, dtype.numpy())))


def _gather(c: Context, g: Expr) -> Expr:
    shape, indices = c.x0.shape, c.x1
    axis = int(c.attr("axis", 0)) % len(shape)
    padding = c.node.metadata_props.get(PADDING_INDEX)
    if padding is not None:  # a row that torch looks up but does not train
        idle = c.op("Equal", indices, c.op.const(int(padding), indices.dtype)).reshape([*indices.shape, 1])
        g = c.op("Where", idle, c.op.const(0, g.dtype), g)
    if indices.value.const_value is not None and indices.value.const_value.size == 1:
        start = int(c.const(1).reshape(())) % shape[axis]
        kept = g.reshape([*shape[:axis], 1, *shape[axis + 1 :]])
        pads = [0] * (2 * len(shape))
        pads[axis], pads[len(shape) + axis] = start, shape[axis] - 1 - start
        return c.op("Pad", kept, np.asarray(pads, np.int64), c.op.const(0, g.dtype)) if any(pads) else kept
    # Bring the gathered axis to the front, where whole rows are added.
    picked = g.rank - len(shape) + 1
    order = [*range(axis, axis + picked), *range(axis), *range(axis + picked, g.rank)]
    moved = [axis, *range(axis), *range(axis + 1, len(shape))]
    rows = g.transpose(order)
    target = tuple(shape[a] for a in moved)
    return add_rows(zeros(c, target, g.dtype), indices, rows).transpose(inverse(moved))


def _gather_elements(c: Context, g: Expr) -> Expr:
    return c.op("ScatterElements", zeros(c, c.x0.shape, g.dtype), c.x1, g, axis=int(c.attr("axis", 0)), reduction="add")


def _gather_nd(c: Context, g: Expr) -> Expr:
    return add_nd(zeros(c, c.x0.shape, g.dtype), c.x1, g, int(c.attr("batch_dims", 0)))


vjp("Gather", _gather, None)
vjp("GatherElements", _gather_elements, None)
vjp("GatherND", _gather_nd, None)


@joint_vjp("ScatterElements")
def _scatter_elements(c: Context) -> Sequence[Expr | None]:
    g, x, indices, updates = c.g[0], c.x0, c.x1, c.input(2)
    assert g is not None
    axis = int(c.attr("axis", 0))
    reduction = c.attr("reduction", "none")

    def pick(value: Expr) -> Expr:
        return c.op("GatherElements", value, indices, axis=axis)

    def scatter(data: Expr, values: Expr, reduction: str = "none") -> Expr:
        return c.op("ScatterElements", data, indices, values, axis=axis, reduction=reduction)

    if reduction == "add":
        return [g, None, pick(g) if c.wants(2) else None]
    if reduction in ("max", "min"):
        # All that equal the extremum share the gradient equally, as torch's scatter_reduce has it.
        kept, hit = mask(c.op("Equal", x, c.y), g.dtype), mask(c.op("Equal", updates, pick(c.y)), g.dtype)
        share = g / scatter(kept, hit, "add")
        return [share * kept if c.wants(0) else None, None, pick(share) * hit if c.wants(2) else None]
    if reduction == "mul":
        if not c.wants(2):
            return [g * scatter(c.op.const(1.0, x.dtype).expand(x.shape), updates, "mul")]
        # The product of the others: with every zero replaced by 1, P / u where no other factor is zero.
        x_zero, u_zero = mask(c.op("Equal", x, 0.0), g.dtype), mask(c.op("Equal", updates, 0.0), g.dtype)
        x_safe, u_safe = x + x_zero, updates + u_zero
        product, count = g * scatter(x_safe, u_safe, "mul"), scatter(x_zero, u_zero, "add")
        dx = product / x_safe * mask(c.op("Equal", count, x_zero), g.dtype) if c.wants(0) else None
        return [dx, None, pick(product) / u_safe * mask(c.op("Equal", pick(count), u_zero), g.dtype)]
    dx = scatter(g, zeros(c, updates.shape, g.dtype)) if c.wants(0) else None
    return [dx, None, pick(g) if c.wants(2) else None]


def _scatter_nd_data(c: Context, g: Expr) -> Expr:
    if c.attr("reduction", "none") == "add":
        return g
    if c.attr("reduction", "none") != "none":
        raise c.refuse(f"reduction '{c.attr('reduction')}' should have been rewritten before")
    return c.op("ScatterND", g, c.x1, zeros(c, c.input(2).shape, g.dtype))


def _scatter_nd_updates(c: Context, g: Expr) -> Expr:
    if c.attr("reduction", "none") not in ("none", "add"):
        raise c.refuse(f"reduction '{c.attr('reduction')}' should have been rewritten before")
    return c.op("GatherND", g, c.x1)


vjp("ScatterND", _scatter_nd_data, None, _scatter_nd_updates)


def _one_hot_values(c: Context, g: Expr) -> Expr:
    # The values are (off, on).
    total = g.sum(range(g.rank))
    unit = c.op.const(np.asarray([0, 1], g.dtype.numpy()))
    on = (g * c.op("OneHot", c.x0, c.x1, unit, axis=int(c.attr("axis", -1)))).sum(range(g.rank))
    return c.op("Concat", (total - on).reshape([1]), on.reshape([1]), axis=0)


vjp("OneHot", None, None, _one_hot_values)


def _reverse_sequence(c: Context, g: Expr) -> Expr:
    return c.op("ReverseSequence", g, c.x1, batch_axis=int(c.attr("batch_axis", 1)), time_axis=int(c.attr("time_axis", 0)))


vjp("ReverseSequence", _reverse_sequence, None)
vjp("Trilu", lambda c, g: c.op("Trilu", g, *([c.input(1)] if c.has(1) else []), upper=c.attr("upper", 1)), None)
not_differentiable("NonMaxSuppression")
refused("Unique", "the number of its elements depends on data; sort with TopK instead")
refused("Scatter", "ONNX replaced it by ScatterElements in opset 11; convert the file")
