"""What an exported program selects by masks, as a pass over it keeps it: tensors of all places with the mask of those that count."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .errors import ExportError
from .known_values import KnownValues, is_operator
from .places import user_line
from .program_edit import ProgramEditor
from .value_numbers import ValueNumbers

__all__ = ["WAY_OUT", "Selection", "Selections", "bound", "is_open", "open_axes", "shape_of"]

_ATEN = torch.ops.aten
WAY_OUT = "compute the mask once, and reduce what it selects (sum, mean, a loss) or write it back under it; else torch.where over full tensors"


@dataclass(frozen=True)
class Selection:
    """Of a tensor's places along ``axis``, those where the vector ``mask`` is true count.

    ``harmless``: the others hold the value of one that counts, so that no operator makes a NaN or an infinity of them alone.
    """

    axis: int
    mask: fx.Node
    harmless: bool


def bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names in its schema, defaults among them."""
    declared = node.target._schema.arguments
    values = {a.name: a.default_value for a in declared if a.has_default_value()}
    return values | dict(zip((a.name for a in declared), node.args, strict=False)) | dict(node.kwargs)


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """The shape of a node's tensor, in which a size that depends on data is a symbol."""
    return tuple(node.meta["val"].shape)


def open_axes(shape: Sequence[Any]) -> list[int]:
    """The axes whose sizes depend on data."""
    return [i for i, d in enumerate(shape) if not isinstance(d, int)]


def is_open(node: fx.Node) -> bool:
    """Whether a size of a node's tensors, or its value itself, is a symbol, which depends on data."""
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else (value,)
    return any(
        bool(open_axes(v.shape)) if isinstance(v, torch.Tensor) else isinstance(v, torch.SymInt | torch.SymBool | torch.SymFloat) for v in items
    )


class Selections:
    """The selections that a pass has come by, which goes over a program in its order, and what its rules make of them."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        """``at`` of ``edit`` is the node that the pass looks at."""
        self.edit, self.known, self.numbers = ProgramEditor(program), KnownValues(program), ValueNumbers()
        self.selections: dict[fx.Node, Selection] = {}
        self._cache: dict[tuple[Any, ...], fx.Node] = {}

    def refusal(self, node: fx.Node, why: str) -> ExportError:
        """An error that names an operator and its line."""
        return ExportError(f"{node.target}{user_line(node.meta.get('stack_trace') or '')}", why, WAY_OUT)

    def spread(self, node: fx.Node, selection: Selection) -> fx.Node:
        """The mask in a shape that broadcasts against a selection."""
        shape = [1] * len(shape_of(node))
        shape[selection.axis] = shape_of(node)[selection.axis]
        return self.edit.emit(_ATEN.reshape.default, selection.mask, shape)

    def blanked(self, node: fx.Node, value: float) -> fx.Node:
        """A selection with ``value`` where places do not count."""
        selection = self.selections[node]
        other = self.edit.emit(_ATEN.full.default, [], value, dtype=node.meta["val"].dtype)
        return self.edit.emit(_ATEN.where.self, self.spread(node, selection), node, other)

    def count(self, mask: fx.Node) -> fx.Node:
        """How many places a mask selects, int64."""
        return self.once(("count", mask), _ATEN.sum.default, mask)

    def harmless(self, node: Any) -> Any:
        """A selection in which a value that counts fills the places that do not; 0.5, 0 or False where none counts."""
        selection = self.selections.get(node) if isinstance(node, fx.Node) else None
        if selection is None or selection.harmless:
            return node
        if ("filled", node) in self._cache:
            return self._cache["filled", node]
        dtype = node.meta["val"].dtype
        number = self.once(("number", selection.mask), _ATEN.to.dtype, selection.mask, torch.int32)
        first = self.once(("first", selection.mask), _ATEN.argmax.default, number, 0, True)
        some = self.once(("any", selection.mask), _ATEN.any.default, selection.mask)
        row = self.edit.emit(_ATEN.detach.default, self.edit.emit(_ATEN.index_select.default, node, selection.axis, first))
        default = self.edit.emit(_ATEN.full.default, [], 0.5 if dtype.is_floating_point else False if dtype is torch.bool else 0, dtype=dtype)
        row = self.edit.emit(_ATEN.where.self, some, row, default)
        filled = self.edit.emit(_ATEN.where.self, self.spread(node, selection), node, row)
        self.selections[filled] = Selection(selection.axis, selection.mask, True)
        self._cache["filled", node] = filled
        return filled

    def common(self, node: fx.Node) -> tuple[int, fx.Node]:
        """Of the selections among the arguments of an operator that broadcasts: the axis, counted from the last, and their mask.

        Raises:
            ExportError: where they differ.
        """
        found: set[tuple[int, fx.Node]] = set()
        for source in node.all_input_nodes:
            if source in self.selections:
                selection = self.selections[source]
                found.add((selection.axis - len(shape_of(source)), selection.mask))
        if len(found) != 1:
            raise self.refusal(node, "it combines selections by different masks, whose sizes depend on data")
        return found.pop()

    def once(self, key: tuple[Any, ...], target: Any, *args: Any) -> fx.Node:
        """A call that is made once for all who ask with this key."""
        if key not in self._cache:
            self._cache[key] = self.edit.emit(target, *args)
        return self._cache[key]

    def flat_mask(self, mask: fx.Node) -> fx.Node:
        """A mask as a vector of its own, which later writes to it leave alone."""
        key = ("mask", self.numbers.origin(mask), self.numbers.writes(mask))
        if key not in self._cache:
            flat = self.edit.emit(_ATEN.reshape.default, mask, [math.prod(shape_of(mask))])
            self._cache[key] = self.edit.emit(_ATEN.clone.default, flat)
        return self._cache[key]

    def size(self, node: Any) -> int | None:
        """A size that masks no longer leave open."""
        if isinstance(node, int):
            return node
        if not isinstance(node, fx.Node):
            return None
        if node.target is _ATEN.sym_size.int:
            source, dim = node.args
            assert isinstance(source, fx.Node) and isinstance(dim, int)
            if source in self.selections and self.selections[source].axis == dim % len(shape_of(source)):
                return None
            size = shape_of(source)[dim]
            return size if isinstance(size, int) else None
        numbers = [self.size(argument) for argument in node.args]
        if node.op != "call_function" or is_operator(node) or None in numbers:
            return None
        return int(node.target(*numbers))

    def total(self, node: Any) -> fx.Node | int | None:
        """The size of a selection, or a multiple of it, as a tensor."""
        if not isinstance(node, fx.Node):
            return node if isinstance(node, int) else None
        if node.target is _ATEN.sym_size.int:
            return self.count(self.selections[node.args[0]].mask) if node.args[0] in self.selections else self.size(node)
        if node.target is not operator.mul:
            return None
        one, two = (self.total(argument) for argument in node.args)
        if one is None or two is None:
            return None
        tensor, other = (one, two) if isinstance(one, fx.Node) else (two, one)
        return self.edit.emit(_ATEN.mul.Tensor, tensor, other) if isinstance(tensor, fx.Node) else tensor * other
