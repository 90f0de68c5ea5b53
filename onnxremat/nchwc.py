"""Convolutions in the blocked layout (NCHWc) of ONNX Runtime's CPU provider.

Its plain convolution unfolds one image at a time, which on small maps leaves most of the machine idle; the blocked kernels of
``com.microsoft.nchwc`` take 60 to 90 % of the time, a third for depthwise ones (``benchmarks/kernels.py``).  The block is 8 or 16
channels wide, depending on the processor, so it must not appear in a file: an activation is reordered by ``ReorderInput``, and so are the
weights, whose layout OIHW{i}{o} is two such reorders, first of the input channels of each output channel, then of the output channels.
Shapes stay those of the plain layout wherever channels are multiples of 16.

The kernels exist on x86-64 only.  Elsewhere a file with them fails to load, with an error that names ``ReorderInput``.
"""

from __future__ import annotations

import math
import platform

import onnx_ir as ir

from .errors import UsageError
from .graph import Expr, GraphBuilder, static_shape

NCHWC = "com.microsoft.nchwc"

#: Channels are multiples of the widest block.
_BLOCK = 16
#: Below so many output positions in a batch the reorder of the weights costs more than the faster kernel saves.
_POSITIONS = 256
#: Inputs of fewer channels than the narrowest block are read as they are; that pays for windows of at least so many elements.
_FEW_CHANNELS, _WINDOW = 4, 64


def resolve_layout(name: str, blocked_kernels: bool = True) -> str:
    """ "nchwc" or "nchw"; "auto" is what suits this machine's processor.

    Args:
        name: what was asked for.
        blocked_kernels: whether the target has the blocked kernels at all.

    Raises:
        UsageError: another name, or a layout that the target has no kernels for.
    """
    if name not in ("auto", "nchwc", "nchw"):
        raise UsageError(f"the convolution layout '{name}' is unknown: use auto, nchwc or nchw")
    if not blocked_kernels:
        if name == "nchwc":
            raise UsageError("the blocked convolutions (--conv-layout nchwc) are no standard operators: leave it out, or use --target ort-training")
        return "nchw"
    if name != "auto":
        return name
    return "nchwc" if platform.machine() in ("x86_64", "AMD64") else "nchw"


def block_convolutions(op: GraphBuilder) -> None:
    """Let every 2-D convolution that gains from it run in the blocked layout, its operands and result reordered around it."""
    for node in [n for n in op.graph if n.op_type == "Conv" and n.domain == "" and _gains(n)]:
        op.graph.opset_imports[NCHWC] = 1
        op.before, op.metadata = node, dict(node.metadata_props)
        x, w, *bias = [None if v is None else op.wrap(v) for v in node.inputs]
        (result,) = node.outputs
        assert x is not None and w is not None
        attributes = {a.name: a.value for a in node.attributes.values() if a.name != "auto_pad"}
        few = x.shape[1] <= _FEW_CHANNELS
        blocked = op("Conv", x if few else _reorder(op, x), _reorder_weights(op, w, few), *bias, **attributes, domain=NCHWC, like=[result])
        plain = op("ReorderOutput", blocked, channels=blocked.shape[1], domain=NCHWC, like=[result]).value
        result.replace_all_uses_with(plain, replace_graph_outputs=True)
        name, result.name = result.name, op.fresh(f"{result.name}_plain")
        plain.name = name
        op.graph.remove(node, safe=True)
        _remove_unused(op.graph, w.value)
    op.before, op.metadata = None, {}


def _gains(node: ir.Node) -> bool:
    x, w, y = (static_shape(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]) if v is not None)
    group = node.attributes["group"].as_int() if "group" in node.attributes else 1
    pointwise = math.prod(w[2:]) == 1  # plain matrix products: nothing to gain
    if len(x) != 4 or node.outputs[0].dtype != ir.DataType.FLOAT or pointwise or w[0] % _BLOCK or y[0] * math.prod(y[2:]) < _POSITIONS:
        return False
    if group > 1:
        return group == x[1] == w[0]
    return x[1] % _BLOCK == 0 or (x[1] <= _FEW_CHANNELS and math.prod(w[1:]) >= _WINDOW)


def _remove_unused(graph: ir.Graph, value: ir.Value | None) -> None:
    """Remove what led to a value that nothing reads any more."""
    node = value.producer() if value is not None else None
    if node is not None and not any(v.uses() or v.is_graph_output() for v in node.outputs):
        inputs = list(node.inputs)
        graph.remove(node, safe=True)
        for one in inputs:
            _remove_unused(graph, one)


def _reorder(op: GraphBuilder, x: Expr) -> Expr:
    return op("ReorderInput", x, domain=NCHWC, like=[x])


def _reorder_weights(op: GraphBuilder, w: Expr, few: bool) -> Expr:
    """OIHW to OIHW{i}{o}, or to OIHW{o} where the input channels are few (of a depthwise convolution: one)."""
    inner = w if few or w.shape[1] == 1 else _reorder_inputs(op, w)
    return _reorder(op, inner.reshape([1, w.shape[0], 1, math.prod(w.shape[1:])])).reshape(w.shape)


def _reorder_inputs(op: GraphBuilder, w: Expr) -> Expr:
    """OIHW to OIHW{i}; without a detour where the input channels were the last axis before (adjoint weights)."""
    reshape = w.value.producer()
    transpose = reshape.inputs[0].producer() if reshape is not None and reshape.op_type == "Reshape" and reshape.inputs[0] is not None else None
    if transpose is None or transpose.op_type != "Transpose" or tuple(transpose.attributes["perm"].as_ints()) != (0, 2, 1):
        return _reorder(op, w)
    (rows,) = transpose.inputs
    assert rows is not None
    outs, ins, *window = w.shape
    if static_shape(rows) != (outs, math.prod(window), ins):
        return _reorder(op, w)
    return op("ReorderInput", op.wrap(rows).reshape([outs, *window, ins]), channels_last=1, domain=NCHWC, like=[w])
