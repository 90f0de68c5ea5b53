"""Einsum as transposes, matrix products and sums.

An equation names the axes of each operand.  Within an operand a repeated name is a diagonal; a name that no other operand and not the output
has is summed at once; then operands are contracted two at a time, always the pair with the smallest result.  The axes of a pair fall
into four groups: shared and kept (batch), shared and summed (contracted), and those that one of the two has alone.  The pair is
then one batched matrix product, or an elementwise one where nothing is contracted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..autodiff.context import Context
from ..autodiff.rules_linalg import matmul
from ..graph import Expr
from .registry import rewrite


@dataclass(frozen=True)
class _Term:
    """An operand and the names of its axes, all different."""

    value: Expr
    axes: tuple[str, ...]

    def size(self, axis: str) -> int:
        return self.value.shape[self.axes.index(axis)]

    def ordered(self, axes: Sequence[str]) -> Expr:
        return self.value.transpose([self.axes.index(a) for a in axes])

    def grouped(self, *groups: Sequence[str]) -> Expr:
        """Transposed and reshaped so that each group of axes is one axis."""
        value = self.ordered([a for group in groups for a in group])
        return value.reshape([math.prod(self.size(a) for a in group) for group in groups])

    def sum(self, axes: Collection[str]) -> _Term:
        kept = tuple(a for a in self.axes if a not in axes)
        return _Term(self.value.sum([i for i, a in enumerate(self.axes) if a in axes]), kept)


def parse(equation: str, ranks: Sequence[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The names of each operand's axes and of the output's; an ellipsis stands for ``...0``, ``...1`` and so on, counted from its end.

    Raises:
        ValueError: the equation does not fit the operands.
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks):
        raise ValueError(f"the equation '{equation}' has {len(parts)} operands, the node {len(ranks)}")
    widest = 0
    terms: list[tuple[str, ...]] = []
    for part, rank in zip(parts, ranks, strict=True):
        width = rank - len(part.replace("...", ""))
        if width < 0 or (width and "..." not in part):
            raise ValueError(f"the term '{part}' of the equation '{equation}' does not fit an operand of rank {rank}")
        terms.append(_names(part, width))
        widest = max(widest, width)
    if arrow:
        return terms, _names(right, widest)
    letters = left.replace("...", "").replace(",", "")
    return terms, (*_names("..." if "..." in left else "", widest), *sorted(a for a in set(letters) if letters.count(a) == 1))


def _names(part: str, width: int) -> tuple[str, ...]:
    before, dots, after = part.partition("...")
    return (*before, *(f"...{i}" for i in reversed(range(width)) if dots), *after)


@rewrite("Einsum")
def _einsum(c: Context) -> Expr:
    operands = [c.input(i) for i in range(len(c.x))]
    try:
        names, output = parse(str(c.attr("equation")), [x.rank for x in operands])
    except ValueError as error:
        raise c.refuse(str(error)) from error
    for x, axes in zip(operands, names, strict=True):
        if any(len({x.shape[i] for i, other in enumerate(axes) if other == a}) > 1 for a in axes):
            raise c.refuse(f"a repeated letter of '{c.attr('equation')}' names axes of different sizes {x.shape}")
    terms = [_diagonal(x, axes) for x, axes in zip(operands, names, strict=True)]
    terms = [_without_broadcast(term, terms) for term in terms]
    terms = [t.sum({a for a in t.axes if a not in output and not any(a in o.axes for o in terms if o is not t)}) for t in terms]
    while len(terms) > 1:
        pairs = list(combinations(range(len(terms)), 2)) if len(terms) > 2 else [(0, 1)]
        i, j = min(pairs, key=lambda pair: _result_size(terms, pair, output))
        kept = _kept(terms, (i, j), output)
        merged = _contract(terms[i], terms[j], kept)
        terms = [merged, *(t for k, t in enumerate(terms) if k not in (i, j))]
    return terms[0].ordered(output)


def _diagonal(x: Expr, axes: tuple[str, ...]) -> _Term:
    """Reads the diagonal of axes with one name: side by side as one axis of n * n, every (n + 1)-th entry."""
    repeated = next((a for a in axes if axes.count(a) > 1), None)
    if repeated is None:
        return _Term(x, axes)
    first = axes.index(repeated)
    second = axes.index(repeated, first + 1)
    rest = [i for i in range(len(axes)) if i not in (first, second)]
    moved, n = x.transpose([*rest, first, second]), x.shape[first]
    shape = [x.shape[i] for i in rest]
    picked = moved.reshape([*shape, n * n]).slice([0], [n * n], [len(rest)], [n + 1])
    return _diagonal(picked, (*(axes[i] for i in rest), repeated))


def _without_broadcast(term: _Term, terms: Sequence[_Term]) -> _Term:
    """Drops axes of size 1 that another operand has at full size."""
    stretched = {a for a in term.axes if term.size(a) == 1 and any(a in t.axes and t.size(a) != 1 for t in terms)}
    if not stretched:
        return term
    kept = tuple(a for a in term.axes if a not in stretched)
    return _Term(term.value.reshape([term.size(a) for a in kept]), kept)


def _kept(terms: Sequence[_Term], pair: tuple[int, int], output: tuple[str, ...]) -> set[str]:
    return {*output, *(a for k, t in enumerate(terms) if k not in pair for a in t.axes)}


def _result_size(terms: Sequence[_Term], pair: tuple[int, int], output: tuple[str, ...]) -> int:
    kept = _kept(terms, pair, output)
    sizes = {axis: terms[k].size(axis) for k in pair for axis in terms[k].axes if axis in kept}
    return math.prod(sizes.values())


def _contract(a: _Term, b: _Term, kept: Collection[str]) -> _Term:
    """The product of two terms, summed over the axes that are not kept (all of them shared)."""
    shared = [x for x in a.axes if x in b.axes]
    batch = [x for x in shared if x in kept]
    summed = [x for x in shared if x not in kept]
    left = [x for x in a.axes if x not in shared]
    right = [x for x in b.axes if x not in shared]
    if not summed or not (left or right) or any(a.size(x) == 0 for x in summed):
        # Elementwise, by broadcasting; ONNX Runtime leaves products over no element unset.
        axes = [*batch, *left, *right, *summed]
        spread = [t.ordered([x for x in axes if x in t.axes]).reshape([t.size(x) if x in t.axes else 1 for x in axes]) for t in (a, b)]
        return _Term(spread[0] * spread[1], tuple(axes)).sum(summed)
    # Of the two layouts of each operand the one that needs no transposition; the product transposes for free.
    trans_a = a.axes == (*batch, *summed, *left)
    summed = summed if trans_a or a.axes == (*batch, *left, *summed) else [x for x in b.axes if x in summed]
    trans_b = b.axes == (*batch, *right, *summed)
    x = a.grouped(batch, summed, left) if trans_a else a.grouped(batch, left, summed)
    y = b.grouped(batch, right, summed) if trans_b else b.grouped(batch, summed, right)
    if not batch:
        x, y = x.reshape(x.shape[1:]), y.reshape(y.shape[1:])
    product = matmul(x, y, trans_a, trans_b)
    axes = [*batch, *left, *right]
    return _Term(product.reshape([(a if n in a.axes else b).size(n) for n in axes]), tuple(axes))
