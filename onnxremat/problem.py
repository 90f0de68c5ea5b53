"""A training graph as a scheduling problem: which buffers it needs, which runs may be repeated, what each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from .graph import nbytes
from .ops import Traits, traits
from .scheduler import Op, Problem, Tensor
from .training_graph import FORWARD, PHASE
from .writes import WRITES, overwritten


@dataclass(frozen=True)
class Costs:
    """What the nodes of a graph cost on a machine.

    Attributes:
        seconds: node name -> seconds of one run.
        workspace_bytes: node name -> bytes of scratch memory while it runs.
        origin: "measured" or "analytic", and of what.
        load: processor cores that other processes kept busy while it was measured; None where it was not, or that is not known.
    """

    seconds: Mapping[str, float]
    workspace_bytes: Mapping[str, int] = field(default_factory=dict)
    origin: str = "analytic"
    load: float | None = None


def scheduling_problem(
    graph: ir.Graph,
    costs: Costs,
    resident: Mapping[str, int],
    name: str = "training step",
    optimizer_peak_bytes: int = 0,
    inplace: bool = True,
) -> Problem:
    """The scheduling problem of a training graph whose nodes are in a valid order.

    Args:
        graph: every value has a static shape.
        costs: seconds and workspace bytes of each node.
        resident: bytes held during the whole step, by class; the graph's inputs and constants must be counted there.
        name: for reports.
        optimizer_peak_bytes: peak of a separate optimizer phase, resident bytes included.
        inplace: kernels take over dead inputs as the op table says; off, none does.

    Returns:
        The problem; op i is the i-th node of the graph.
    """
    index: dict[int, int] = {}
    tensors: list[Tensor] = []
    outputs = {id(v) for v in graph.outputs}
    for value in [*graph.inputs, *(v for v in graph.initializers.values() if not v.is_graph_input())]:
        index[id(value)] = len(tensors)
        tensors.append(Tensor(str(value.name), nbytes(value), producer=-1))
    ops: list[Op] = []
    writes = overwritten(graph)
    for node in graph:
        row = traits(node.op_type, node.domain)
        made = []
        for value in node.outputs:
            if not value.name:
                continue
            index[id(value)] = len(tensors)
            made.append(len(tensors))
            base = next((node.inputs[source] for source, target in row.aliases if value is node.outputs[target]), None)
            alias = -1 if base is None else index[id(base)]
            if WRITES in node.metadata_props and value is node.outputs[0]:
                alias = index[id(writes[node])]  # bound to the array of the value that it replaces
            tensors.append(Tensor(value.name, nbytes(value), producer=len(ops), alias_of=alias, output=id(value) in outputs))
        ops.append(
            Op(
                name=str(node.name),
                seconds=float(costs.seconds.get(str(node.name), 0.0)),
                inputs=tuple(dict.fromkeys(index[id(v)] for v in (*node.inputs, writes.get(node)) if v is not None)),
                outputs=tuple(made),
                workspace_bytes=int(costs.workspace_bytes.get(str(node.name), 0)),
                phase=node.metadata_props.get(PHASE, FORWARD),
                pinned=_pinned(node, row, outputs),
                inplace=_inplace(node, row, index) if inplace else (),
                writes=(index[id(writes[node])],) if node in writes else (),
                op_type=node.op_type,
            )
        )
    problem = Problem(name=name, ops=tuple(ops), tensors=tuple(tensors), resident=dict(resident), optimizer_peak_bytes=optimizer_peak_bytes)
    problem.check()
    return problem


def _pinned(node: ir.Node, row: Traits, outputs: set[int]) -> str:
    if row.random:
        return "random"
    if row.stateful:
        return "stateful"
    if node.op_type == "Cast" and any(use.node.op_type == "Cast" for use in node.outputs[0].uses()):
        # A clone that only Casts read is one that the runtime takes out (see normalize.merge_casts for those without loss).
        return "cast"
    return "output" if any(id(v) in outputs for v in node.outputs) else ""


def _inplace(node: ir.Node, row: Traits, index: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    pairs = []
    for source, target in row.inplace:
        read, written = node.inputs[source], node.outputs[target]
        if read is not None and written.name and nbytes(read) == nbytes(written):
            pairs.append((index[id(read)], index[id(written)]))
    return tuple(pairs)
