"""What ``forward`` sets on a module while it is traced: undone, and hidden from ``torch.export``, which knows no buffers that come up on the way."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

__all__ = ["left_as_it_was", "new_buffers"]

#: Classes derived from them may forbid what they allow.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set)


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Undoes what ``forward`` sets, registers or deletes on the module and its submodules: caches, auxiliary losses, counters.

    Attributes come back, and what the lists, dictionaries and sets among them hold; tensors keep the values that were written to them.
    """
    kept: list[tuple[dict[Any, Any] | list[Any] | set[Any], Any]] = []
    for sub in module.modules():
        kept += [(value, copy.copy(value)) for value in (vars(sub), *vars(sub).values()) if type(value) in _CONTAINERS]
    try:
        yield
    finally:
        for container, content in kept:
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)


@contextlib.contextmanager
def new_buffers(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Lets ``forward`` register buffers, and gives a function that takes them off again, to be called at its end.

    ``torch.export`` takes a registration that its hook is told of for a write to a buffer that was there before.
    """
    held = [(sub._buffers, dict(sub._buffers)) for sub in module.modules()]
    register = nn.Module.register_buffer

    def register_buffer(owner: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if owner._buffers.get(name) is None:
            owner._buffers[name] = tensor
        else:
            register(owner, name, tensor, persistent)

    def take_off() -> None:
        for now, before in held:
            kept = {name: None if value is None else now.get(name) for name, value in before.items()}
            now.clear()
            now.update(kept)

    with patch.object(nn.Module, "register_buffer", register_buffer):
        yield take_off
