"""Dimensions by name instead of number, so that ONNX Runtime hands no dead buffer on from one tensor to another.

With memory reuse, which only Python can switch off, a session keeps a buffer after its last reader for a later tensor of the same shape:
the buffer is held in between, and more is held at once than the plan says.  It does so only for shapes that it knows to be equal before it
runs.  So each tensor within the graph is declared to have dimensions of its own, except where the plan wants a buffer to be taken over: an
operator that works in place has its input's dimensions, and so has the Reshape that carries an edge.
"""

from __future__ import annotations

import onnx_ir as ir

from ..ops import traits


def name_dimensions(graph: ir.Graph) -> None:
    """Declare the shapes of all tensors that are neither inputs nor outputs of a graph by names, in place; nothing else changes.

    Args:
        graph: typed, its nodes in the order in which they are to run.
    """
    outputs = {id(v) for v in graph.outputs}
    roots, last = _buffers(graph)
    known: dict[int, tuple[int, ...]] = {}  # what the named shapes stand for
    count = 0
    for node in graph:
        kind = traits(node.op_type, node.domain)
        for index, value in enumerate(node.outputs):
            if not value.name or value.shape is None or not len(value.shape) or id(value) in outputs:
                continue
            sizes = tuple(int(d) for d in value.shape.numpy())
            taken = None
            for source, target in (*kind.aliases, *kind.inplace):
                held = node.inputs[source] if target == index else None
                if held is None or known.get(id(held)) != sizes:
                    continue
                if (source, target) in kind.aliases or last[id(roots.get(id(held), held))] is node:
                    taken = held.shape
            known[id(value)] = sizes
            value.shape = ir.Shape([f"d{count}_{axis}" for axis in range(len(sizes))]) if taken is None else ir.Shape(list(taken))
            count += taken is None


def _buffers(graph: ir.Graph) -> tuple[dict[int, ir.Value], dict[int, ir.Node]]:
    """Of each view the value whose buffer it shows; of each buffer its last reader, by identities of values."""
    roots: dict[int, ir.Value] = {}
    last: dict[int, ir.Node] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None:
                last[id(roots.get(id(value), value))] = node
        if traits(node.op_type, node.domain).view and node.inputs[0] is not None:
            roots[id(node.outputs[0])] = roots.get(id(node.inputs[0]), node.inputs[0])
    return roots, last
