"""Custom ``autograd.Function``: traced through its forward where its backward is proven to be the derivative of that, refused elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction

from .errors import ExportError
from .module_copy import copy_module

__all__ = ["UnprovenFunction", "custom_functions_as", "forward_of", "proven_functions"]

#: Relative error, in float32, below which two gradients are the same.
_TOLERANCE = 1e-3


class UnprovenFunction(Exception):
    """A custom Function was called about which nothing is known yet."""


class _Context:
    """The ``ctx`` of a forward whose backward is never asked for."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def save_for_forward(self, *tensors: torch.Tensor) -> None: ...

    def mark_dirty(self, *tensors: torch.Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def forward_of(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the forward of an ``autograd.Function`` computes, in operations that autograd and the tracer see."""
    if function.setup_context is not _SingleLevelFunction.setup_context:
        return function.forward(*args, **kwargs)
    context = _Context()
    context.needs_input_grad = tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    return function.forward(context, *args, **kwargs)


@contextlib.contextmanager
def custom_functions_as(call: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Within the block every ``Function.apply`` outside torch is ``call(function, *args)``; yields the original ``apply(function, *args)``."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, function)(*args, **kwargs)

    def replaced(cls: type, *args: Any, **kwargs: Any) -> Any:
        return (apply if cls.__module__.startswith("torch.") else call)(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(replaced)
    try:
        yield apply
    finally:
        torch.autograd.Function.apply = original


def proven_functions(module: nn.Module, run: Callable[[nn.Module], Any]) -> frozenset[type]:
    """Runs a copy of a module once; the custom Functions that it calls, each proven on the arguments of each call.

    Raises:
        ExportError: for one whose backward gives other gradients than autograd's through its forward.
    """
    found: set[type] = set()

    def check(function: Any, *args: Any, **kwargs: Any) -> Any:
        found.add(function)
        error = _difference(apply, function, args, kwargs)
        if not error <= _TOLERANCE:
            raise ExportError(
                f"autograd.Function {function.__qualname__}",
                f"its custom backward is not the derivative of its forward (off by {error:.1e}), and the exporter sees only the forward",
                "write it in torch operations, with detach() around what gets no gradient",
            )
        return apply(function, *args, **kwargs)

    with torch.random.fork_rng(devices=[]), torch.enable_grad(), custom_functions_as(check) as apply:
        run(copy_module(module))
    return frozenset(found)


def _difference(apply: Callable[..., Any], function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """The largest error of the custom values and gradients for random cotangents, relative to autograd's."""
    results = []
    for call in (apply, forward_of):
        fresh = [a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args]
        leaves = [a for a in fresh if isinstance(a, torch.Tensor) and a.requires_grad]
        with torch.random.fork_rng(devices=[]):
            # Not the leaves themselves, which nothing may write to.
            made = call(function, *(a * 1 if isinstance(a, torch.Tensor) and a.requires_grad else a for a in fresh), **kwargs)
        outputs = [v for v in (made if isinstance(made, tuple) else (made,)) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in outputs]
        live = [(v, w) for v, w in zip(outputs, weights, strict=True) if v.requires_grad]
        total = sum((v * w).sum() for v, w in live)
        grads = torch.autograd.grad(total, leaves, allow_unused=True) if live and leaves else [None] * len(leaves)
        given = [torch.zeros_like(a) if g is None else g for g, a in zip(grads, leaves, strict=True)]
        results.append([*(v.detach() for v in outputs), *given])
    worst = 0.0
    for custom, own in zip(*results, strict=True):
        scale = max(float(own.abs().max()) if own.numel() else 0.0, 1e-6)
        worst = max(worst, float((custom - own).abs().max()) / scale if own.numel() else 0.0)
    return worst
