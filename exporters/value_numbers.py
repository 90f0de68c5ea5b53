"""Which nodes of a program compute the same: equal operations on equal values, between which nothing was written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from .known_values import is_operator, storage_of, written_arguments

__all__ = ["ValueNumbers"]


class ValueNumbers:
    """Finds the first of equal computations, as the nodes of a program are told to it in their order (local value numbering)."""

    def __init__(self) -> None:
        """Knows no node yet."""
        self._first: dict[tuple[Any, str], fx.Node] = {}
        self._origins: dict[fx.Node, fx.Node] = {}
        self._writes: Counter[int | None] = Counter()

    def note(self, node: fx.Node) -> None:
        """Takes notice of the next node."""
        target = node.target
        if is_operator(node) and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags:
            first = self._first.setdefault((target, repr(fx.map_arg((node.args, dict(node.kwargs)), self._name_now))), node)
            if not self.writes(first):
                self._origins[node] = first
        for written in written_arguments(node):
            self._writes[storage_of(written)] += 1

    def origin(self, node: fx.Node) -> fx.Node:
        """The first node that computed the value of this one; it may have been written to since."""
        return self._origins.get(node, node)

    def writes(self, node: fx.Node) -> int:
        """How often the storage of a node has been written to so far."""
        return self._writes[storage_of(node)]

    def _name_now(self, node: fx.Node) -> str:
        return f"{self.origin(node).name} after {self.writes(node)}"
