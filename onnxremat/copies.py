"""Swap to the host on CUDA: a plan's swap steps as the runtime's own copy operators, on streams of their own.

``MemcpyToHost`` copies a tensor into pinned memory and ``MemcpyFromHost`` copies it back, both without waiting, so what keeps them apart from
the ops are nodes that wait.  A session launches the nodes of a stream in the order of the file, and a node of one stream that reads a tensor
of another waits for its producer; so a tiny tensor made behind some node (a *mark*) lets whoever reads it wait for all that its stream had
been given by then.  ``PassThrough`` is the reader: its output is its input, nothing is run or copied.

- out, behind the run that makes x, on stream ``out``: ``MemcpyToHost(x)``, a mark.
- ``swap_out``, among the ops: ``Group(x, mark)``.  It holds x until the copy has ended, whatever its speed, and the ops wait for it.
- ``swap_in``: a mark among the ops; on stream ``in`` ``Group(mark)``, so that the copy starts, and its buffer is taken, no earlier than
  the plan says; ``MemcpyFromHost``.
- A copy out after copies back first reads a mark of theirs: it may take over the pinned memory that they read.

Read off the sources of ONNX Runtime 1.19; the order of nodes and their numbers are tested on the CPU (:func:`cpu_twin`).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from .ops import MS
from .runtime.placement import STREAM
from .scheduler import Plan, Problem, Step
from .scheduler.timeline import copy_starts
from .swaps import step_values
from .training_graph import PHASE

#: Key of a node's metadata: it waits, or marks a place, and computes nothing.
WAIT = "onnxremat.wait"
OUT, IN = "out", "in"
_COPIES = ("MemcpyToHost", "MemcpyFromHost")


class HostSwaps:
    """Makes the nodes of a plan's swaps to the host; the arguments and attributes are those of ``onnxremat.swaps.Swaps``."""

    def __init__(self, problem: Problem, plan: Plan, nodes: Sequence[ir.Node], latest: MutableMapping[int, ir.Value]) -> None:
        self._latest = latest
        self._values = step_values(problem, nodes)
        self._steps = plan.steps
        self._behind: dict[int, list[int]] = {}
        for k, start in copy_starts(problem, plan.steps).items():
            self._behind.setdefault(start, []).append(k)
        #: Of a ``swap_out`` step: what its copy made, and the mark behind it.
        self._copied: dict[int, tuple[ir.Value, ir.Value]] = {}
        self._on_host: dict[int, ir.Value] = {}
        self._mark_in: ir.Value | None = None
        self._names: dict[str, int] = {}
        content = ir.tensor(np.ones(1, np.float32), name="swap:one")
        self._one = ir.Value(name="swap:one", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT), const_value=content)
        self.constants = [self._one] if plan.swapped_tensors else []
        self.opset_imports = {MS: 1} if plan.swapped_tensors else {}

    def behind(self, k: int) -> list[ir.Node]:
        """The copies out that start behind step ``k``."""
        made: list[ir.Node] = []
        for out in self._behind.get(k, ()):
            value = self._values[self._steps[out].index]
            if self._mark_in is not None:
                made.append(self._wait(f"after:{value.name}", [self._mark_in], value, OUT))
                self._mark_in = None
            copy = self._node("MemcpyToHost", "", f"out:{value.name}", [self._latest[id(value)]], value, OUT)
            copy.outputs[0].name = self._fresh(f"{value.name}:host")
            copy.outputs[0].shape, copy.outputs[0].type = value.shape, value.type
            mark = self._mark(f"out:{value.name}", value, OUT)
            self._copied[out] = copy.outputs[0], mark.outputs[0]
            made += [copy, mark]
        return made

    def nodes(self, k: int, step: Step) -> list[ir.Node]:
        """The nodes of swap step ``k``."""
        value = self._values[step.index]
        if step.kind == "swap_out":
            self._on_host[step.index], mark = self._copied.pop(k)
            return [self._wait(f"gone:{value.name}", [self._latest[id(value)], mark], value)]
        mark_node = self._mark(f"in:{value.name}", value)
        wait = self._wait(f"in:{value.name}", [mark_node.outputs[0]], value, IN)
        copy = self._node("MemcpyFromHost", "", f"back:{value.name}", [self._on_host[step.index]], value, IN)
        (back,) = copy.outputs
        back.name = self._fresh(f"{value.name}:back")
        back.shape, back.type = value.shape, value.type
        self._latest[id(value)] = back
        made = [mark_node, wait, copy]
        if any(start >= k for start in self._behind):
            last = self._mark(f"back:{value.name}", value, IN)
            self._mark_in = last.outputs[0]
            made.append(last)
        return made

    def _fresh(self, name: str) -> str:
        number = self._names[name] = self._names.get(name, -1) + 1
        return f"{name}:{number}" if number else name

    def _node(self, kind: str, domain: str, name: str, inputs: list[ir.Value], value: ir.Value, stream: str = "") -> ir.Node:
        producer = value.producer()
        assert producer is not None
        metadata = {PHASE: producer.metadata_props[PHASE]} | ({STREAM: stream} if stream else {})
        return ir.Node(domain, kind, inputs, num_outputs=1, name=self._fresh(name), metadata_props=metadata)

    def _mark(self, name: str, value: ir.Value, stream: str = "") -> ir.Node:
        node = self._node("Neg", "", f"mark:{name}", [self._one], value, stream)
        node.metadata_props[WAIT] = "mark"
        node.outputs[0].name = self._fresh(f"mark:{name}:value")
        node.outputs[0].shape, node.outputs[0].type = self._one.shape, self._one.type
        return node

    def _wait(self, name: str, inputs: list[ir.Value], value: ir.Value, stream: str = "") -> ir.Node:
        node = self._node("Group", MS, f"wait:{name}", inputs, value, stream)
        node.metadata_props[WAIT] = "wait"
        node.outputs[0].name = self._fresh(f"wait:{name}:done")
        node.outputs[0].shape, node.outputs[0].type = ir.Shape([]), ir.TensorType(ir.DataType.BOOL)
        return node


def is_wait(node: ir.Node) -> bool:
    """Whether a node only marks a place or waits for one."""
    return WAIT in node.metadata_props


def cpu_twin(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose copies between host and GPU are copies on the CPU: the same nodes, order and numbers where there is no GPU."""
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    for node in twin.graph.node:
        if node.op_type in _COPIES:  # an Identity would share its input's buffer
            node.op_type = "Concat"
            node.attribute.append(onnx.helper.make_attribute("axis", 0))
    return twin


def cpu_copy(path: Path) -> bytes:
    """The bytes of :func:`cpu_twin` of a model file."""
    return bytes(cpu_twin(onnx.load(str(path))).SerializeToString())


__all__ = ["IN", "OUT", "STREAM", "HostSwaps", "cpu_copy", "cpu_twin", "is_wait"]
