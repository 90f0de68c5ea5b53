"""Writes without a kernel that overwrites: the new value is an output of the graph, bound by the caller to the array of the old one."""

from __future__ import annotations

import onnx_ir as ir

from ..graph import GraphBuilder
from ..ops import traits
from ..writes import OVERWRITER, WRITES

#: Operators that read their input and write their output entry by entry, so that both may be one array.
_ENTRYWISE = ("Add", "Sub", "Mul", "Div")


def lower_writes(graph: ir.Graph) -> None:
    """Replace every ``InPlaceAccumulatorV2`` by an output of the graph, in place.

    Where its flag is the constant true, the new value replaces the old one; else it is added to it: the caller zeroes the array before the
    first of several batches.  The node that makes the output is marked (``onnxremat.writes``).
    """
    op = GraphBuilder(graph)
    position = {node: i for i, node in enumerate(graph)}
    # Flags of the accumulators were outputs; their place is taken by the values.
    flags = {id(n.outputs[0]) for n in graph if n.op_type == OVERWRITER}
    outputs = [v for v in graph.outputs if id(v) not in flags]
    made: list[ir.Value] = []
    for node in [n for n in graph if n.op_type == OVERWRITER]:
        old, new, flag = node.inputs
        assert old is not None and new is not None and flag is not None
        op.before, op.metadata = node, dict(node.metadata_props)
        if flag.const_value is None:
            writer = op("Add", old, new).value.producer()
        elif _may_write(old, new, node, position):
            writer = new.producer()
        else:
            writer = op("Max", new).value.producer()  # of one operand: a copy
        assert writer is not None and old.name
        name, node.outputs[0].name = node.outputs[0].name, f"{node.outputs[0].name}_flag"
        writer.metadata_props[WRITES] = old.name
        writer.outputs[0].name = name
        made.append(writer.outputs[0])
    graph.outputs[:] = [*outputs, *made]
    for node in [n for n in graph if n.op_type == OVERWRITER]:
        graph.remove(node, safe=True)


def _may_write(old: ir.Value, new: ir.Value, write: ir.Node, position: dict[ir.Node, int]) -> bool:
    """Whether the node that computes the new value may do so over the old one."""
    producer = new.producer()
    if producer is None or producer not in position or len(producer.outputs) != 1 or WRITES in producer.metadata_props:
        return False
    if any(use.node is not write for use in new.uses()) or new.is_graph_output() or traits(producer.op_type, producer.domain).view:
        return False
    views = [old]
    for value in views:
        views += [u.node.outputs[0] for u in value.uses() if traits(u.node.op_type, u.node.domain).view and u.idx == 0]
    readers = {use.node for value in views for use in value.uses() if not traits(use.node.op_type, use.node.domain).view} - {write}
    if any(position.get(reader, len(position)) > position[producer] for reader in readers):
        return False  # somebody reads the old value later
    return producer not in readers or producer.op_type in _ENTRYWISE
