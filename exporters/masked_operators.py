"""Operators on what a mask selects: those that treat each place by itself work on all places as well."""

from __future__ import annotations

import math

import torch
from torch import fx

from .known_values import is_operator, written_arguments
from .masked_reductions import finish
from .selections import Selection, Selections, bound, open_axes, shape_of

__all__ = ["rewrite_operator"]

_ATEN = torch.ops.aten
#: Operators that treat each element by itself, though torch does not tag them so.
_BY_ELEMENT = {
    _ATEN.to.dtype,
    _ATEN.to.device,
    _ATEN.to.dtype_layout,
    _ATEN.to.other,
    _ATEN._to_copy.default,
    _ATEN.type_as.default,
    _ATEN.detach.default,
    _ATEN.alias.default,
    _ATEN.contiguous.default,
    _ATEN.where.ScalarOther,
    _ATEN.where.ScalarSelf,
    _ATEN.where.Scalar,
    _ATEN.zeros_like.default,
    _ATEN.ones_like.default,
    _ATEN.full_like.default,
    _ATEN.log_sigmoid.default,
    _ATEN.broadcast_tensors.default,
    _ATEN.__and__.Tensor,
    _ATEN.__or__.Tensor,
    _ATEN.__xor__.Tensor,
}
#: Operators that mix elements along the axes in their argument ``dim`` alone.
_ALONG_DIM = {
    _ATEN.softmax.int,
    _ATEN.log_softmax.int,
    _ATEN.sum.dim_IntList,
    _ATEN.mean.dim,
    _ATEN.amax.default,
    _ATEN.amin.default,
    _ATEN.argmax.default,
    _ATEN.argmin.default,
    _ATEN.max.dim,
    _ATEN.min.dim,
    _ATEN.any.dim,
    _ATEN.all.dim,
    _ATEN.prod.dim_int,
    _ATEN.var.correction,
    _ATEN.std.correction,
    _ATEN.var.dim,
    _ATEN.std.dim,
    _ATEN.logsumexp.default,
    _ATEN.linalg_vector_norm.default,
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
    _ATEN.gather.default,
    _ATEN.cosine_similarity.default,
    _ATEN.cat.default,
    _ATEN.glu.default,
}
_RESHAPES = {_ATEN.view.default, _ATEN.reshape.default, _ATEN.flatten.using_ints, _ATEN._unsafe_view.default}
_REARRANGED = {_ATEN.permute.default, _ATEN.transpose.int, _ATEN.t.default, _ATEN.unsqueeze.default}


def rewrite_operator(state: Selections, node: fx.Node) -> None:
    """Gives an operator on selections static shapes.

    Raises:
        ExportError: where it mixes the places of a selection, other than by a reduction that is known.
    """
    for source in node.all_input_nodes:
        if isinstance(source.meta.get("val"), torch.SymInt) and node.target not in {*_RESHAPES, _ATEN.expand.default}:
            number = state.size(source)
            total = state.total(source) if number is None else None
            if total is None and number is None:
                raise state.refusal(node, "it reads a size that depends on data")
            node.args = fx.map_arg(node.args, lambda n: (total if number is None else number) if n is source else n)  # noqa: B023
    if finish(state, node):
        return
    if node.target in _RESHAPES:
        _reshape(state, node)
        return
    value = node.meta["val"]
    axes = open_axes((value[0] if isinstance(value, list | tuple) else value).shape)
    mask = _places_apart(state, node)
    if mask is None or len(axes) != 1:
        raise state.refusal(node, "it reads what a mask selects, whose size depends on data")
    if node.target is _ATEN.expand.default:
        axis = axes[0]
        sizes = list(shape_of(node))
        source = node.args[0]
        assert isinstance(source, fx.Node)
        sizes[axis] = shape_of(source)[state.selections[source].axis]
        node.args = (source, sizes)
    rearranged = node.target in _REARRANGED or node.target in (_ATEN.expand.default, _ATEN.clone.default, _ATEN.select.int, _ATEN.slice.Tensor)
    for target in written_arguments(node):
        _out_of_place(state, node, target)
    calm = all(state.selections[s].harmless for s in node.all_input_nodes if s in state.selections)
    if not rearranged:
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), state.harmless)
    state.edit.evaluate(node)
    state.selections[node] = Selection(axes[0], mask, calm or not rearranged)


def _out_of_place(state: Selections, node: fx.Node, target: fx.Node) -> None:
    """An operator that writes into a selection, as one that makes another, which all later readers get."""
    schema = node.target._schema
    plain = getattr(getattr(_ATEN, schema.name.removeprefix("aten::").removesuffix("_"), None), schema.overload_name, None)
    shared = {n for n in (target, *target.users) if n is not node and is_operator(n) and n.target.is_view and not written_arguments(n)}
    if plain is None or shared or target not in state.selections:
        raise state.refusal(node, "it writes into what a mask selects, whose size depends on data")
    position = {n: i for i, n in enumerate(node.graph.nodes)}
    target.replace_all_uses_with(node, delete_user_cb=lambda user: position[user] > position[node])
    node.target = plain


def _places_apart(state: Selections, node: fx.Node) -> fx.Node | None:
    """The mask of an operator that treats each place of its selections by itself; None where it does not."""
    target = node.target
    arguments = bound(node)
    source = arguments[target._schema.arguments[0].name]
    assert isinstance(target, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise state.refusal(node, "it draws a number for each place that a mask selects, and how many there are depends on data")
    idle = target is _ATEN.dropout.default and (not arguments["train"] or not arguments["p"])
    if torch.Tag.pointwise in target.tags or target in _BY_ELEMENT or idle:
        place, mask = state.common(node)
        others = [n for n in node.all_input_nodes if n not in state.selections]
        return mask if all(len(s := _sizes(n)) < -place or (isinstance(s[place], int) and s[place] == 1) for n in others) else None
    if target is _ATEN.cat.default:
        source = source[0]
    selection = state.selections.get(source) if isinstance(source, fx.Node) else None
    if target is _ATEN.embedding.default:
        indices = state.selections.get(arguments["indices"])
        return indices.mask if indices is not None and selection is None else None
    if selection is None:
        return None
    rank, axis = len(shape_of(source)), selection.axis
    if target in _ALONG_DIM:
        dims = arguments["dim"]
        dims = [dims] if isinstance(dims, int) else dims
        apart = dims and axis not in {d % rank for d in dims}
        alike = state.common(node) == (axis - rank, selection.mask)
        return selection.mask if apart and alike and all(n in state.selections for n in node.all_input_nodes) else None
    if any(n in state.selections for n in node.all_input_nodes if n is not source):
        return None
    if target in _REARRANGED or target is _ATEN.expand.default:
        return selection.mask
    if target is _ATEN.layer_norm.default:
        return selection.mask if axis < rank - len(arguments["normalized_shape"]) else None
    if target is _ATEN.linear.default:
        return selection.mask if axis < rank - 1 else None
    if target in (_ATEN.matmul.default, _ATEN.mm.default):
        return selection.mask if axis < rank - 1 and len(shape_of(arguments.get("other", arguments.get("mat2")))) <= 2 else None
    return None


def _sizes(node: fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _reshape(state: Selections, node: fx.Node) -> None:
    """A view that keeps the places, or lays them out along with neighbouring axes."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    selection, shape, wanted = state.selections[source], list(shape_of(source)), list(shape_of(node))
    axes = open_axes(wanted)
    places = shape[selection.axis]
    # With one place for each one selected, what the open axis holds is how many elements belong to a place.
    kept = math.prod(d for i, d in enumerate(wanted) if i not in axes)
    each = math.prod(shape) // places // max(kept, 1) if kept else 0
    lead, ahead = math.prod(shape[: selection.axis]), math.prod(wanted[: axes[0]]) if len(axes) == 1 else 0
    if len(axes) != 1 or not each or each * kept * places != math.prod(shape) or not ahead or lead % ahead or each % (lead // ahead):
        raise state.refusal(node, "it lays out what a mask selects in another shape, and its size depends on data")
    outer = lead // ahead
    inner = each // outer
    wanted[axes[0]] = places * each
    mask = selection.mask
    if each > 1:
        column = state.once(("column", mask), _ATEN.reshape.default, mask, [1, places, 1])
        wide = state.once(("wide", mask, outer, inner), _ATEN.expand.default, column, [outer, places, inner])
        mask = state.once(("laid out", mask, outer, inner), _ATEN.reshape.default, wide, [places * each])
    state.edit.replace(node, _ATEN.reshape.default, source, wanted)
    state.selections[node] = Selection(axes[0], mask, selection.harmless)
