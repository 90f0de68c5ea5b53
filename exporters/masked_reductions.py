"""Reductions over what a mask selects: over all places, with those that do not count blanked, and counts from the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .selections import Selection, Selections, bound

__all__ = ["finish"]

_ATEN = torch.ops.aten
_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_SUMS = {_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.any.default, _ATEN.any.dim, _ATEN.any.dims}
_PRODUCTS = {_ATEN.prod.default, _ATEN.prod.dim_int, _ATEN.all.default, _ATEN.all.dim, _ATEN.all.dims}
_MAXIMA = {_ATEN.max.default, _ATEN.amax.default}
_MINIMA = {_ATEN.min.default, _ATEN.amin.default}
_MEANS = {_ATEN.mean.default, _ATEN.mean.dim}
_VARIANCES = {_ATEN.var.default, _ATEN.var.dim, _ATEN.var.correction}
_DEVIATIONS = {_ATEN.std.default, _ATEN.std.dim, _ATEN.std.correction}
#: Losses of one value for each element, which are reduced by their argument ``reduction``.
_ELEMENT_LOSSES = {
    _ATEN.mse_loss.default,
    _ATEN.l1_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.huber_loss.default,
    _ATEN.binary_cross_entropy.default,
    _ATEN.binary_cross_entropy_with_logits.default,
    _ATEN.kl_div.default,
    _ATEN.soft_margin_loss.default,
    _ATEN.poisson_nll_loss.default,
    _ATEN.hinge_embedding_loss.default,
}
_CLASS_LOSSES = {_ATEN.cross_entropy_loss.default, _ATEN.nll_loss_nd.default}


def finish(state: Selections, node: fx.Node) -> bool:
    """Rewrites a reduction over the places of a selection; False where ``node`` is none."""
    if node.target in _ELEMENT_LOSSES:
        _element_loss(state, node)
        return True
    if node.target in _CLASS_LOSSES:
        _class_loss(state, node)
        return True
    rule = next((rule for targets, rule in _REDUCTIONS if node.target in targets), None)
    source = node.args[0]
    if rule is None or source not in state.selections:
        return False
    assert isinstance(source, fx.Node)
    axes = _axes(node, source)
    if state.selections[source].axis not in axes:
        return False
    rule(state, node, source, axes)
    return True


def _axes(node: fx.Node, source: fx.Node) -> list[int]:
    """The axes that a reduction is over."""
    rank, dims = len(source.meta["val"].shape), bound(node).get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return [d % rank for d in dims] if dims else list(range(rank))


def _with_neutral(value: Callable[[torch.dtype], float]) -> Callable[[Selections, fx.Node, fx.Node, list[int]], None]:
    """The same reduction, in which places that do not count have no effect."""

    def rule(state: Selections, node: fx.Node, source: fx.Node, axes: list[int]) -> None:
        blanked = state.blanked(source, value(source.meta["val"].dtype))
        node.args = (blanked, *node.args[1:])
        state.edit.evaluate(node)

    return rule


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _mean(state: Selections, node: fx.Node, source: fx.Node, axes: list[int]) -> None:
    options = bound(node)
    total = state.edit.emit(_ATEN.sum.dim_IntList, state.blanked(source, 0.0), axes, bool(options.get("keepdim")), dtype=options.get("dtype"))
    _divide(state, node, total, _number(state, source, axes))


def _number(state: Selections, source: fx.Node, axes: list[int]) -> fx.Node:
    """How many elements of a selection a reduction over these axes, the places among them, puts together."""
    selection, shape = state.selections[source], source.meta["val"].shape
    each = math.prod(shape[axis] for axis in axes if axis != selection.axis)
    count = state.count(selection.mask)
    return count if each == 1 else state.edit.emit(_ATEN.mul.Tensor, count, each)


def _divide(state: Selections, node: fx.Node, total: fx.Node, number: fx.Node, root: bool = False) -> None:
    """Makes ``node`` a quotient, or its root: NaN where there is nothing, as torch's, but with zeros as gradient, as torch's of no elements."""
    edit, dtype = state.edit, total.meta["val"].dtype
    some = edit.emit(_ATEN.gt.Scalar, number, 0)
    one = edit.emit(_ATEN.full.default, [], 1.0, dtype=dtype)
    quotient = edit.emit(_ATEN.div.Tensor, total, edit.emit(_ATEN.where.self, some, edit.emit(_ATEN.to.dtype, number, dtype), one))
    if root:
        quotient = edit.emit(_ATEN.sqrt.default, edit.emit(_ATEN.where.self, some, quotient, one))
    nothing = edit.emit(_ATEN.full.default, [], math.nan, dtype=dtype)
    edit.replace(node, _ATEN.where.self, some, quotient, nothing)


def _variance(state: Selections, node: fx.Node, source: fx.Node, axes: list[int]) -> None:
    """Sum of squared deviations over the number less the correction; NaN, without a gradient, where that is not positive."""
    edit, options = state.edit, bound(node)
    selection, number, dtype = state.selections[source], _number(state, source, axes), source.meta["val"].dtype
    some = edit.emit(_ATEN.to.dtype, edit.emit(_ATEN.clamp.default, number, 1), dtype)
    mean = edit.emit(_ATEN.div.Tensor, edit.emit(_ATEN.sum.dim_IntList, state.blanked(source, 0.0), axes, True), some)
    distance = edit.emit(_ATEN.sub.Tensor, state.harmless(source), mean)
    state.selections[distance] = Selection(selection.axis, selection.mask, False)
    squares = edit.emit(_ATEN.square.default, state.blanked(distance, 0.0))
    total = edit.emit(_ATEN.sum.dim_IntList, squares, axes, bool(options.get("keepdim")))
    correction = options.get("correction", int(options.get("unbiased", True)))
    freedom = edit.emit(_ATEN.sub.Tensor, number, 1 if correction is None else correction)
    _divide(state, node, total, freedom, root=node.target in _DEVIATIONS)


_REDUCTIONS: tuple[tuple[set[Any], Callable[[Selections, fx.Node, fx.Node, list[int]], None]], ...] = (
    (_SUMS, _with_neutral(lambda dtype: 0)),
    (_PRODUCTS, _with_neutral(lambda dtype: 1)),
    (_MAXIMA, _with_neutral(_lowest)),
    (_MINIMA, _with_neutral(_highest)),
    (_MEANS, _mean),
    (_VARIANCES | _DEVIATIONS, _variance),
)


def _element_loss(state: Selections, node: fx.Node) -> None:
    """A loss of one value for each element: unreduced over all places, then reduced as a selection is."""
    options = bound(node)
    reduction = options["reduction"]
    place, mask = state.common(node)
    for source in node.all_input_nodes:
        shape = source.meta["val"].shape
        if source not in state.selections and len(shape) >= -place and not (isinstance(shape[place], int) and shape[place] == 1):
            raise state.refusal(node, "it combines what a mask selects, whose size depends on data, with a tensor that has a value for each place")
    arguments = {name: state.harmless(value) for name, value in options.items()} | {"reduction": 0}
    declared = node.target._schema.arguments
    positional = [arguments[a.name] for a in declared if not a.kwarg_only]
    keywords = {a.name: arguments[a.name] for a in declared if a.kwarg_only}
    losses = state.edit.emit(node.target, *positional, **keywords)
    state.selections[losses] = Selection(len(losses.meta["val"].shape) + place, mask, True)
    if reduction == 0:
        state.edit.replace(node, _ATEN.clone.default, losses)
        state.selections[node] = state.selections[losses]
    elif reduction == _SUM:
        state.edit.replace(node, _ATEN.sum.default, state.blanked(losses, 0.0))
    else:
        node.target, node.args, node.kwargs = _ATEN.mean.default, (losses,), {}
        _mean(state, node, losses, list(range(len(losses.meta["val"].shape))))


def _class_loss(state: Selections, node: fx.Node) -> None:
    """Cross-entropy or negative log-likelihood of selected rows: places that do not count get the class that is ignored."""
    edit, options = state.edit, bound(node)
    scores, target, weight, reduction, ignored = (options[k] for k in ("self", "target", "weight", "reduction", "ignore_index"))
    rows, places = state.selections.get(scores), state.selections.get(target)
    if rows is None or places is None or (rows.axis, rows.mask) != (0, places.mask) or places.axis or weight in state.selections:
        raise state.refusal(node, "it needs scores and classes selected by the same mask, whose size depends on data")
    mask = rows.mask
    none = edit.emit(_ATEN.full.default, [], ignored, dtype=target.meta["val"].dtype)
    classes = edit.emit(_ATEN.where.self, state.spread(target, places), target, none)
    rest = [options["label_smoothing"]] if "label_smoothing" in options else []
    arguments = (state.harmless(scores), classes, weight)
    if reduction != _MEAN:
        edit.replace(node, node.target, *arguments, reduction, ignored, *rest)
        if reduction == 0:
            state.selections[node] = Selection(0, mask, True)
        return
    total = edit.emit(node.target, *arguments, _SUM, ignored, *rest)
    counted = edit.emit(_ATEN.ne.Scalar, classes, ignored)
    if weight is None:
        _divide(state, node, total, edit.emit(_ATEN.sum.default, counted))
        return
    zero = edit.emit(_ATEN.full.default, [], 0, dtype=classes.meta["val"].dtype)
    each = edit.emit(_ATEN.index.Tensor, weight, [edit.emit(_ATEN.where.self, counted, classes, zero)])
    nothing = edit.emit(_ATEN.full.default, [], 0.0, dtype=weight.meta["val"].dtype)
    weights = edit.emit(_ATEN.sum.default, edit.emit(_ATEN.where.self, counted, each, nothing))
    _divide(state, node, total, weights)
