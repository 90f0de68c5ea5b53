"""The engine: walks the edges of the forward graph in reverse and asks the registry for each operator's VJP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx_ir as ir

from ..errors import DifferentiationError
from ..graph import Expr, GraphBuilder
from .broadcast import unbroadcast
from .context import REFUSAL, Context, describe
from .registry import NotDifferentiable, Refused, Rewritten, Vjp, lookup

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def differentiate(
    op: GraphBuilder,
    loss: ir.Value,
    targets: Sequence[ir.Value],
    stop_gradient: Collection[str] = (),
    on_complete: Callable[[ir.Value, Expr], None] | None = None,
) -> dict[str, Expr]:
    """Add the backward graph of a scalar loss to the graph.

    Args:
        op: builder at the end of the forward graph.
        loss: a floating-point scalar.
        targets: values whose gradients are wanted (parameters, inputs).
        stop_gradient: names of values through which no gradient flows.
        on_complete: called with each target and its gradient as soon as that is complete, so that its consumer can follow at once.

    Returns:
        Target name -> gradient, of the target's shape and dtype.  A target that the loss does not depend on has no entry (its gradient
        is zero).

    Raises:
        DifferentiationError: an operator on the way has no rule, or refuses; names the node.
    """
    if loss.dtype not in _FLOATS or any(d != 1 for d in op.wrap(loss).shape):
        raise DifferentiationError(f"the loss '{loss.name}' must be one floating-point number, not {loss.dtype} {loss.shape}")
    nodes = list(op.graph)
    live = _influenced(nodes, targets, set(stop_gradient))
    if id(loss) not in live:
        raise DifferentiationError(f"no trainable parameter reaches the loss: {_cut(nodes, loss, live, set(stop_gradient))}")
    wanted = {id(t): t for t in targets}
    grads: dict[int, Expr] = {id(loss): op.const(1.0, loss.dtype).expand(op.wrap(loss).shape)}
    result: dict[str, Expr] = {}
    remaining = _pending_uses(nodes, live, wanted)
    for node in reversed(nodes):
        incoming = [grads.get(id(v)) if id(v) in live else None for v in node.outputs]
        inputs = [v for v in node.inputs if v is not None and id(v) in live]
        if any(g is not None for g in incoming) and inputs:
            for value, grad in _input_gradients(op, node, incoming, live):
                previous = grads.get(id(value))
                grads[id(value)] = grad if previous is None else previous + grad
        for value in node.outputs:
            grads.pop(id(value), None)
        # A parameter's gradient is complete once the first of its forward readers has been passed.
        for value in dict.fromkeys(inputs):
            if id(value) in remaining:
                remaining[id(value)] -= 1
                if remaining[id(value)] == 0 and id(value) in grads:
                    assert value.name
                    result[value.name] = grads.pop(id(value))
                    if on_complete is not None:
                        on_complete(value, result[value.name])
    if not result:
        raise DifferentiationError("no trainable parameter reaches the loss: every path is cut by operations that pass no gradient")
    return result


def _influenced(nodes: Sequence[ir.Node], targets: Sequence[ir.Value], stop: set[str]) -> set[int]:
    """The values that depend on a target through operators that pass a gradient: floating-point ones.

    And whatever a refused operator makes of them: were the integers of a QuantizeLinear left out, the path through it would be cut unseen.
    """
    live = {id(t) for t in targets if t.name not in stop}
    for node in nodes:
        state = lookup(node.op_type, node.domain)
        if isinstance(state, NotDifferentiable):
            continue
        if any(v is not None and id(v) in live for v in node.inputs):
            any_type = isinstance(state, Refused)
            live |= {id(v) for v in node.outputs if (any_type or v.dtype in _FLOATS) and v.name not in stop}
    return live


def _cut(nodes: Sequence[ir.Node], loss: ir.Value, live: set[int], stop: set[str]) -> str:
    """Why a loss depends on no target: the last place, on the way to it, where the gradient ends."""
    needed = {id(loss)}
    for node in reversed(nodes):
        if not any(id(v) in needed for v in node.outputs):
            continue
        needed |= {id(v) for v in node.inputs if v is not None}
        if not any(v is not None and id(v) in live for v in node.inputs):
            continue
        if any(v.name in stop for v in node.outputs):
            return f"a detach or no_grad cuts the gradient after {describe(node)}; remove it, or train a parameter behind it"
        return f"no gradient passes {describe(node)}; use a smooth operation there, or train a parameter behind it"
    return "the loss is computed from none of them; return a loss that depends on the model's parameters, or freeze fewer"


def _pending_uses(nodes: Sequence[ir.Node], live: set[int], wanted: dict[int, ir.Value]) -> dict[int, int]:
    """For each target, how many nodes read it."""
    uses = dict.fromkeys(wanted, 0)
    for node in nodes:
        for key in {id(v) for v in node.inputs if v is not None and id(v) in live}:
            if key in uses:
                uses[key] += 1
    return uses


def _input_gradients(op: GraphBuilder, node: ir.Node, incoming: list[Expr | None], live: set[int]) -> list[tuple[ir.Value, Expr]]:
    """The gradients that one node passes to its inputs; an input read twice comes twice."""
    state = lookup(node.op_type, node.domain)
    if state is None:
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise DifferentiationError(f"there is no gradient rule for {name}, needed by {describe(node)}; freeze what is before it, or add a rule")
    if isinstance(state, Refused):
        raise DifferentiationError(f"can't differentiate {describe(node)}: {state.reason}")
    if isinstance(state, NotDifferentiable):
        return []
    if REFUSAL in node.metadata_props:
        raise DifferentiationError(node.metadata_props[REFUSAL])
    if isinstance(state, Rewritten):
        raise DifferentiationError(f"{describe(node)} should have been rewritten before")
    wanted = [v is not None and id(v) in live for v in node.inputs]
    context = Context(op, node, incoming, wanted)
    op.metadata = {key: value for key, value in node.metadata_props.items() if key == "pkg.torch.onnx.name_scopes"}
    op.metadata["onnxremat.gradient_of"] = node.name or ""
    try:
        grads = _apply(state, context, incoming)
    except ValueError as error:
        raise context.refuse(str(error)) from error
    finally:
        op.metadata = {}
    pairs: list[tuple[ir.Value, Expr]] = []
    for value, grad, want in zip(node.inputs, grads, wanted, strict=False):
        if want and grad is not None and value is not None:
            pairs.append((value, unbroadcast(grad, op.wrap(value).shape)))
    return pairs


def _apply(state: Vjp, context: Context, incoming: list[Expr | None]) -> Sequence[Expr | None]:
    if state.joint is not None:
        return state.joint(context)
    grad = incoming[0]
    if grad is None:
        return []
    return [rule(context, grad) if rule is not None and context.wants(i) else None for i, rule in enumerate(state.per_input)]
