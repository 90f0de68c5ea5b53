"""Undoing broadcasting: the one place where it is done."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Expr


def unbroadcast(grad: Expr, shape: Sequence[int]) -> Expr:
    """Sum a gradient over the axes along which an operand of ``shape`` was broadcast (NumPy's rules), and give it that shape.

    Raises:
        ValueError: the gradient's shape is not one that ``shape`` broadcasts to.
    """
    if grad.shape == tuple(shape):
        return grad
    lead = grad.rank - len(shape)
    if lead < 0:
        raise ValueError(f"a gradient of shape {grad.shape} can't belong to an operand of shape {tuple(shape)}")
    axes = list(range(lead))
    for axis, size in enumerate(shape):
        if size != grad.shape[lead + axis]:
            if size != 1:
                raise ValueError(f"a gradient of shape {grad.shape} can't belong to an operand of shape {tuple(shape)}")
            axes.append(lead + axis)
    return grad.sum(axes).reshape(shape)
