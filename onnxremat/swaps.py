"""The swap steps of a plan as nodes of the operators in ``onnxremat.spill``."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import numpy as np
import onnx_ir as ir

from .graph import static_shape
from .scheduler import Plan, Problem, Step
from .spill import DOMAIN
from .training_graph import PHASE


class Swaps:
    """Makes the nodes of a plan's swap steps, one after another.

    Args:
        problem: the scheduling problem of the graph.
        plan: its steps.
        nodes: the nodes of the unscheduled graph, op by op.
        latest: id of a value of the unscheduled graph -> the value that holds its latest instance; ``swap_in`` replaces it.

    Attributes:
        constants: empty tensors, one per element type, that tell ``SpillIn`` what it makes.
        opset_imports: the operators' domain, where there are swaps.
    """

    def __init__(self, problem: Problem, plan: Plan, nodes: Sequence[ir.Node], latest: MutableMapping[int, ir.Value]) -> None:
        self._latest = latest
        self._values = step_values(problem, nodes)
        self._steps = plan.steps
        self._tokens: dict[int, ir.Value] = {}
        self._times: dict[tuple[str, int], int] = {}
        self._like: dict[ir.DataType, ir.Value] = {}
        self.opset_imports = {DOMAIN: 1} if plan.swapped_tensors else {}

    @property
    def constants(self) -> list[ir.Value]:
        return list(self._like.values())

    def behind(self, k: int) -> list[ir.Node]:
        """What follows step ``k`` by itself: nothing."""
        return []

    def nodes(self, k: int, step: Step) -> list[ir.Node]:
        """The node of swap step ``k``."""
        value = self._values[step.index]
        number = self._times[step.kind, step.index] = self._times.get((step.kind, step.index), -1) + 1
        return [self._out(k, step.index, value, number) if step.kind == "swap_out" else self._in(step.index, value, number)]

    def _out(self, k: int, tensor: int, value: ir.Value, number: int) -> ir.Node:
        reads, suffix = 0, _suffix(number)
        for step in self._steps[k + 1 :]:
            if step.index == tensor and step.kind == "swap_out":
                break
            reads += step.index == tensor and step.kind == "swap_in"
        node = self._make("SpillOut", f"out:{value.name}{suffix}", [self._latest[id(value)]], [ir.AttrInt64("reads", reads)], value)
        (token,) = node.outputs
        token.name = f"{value.name}:token{suffix}"
        token.shape, token.type = ir.Shape([1]), ir.TensorType(ir.DataType.INT64)
        self._tokens[tensor] = token
        return node

    def _in(self, tensor: int, value: ir.Value, number: int) -> ir.Node:
        assert value.dtype is not None
        shape = ir.AttrInt64s("shape", list(static_shape(value)))
        node = self._make("SpillIn", f"in:{value.name}{_suffix(number)}", [self._tokens[tensor], self._empty(value.dtype)], [shape], value)
        (back,) = node.outputs
        back.name = returned_name(str(value.name), number)
        back.shape, back.type = value.shape, value.type
        self._latest[id(value)] = back
        return node

    def _make(self, kind: str, name: str, inputs: list[ir.Value], attributes: list[ir.Attr], value: ir.Value) -> ir.Node:
        producer = value.producer()
        assert producer is not None
        metadata = {PHASE: producer.metadata_props[PHASE]}
        return ir.Node(DOMAIN, kind, inputs, attributes, num_outputs=1, name=name, metadata_props=metadata)

    def _empty(self, dtype: ir.DataType) -> ir.Value:
        if dtype not in self._like:
            name = f"spill:like:{dtype.name.lower()}"
            content = ir.tensor(np.zeros(0, dtype.numpy()), name=name)
            self._like[dtype] = ir.Value(name=name, shape=ir.Shape([0]), type=ir.TensorType(dtype), const_value=content)
        return self._like[dtype]


def returned_name(name: str, number: int) -> str:
    """What a value is called that ``SpillIn`` makes the ``number``-th time, counted from 0, from the value of this name."""
    return f"{name}:back{_suffix(number)}"


def _suffix(number: int) -> str:
    return f":{number}" if number else ""


def step_values(problem: Problem, nodes: Sequence[ir.Node]) -> dict[int, ir.Value]:
    """Tensor of the problem -> value of the unscheduled graph, of all that its nodes make."""
    values: dict[int, ir.Value] = {}
    for op, node in zip(problem.ops, nodes, strict=True):
        values |= dict(zip(op.outputs, (v for v in node.outputs if v.name), strict=True))
    return values


__all__ = ["Swaps", "returned_name", "step_values"]
