"""Additions to an exported program: operators in front of a node, and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

__all__ = ["ProgramEditor"]

_KEPT = ("nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack", "custom")


class ProgramEditor:
    """Adds nodes with the metadata that a trace would have given them; ``at`` is the node that all come in front of."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        """Edits ``program`` in place."""
        self.program, self.graph = program, program.graph_module.graph
        self.at: fx.Node = next(iter(self.graph.nodes))
        self._mode = next(v.fake_mode for n in self.graph.nodes if isinstance(v := n.meta.get("val"), torch._subclasses.FakeTensor))
        self._constants = 0

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of ``target``, said to come from where ``at`` comes from."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({key: self.at.meta[key] for key in _KEPT if key in self.at.meta})
        self.evaluate(node)
        return node

    def evaluate(self, node: fx.Node) -> None:
        """Computes shape and dtype of a node from its arguments'."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        with self._mode, torch.no_grad():
            node.meta["val"] = node.target(*args, **kwargs)
        node.meta.pop("tensor_meta", None)

    def replace(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> None:
        """Makes ``node`` another call, for all who read it."""
        node.target, node.args, node.kwargs = target, args, kwargs
        self.evaluate(node)

    def constant(self, tensor: torch.Tensor) -> fx.Node:
        """A further constant of the program."""
        signature = self.program.graph_signature
        name = f"c_mask_constant_{self._constants}"
        self._constants += 1
        position = next((i for i, spec in enumerate(signature.input_specs) if spec.kind is InputKind.USER_INPUT), len(signature.input_specs))
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        first = placeholders[position] if position < len(placeholders) else next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = self._mode.from_tensor(tensor.clone(), static_shapes=True)
        signature.input_specs.insert(position, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name))
        self.program.constants[name] = tensor.clone()
        return node
