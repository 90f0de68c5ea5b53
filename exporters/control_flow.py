"""If, Loop and Scan written out, where what they do is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .errors import ExportError
from .places import place_of
from .roles import unique_name

__all__ = ["has_control_flow", "refuse_control_flow", "unroll_control_flow"]

_KINDS = ("If", "Loop", "Scan")
#: Nodes beyond which an unrolled graph is refused: no schedule would be found.
MOST_NODES = 50_000


def has_control_flow(node: ir.Node) -> bool:
    """Whether a node has subgraphs."""
    return any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values())


def unroll_control_flow(model: ir.Model) -> None:
    """Replaces If by the branch that its constant condition takes, and Loop and Scan of known length by copies of their bodies, in place.

    What is not known yet stays: constants may be folded and shapes inferred, and this tried again.
    """
    changed = True
    while changed:
        changed = False
        for node in list(model.graph):
            if node.op_type in _KINDS and node.domain in ("", "ai.onnx") and _obstacle(node) is None:
                _Writer(model.graph, node).write()
                changed = True


def refuse_control_flow(model: ir.Model) -> None:
    """Raises ExportError for the first node that still has a subgraph."""
    for node in model.graph:
        if has_control_flow(node):
            why = _obstacle(node) if node.op_type in _KINDS else None
            raise ExportError(
                f"{node.op_type} {node.name}{place_of(node)}",
                why or "a subgraph has no static schedule",
                "export the model with constant control flow, or compute both ways and choose with Where",
            )


def _known(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The content of a constant."""
    if value is None:
        return None
    if value.const_value is not None and not value.is_graph_input():
        return np.asarray(value.const_value.numpy())
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return np.asarray(node.attributes["value"].as_tensor().numpy())
    if node is not None and node.op_type == "Identity":
        return _known(node.inputs[0])
    return None


def _source(value: ir.Value | None) -> ir.Value | None:
    """The value behind Identity nodes."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    return value


def _obstacle(node: ir.Node) -> str | None:
    """Why a node can't be written out; None where it can."""
    if node.op_type == "If":
        return None if _known(node.inputs[0]) is not None else "its condition depends on data"
    body = node.attributes["body"].as_graph()
    if node.op_type == "Scan":
        count = node.attributes.get_int("num_scan_inputs", 0)
        shapes = [value.shape if value is not None else None for value in node.inputs[len(node.inputs) - count :]]
        if any(shape is None or not shape.is_static() for shape in shapes):
            return "the length of its sequences is unknown"
        if _scan_length(node) == 0:
            return "its sequences are empty"
        steps = _scan_length(node)
    else:
        trips, condition = _known(node.inputs[0]), node.inputs[1]
        if trips is None:
            return "its trip count depends on data" if node.inputs[0] is not None else "it has no trip count"
        start = _known(condition)
        if condition is not None and start is None:
            return "its condition depends on data"
        after = _source(body.outputs[0])
        kept = _known(body.outputs[0])
        if after is not body.inputs[1] and (kept is None or not bool(kept.reshape(()))):
            return "its condition is computed in its body"
        steps = int(trips.reshape(())) if start is None or bool(start.reshape(())) else 0
        if steps <= 0 and len(node.outputs) > len(body.inputs) - 2:
            return "it runs no step, so its stacked outputs have no shape"
    if steps * len(body) > MOST_NODES:
        return f"written out it would have {steps * len(body):,} nodes, more than {MOST_NODES:,}"
    return None


def _axis(node: ir.Node, name: str, index: int, rank: int) -> int:
    axes = node.attributes.get_ints(name) or []
    return int(axes[index]) % rank if index < len(axes) else 0


def _scan_length(node: ir.Node) -> int:
    count = node.attributes.get_int("num_scan_inputs", 0)
    value = node.inputs[len(node.inputs) - count]
    assert value is not None and value.shape is not None
    return int(value.shape.numpy()[_axis(node, "scan_input_axes", 0, len(value.shape))])


class _Writer:
    """Writes one node out in front of it."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self.graph, self.node = graph, node
        self.taken = {str(v.name) for n in ir.traversal.RecursiveGraphIterator(graph) for v in n.outputs if v.name}
        self.taken |= {str(v.name) for v in graph.inputs} | set(graph.initializers) | {str(n.name) for n in graph if n.name}

    def write(self) -> None:
        outputs = {"If": self._if, "Loop": self._loop, "Scan": self._scan}[self.node.op_type]()
        for old, new in zip(self.node.outputs, outputs, strict=True):
            name = old.name
            if old.is_graph_output() and new.producer() is None:
                new = self._node("Identity", [new])
            if old.is_graph_output() and name:
                old.name, new.name = unique_name(f"{name}_of_{self.node.op_type}", self.taken), name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        self.graph.remove(self.node, safe=True)

    def _if(self) -> list[ir.Value]:
        condition = _known(self.node.inputs[0])
        assert condition is not None
        branch = self.node.attributes["then_branch" if bool(condition.reshape(())) else "else_branch"].as_graph()
        return self._inline(branch, [])

    def _loop(self) -> list[ir.Value]:
        trips, start = _known(self.node.inputs[0]), _known(self.node.inputs[1])
        assert trips is not None
        body = self.node.attributes["body"].as_graph()
        steps = int(trips.reshape(())) if start is None or bool(start.reshape(())) else 0
        carried = [v for v in self.node.inputs[2:] if v is not None]
        go_on = self._constant(np.asarray(True), "loop_condition")
        stacked: list[list[ir.Value]] = [[] for _ in self.node.outputs[len(carried) :]]
        for step in range(steps):
            made = self._inline(body, [self._constant(np.asarray(step, np.int64), "loop_step"), go_on, *carried])
            carried = made[1 : 1 + len(carried)]
            for values, value in zip(stacked, made[1 + len(carried) :], strict=True):
                values.append(value)
        return [*carried, *(self._stack(values, 0) for values in stacked)]

    def _scan(self) -> list[ir.Value]:
        node, body = self.node, self.node.attributes["body"].as_graph()
        count = node.attributes.get_int("num_scan_inputs", 0)
        steps = _scan_length(node)
        carried = [v for v in node.inputs[: len(node.inputs) - count] if v is not None]
        slices = []
        for i, value in enumerate(node.inputs[len(node.inputs) - count :]):
            assert value is not None and value.shape is not None
            parts = self._unstack(value, _axis(node, "scan_input_axes", i, len(value.shape)), steps)
            slices.append(parts[::-1] if (node.attributes.get_ints("scan_input_directions") or [0] * count)[i] else parts)
        stacked: list[list[ir.Value]] = [[] for _ in node.outputs[len(carried) :]]
        for step in range(steps):
            made = self._inline(body, [*carried, *(parts[step] for parts in slices)])
            carried = made[: len(carried)]
            for values, value in zip(stacked, made[len(carried) :], strict=True):
                values.append(value)
        backwards = node.attributes.get_ints("scan_output_directions") or [0] * len(stacked)
        axes = node.attributes.get_ints("scan_output_axes") or [0] * len(stacked)
        return [
            *carried,
            *(self._stack(v[::-1] if b else v, int(a)) for v, a, b in zip(stacked, axes, backwards, strict=True)),
        ]

    def _inline(self, body: ir.Graph, arguments: Sequence[ir.Value]) -> list[ir.Value]:
        """Puts a copy of a body in front of the node; its constants become the graph's, once for all copies."""
        for name, value in list(body.initializers.items()):
            del body.initializers[name]
            value.name = unique_name(name, self.taken)
            self.graph.register_initializer(value)
        copy = body.clone(allow_outer_scope_values=True)
        given = dict(zip(copy.inputs, arguments, strict=True))
        outputs = [given.get(v, v) for v in copy.outputs]
        copy.outputs.clear()
        for value, argument in given.items():
            value.replace_all_uses_with(argument)
        nodes = list(copy)
        for node in nodes:
            copy.remove(node)
            node.attributes.pop("seed", None)  # copies of one seed would draw the same numbers
            node.name = unique_name(str(node.name or node.op_type), self.taken)
            for value in node.outputs:
                if value.name:
                    value.name = unique_name(value.name, self.taken)
            self.graph.insert_before(self.node, node)
        return outputs

    def _node(self, op_type: str, inputs: Sequence[ir.Value], count: int = 1, **attributes: int) -> ir.Value:
        return self._nodes(op_type, inputs, count, **attributes)[0]

    def _nodes(self, op_type: str, inputs: Sequence[ir.Value], count: int, **attributes: int) -> Sequence[ir.Value]:
        node = ir.node(op_type, list(inputs), attributes=attributes, num_outputs=count)
        node.name = unique_name(f"{self.node.name or self.node.op_type}_{op_type}", self.taken)
        for value in node.outputs:
            value.name = unique_name(f"{node.name}_value", self.taken)
        self.graph.insert_before(self.node, node)
        return node.outputs

    def _constant(self, array: npt.NDArray[Any], hint: str) -> ir.Value:
        name = unique_name(hint, self.taken)
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def _stack(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        place = self._constant(np.asarray([axis], np.int64), "stack_axis")
        return self._node("Concat", [self._node("Unsqueeze", [v, place]) for v in values], axis=axis)

    def _unstack(self, value: ir.Value, axis: int, steps: int) -> list[ir.Value]:
        # One Split, whose gradient is one Concat: a Gather for each step would be added up over the whole sequence.
        sizes = self._constant(np.ones(steps, np.int64), "split_sizes")
        parts = [value] if steps == 1 else self._nodes("Split", [value, sizes], steps, axis=axis)
        place = self._constant(np.asarray([axis], np.int64), "squeeze_axis")
        return [self._node("Squeeze", [part, place]) for part in parts]
