"""Rewrites of an exported program that must come before torch's own decompositions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["contiguous_views", "expand_copies", "float_bounds", "rewrite_dropouts"]

_IN_PLACE = frozenset({torch.ops.aten.dropout_.default})


def rewrite_dropouts(program: torch.export.ExportedProgram) -> None:
    """Feature dropouts and in-place dropouts become ordinary ones, in place: torch would decompose them into bernoulli."""
    _feature_dropouts(program)
    graph = program.graph_module.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in _IN_PLACE]:
        source, p, train = node.args
        if not train or not p:
            continue
        with graph.inserting_before(node):
            dropped = graph.call_function(torch.ops.aten.dropout.default, (source, p, train))
        dropped.meta = dict(node.meta)
        node.target, node.args = torch.ops.aten.copy_.default, (source, dropped)
    program.graph_module.recompile()


def _feature_dropouts(program: torch.export.ExportedProgram) -> None:
    """Feature dropout becomes ``x * dropout(ones(N, C, 1, ...))``, in place: one draw per sample and channel, by an ordinary dropout.

    torch would decompose it into bernoulli, that is, four ONNX nodes around a RandomUniformLike that no dropout rule knows.
    """
    aten = torch.ops.aten
    multiply = {aten.feature_dropout.default: aten.mul.Tensor, aten.feature_dropout_.default: aten.mul_.Tensor}
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in multiply:
            continue
        source, p, train = node.args
        assert isinstance(source, fx.Node)
        if not train or not p:
            continue
        value: Any = source.meta["val"]
        shape = [*value.shape[:2], *(1,) * (value.ndim - 2)]
        with graph.inserting_before(node):
            ones = graph.call_function(aten.full.default, (shape, 1.0), {"dtype": value.dtype})
            noise = graph.call_function(aten.dropout.default, (ones, p, True))
            product = graph.call_function(multiply[node.target], (source, noise))
        for new, shaped in ((ones, False), (noise, False), (product, True)):
            new.meta = dict(node.meta)
            if not shaped:
                new.meta["val"] = value.new_empty(shape)
        node.replace_all_uses_with(product)
        graph.erase_node(node)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = product.name
    program.graph_module.recompile()


def contiguous_views(program: torch.export.ExportedProgram) -> None:
    """Copies what is permuted before it is viewed, in place; ONNX, which knows no strides, drops the copy.

    Whether a view is possible, and whether ``contiguous()`` does anything, depends on strides, and those that an attention kernel gives when
    it is traced are not those of its translation.  Views that something writes through stay.
    """
    aten = torch.ops.aten
    permutations = (aten.transpose.int, aten.permute.default, aten.t.default, aten.movedim.int, aten.movedim.intlist)
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.contiguous.default and not any(_writes(user) for user in node.users):
            node.target, node.args, node.kwargs = aten.clone.default, node.args[:1], {"memory_format": torch.contiguous_format}
        if node.op != "call_function" or node.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.target not in permutations or any(_writes(user) for user in node.users):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        copy.meta = dict(node.meta) | {"val": source.meta["val"].contiguous()}
        node.args = (copy, *node.args[1:])
    program.graph_module.recompile()


def float_bounds(program: torch.export.ExportedProgram) -> None:
    """Makes the bounds of a float tensor's ``clamp`` floats, in place: for a float and an integer torch.onnx finds no overload."""
    aten = torch.ops.aten
    clamps = (aten.clamp.default, aten.clamp_.default, aten.clip.default, aten.clip_.default)
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and node.target in clamps and node.meta["val"].dtype.is_floating_point:
            node.args = tuple(float(a) if isinstance(a, int) else a for a in node.args)
            node.kwargs = {key: float(a) if isinstance(a, int) else a for key, a in node.kwargs.items()}
    program.graph_module.recompile()


def expand_copies(program: torch.export.ExportedProgram) -> None:
    """Expands what ``copy_`` broadcasts, in place: a copy into a view becomes a scatter, which wants the whole shape."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.copy_.default or not isinstance(node.args[1], fx.Node):
            continue
        source, shape = node.args[1], list(node.args[0].meta["val"].shape)
        if list(source.meta["val"].shape) != shape:
            with graph.inserting_before(node):
                wide = graph.call_function(torch.ops.aten.expand.default, (source, shape))
            wide.meta = dict(node.meta) | {"val": source.meta["val"].expand(shape)}
            node.args = (node.args[0], wide, *node.args[2:])
    program.graph_module.recompile()


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
