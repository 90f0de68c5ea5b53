"""The registry of vector-Jacobian products (VJPs): one of four states for each operator.

An operator has a rule, is *rewritten* before into operators that have one, is *not differentiable* (its outputs do not depend smoothly on
its inputs: the gradient is zero), or is *refused* with a reason.  An operator without a row is refused as unknown.

A rule takes the context of one node and the gradient of its output, and returns the gradient of one input.  Rules are mathematics only:
undoing broadcasting, summing gradients that fan in, symbolic zeros and skipping what nobody needs are the engine's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..graph import Expr
    from .context import Context

InputRule = Callable[["Context", "Expr"], "Expr | None"]
JointRule = Callable[["Context"], Sequence["Expr | None"]]


@dataclass(frozen=True, slots=True)
class Vjp:
    """A rule: one function per input, or a joint one that returns the gradients of all inputs at once."""

    per_input: tuple[InputRule | None, ...] = ()
    joint: JointRule | None = None


@dataclass(frozen=True, slots=True)
class NotDifferentiable:
    """No gradient flows through any input: integer or boolean outputs, or piecewise constant ones."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Training through this operator is refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Normalization replaces it by operators that have rules (``onnxremat.rewrites``)."""


State = Vjp | NotDifferentiable | Refused | Rewritten
_REGISTRY: dict[tuple[str, str], State] = {}


def _register(op_type: str, domain: str, state: State) -> None:
    if (domain, op_type) in _REGISTRY:
        raise ValueError(f"{domain or 'ai.onnx'}.{op_type} is registered twice")
    _REGISTRY[domain, op_type] = state


def vjp(op_type: str, *per_input: InputRule | None, domain: str = "") -> None:
    """Register the gradient of each input; None for one that never has a gradient. Inputs beyond the list have none."""
    _register(op_type, domain, Vjp(per_input=per_input))


def joint_vjp(*op_types: str, domain: str = "") -> Callable[[JointRule], JointRule]:
    """Register a rule that returns the gradients of all inputs at once, for operators where they share work or are any number."""

    def register(rule: JointRule) -> JointRule:
        for op_type in op_types:
            _register(op_type, domain, Vjp(joint=rule))
        return rule

    return register


def not_differentiable(names: str, domain: str = "") -> None:
    """Register operators through which no gradient flows."""
    for name in names.split():
        _register(name, domain, NotDifferentiable())


def refused(names: str, reason: str, domain: str = "") -> None:
    """Register operators that can't be trained through, with the reason."""
    for name in names.split():
        _register(name, domain, Refused(reason))


def rewritten(names: str, domain: str = "") -> None:
    """Register operators that normalization replaces."""
    for name in names.split():
        _register(name, domain, Rewritten())


def lookup(op_type: str, domain: str = "") -> State | None:
    """The state of an operator; None where it is unknown."""
    return _REGISTRY.get(("" if domain == "ai.onnx" else domain, op_type))


def registered() -> dict[tuple[str, str], State]:
    """All rows: (domain, operator) -> state."""
    return dict(sorted(_REGISTRY.items()))
