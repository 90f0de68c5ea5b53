"""A plan becomes an ONNX graph: the nodes in the plan's order, recomputes as clones, and data edges that protect every overwritten value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .copies import HostSwaps, is_wait
from .errors import OnnxRematError
from .graph import GraphBuilder, nbytes
from .ops import traits
from .portable.dimensions import name_dimensions
from .portable.tokens import order_by_tokens
from .scheduler import Lowered, Plan, Problem, Step
from .swaps import Swaps, returned_name
from .targets import ORT_TRAINING, Target
from .training_graph import FORWARD, PHASE
from .writes import note_writes, overwritten

CLONE_OF = "onnxremat.recompute_of"
SEPARATOR = "@"
#: Buffers up to this many bytes are small: they live in a pen of their own, and are not worth a node that frees them early.
SMALL_BYTES = 64 * 1024
#: Metadata of nodes that are there for order or placement only.
HELPER = "onnxremat.helper"
#: Elements of the fence behind the pen where order is forced by tokens: four granules of the arena.
_WIDE_FENCE = 256


@dataclass(frozen=True, slots=True)
class Emitted:
    """A scheduled graph.

    Attributes:
        model: the graph, its nodes in the order of the plan.
        order: node names in that order (helper nodes excluded).
        clones: names of the recompute clones.
    """

    model: ir.Model
    order: tuple[str, ...]
    clones: tuple[str, ...]


def emit(model: ir.Model, problem: Problem, plan: Plan, pen_bytes: int = 0, target: Target = ORT_TRAINING) -> Emitted:
    """Lay out a training graph by a plan.

    Args:
        model: the unscheduled training graph; it is left alone.
        problem: its scheduling problem (op i is node i).
        plan: the sequence of runs and swaps.
        pen_bytes: size of the pen for small buffers (``onnxremat.runtime.arena.place``); 0 for none.
        target: whether data edges are to force the order.

    Returns:
        The scheduled graph. A clone of ``node`` is called ``node@k`` for its k-th recompute, and so are its outputs.

    Raises:
        OnnxRematError: the plan overwrites a value that a later run reads.
    """
    if plan.swapped_tensors and target.tokens:
        raise OnnxRematError(f"the plan swaps tensors, which target {target.name} has no operators for: plan with recomputes only")
    kind = HostSwaps if target.on_gpu else Swaps
    return _lay_out(model, plan.steps, lambda nodes, latest: kind(problem, plan, nodes, latest), pen_bytes, target)


def lay_out(model: ir.Model, target: Target) -> ir.Model:
    """A copy of a training graph in its own order, which is forced where the target's way is data edges."""
    steps = [Step("run", op) for op in range(len(model.graph))]
    return _lay_out(model, steps, lambda nodes, latest: None, 0, target).model


def _lay_out(
    model: ir.Model,
    steps: Sequence[Step],
    make_swaps: Callable[[Sequence[ir.Node], MutableMapping[int, ir.Value]], Swaps | HostSwaps | None],
    pen_bytes: int,
    target: Target,
) -> Emitted:
    source = model.graph
    nodes = list(source)
    latest: dict[int, ir.Value] = {}
    inputs = [_copy_value(v, latest) for v in source.inputs]
    constants = [_copy_value(v, latest) for v in source.initializers.values() if not v.is_graph_input()]
    runs: dict[int, int] = {}
    laid: list[ir.Node] = []
    originals: dict[int, ir.Value] = {}
    swaps = make_swaps(nodes, latest)
    for k, step in enumerate(steps):
        if step.kind != "run":
            assert swaps is not None
            laid += [*swaps.nodes(k, step), *swaps.behind(k)]
            continue
        op = step.index
        node = nodes[op]
        count = runs[op] = runs.get(op, -1) + 1
        made = _run(node, latest, count)
        if count == 0:
            originals |= {id(old): new for old, new in zip(node.outputs, made.outputs, strict=True)}
        laid.append(made)
        laid += swaps.behind(k) if swaps is not None else []
    graph = ir.Graph(
        inputs,
        [originals[id(v)] for v in source.outputs],
        nodes=laid,
        initializers=[*constants, *(swaps.constants if swaps is not None else ())],
        opset_imports=dict(source.opset_imports) | (swaps.opset_imports if swaps is not None else {}),
        name=source.name or "training",
    )
    _free_unread(graph, target)
    _protect_overwritten(graph, target)
    if pen_bytes:
        _fence_pen(graph, pen_bytes, target)
    if target.tokens:
        order_by_tokens(graph, HELPER)
        name_dimensions(graph)
    scheduled = ir.Model(graph, ir_version=model.ir_version, producer_name="onnxremat")
    note_writes(scheduled)
    run = [n for n in graph if not is_helper(n)]
    return Emitted(scheduled, tuple(str(n.name) for n in run), tuple(str(n.name) for n in run if CLONE_OF in n.metadata_props))


def _copy_value(value: ir.Value, latest: dict[int, ir.Value]) -> ir.Value:
    copy = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
    latest[id(value)] = copy
    return copy


def _run(node: ir.Node, latest: dict[int, ir.Value], count: int) -> ir.Node:
    """One run of a node, reading the latest instance of each input; count 0 is the original."""
    metadata = dict(node.metadata_props)
    if count:
        metadata[CLONE_OF] = str(node.name)
    made = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else latest[id(v)] for v in node.inputs],
        list(node.attributes.values()),
        num_outputs=len(node.outputs),
        name=instance_name(str(node.name), count),
        metadata_props=metadata,
    )
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.name = instance_name(old.name, count) if old.name else ""
        new.shape, new.type = old.shape, old.type
        latest[id(old)] = new
    return made


def instance_name(name: str, run: int) -> str:
    """What a node or value of the unscheduled graph is called in its ``run``-th run, counted from 0."""
    return f"{name}{SEPARATOR}{run}" if run else name


def made_names(problem: Problem, form: Lowered) -> dict[tuple[int, int], str]:
    """What the tensors that a plan makes on the CPU are called in its graph.

    Args:
        problem: the problem of the plan.
        form: the plan with its swaps as ops.

    Returns:
        Tensor of the lowered problem and number of the run that makes it -> name of the value; tokens of what went out are left out.
    """
    names: dict[tuple[int, int], str] = {}
    runs: Counter[int] = Counter()
    times: Counter[Step] = Counter()
    for op in form.sequence:
        step, run = form.steps[op], runs[op]
        number = times[step]
        runs[op] += 1
        times[step] += 1
        outputs = form.problem.ops[op].outputs
        if step.kind == "run":
            made = problem.ops[step.index].outputs
            names |= {(t, run): instance_name(problem.tensors[u].name, number) for t, u in zip(outputs, made, strict=True)}
        elif step.kind == "swap_in":
            names[outputs[0], run] = returned_name(problem.tensors[step.index].name, number)
    return names


def _protect_overwritten(graph: ir.Graph, target: Target) -> None:
    """Make every node that overwrites a graph input depend, by data edges, on all other readers of the old value.

    File order alone would do under the session options of the manifest, but a default session may run the write first, silently.  The
    edge: the new value passes through ``Reshape(value, Min(Size(reader's output), 0...))``, whose target shape of zeros means "as it is"; Reshape
    aliases, so the edge costs no memory.  Where tokens order all nodes anyway, only the plan is checked.
    """
    nodes = list(graph)
    position = {id(n): i for i, n in enumerate(nodes)}
    ancestors = _ancestors(nodes, position)
    op = GraphBuilder(graph, prefix="order_")
    for write, buffer in overwritten(graph).items():
        readers = {id(n): n for v in _aliases(buffer) for n in (use.node for use in v.uses()) if n is not write}
        loose = [
            n
            for n in readers.values()
            if n.graph is graph and not ancestors[position[id(write)]] >> position[id(n)] & 1 and not traits(n.op_type, n.domain).view
        ]
        late = [n for n in loose if position[id(n)] > position[id(write)]]
        if late:
            raise OnnxRematError(f"node '{late[0].name}' reads '{buffer.name}' after '{write.name}' has overwritten it; the plan is not valid")
        if loose and not target.tokens:
            _depend(op, write, _last_of_each_chain(loose, ancestors, position))


def _aliases(value: ir.Value) -> list[ir.Value]:
    """A value and all views of it."""
    found = [value]
    for current in found:
        for use in current.uses():
            if traits(use.node.op_type, use.node.domain).view and use.idx == 0:
                found.append(use.node.outputs[0])
    return found


def _ancestors(nodes: Sequence[ir.Node], position: Mapping[int, int]) -> list[int]:
    """For each node the set of nodes that it depends on, as a bit set."""
    sets: list[int] = []
    for node in nodes:
        bits = 0
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None:
                at = position[id(producer)]
                bits |= sets[at] | 1 << at
        sets.append(bits)
    return sets


def _last_of_each_chain(loose: Sequence[ir.Node], ancestors: Sequence[int], position: Mapping[int, int]) -> list[ir.Node]:
    """Drop readers that another reader depends on anyway."""
    covered = 0
    for node in loose:
        covered |= ancestors[position[id(node)]]
    return [n for n in loose if not covered >> position[id(n)] & 1]


def _depend(op: GraphBuilder, write: ir.Node, readers: Sequence[ir.Node]) -> None:
    value = write.inputs[1]
    assert value is not None
    op.before = write
    op.forget()
    op.metadata = {HELPER: str(write.name), PHASE: write.metadata_props[PHASE]}
    first = op.wrap(value)
    sizes = [op("Size", next(v for v in n.outputs if v.name)) for n in readers]
    token = op("Min", *sizes, np.zeros(first.rank, np.int64))
    if first.rank == 0:
        # A scalar keeps its value and shape: reshaping it to one element and back carries the edge.
        one = op.node("Reshape", first, op("Max", op("Min", *sizes, np.zeros(1, np.int64)), np.ones(1, np.int64)), like=[((1,), first.dtype)])[0]
        held = op.node("Reshape", one, np.zeros(0, np.int64), like=[first])[0]
    else:
        held = op.node("Reshape", first, token, like=[first])[0]
    write.replace_input_with(1, held.value)


def _free_unread(graph: ir.Graph, target: Target) -> None:
    """Keep outputs that nobody reads from living to the end of the step.

    ONNX Runtime releases a buffer after its last reader, so one without readers stays.  An optional output is left out; a large one gets a
    reader; where tokens order all nodes, those are readers enough.
    """
    outputs = {id(v) for v in graph.outputs}
    for node in list(graph):
        optional = traits(node.op_type, node.domain).optional_outputs
        for index, value in enumerate(node.outputs):
            if not value.name or value.uses() or id(value) in outputs:
                continue
            if index in optional:
                value.name = ""
            elif nbytes(value) > SMALL_BYTES and not target.tokens:
                size = ir.node("Size", [value], name=f"free:{value.name}", metadata_props={HELPER: "free", PHASE: node.metadata_props[PHASE]})
                size.outputs[0].name = f"{value.name}:size"
                size.outputs[0].shape, size.outputs[0].type = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
                graph.insert_after(node, size)


def _fence_pen(graph: ir.Graph, pen_bytes: int, target: Target) -> None:
    """Make a block of memory first, put a small tensor that lives to the end behind it, and free the block: a pen for small buffers.

    Where tokens force the order, they are to be laid through these nodes too, or another order would let the fence go at once.
    """
    first = next(iter(graph))
    op = GraphBuilder(graph, prefix="pen_", before=first)
    op.metadata = {HELPER: "pen", PHASE: FORWARD}
    size = op.const(np.asarray([pen_bytes // 4], np.int64))
    block = op.node("ConstantOfShape", size, value=ir.tensor(np.zeros(1, np.float32)), like=[((pen_bytes // 4,), ir.DataType.FLOAT)])[0]
    # What the sizes of tokens leave are holes of one granule each, in front: there the fence must be larger to lie behind the block.
    # On a GPU a size would lie in the host's memory, and so be no fence.
    wide = target.tokens or target.on_gpu
    fence = op("Gather", block, np.zeros(_WIDE_FENCE, np.int64)) if wide else op("Size", block)
    op.before = None
    op("Neg", fence)


def is_helper(node: ir.Node) -> bool:
    """Whether a node is there for order or placement only."""
    return HELPER in node.metadata_props or is_wait(node)


__all__ = ["CLONE_OF", "HELPER", "Emitted", "emit", "instance_name", "is_helper", "lay_out", "made_names"]
