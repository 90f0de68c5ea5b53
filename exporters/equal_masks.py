"""Masks that a model writes down twice: while tracing, a selection by the second is one by the first, so that torch knows their sizes for equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from .value_numbers import ValueNumbers

__all__ = ["EQUAL_MASKS"]

_getitem = torch.Tensor.__getitem__


def getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """``Tensor.__getitem__``, in which a mask is the first that was computed by the same operations from the same tensors."""
    if isinstance(tensor, FakeTensor):
        index = tuple(_first(i) for i in index) if isinstance(index, tuple) else _first(index)
    return _getitem(tensor, index)


def masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``torch.masked_select`` as an index, whose size torch remembers with the mask."""
    if input.shape != mask.shape:
        input, mask = torch.broadcast_tensors(input, mask)
    return getitem(input, mask)


#: (class or module, name of a function of it, what takes its place while tracing).
EQUAL_MASKS = ((torch.Tensor, "__getitem__", getitem), (torch.Tensor, "masked_select", masked_select), (torch, "masked_select", masked_select))


def _first(index: Any) -> Any:
    mode = get_proxy_mode()
    if not isinstance(index, FakeTensor) or index.dtype is not torch.bool or mode is None:
        return index
    node = get_proxy_slot(index, mode.tracer, None, lambda slot: slot.proxy.node)
    if not isinstance(node, fx.Node):
        return index
    numbers = ValueNumbers()
    for other in node.graph.nodes:
        numbers.note(other)
    origin = numbers.origin(node)
    masks: dict[fx.Node, FakeTensor] = vars(mode.tracer).setdefault("onnxremat_masks", {})
    return index if numbers.writes(origin) else masks.setdefault(origin, index)
