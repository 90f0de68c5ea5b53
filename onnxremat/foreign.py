"""Problems from files: a Problem, an artifact folder, or any ONNX training graph, ONNX Runtime's own included.

ONNX infers the shapes of its own operators.  For the gradient operators of com.microsoft, which it doesn't know, a table says what each
output looks like; a value that is named ``X_grad`` and has no row looks like ``X``, as ONNX Runtime's gradient builder names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnx.reference
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from .artifact import MANIFEST, OPTIMIZER, Artifact
from .costs import analytic_costs
from .costs.workspace import known_workspace
from .errors import OnnxRematError
from .exporters import InputSpec
from .graph import nbytes, static_shape
from .graph.builder import infer_outputs
from .ops import MS, traits
from .problem import Costs, scheduling_problem
from .scheduler import Problem, ProblemError
from .training_graph import BACKWARD, FORWARD, GRADIENT_BUFFER, PHASE, UPDATE

Kind = Literal["problem", "artifact", "onnx"]
Shape = tuple[int, ...]
#: What a rule says of one output: the value it looks like, or its shape and dtype; None leaves it to ONNX or to the file.
Look = ir.Value | tuple[Shape, ir.DataType] | None

_WAYS_IN = "give an artifact folder, a problem (.json) or a training graph (.onnx)"
_WAY_OUT = "pin the graph's inputs with --input NAME=SHAPE, or export with static shapes"
#: Integer values up to this many elements are followed as numbers, because shapes are made of them.
_FOLDED_ELEMENTS = 1024
#: Moments that each optimizer node keeps for a parameter.
_MOMENTS = {"AdamWOptimizer": 2, "SGDOptimizerV2": 0}
_OPTIMIZER_STATE = (".momentum", ".first_order_moment", ".second_order_moment")
_BATCH_NORMS = ("BatchNormInternal", "BatchNormalization")


def kind_of_file(path: Path) -> Kind:
    """Which of the three a path is: a ``problem`` (JSON), an ``artifact`` folder or an ``onnx`` file.

    Raises:
        OnnxRematError: it is missing, can't be read, or is none of them.
    """
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return "artifact"
        raise OnnxRematError(f"{path} is a folder without {MANIFEST}, so no artifact: {_WAYS_IN}")
    try:
        with open(path, "rb") as file:
            head = file.read(64).lstrip()
    except FileNotFoundError:
        raise OnnxRematError(f"there is no file {path}: {_WAYS_IN}") from None
    except OSError as error:
        raise OnnxRematError(f"can't read {path}: {error.strerror or error}") from error
    if path.suffix == ".onnx":
        return "onnx"
    # A ModelProto starts with its ir_version: field 1, a varint.
    if head[:1] in (b"{", b"[") or path.suffix == ".json":
        return "problem"
    if head[:1] == b"\x08":
        return "onnx"
    raise OnnxRematError(f"{path} is neither a problem (JSON) nor an ONNX model: {_WAYS_IN}")


def problem_from_file(path: Path, inputs: Sequence[InputSpec] = (), threads: int = 0) -> Problem:
    """The scheduling problem of a file.

    Args:
        path: a problem or plain instance (JSON), an artifact folder, or an ONNX training graph.
        inputs: pin the dimensions that an ONNX graph leaves open; they must fit those it gives. A symbol such as ``batch`` that one of them
            pins is pinned wherever it occurs.
        threads: intra-op threads of the machine that trains, for the kernels' workspace; 0 is one for each core.

    Returns:
        The problem. Of an ONNX graph, times are analytic, and optimizer state is counted where ``optimizer_model.onnx`` lies beside it.

    Raises:
        OnnxRematError: the file is missing or none of the three, an input doesn't fit the graph, or the shape of a value stays unknown.
    """
    kind = kind_of_file(path)
    if kind != "onnx" and inputs:
        raise OnnxRematError(f"{path} has fixed shapes, so --input {inputs[0]} has no meaning for it: leave it out")
    if kind == "artifact":
        return Artifact.load(path).problem
    if kind == "problem":
        try:
            return Problem.load(path)
        except ProblemError as error:
            raise OnnxRematError(" ".join(str(error).split())) from error
    return _problem_from_onnx(path, inputs, threads)


def _problem_from_onnx(path: Path, inputs: Sequence[InputSpec], threads: int) -> Problem:
    graph = _load(path)
    open_inputs = _pin(graph, inputs)
    _name_nodes(graph)
    try:
        _infer_shapes(graph)
        _set_phases(graph)
        costs = analytic_costs(graph)
        if threads:
            costs = Costs(costs.seconds, {str(n.name): known_workspace(n, threads) or 0 for n in graph}, costs.origin)
        resident = _resident(graph, {*open_inputs, *(spec.name for spec in inputs)}, path.parent)
        problem = scheduling_problem(graph, costs, resident, path.name)
        return _pin_running_statistics(problem, graph)
    except (ValueError, KeyError, OSError) as error:
        raise OnnxRematError(f"{path} can't be scheduled: {' '.join(str(error).split())}") from error


def _load(path: Path) -> ir.Graph:
    try:
        model = ir.load(path)
    except OSError as error:
        raise OnnxRematError(f"can't read {path}: {error.strerror or error}") from error
    except Exception as error:  # protobuf's DecodeError and its kin share no base class that is public
        reason = " ".join(str(error).split())[:200]
        raise OnnxRematError(f"{path} is not an ONNX model ({reason}): give a file written by an ONNX exporter") from error
    if not list(model.graph) or not model.graph.outputs:
        raise OnnxRematError(f"{path} is not an ONNX model, or an empty one: give a file written by an ONNX exporter")
    if model.functions:
        model = InlinePass()(model).model
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for value in model.graph.initializers.values():
        # Weights need not be there, but the numbers that shapes are made of.
        held = value.const_value
        if isinstance(held, ir.ExternalTensor) and _is_small_integer(value) and not Path(held.path).is_file():
            raise OnnxRematError(f"{path}: '{value.name}' lies in {held.path}, which is missing: put that file beside the model")
    made: set[int] = set()
    for node in model.graph:
        what = f"{path}: {node.op_type} '{node.name or next((v.name for v in node.outputs if v.name), '')}'"
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise OnnxRematError(f"{what} has a subgraph, whose memory isn't known: export the model without control flow")
        if any(v is not None and v.producer() is not None and id(v) not in made for v in node.inputs):
            raise OnnxRematError(f"{what} reads a value before it is made, which ONNX forbids: export the model again")
        made |= {id(v) for v in node.outputs}
    return model.graph


def _pin(graph: ir.Graph, inputs: Sequence[InputSpec]) -> set[str]:
    """Give every graph input a static shape; returns the names of those that the file leaves open."""
    values = {str(v.name): v for v in graph.inputs}
    symbols: dict[str, int] = {}
    left_open = {name for name, v in values.items() if v.shape is not None and not all(isinstance(d, int) for d in v.shape)}
    for spec in inputs:
        value = values.get(spec.name)
        if value is None:
            names = ", ".join(name for name in values if not name.endswith(GRADIENT_BUFFER))
            raise OnnxRematError(f"--input {spec}: the graph has no input '{spec.name}'; it has {names[:200]}")
        if value.dtype is not None and value.dtype.numpy() != np.dtype(spec.dtype):
            raise OnnxRematError(f"--input {spec}: '{spec.name}' has dtype {value.dtype.numpy()} in the graph, not {spec.dtype}")
        if value.shape is not None:
            pairs = zip(value.shape, spec.shape, strict=False)
            if len(value.shape) != len(spec.shape) or any(isinstance(d, int) and d != size for d, size in pairs):
                raise OnnxRematError(f"--input {spec}: '{spec.name}' has the shape {_show(value)} in the graph")
            for dim, size in zip(value.shape, spec.shape, strict=True):
                symbol = dim.value if isinstance(dim, ir.SymbolicDim) else None
                if symbol is not None and symbols.setdefault(symbol, size) != size:
                    raise OnnxRematError(f"--input {spec}: the graph's dimension '{symbol}' is {symbols[symbol]} and {size} at once")
        value.shape = ir.Shape(spec.shape)
    for value in [*graph.inputs, *(v for node in graph for v in node.outputs)]:
        if value.shape is not None and symbols:
            value.shape = ir.Shape([symbols.get(d.value or "", d) if isinstance(d, ir.SymbolicDim) else d for d in value.shape])
    for value in graph.inputs:
        if value.shape is None or not all(isinstance(d, int) for d in value.shape):
            way_out = f"pin it with --input {value.name}={_example(value)}"
            raise OnnxRematError(f"the graph's input '{value.name}' has the open shape {_show(value)}: {way_out}")
    return left_open


def _show(value: ir.Value) -> str:
    return "?" if value.shape is None else "[" + ", ".join(str(d) if isinstance(d, int) else d.value or "?" for d in value.shape) + "]"


def _example(value: ir.Value) -> str:
    dims = "8" if value.shape is None else "x".join(str(d) if isinstance(d, int) else "8" for d in value.shape)
    dtype = "" if value.dtype in (None, ir.DataType.FLOAT) else f":{value.dtype.numpy()}"
    return dims + dtype


def _name_nodes(graph: ir.Graph) -> None:
    """Unique names: costs are kept by name."""
    seen: set[str] = set()
    for i, node in enumerate(graph):
        name = node.name or f"{node.op_type}:{next((v.name for v in node.outputs if v.name), i)}"
        while name in seen:
            name = f"{name}_{i}"
        node.name = name
        seen.add(name)


def _infer_shapes(graph: ir.Graph) -> None:
    """Give every value a static shape and a dtype, node by node, following small integers as numbers."""
    by_name = {str(v.name): v for v in [*graph.inputs, *graph.initializers.values()] if v.name}
    opsets = graph.opset_imports
    for node in graph:
        _apply_rule(node)
        if not all(_is_static(v) for v in node.outputs if v.name):
            reason = _infer_node(node, opsets, by_name)
            unknown = next((v for v in node.outputs if v.name and not _is_static(v)), None)
            if unknown is not None:
                raise _unknown(unknown, node, reason)
        by_name |= {v.name: v for v in node.outputs if v.name}
        _fold(node, opsets)


def _unknown(value: ir.Value, node: ir.Node, reason: str) -> OnnxRematError:
    return OnnxRematError(f"the shape of '{value.name}', made by {node.op_type} '{node.name}', stays unknown ({reason}): {_WAY_OUT}")


def _is_static(value: ir.Value) -> bool:
    return value.dtype is not None and value.shape is not None and all(isinstance(d, int) for d in value.shape)


def _infer_node(node: ir.Node, opsets: Mapping[str, int], by_name: Mapping[str, ir.Value]) -> str:
    """Ask ONNX, then the names of gradients; returns why ONNX could not tell."""
    reason = ""
    try:
        infer_outputs(node, opsets.get(node.domain))
    except ValueError as error:
        reason = " ".join(str(error).split())
    except (onnx.shape_inference.InferenceError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
    for value in node.outputs:
        match = re.fullmatch(r"(.+)_grad(?:_\d+)?", value.name or "")
        source = by_name.get(match.group(1)) if match else None
        if source is not None and not _is_static(value):
            _look_like(value, source)
    return reason


def _look_like(value: ir.Value, look: Look) -> None:
    if isinstance(look, ir.Value):
        value.shape, value.type = ir.Shape(static_shape(look)), look.type
    elif look is not None:
        value.shape, value.type = ir.Shape(look[0]), ir.TensorType(look[1])


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise ValueError(f"its input {index} is missing")
    return value


def _ints(node: ir.Node, index: int) -> Shape:
    """The numbers in an input that shapes are made of."""
    constant = _input(node, index).const_value
    if constant is None:
        raise ValueError(f"its input {index}, '{_input(node, index).name}', isn't known as numbers")
    return tuple(int(n) for n in constant.numpy().reshape(-1))


def _int(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _dtype(node: ir.Node, index: int) -> ir.DataType:
    dtype = _input(node, index).dtype
    if dtype is None:
        raise ValueError(f"the dtype of its input {index} is unknown")
    return dtype


def _alike(*sources: int) -> Callable[[ir.Node], list[Look]]:
    """Output i looks like input ``sources[i]``."""
    return lambda node: [_input(node, source) for source, v in zip(sources, node.outputs, strict=False) if v is not None]


def _shaped_by(numbers: int, like: int) -> Callable[[ir.Node], list[Look]]:
    """The output has the shape that input ``numbers`` holds and the dtype of input ``like``."""
    return lambda node: [(_ints(node, numbers), _dtype(node, like))]


def _conv_grad(node: ir.Node) -> list[Look]:
    weight = _input(node, 2)
    return [_input(node, 1), weight, (static_shape(weight)[:1], _dtype(node, 2))]


def _fused_matmul(node: ir.Node) -> list[Look]:
    left, right = static_shape(_input(node, 0)), static_shape(_input(node, 1))
    if min(len(left), len(right)) < 2 or _int(node, "transBatchA", 0) or _int(node, "transBatchB", 0):
        raise ValueError("vectors and transposed batches have no rule")
    rows = left[-1] if _int(node, "transA", 0) else left[-2]
    columns = right[-2] if _int(node, "transB", 0) else right[-1]
    return [((*np.broadcast_shapes(left[:-2], right[:-2]), rows, columns), _dtype(node, 0))]


def _reduce_sum(node: ir.Node) -> list[Look]:
    shape, axes = static_shape(_input(node, 0)), _ints(node, 1)
    if not axes:
        axes = () if _int(node, "noop_with_empty_axes", 0) else tuple(range(len(shape)))
    gone = {axis % len(shape) for axis in axes} if shape else set()
    if _int(node, "keepdims", 1):
        return [(tuple(1 if i in gone else d for i, d in enumerate(shape)), _dtype(node, 0))]
    return [(tuple(d for i, d in enumerate(shape) if i not in gone), _dtype(node, 0))]


def _concat(node: ir.Node) -> list[Look]:
    shapes = [static_shape(_input(node, i)) for i in range(len(node.inputs))]
    axis = _int(node, "axis", 0) % len(shapes[0])
    joined = list(shapes[0])
    joined[axis] = sum(shape[axis] for shape in shapes)
    return [(tuple(joined), _dtype(node, 0)), ((len(shapes),), ir.DataType.INT64)]


def _split(node: ir.Node) -> list[Look]:
    shape = static_shape(_input(node, 0))
    axis = _int(node, "axis", 0) % len(shape)
    return [((*shape[:axis], part, *shape[axis + 1 :]), _dtype(node, 0)) for part in _ints(node, 1)]


def _cross_entropy(node: ir.Node) -> list[Look]:
    reduced = "reduction" not in node.attributes or node.attributes["reduction"].as_string() != "none"
    loss = () if reduced else static_shape(_input(node, 1))
    return [(loss, _dtype(node, 0)), _input(node, 0)]


def _max_pool_grad(node: ir.Node) -> list[Look]:
    pool = _input(node, 1).producer()
    if pool is None or pool.op_type != "MaxPool":
        return [None]
    return [(static_shape(_input(pool, 0)), _dtype(node, 0))]


def _broadcast_axes(node: ir.Node) -> tuple[Shape, Shape]:
    """The axes over which the gradients of two broadcast operands are summed, last first."""
    shapes = _ints(node, 0), _ints(node, 1)
    rank = max(map(len, shapes))
    left, right = ((1,) * (rank - len(shape)) + shape for shape in shapes)

    def stretched(own: Shape, other: Shape, missing: int) -> Shape:
        return tuple(i for i in reversed(range(rank)) if i < missing or (own[i] == 1 and other[i] != 1))

    return stretched(left, right, rank - len(shapes[0])), stretched(right, left, rank - len(shapes[1]))


def _broadcast_gradient_args(node: ir.Node) -> list[Look]:
    return [((len(axes),), ir.DataType.INT64) for axes in _broadcast_axes(node)]


def _flag(node: ir.Node) -> list[Look]:
    return [((1,), ir.DataType.BOOL)]


_RULES: dict[tuple[str, str], Callable[[ir.Node], list[Look]]] = {
    (MS, "BatchNormInternal"): _alike(0, 1, 1, 1, 1),
    (MS, "BatchNormalizationGrad"): _alike(1, 2, 2),
    (MS, "BroadcastGradientArgs"): _broadcast_gradient_args,
    (MS, "ConcatTraining"): _concat,
    (MS, "ConvGrad"): _conv_grad,
    (MS, "DivGrad"): _alike(1, 2),
    (MS, "FusedMatMul"): _fused_matmul,
    (MS, "GatherElementsGrad"): _shaped_by(1, 0),
    (MS, "GatherGrad"): _shaped_by(0, 2),
    (MS, "GatherNDGrad"): _shaped_by(0, 2),
    (MS, "InPlaceAccumulatorV2"): _flag,
    (MS, "InvertibleLayerNormalizationGrad"): _alike(1, 2, 3),
    (MS, "LayerNormalizationGrad"): _alike(1, 2, 2),
    (MS, "ReduceSumTraining"): _reduce_sum,
    (MS, "SimplifiedLayerNormalizationGrad"): _alike(1, 2),
    (MS, "SliceGrad"): _shaped_by(1, 0),
    (MS, "SoftmaxCrossEntropyLossGrad"): _alike(1),
    (MS, "SoftmaxCrossEntropyLossInternal"): _cross_entropy,
    (MS, "SoftmaxCrossEntropyLossInternalGrad"): _alike(1),
    (MS, "SplitTraining"): _split,
    ("", "MaxPoolGrad"): _max_pool_grad,
}
_ELEMENTWISE = (
    *("ReluGrad", "GeluGrad", "FastGeluGrad", "QuickGeluGrad", "BiasGeluGrad_dX", "BiasFastGeluGrad_dX", "SigmoidGrad", "TanhGrad"),
    *("LeakyReluGrad", "SoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad", "LogSoftmaxGrad_13", "DropoutGrad"),
    *("Gelu", "FastGelu", "QuickGelu", "BiasGelu", "Scale"),
)
_RULES |= {(MS, name): _alike(0) for name in _ELEMENTWISE}


def _apply_rule(node: ir.Node) -> None:
    """Let the table speak before ONNX: for some of these the runtime registers nothing at all."""
    rule = _RULES.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    if rule is None or all(_is_static(v) for v in node.outputs if v.name):
        return
    try:
        looks = rule(node)
    except ValueError as error:
        unknown = next(v for v in node.outputs if v.name and not _is_static(v))
        raise _unknown(unknown, node, str(error)) from error
    for value, look in zip(node.outputs, looks, strict=False):
        if value.name:
            _look_like(value, look)


def _fold(node: ir.Node, opsets: Mapping[str, int]) -> None:
    """Compute a node's small integer outputs where its inputs are known: later shapes are made of them."""
    if not traits(node.op_type, node.domain).pure:
        return
    known = all(v is None or _is_known(v) for v in node.inputs)
    results: list[npt.NDArray[Any] | None]
    if node.op_type == "Shape":
        shape = static_shape(_input(node, 0))
        results = [np.asarray(shape[_int(node, "start", 0) : _int(node, "end", len(shape))], np.int64)]
    elif node.op_type == "Size":
        results = [np.asarray(np.prod(static_shape(_input(node, 0)), dtype=np.int64))]
    elif node.op_type == "ConcatTraining":
        axis = _int(node, "axis", 0)
        joined = np.concatenate([_numbers(v) for v in node.inputs], axis) if known else None
        results = [joined, np.asarray([static_shape(_input(node, i))[axis] for i in range(len(node.inputs))], np.int64)]
    elif node.op_type == "BroadcastGradientArgs" and known:
        results = [np.asarray(axes, np.int64) for axes in _broadcast_axes(node)]
    elif node.domain in ("", "ai.onnx") and known and all(_is_small_integer(v) for v in node.outputs if v.name):
        results = _evaluate(node, opsets)
    else:
        return
    for value, result in zip((v for v in node.outputs if v.name), results, strict=False):
        if result is not None and _is_small_integer(value):
            value.const_value = ir.tensor(result, name=value.name)


def _is_known(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= _FOLDED_ELEMENTS and not value.is_graph_input()


def _is_small_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer() and int(np.prod(static_shape(value))) <= _FOLDED_ELEMENTS


def _numbers(value: ir.Value | None) -> npt.NDArray[Any]:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()


def _evaluate(node: ir.Node, opsets: Mapping[str, int]) -> list[npt.NDArray[Any] | None]:
    given = {str(v.name): _numbers(v) for v in node.inputs if v is not None}
    graph = onnx.helper.make_graph(
        [ir.serde.serialize_node(node)],
        "fold",
        [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in given.items()],
        [onnx.helper.make_empty_tensor_value_info(str(v.name)) for v in node.outputs if v.name],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opsets.get("", 20))])
    try:
        return [np.asarray(r) for r in onnx.reference.ReferenceEvaluator(model).run(None, given)]
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # Numbers that stay unknown matter only where a shape is made of them, and that shape is then refused by name.
        return []


def _set_phases(graph: ir.Graph) -> None:
    """Forward is what the loss depends on, an update is what writes state, backward is the rest; a phase that the file gives is kept."""
    scalars = [v for v in graph.outputs if v.dtype is not None and v.dtype.is_floating_point() and int(np.prod(static_shape(v))) == 1]
    loss = (scalars or list(graph.outputs))[0]
    needed = {id(loss)}
    forward: set[int] = set()
    for node in reversed(list(graph)):
        if any(id(v) in needed for v in node.outputs):
            forward.add(id(node))
            needed |= {id(v) for v in node.inputs if v is not None}
    for node in graph:
        phase = FORWARD if id(node) in forward else UPDATE if traits(node.op_type, node.domain).stateful else BACKWARD
        node.metadata_props.setdefault(PHASE, phase)


def _resident(graph: ir.Graph, batch: set[str], folder: Path) -> dict[str, int]:
    """Bytes held during the whole step, by class.

    A trained parameter has a gradient buffer or is overwritten with what depends on gradients.  The batch is what the file leaves open,
    what the user pins and what is no float; where all of it is static, what comes before the first trained parameter.
    """
    names = [str(v.name) for v in graph.inputs]
    trained = {name.removesuffix(GRADIENT_BUFFER) for name in names if name.endswith(GRADIENT_BUFFER)} | _updated(graph)
    written = {str(v.name) for node in graph for v in _written(node)}
    first = next((i for i, name in enumerate(names) if name in trained), len(names)) if not batch else 0
    sizes = dict.fromkeys(("parameters", "gradients", "optimizer_state", "model_state", "batch", "constants"), 0)
    for i, value in enumerate(graph.inputs):
        name = names[i]
        if name.endswith(GRADIENT_BUFFER):
            kind = "gradients"
        elif any(name.endswith(suffix) and name.removesuffix(suffix) in names for suffix in _OPTIMIZER_STATE):
            kind = "optimizer_state"
        elif name in trained:
            kind = "parameters"
        elif name in written:
            kind = "model_state"
        elif name in batch or (name not in graph.initializers and (i < first or value.dtype != ir.DataType.FLOAT)):
            kind = "batch"
        else:
            kind = "parameters"
        sizes[kind] += nbytes(value)
    held = [v for v in graph.initializers.values() if not v.is_graph_input()]
    # Where parameters are inputs, as in training artifacts, what is left inside the file are constants.
    inside = "parameters" if not trained & set(names) else "constants"
    for value in held:
        weight = value.dtype is not None and value.dtype.is_floating_point() and len(static_shape(value)) > 0
        sizes[inside if weight else "constants"] += nbytes(value)
    kept = _moments_beside(folder)
    sizes["optimizer_state"] += kept * sum(nbytes(v) for v in graph.inputs if str(v.name) + GRADIENT_BUFFER in names)
    return sizes


def _updated(graph: ir.Graph) -> set[str]:
    """Graph inputs that a node of the graph overwrites with something that depends on gradients."""
    depends: set[int] = set()
    found: set[str] = set()
    for node in graph:
        tainted = node.metadata_props[PHASE] == BACKWARD or any(id(v) in depends for v in node.inputs if v is not None)
        if tainted:
            depends |= {id(v) for v in node.outputs}
            if traits(node.op_type, node.domain).stateful:
                found |= {str(v.name) for v in _written(node) if not str(v.name).endswith((GRADIENT_BUFFER, *_OPTIMIZER_STATE))}
    return found


def _written(node: ir.Node) -> list[ir.Value]:
    """Graph inputs and initializers that a node overwrites."""
    if node.op_type in _BATCH_NORMS and _int(node, "training_mode", 1 if node.domain == MS else 0):
        places: tuple[int, ...] = (3, 4)
    elif traits(node.op_type, node.domain).stateful:
        places = (0,)
    else:
        places = ()
    found = [node.inputs[i] for i in places if i < len(node.inputs)]
    return [v for v in found if v is not None and v.producer() is None]


def _moments_beside(folder: Path) -> int:
    """Moments that the optimizer beside a training model keeps for each parameter; 0 where there is none."""
    file = folder / OPTIMIZER
    if not file.is_file():
        return 0
    try:
        nodes = onnx.load(str(file), load_external_data=False).graph.node
    except Exception as error:  # see _load
        raise OnnxRematError(f"{file} is not an ONNX model ({error}): move it away, or generate the training artifacts again") from error
    return max((_MOMENTS.get(node.op_type, 0) for node in nodes), default=0)


def _pin_running_statistics(problem: Problem, graph: ir.Graph) -> Problem:
    """A training BatchNormalization that is fed the running statistics themselves overwrites them: it must run once."""
    index = {tensor.name: t for t, tensor in enumerate(problem.tensors)}
    ops = []
    for op, node in zip(problem.ops, graph, strict=True):
        written = _written(node) if node.op_type in _BATCH_NORMS else []
        if written:
            op = replace(op, pinned="stateful", writes=tuple(index[str(v.name)] for v in written))
        ops.append(op)
    changed = replace(problem, ops=tuple(ops))
    changed.check()
    return changed


__all__ = ["Kind", "kind_of_file", "problem_from_file"]
