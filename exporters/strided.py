"""as_strided in an exported program: torch counts in the storage of a tensor, ONNX in its elements."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from .errors import ExportError
from .places import user_line

__all__ = ["resolve_strides"]


def resolve_strides(program: torch.export.ExportedProgram) -> None:
    """Makes ``as_strided`` read the tensor that owns the storage, in place.

    Its strides and offset count in the storage; a translation counts in the elements of its argument, which are in that order only where the
    argument is the whole of a contiguous storage.

    Raises:
        ExportError: where the owner of the storage is not such a tensor, and where more is read than the argument has.
    """
    for node in list(program.graph_module.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.as_strided.default:
            _from_owner(node)
    program.graph_module.recompile()


def _from_owner(node: fx.Node) -> None:
    arguments: list[Any] = [*node.args, *node.kwargs.values()]
    source, size, stride = arguments[:3]
    offset = arguments[3] if len(arguments) > 3 and arguments[3] is not None else source.meta["val"].storage_offset()
    place = user_line(node.meta.get("stack_trace") or "")
    viewed = source.meta["val"]
    if np.setdiff1d(_places(size, stride, offset), _places(viewed.shape, viewed.stride(), viewed.storage_offset())).size:
        why = "it reads elements of the storage that its tensor has not, which get no gradient in torch"
        raise ExportError(f"as_strided{place}", why, "apply it to the whole tensor")
    owner: fx.Node = source
    while (base := _viewed(owner)) is not None and not _owns(owner):
        owner = base
    if not _owns(owner):
        raise ExportError(f"as_strided{place}", "its tensor is not laid out in order", "call contiguous() first, or index instead")
    node.args, node.kwargs = (owner, size, stride, offset), {}


def _places(size: Sequence[int], stride: Sequence[int], offset: int) -> npt.NDArray[np.int64]:
    """Where in the storage the elements of a tensor lie."""
    places = np.full([1] * len(size), offset, np.int64)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        places = places + (np.arange(count) * step).reshape([-1 if a == axis else 1 for a in range(len(size))])
    return places


def _owns(node: fx.Node) -> bool:
    """Whether a tensor is all of its storage, in order."""
    value: Any = node.meta["val"]
    return bool(value.is_contiguous()) and value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of; a detached one is none, since no gradient reaches the other."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return _viewed(source) if isinstance(source, fx.Node) else None
    if not isinstance(node.target, torch._ops.OpOverload) or not (node.target.is_view or node.target._schema.is_mutable):
        return None
    source = node.args[0]
    if node.target is torch.ops.aten.detach.default or not isinstance(source, fx.Node):
        return None
    values = [n.meta["val"] for n in (node, source)]
    stores = [(v[0] if isinstance(v, list | tuple) else v).untyped_storage()._cdata for v in values]
    return source if stores[0] == stores[1] else None
