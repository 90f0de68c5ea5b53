"""The registry of rewrites: operator -> a function that builds the same from operators that have gradient rules.

A rewrite takes the ``Context`` of one node (without gradients) and returns a replacement for each output that is used, or None to leave
the node alone.  What it can't rewrite it refuses with ``c.refuse(reason)``: the node stays, and the reason is told should a gradient have
to pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ..autodiff.context import REFUSAL, Context
from ..autodiff.registry import rewritten
from ..errors import DifferentiationError
from ..graph import Expr, GraphBuilder, static_shape
from ..graph.builder import infer_outputs

Rewrite = Callable[[Context], "Expr | Sequence[Expr | None] | None"]

_REGISTRY: dict[tuple[str, str], Rewrite] = {}


def rewrite(names: str, domain: str = "", has_rule: bool = False) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite of operators; ``has_rule`` where it concerns some forms only and the others have a gradient rule."""

    def register(function: Rewrite) -> Rewrite:
        for name in names.split():
            if (domain, name) in _REGISTRY:
                raise ValueError(f"{domain or 'ai.onnx'}.{name} has two rewrites")
            _REGISTRY[domain, name] = function
        if not has_rule:
            rewritten(names, domain)
        return function

    return register


def expand(graph: ir.Graph) -> None:
    """Rewrite every node that has a rewrite, and what the rewrites made, in place; replaced values hand on their names."""
    changed = True
    while changed:
        changed = False
        for node in list(graph):
            key = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
            if node.graph is not None and key in _REGISTRY and REFUSAL not in node.metadata_props:
                changed |= replace(graph, node, lambda op, n, key=key: _REGISTRY[key](Context(op, n, [], [])))  # type: ignore[misc]


def replace(graph: ir.Graph, node: ir.Node, rewrite: Callable[[GraphBuilder, ir.Node], Expr | Sequence[Expr | None] | None]) -> bool:
    """Put what ``rewrite`` builds in the place of a node; returns whether it did."""
    before = {id(n) for n in graph}
    op = GraphBuilder(graph, before=node)
    op.metadata = dict(node.metadata_props)
    try:
        made = rewrite(op, node)
    except DifferentiationError as error:
        node.metadata_props[REFUSAL] = str(error)
        return False
    if made is None:
        return False
    for old, new in zip(node.outputs, [made] if isinstance(made, Expr) else made, strict=False):
        if new is None or not (old.uses() or old.is_graph_output()):
            continue
        producer = new.value.producer()
        if producer is None or id(producer) in before:
            # A value that was there before keeps its own name, which may be the one that its role goes by.
            new = op.node("Identity", new, outputs=[op.fresh("identity")])[0]
            producer = new.value.producer()
        assert producer is not None
        before.add(id(producer))
        name, stale = old.name, old.shape is not None and old.shape.is_static() and static_shape(old) != new.shape
        old.replace_all_uses_with(new.value, replace_graph_outputs=True)
        if stale:
            _infer_again(graph, new.value)
        if name:
            # The new value takes the old one's name: roles are told by name.
            old.name, new.value.name = f"{name}_replaced", name
    graph.remove(node, safe=True)
    return True


def _infer_again(graph: ir.Graph, start: ir.Value) -> None:
    """Types of what depends on a value that ONNX had inferred wrongly: for Einsum it takes a stretched axis of size 1 at its word."""
    changed = {id(start)}
    for node in graph:
        if any(id(v) in changed for v in node.inputs if v is not None):
            before = [(v.shape, v.dtype) for v in node.outputs]
            infer_outputs(node, graph.opset_imports.get(node.domain))
            changed |= {id(v) for v, old in zip(node.outputs, before, strict=True) if (v.shape, v.dtype) != old}
