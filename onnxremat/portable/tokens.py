"""The order of the nodes as data edges, so that every ONNX Runtime runs them so: in any order, at any optimization level.

Only a runner that sets the session's options can rely on the order in the file; C, Java and JavaScript have no such option.  Here each node
reads what other nodes made through ``Reshape(x, Min(Size(previous), 0...))``, where ``previous`` is what the node before it in the plan
made.  The target shape of zeros means "as it is" and Reshape shares its input's buffer, so the edge costs no memory.  It also keeps the
optimizations of a default session away: a recompute is no common subexpression, as it hangs on another node; nothing is constant;
and no two nodes are neighbours that could be fused, or moved past one another.

Views take no time and no memory, so they have no place in the order: each reader makes its own, with the edge in the same Reshape (two
in a row would be fused into one, and the edge be lost).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..errors import OnnxRematError
from ..graph import Expr, GraphBuilder
from ..ops import traits
from ..training_graph import PHASE


def order_by_tokens(graph: ir.Graph, marker: str) -> None:
    """Make each node of a graph hang on the one before it, in place.

    Args:
        graph: typed, its nodes in the order in which they are to run, the first input being there before them.
        marker: metadata key of the nodes that are added.

    Raises:
        OnnxRematError: a node reads nothing, so that no edge can hold it.
    """
    op = GraphBuilder(graph, prefix="order_")
    roots: dict[int, ir.Value] = {}
    outputs = {id(v) for v in graph.outputs}
    previous: Sequence[ir.Value] = [graph.inputs[0]]
    for node in list(graph):
        view = traits(node.op_type, node.domain).view
        if view and id(node.outputs[0]) not in outputs:
            source = node.inputs[0]
            assert source is not None
            roots[id(node.outputs[0])] = roots.get(id(source), source)
            continue
        op.before, op.metadata = node, {marker: str(node.name), PHASE: node.metadata_props[PHASE]}
        if view:  # an output of the graph, under its name
            previous = [_emit_view(op, node, roots, previous)]
            continue
        for index in _held_inputs(node, roots):
            value = node.inputs[index]
            assert value is not None
            node.replace_input_with(index, _through(op, roots.get(id(value), value), value, previous).value)
        unread = [v for v in node.outputs[1:] if v.name and not v.uses() and id(v) not in outputs]
        previous = [next(v for v in node.outputs if v.name), *unread]
    for node in reversed(list(graph)):
        if traits(node.op_type, node.domain).view and id(node.outputs[0]) in roots:
            graph.remove(node, safe=True)


def _held_inputs(node: ir.Node, roots: dict[int, ir.Value]) -> list[int]:
    """The inputs that get an edge: all that other nodes made or that are views; without any, one that was there before."""
    present = [(i, v) for i, v in enumerate(node.inputs) if v is not None]
    if not present:
        raise OnnxRematError(f"'{node.name}' ({node.op_type}) reads nothing, so no data edge can hold it in the plan's order")
    made = [i for i, v in present if v.producer() is not None or id(v) in roots]
    if made:
        return made
    return [next((i for i, v in present if v.is_graph_input()), present[0][0])]


def _token(op: GraphBuilder, previous: Sequence[ir.Value], width: int) -> Expr:
    """Zeros that are known once the previous node has run."""
    sizes = [op.node("Size", value, like=[((), ir.DataType.INT64)])[0] for value in previous]
    return op.node("Min", *sizes, np.zeros(width, np.int64), like=[((width,), ir.DataType.INT64)])[0]


def _target(op: GraphBuilder, root: ir.Value, value: ir.Value, previous: Sequence[ir.Value]) -> tuple[Expr, int | None]:
    """The shape input of the Reshape that shows ``root`` as ``value``, and its attribute ``allowzero``."""
    shape = op.wrap(value).shape
    if root is value:
        return _token(op, previous, len(shape)), None
    literal = np.asarray(shape, np.int64)
    if not shape:
        return _token(op, previous, 0), None
    made = op.node("Add", _token(op, previous, 1), literal, like=[((len(shape),), ir.DataType.INT64)])[0]
    return made, 1 if 0 in shape else None


def _through(op: GraphBuilder, root: ir.Value, value: ir.Value, previous: Sequence[ir.Value]) -> Expr:
    """The value, once the previous node has run."""
    target, allowzero = _target(op, root, value, previous)
    return op.node("Reshape", root, target, like=[value], allowzero=allowzero)[0]


def _emit_view(op: GraphBuilder, node: ir.Node, roots: dict[int, ir.Value], previous: Sequence[ir.Value]) -> ir.Value:
    """A view that is an output of the graph becomes a Reshape of its root under its own name."""
    (output,), source = node.outputs, node.inputs[0]
    assert source is not None and output.name
    root = roots.get(id(source), source)
    target, allowzero = _target(op, root, output, previous)
    op.metadata = dict(node.metadata_props)
    made = op.node("Reshape", root, target, like=[output], allowzero=allowzero)[0]
    producer = made.value.producer()
    assert producer is not None
    name, node_name = output.name, node.name
    output.replace_all_uses_with(made.value, replace_graph_outputs=True)
    output.name, made.value.name = f"{name}_view", name
    op.graph.remove(node, safe=True)
    producer.name = node_name
    return made.value
