"""The evaluation model for batches of any size.

Exported graphs have the batch's size written into their reshapes.  Here every value is sized anew for a second batch; where a Reshape, an
Expand or a constant holds the first one's size, it is made to follow its input.  Whether that was right is not argued but tried: the changed
model must give the numbers of the fixed one, row by row and for other batch sizes, or it is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .errors import OnnxRematError
from .exporters import InputSpec
from .graph.builder import infer_outputs
from .runtime.session import Options, make_session

Array = npt.NDArray[Any]

#: Name of the open dimension.
BATCH = "batch"
#: Batch sizes that are tried.
_TRIED = (1, 3)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "PRelu")
_LOGIC = ("And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
_TOLERANCE = 1e-4


class _Fixed(Exception):
    """Why the batch can't be left open."""


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """What came of it.

    Attributes:
        model: with the open dimension ``batch``, or the given one.
        reason: why the batch had to stay as it is; empty where it is open.
    """

    model: ir.Model
    reason: str


def open_batch(model: ir.Model, specs: Sequence[InputSpec], weights: Mapping[str, Array], loss: str, summed: bool = False) -> OpenBatch:
    """Leave the batch of an evaluation model open where that gives the same numbers.

    Args:
        model: with static shapes; unchanged.
        specs: its inputs and labels, whose first dimension is the batch.
        weights: its other inputs.
        loss: name of its loss.
        summed: the loss is the sum over the batch; else its mean.
    """
    sizes = {spec.shape[0] if spec.shape else 0 for spec in specs}
    if len(sizes) != 1 or 0 in sizes:
        return OpenBatch(model, "its inputs have no first dimension in common")
    size = sizes.pop()
    changed = ir.from_proto(ir.to_proto(model))
    try:
        _follow(changed.graph, {spec.name for spec in specs}, size)
        _compare(model, changed, specs, weights, loss, summed)
    except (_Fixed, OnnxRematError, ValueError, KeyError) as error:
        return OpenBatch(model, " ".join(str(error).split()))
    return OpenBatch(changed, "")


def _follow(graph: ir.Graph, batch: set[str], size: int) -> None:
    """Let everything follow the batch; the graph's values get the open dimension where it reaches them."""
    other = 7 * size + 13  # a size that no other dimension has by chance
    first: dict[int, tuple[int, ...]] = {}
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    for value in values:
        if value.name:
            if value.shape is None or not value.shape.is_static():
                raise _Fixed(f"the shape of '{value.name}' is not known")
            first[id(value)] = tuple(int(d) for d in value.shape.numpy())
    for value in graph.inputs:
        if value.name in batch:
            value.shape = ir.Shape([other, *first[id(value)][1:]])
    leading = next(v for v in graph.inputs if v.name in batch)
    outer: dict[int, int] = {}
    for node in list(graph):
        if node.domain == "" and node.op_type == "Expand" and _widened(node, first, size):
            _follow_input(graph, node, leading, first)
            continue
        if node.domain == "" and node.op_type in ("Reshape", "Expand"):
            _free_target(graph, node, first, size, outer)
        elif node.domain == "" and (node.op_type in (*_ARITHMETIC, *_LOGIC, "Gather")):
            _free_constants(graph, node, first, size)
        types = [(v.type, v.shape) for v in node.outputs]
        try:
            infer_outputs(node, graph.opset_imports.get(node.domain))
        except ValueError:
            if node.domain == "":
                raise
            _guess(node, types, first)
        if node.op_type != "Reshape":
            _inherit(node, first, outer)
    moved = {id(v) for v in values if v.name and tuple(v.shape or ()) != first[id(v)]}
    for value in values:
        if id(value) in moved:
            now = tuple(int(d) for d in value.shape.numpy())  # type: ignore[union-attr]
            if not value.is_graph_input():
                value.shape = ir.Shape([d if d == before else None for d, before in zip(now, first[id(value)], strict=True)])
            else:
                value.shape = ir.Shape([BATCH, *first[id(value)][1:]])


def _guess(node: ir.Node, types: Sequence[tuple[Any, Any]], first: Mapping[int, tuple[int, ...]]) -> None:
    """Outputs of an operator without inference: the first axis follows that of the first input."""
    source = node.inputs[0]
    assert source is not None and source.shape is not None
    before, now = first[id(source)], tuple(int(d) for d in source.shape.numpy())
    for value, (kind, _) in zip(node.outputs, types, strict=True):
        if not value.name:
            continue
        old = first[id(value)]
        new = list(old)
        if before != now:
            if before[1:] != now[1:] or not old or old[0] != before[0]:
                raise _Fixed(f"the shape of '{value.name}', made by {node.op_type}, is not known for another batch")
            new[0] = now[0]
        value.type, value.shape = kind, ir.Shape(new)


def _moved_axis(value: ir.Value, first: Mapping[int, tuple[int, ...]]) -> int | None:
    """The axis that holds the batch."""
    axes = [a for a, (old, new) in enumerate(zip(first[id(value)], value.shape or (), strict=True)) if old != new]
    if len(axes) > 1:
        raise _Fixed(f"'{value.name}' has the batch in {len(axes)} dimensions")
    return axes[0] if axes else None


def _inherit(node: ir.Node, first: Mapping[int, tuple[int, ...]], outer: dict[int, int]) -> None:
    """What runs slower than the batch inside one axis does so in what is computed from it along the same axis."""
    known = [v for v in node.inputs if v is not None and id(v) in outer]
    for value in node.outputs if known else ():
        if value.name:
            axis, source = _moved_axis(value, first), _moved_axis(known[0], first)
            if axis is not None and source is not None and first[id(value)][axis] == first[id(known[0])][source]:
                outer[id(value)] = outer[id(known[0])] // math.prod(first[id(known[0])][:source]) * math.prod(first[id(value)][:axis])


def _widened(node: ir.Node, first: Mapping[int, tuple[int, ...]], size: int) -> bool:
    """Whether an Expand makes one row a batch of them."""
    source, out = node.inputs[0], first[id(node.outputs[0])]
    assert source is not None
    before = (1,) * (len(out) - len(first[id(source)])) + first[id(source)]
    return bool(out) and tuple(source.shape or ()) == first[id(source)] and out[0] == size and before[0] == 1 and size > 1


def _follow_input(graph: ir.Graph, node: ir.Node, leading: ir.Value, first: Mapping[int, tuple[int, ...]]) -> None:
    out = first[id(node.outputs[0])]
    size = ir.Node("", "Shape", [leading], [ir.AttrInt64("start", 0), ir.AttrInt64("end", 1)], name=f"{node.name}_batch")
    target = ir.Node("", "Concat", [size.outputs[0], _constant(graph, out[1:])], [ir.AttrInt64("axis", 0)], name=f"{node.name}_shape")
    for made, length in ((size, 1), (target, len(out))):
        value = made.outputs[0]
        value.name, value.shape, value.type = made.name, ir.Shape([length]), ir.TensorType(ir.DataType.INT64)
    graph.insert_before(node, [size, target])
    node.replace_input_with(1, target.outputs[0])
    assert leading.shape is not None
    node.outputs[0].shape = ir.Shape([leading.shape[0], *out[1:]])


def _free_target(graph: ir.Graph, node: ir.Node, first: Mapping[int, tuple[int, ...]], size: int, outer: dict[int, int]) -> None:
    source, target = node.inputs
    assert source is not None and target is not None
    axis = _moved_axis(source, first)
    if axis is None:
        return
    out = list(first[id(node.outputs[0])])
    if node.op_type == "Expand":
        out[axis - len(first[id(source)])] = 1
    else:
        # The batch stays where it was in the order of elements: behind as many of them as before.
        slower = outer.get(id(source), math.prod(first[id(source)][:axis]))
        place = next((p for p in range(len(out)) if slower % math.prod(out[:p]) == 0 and math.prod(out[: p + 1]) % (slower * size) == 0), None)
        if place is None:
            raise _Fixed(f"Reshape '{node.name}' moves the batch from {list(first[id(source)])} to {out}")
        out[place] = -1
        outer[id(node.outputs[0])] = slower
        node.attributes.pop("allowzero", None)
    node.replace_input_with(1, _constant(graph, out))


def _free_constants(graph: ir.Graph, node: ir.Node, first: Mapping[int, tuple[int, ...]], size: int) -> None:
    """A constant that repeats itself along the batch needs one row."""
    rank = len(first[id(node.outputs[0])])
    if node.op_type == "Gather":  # indices: what reads the rows broadcasts them
        rank -= len(first[id(node.inputs[0])]) - 1
    for index, value in enumerate(node.inputs):
        if value is None or value.const_value is None or len(first.get(id(value), ())) != rank or not rank:
            continue
        array = value.const_value.numpy()
        if array.shape[0] == size > 1 and (array == array[:1]).all():
            node.replace_input_with(index, _constant(graph, array[:1]))


def _constant(graph: ir.Graph, content: Sequence[int] | Array) -> ir.Value:
    array = np.asarray(content) if isinstance(content, np.ndarray) else np.asarray(content, np.int64)
    name = f"any_batch_{len(graph.initializers)}"
    while name in graph.initializers:
        name += "_"
    tensor = ir.tensor(np.array(array), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _compare(fixed: ir.Model, changed: ir.Model, specs: Sequence[InputSpec], weights: Mapping[str, Array], loss: str, summed: bool) -> None:
    """Rows of the outputs for other batch sizes; the loss of a batch that repeats one row."""
    rng = np.random.default_rng(0)
    size = specs[0].shape[0]
    given = {v.name for v in fixed.graph.inputs}
    rows = {spec.name: np.asarray(spec.sample(rng)) for spec in specs if spec.name in given}
    held = {name: np.asarray(a) for name, a in weights.items() if name in given}
    sessions = [make_session(ir.to_proto(m).SerializeToString(), Options(threads=1)) for m in (fixed, changed)]
    names = [v.name for v in sessions[0].get_outputs()]

    def run(session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
        try:
            return dict(zip(names, session.run(names, {**held, **feeds}), strict=True))
        except Exception as error:  # the bindings raise a dozen unrelated classes
            raise _Fixed(f"the runtime refuses another batch: {error}") from error

    wanted = run(sessions[0], rows)
    single = run(sessions[0], {n: np.repeat(a[:1], size, 0) for n, a in rows.items()})
    for count in (*_TRIED, size):
        index = np.arange(count) % size
        found = run(sessions[1], {n: a[index] for n, a in rows.items()})
        for name in names:
            if name == loss and count != size:
                continue
            expected = wanted[name] if name == loss or not wanted[name].ndim else wanted[name][index]
            _same(name, found[name], expected)
        repeated = run(sessions[1], {n: np.repeat(a[:1], count, 0) for n, a in rows.items()})[loss]
        # From one batch size alone, a sum can't be told from a mean whose divisor is written into the graph.
        share = count / size if summed else 1.0
        if not np.allclose(repeated, single[loss] * share, rtol=_TOLERANCE, equal_nan=True):
            raise _Fixed(f"its loss is no {'sum' if summed else 'mean'} over the batch")


def _same(name: str, found: Array, wanted: Array) -> None:
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        raise _Fixed(f"the output '{name}' differs for another batch")
