"""Problems from files: a Problem, an artifact folder, or any ONNX training graph, ONNX Runtime's own included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass

from .artifact import MANIFEST, OPTIMIZER, Artifact
from .costs import analytic_costs
from .costs.workspace import known_workspace
from .errors import OnnxRematError
from .exporters import InputSpec
from .foreign_shapes import infer_static_shapes, int_attribute, is_small_integer
from .graph import nbytes, static_shape
from .ops import MS, traits
from .problem import Costs, scheduling_problem
from .scheduler import Problem, ProblemError
from .training_graph import BACKWARD, FORWARD, GRADIENT_BUFFER, PHASE, UPDATE

Kind = Literal["problem", "artifact", "onnx"]

_WAYS_IN = "give an artifact folder, a problem (.json) or a training graph (.onnx)"
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
        infer_static_shapes(graph)
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
        if isinstance(held, ir.ExternalTensor) and is_small_integer(value) and not Path(held.path).is_file():
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
    if node.op_type in _BATCH_NORMS and int_attribute(node, "training_mode", 1 if node.domain == MS else 0):
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
