"""Selections by boolean masks in an exported program: their size depends on data, what is made of them often does not.

A selection is kept as a tensor of all places with the mask of those that count, through operators that treat each place by itself, up to a
reduction over the places or a write under the same mask.  Masks that depend on no input become constant indices.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .known_values import is_operator, written_arguments
from .masked_indexing import WRITES, rewrite_indexing
from .masked_operators import rewrite_operator
from .selections import Selection, Selections, is_open, open_axes, shape_of

__all__ = ["resolve_selections"]

_ATEN = torch.ops.aten
#: Checks that a trace leaves behind, of sizes and dtypes which are static in the end.
_ASSERTIONS = {
    _ATEN._assert_scalar.default,
    _ATEN._assert_tensor_metadata.default,
    _ATEN.sym_constrain_range_for_size.default,
    _ATEN.sym_constrain_range.default,
}


def resolve_selections(program: torch.export.ExportedProgram) -> None:
    """Gives selections by masks static shapes, in place; what has none, and is no operator on a selection, is left as it is.

    Raises:
        ExportError: where an operator mixes the places of a selection other than by a reduction that is known.
    """
    if any(is_open(node) or node.target in WRITES for node in program.graph_module.graph.nodes):
        _Pass(program).run()
        program.graph_module.graph.lint()
        program.graph_module.recompile()


class _Pass:
    """One pass over a program in its order, in which each node gets static shapes before its readers are looked at."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.graph, self.state = program.graph_module.graph, Selections(program)
        self._opened = {node for node in self.graph.nodes if is_open(node)}

    def run(self) -> None:
        """Rewrites the program.

        Raises:
            ExportError: as ``resolve_selections``.
        """
        state = self.state
        for node in list(self.graph.nodes):
            state.edit.at = node
            if node.op == "call_function":
                self._visit(node)
            elif node.op == "output":
                for source in node.all_input_nodes:
                    if source in state.selections:
                        raise state.refusal(source, "what it selects leaves the model, and its size depends on data")
        for node in reversed(list(self.graph.nodes)):
            symbolic = node.op == "call_function" and (node.target in _ASSERTIONS or is_open(node))
            if symbolic and not node.users and not (is_operator(node) and written_arguments(node)):
                self.graph.erase_node(node)

    def _visit(self, node: fx.Node) -> None:
        state = self.state
        state.numbers.note(node)
        call = node.target, node.args, node.kwargs
        rewritten = self._rewrite(node)
        state.known.follow(node, *call)
        value = state.known.get(node)
        if not rewritten and isinstance(value, torch.Tensor) and is_open(node):
            constant = state.edit.constant(value)
            node.replace_all_uses_with(constant)
            state.known.tell(constant, value)
            self._opened.add(constant)

    def _rewrite(self, node: fx.Node) -> bool:
        """Gives a node static shapes; False where it is left as it is."""
        state = self.state
        if node.target in _ASSERTIONS:
            return False
        if rewrite_indexing(state, node):
            return True
        if any(source in state.selections for source in node.all_input_nodes):
            if node.target is _ATEN.sym_size.int or not is_operator(node):
                return self._getitem(node)
            rewrite_operator(state, node)
            return True
        return self._settle(node)

    def _settle(self, node: fx.Node) -> bool:
        """Evaluates a node anew whose arguments have got static shapes."""
        state = self.state
        if not is_operator(node):
            return False
        sizes = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.SymInt)]
        for source in sizes:
            number = state.size(source)
            if number is None:
                if torch.Tag.pointwise in node.target.tags and (total := state.total(source)) is not None:
                    node.replace_input_with(source, total)
                    continue
                return False
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: number if n is source else n)  # noqa: B023
        if not is_open(node) or any(is_open(source) for source in node.all_input_nodes):
            return False
        if not sizes and not any(source in self._opened for source in node.all_input_nodes):
            return False
        try:
            state.edit.evaluate(node)
        except RuntimeError as error:
            raise state.refusal(node, str(error).splitlines()[0]) from error
        return True

    def _getitem(self, node: fx.Node) -> bool:
        state = self.state
        if node.target is not operator.getitem:
            return True  # a size, read off where it is used
        source = node.args[0]
        assert isinstance(source, fx.Node)
        axes = open_axes(shape_of(node))
        state.edit.evaluate(node)
        if axes:
            state.selections[node] = Selection(axes[0], state.selections[source].mask, True)
        return True
