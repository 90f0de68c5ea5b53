"""Values in an exported program that depend on no input, parameter or state: computed as the program is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["KnownValues", "is_operator", "storage_of", "written_arguments", "written_by"]


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch, whose schema says what it writes."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to."""
    return written_by(node.target, node.args, node.kwargs) if is_operator(node) else []


def written_by(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[fx.Node]:
    """The tensors that a call writes to; of batch normalization the schema does not say it."""
    if target is torch.ops.aten.batch_norm.default:
        return [n for n in args[3:5] if isinstance(n, fx.Node)] if args[5] else []
    declared = target._schema.arguments
    given = [*zip(declared, args, strict=False), *((a, kwargs[a.name]) for a in declared if a.name in kwargs)]
    return [value for argument, value in given if argument.is_write and isinstance(value, fx.Node)]


def storage_of(node: fx.Node) -> int | None:
    """What tells the storage of a node's traced tensor from others; None where it has none."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


class KnownValues:
    """Runs, in the order of the program, every node whose arguments are all known, writes into known tensors included.

    Known from the start are constants, and buffers of integers or booleans that nothing writes to: those that a graph has as tables.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        """Finds what is known from the start."""
        self._values: dict[fx.Node, Any] = {}
        signature = program.graph_signature
        names = dict(signature.inputs_to_lifted_tensor_constants) | dict(signature.inputs_to_buffers)
        written = {storage_of(target) for node in program.graph.nodes for target in written_arguments(node)}
        for node in program.graph.nodes:
            name = names.get(node.name) if node.op == "placeholder" else None
            if name is None:
                continue
            tensor = program.constants[name] if name in program.constants else program.state_dict[name]
            constant = node.name in signature.inputs_to_lifted_tensor_constants
            if type(tensor) in (torch.Tensor, torch.nn.Buffer) and (constant or not (tensor.is_floating_point() or storage_of(node) in written)):
                self._values[node] = tensor.detach().clone()

    def get(self, node: Any) -> Any:
        """The present value of a node, a tensor or what else it computes; None where it is unknown."""
        return self._values.get(node)

    def tell(self, node: fx.Node, value: torch.Tensor) -> None:
        """Gives the value of a node that was added to the program."""
        self._values[node] = value

    def follow(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes notice of the next node of the program, which was this call before anything replaced it."""
        sources: list[fx.Node] = []
        fx.map_arg((args, kwargs), sources.append)
        operator = isinstance(target, torch._ops.OpOverload)
        known = all(source in self._values for source in sources)
        if operator and torch.Tag.nondeterministic_seeded in target.tags:
            known = False
        if known and (operator or getattr(target, "__module__", "") == "_operator"):
            own_args, own_kwargs = fx.map_arg((args, dict(kwargs)), self._values.__getitem__)
            with torch.no_grad():
                self._values[node] = target(*own_args, **own_kwargs)
        elif operator:
            for written in written_by(target, args, kwargs):
                self._forget(written)

    def _forget(self, target: fx.Node) -> None:
        """Drops what shares memory with a tensor that gets an unknown value."""
        lost = self._values.get(target)
        if not isinstance(lost, torch.Tensor):
            return
        pointer = lost.untyped_storage().data_ptr()
        for node, value in list(self._values.items()):
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == pointer:
                del self._values[node]
