"""A copy of a module that may be run, trained and changed."""

from __future__ import annotations

import copy

import torch
from torch import nn

__all__ = ["copy_module"]


def copy_module(module: nn.Module) -> nn.Module:
    """A deep copy, also of modules that ``deepcopy`` refuses.

    The older ``torch.nn.utils.weight_norm`` and ``spectral_norm`` keep the weight that they computed last as an attribute, which is no leaf of
    autograd: its values are copied.  Scripted functions have no state, and are shared.
    """
    memo: dict[int, object] = {}
    for sub in module.modules():
        for value in vars(sub).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
            elif isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value
    return copy.deepcopy(module, memo)
