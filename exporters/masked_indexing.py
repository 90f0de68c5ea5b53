"""Reading and writing by boolean masks, with indices where the mask is constant and over all places where it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .selections import Selection, Selections, bound, is_open, shape_of

__all__ = ["WRITES", "rewrite_indexing"]

_ATEN = torch.ops.aten
WRITES = {_ATEN.index_put_.default, _ATEN.index_put.default}
_SCATTERS = {_ATEN.masked_scatter_.default, _ATEN.masked_scatter.default}


def rewrite_indexing(state: Selections, node: fx.Node) -> bool:
    """Rewrites a node that selects by a mask or writes under one; False where it is none, or does neither.

    Raises:
        ExportError: for a write that is sized by data.
    """
    if node.target in (_ATEN.index.Tensor, _ATEN.masked_select.default):
        return _select(state, node)
    if node.target in WRITES:
        return _write(state, node)
    return node.target in _SCATTERS and _scatter(state, node)


def _indices(state: Selections, indices: Sequence[Any]) -> list[Any] | None:
    """Indices with constant masks written out; None where none of them is a mask that is known."""
    result: list[Any] = []
    for index in indices:
        value = state.known.get(index)
        if index is not None and index.meta["val"].dtype is torch.bool and value is not None:
            result += [state.edit.constant(places.clone()) for places in value.nonzero(as_tuple=True)]
        else:
            result.append(index)
    return result if len(result) != len(indices) or any(a is not b for a, b in zip(result, indices, strict=True)) else None


def _select(state: Selections, node: fx.Node) -> bool:
    source, indices = node.args[:2]
    assert isinstance(source, fx.Node)
    if node.target is _ATEN.masked_select.default:
        size = list(torch.broadcast_shapes(shape_of(source), shape_of(indices)))
        source, mask = (n if list(shape_of(n)) == size else state.edit.emit(_ATEN.expand.default, n, size) for n in (source, indices))
        if state.known.get(indices) is not None:
            state.known.tell(mask, state.known.get(indices).expand(size))
        indices = [mask]
    assert isinstance(indices, list | tuple)
    if source not in state.selections:
        written = _indices(state, indices)
        if written is not None:
            state.edit.replace(node, _ATEN.index.Tensor, source, written)
            return True
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return False
    axis, index = given[0]
    if index in state.selections and source not in state.selections and index.meta["val"].dtype is not torch.bool:
        _look_up(state, node, source, axis, index)
        return True
    if index.meta["val"].dtype is not torch.bool:
        return False
    if source in state.selections:
        _select_again(state, node, source, axis, index)
        return True
    if index in state.selections or is_open(source):
        return False
    shape, rank, flat = list(shape_of(source)), len(shape_of(index)), state.flat_mask(index)
    places = state.edit.emit(_ATEN.reshape.default, source, [*shape[:axis], math.prod(shape[axis : axis + rank]), *shape[axis + rank :]])
    state.edit.replace(node, _ATEN.clone.default, places)
    state.selections[node] = Selection(axis, flat, False)
    return True


def _select_again(state: Selections, node: fx.Node, source: fx.Node, axis: int, index: fx.Node) -> None:
    """A selection of a selection, by a mask made of it."""
    outer, inner = state.selections[source], state.selections.get(index)
    if inner is None or (outer.axis, outer.mask) != (axis, inner.mask) or len(shape_of(index)) != 1:
        raise state.refusal(node, "it selects from a selection whose size depends on data")
    both = state.once(("both", inner.mask, state.numbers.origin(index)), _ATEN.logical_and.default, inner.mask, index)
    state.edit.replace(node, _ATEN.clone.default, source)
    state.selections[node] = Selection(axis, both, False)


def _look_up(state: Selections, node: fx.Node, source: fx.Node, axis: int, index: fx.Node) -> None:
    """Rows of a table by selected indices."""
    selection = state.selections[index]
    state.edit.replace(node, node.target, source, [*(None for _ in range(axis)), state.harmless(index)])
    state.selections[node] = Selection(axis + selection.axis, selection.mask, True)


def _write(state: Selections, node: fx.Node) -> bool:
    target, indices, values, *rest = node.args
    assert isinstance(target, fx.Node) and isinstance(indices, list | tuple) and isinstance(values, fx.Node)
    if target in state.selections:
        return False
    if values not in state.selections:
        written = _indices(state, indices)
        if written is not None:
            node.args = (target, written, values, *rest)
            state.edit.evaluate(node)
            return True
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype is not torch.bool or given[0][1] in state.selections:
        return False
    axis, mask = given[0]
    rank = len(shape_of(mask))
    trail = shape_of(target)[axis + rank :]
    full = _unfolded(state, node, values, mask, len(trail)) if values in state.selections else _broadcast(state, values, target, mask, axis, trail)
    condition = state.edit.emit(_ATEN.reshape.default, mask, [*shape_of(mask), *(1 for _ in trail)])
    if full.meta["val"].dtype != target.meta["val"].dtype:
        full = state.edit.emit(_ATEN.to.dtype, full, target.meta["val"].dtype)
    if bound(node)["accumulate"]:
        full = state.edit.emit(_ATEN.add.Tensor, target, full)
    _store(state, node, target, state.edit.emit(_ATEN.where.self, condition, full, target))
    return True


def _store(state: Selections, node: fx.Node, target: fx.Node, result: fx.Node) -> None:
    in_place = node.target._schema.is_mutable
    if in_place:
        state.edit.replace(node, _ATEN.copy_.default, target, result)
    else:
        state.edit.replace(node, _ATEN.clone.default, result)


def _unfolded(state: Selections, node: fx.Node, values: fx.Node, mask: fx.Node, trail: int) -> fx.Node:
    """What was selected, in the shape of the tensor that it is written to, by the mask that selected it."""
    selection, shape = state.selections[values], list(shape_of(values))
    if selection.mask is not state.flat_mask(mask) or len(shape) - selection.axis - 1 != trail:
        raise state.refusal(node, "it writes a selection under another mask, and their sizes depend on data")
    return state.edit.emit(_ATEN.reshape.default, values, [*shape[: selection.axis], *shape_of(mask), *shape[selection.axis + 1 :]])


def _broadcast(state: Selections, values: fx.Node, target: fx.Node, mask: fx.Node, axis: int, trail: Sequence[int]) -> fx.Node:
    """Values that are not selected, in a shape that broadcasts against the target; of a list of rows, the n-th goes to the n-th place."""
    shape, after = list(shape_of(values)), len(trail)
    if len(shape) <= after:
        return values
    lead, places, rows = shape[: len(shape) - after - 1], shape[len(shape) - after - 1], shape[len(shape) - after :]
    if places == 1:
        return state.edit.emit(_ATEN.reshape.default, values, [*lead, *(1 for _ in shape_of(mask)), *rows])
    if axis:
        raise state.refusal(state.edit.at, "it writes a list of values under a mask behind other axes")
    wide = state.edit.emit(_ATEN.reshape.default, mask, [*shape_of(mask), *(1 for _ in trail)])
    wide = state.edit.emit(_ATEN.expand.default, wide, list(shape_of(target)))
    listed = state.edit.emit(_ATEN.expand.default, values, [places, *trail])
    if listed.meta["val"].dtype != target.meta["val"].dtype:
        listed = state.edit.emit(_ATEN.to.dtype, listed, target.meta["val"].dtype)
    return state.edit.emit(_ATEN.masked_scatter.default, target, wide, listed)


def _scatter(state: Selections, node: fx.Node) -> bool:
    """masked_scatter of what the same mask selected."""
    target, mask, source = node.args
    if source not in state.selections or not all(isinstance(n, fx.Node) for n in node.args):
        return False
    values = state.selections[source]
    if values.mask is not state.flat_mask(mask) or shape_of(source) != (math.prod(shape_of(target)),):
        raise state.refusal(node, "it writes a selection under another mask, and their sizes depend on data")
    full = state.edit.emit(_ATEN.reshape.default, source, list(shape_of(target)))
    _store(state, node, target, state.edit.emit(_ATEN.where.self, mask, full, target))
    return True
