"""ForwardGraph -> TrainingGraph: the whole training step as one graph, every value with a type and every node with a phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .autodiff import differentiate
from .errors import DifferentiationError
from .exporters import ForwardGraph, InputSpec
from .graph import GraphBuilder, nbytes
from .nchwc import block_convolutions
from .normalize import broadcast_expands, merge_casts, normalize, remove_dead
from .ops import MS, traits
from .optimizers import IR_VERSION, LEARNING_RATE, STEP, Optimizer, Update, add_updates
from .targets import ORT_TRAINING, Target, lower
from .writes import OVERWRITER

Array = npt.NDArray[Any]

PHASE = "onnxremat.phase"
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
#: Suffixes and names that onnxruntime.training.api recognises.
GRADIENT_BUFFER = "_grad.accumulation.buffer"
GRADIENT_OUT = "_grad.accumulation.out"
LAZY_RESET = "lazy_reset_grad"


@dataclass
class TrainingGraph:
    """One training step.

    Attributes:
        model: the graph; inputs are the batch inputs, labels, [learning_rate,] trainable and frozen parameters, state, moments, gradient
            buffers and ``lazy_reset_grad``; outputs are the loss and the flags of the accumulated gradients (``onnxruntime.training.api``
            looks for them); for a target without a kernel that overwrites, the loss and every value that replaces an input
            (``writes``). Nodes are in base order: forward, backward, update.
        loss: name of the scalar loss.
        inputs: the batch inputs.
        labels: the labels.
        trainable: parameters that reach the loss, in order.
        frozen: parameters and buffers that no step changes.
        state: tensors that the step itself replaces (running statistics), each under its name.
        moments: optimizer state inside the graph (name -> shape); empty where the optimizer is a model of its own.
        gradients: parameter -> name of the value that holds its gradient.
        weights: initial values of parameters, frozen tensors and state.
        optimizer: how the parameters are updated.
        source: where the model came from.
    """

    model: ir.Model
    loss: str
    inputs: tuple[InputSpec, ...]
    labels: tuple[InputSpec, ...]
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]
    state: tuple[str, ...]
    moments: dict[str, tuple[int, ...]]
    gradients: dict[str, str]
    weights: dict[str, Array]
    optimizer: Optimizer
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    @property
    def dropout_masks(self) -> tuple[str, ...]:
        """The masks that dropouts draw, in order."""
        return tuple(str(n.outputs[1].name) for n in self.graph if n.op_type == "Dropout" and len(n.outputs) > 1)

    @property
    def random_values(self) -> tuple[str, ...]:
        """What other operators draw, in order."""
        return tuple(str(n.outputs[0].name) for n in self.graph if n.op_type != "Dropout" and traits(n.op_type, n.domain).random)

    def values(self) -> dict[str, ir.Value]:
        """All named values of the graph."""
        found = {v.name: v for v in self.graph.inputs if v.name}
        found |= {v.name: v for node in self.graph for v in node.outputs if v.name}
        return found

    def resident(self) -> dict[str, int]:
        """Bytes held during the whole step, by class."""
        values = {v.name: v for v in self.graph.inputs}
        size = {name: nbytes(value) for name, value in values.items()}
        trained = sum(size[name] for name in self.trainable)
        constants = sum(v.const_value.nbytes for v in self.graph.initializers.values() if v.const_value is not None)
        separate = 0 if self.optimizer.in_graph else trained * len(self.optimizer.moments)
        return {
            "parameters": trained + sum(size[name] for name in self.frozen),
            "gradients": 0 if self.optimizer.in_graph else trained,
            "optimizer_state": separate + sum(size[name] for name in self.moments),
            "model_state": sum(size[name] for name in self.state),
            "batch": sum(size[spec.name] for spec in (*self.inputs, *self.labels)),
            "constants": constants,
        }


def build_training_graph(
    forward: ForwardGraph, optimizer: Optimizer | None = None, conv_layout: str = "nchw", target: Target = ORT_TRAINING
) -> TrainingGraph:
    """Add loss gradients and updates to a forward graph, which is consumed.

    Args:
        forward: with a loss and something to train.
        optimizer: how parameters follow gradients; by default AdamW.
        conv_layout: "nchw", or "nchwc" for the blocked convolutions of x86-64 (see ``nchwc``).
        target: whose operators the graph may have.

    Raises:
        DifferentiationError: there is no loss, nothing to train, an operator without a rule on the way, or one that the target lacks.
    """
    optimizer = optimizer or Optimizer()
    graph = forward.model.graph
    if forward.loss is None:
        raise DifferentiationError("the model has no loss: give one with --loss, such as cross_entropy, or return a scalar from the model")
    if not forward.trainable:
        raise DifferentiationError("the model has no trainable parameter: set requires_grad, or name parameters to train")
    graph.opset_imports[MS] = 1
    forward.model.ir_version = IR_VERSION
    keep = {forward.loss, *forward.state.values()}
    graph.outputs[:] = list({id(v): v for v in graph.outputs if v.name in keep}.values())
    normalize(graph)
    ends = {v.name: v for v in graph.outputs}
    state_values = {name: ends[output] for name, output in forward.state.items()}
    for node in graph:
        node.metadata_props[PHASE] = FORWARD
    weights = weights_become_inputs(graph, [*forward.trainable, *forward.frozen, *forward.state])
    values = {v.name: v for v in graph.inputs}
    op = GraphBuilder(graph)
    op.on_node = lambda node: node.metadata_props.__setitem__(PHASE, BACKWARD)

    loss = ends[forward.loss]
    targets = [values[name] for name in forward.trainable if name in values]
    gradients: dict[str, str] = {}
    held_gradients: dict[str, ir.Value] = {}
    buffers: list[ir.Value] = []
    reset = _graph_input(LAZY_RESET, (1,), ir.DataType.BOOL)
    outs: list[ir.Value] = [loss]
    in_graph = optimizer.in_graph
    fused = optimizer.resolved({str(v.name): op.wrap(v).shape for v in targets}) if optimizer.fused else None
    rate = _graph_input(LEARNING_RATE, (1,), ir.DataType.FLOAT)
    step = _graph_input(STEP, (1,), ir.DataType.INT64)
    moment_values: dict[str, ir.Value] = {}
    written: list[ir.Value] = []

    def update(names: Sequence[str], how: Optimizer) -> None:
        updates = []
        for name in names:
            moments = {s: _graph_input(name + s, op.wrap(values[name]).shape, op.wrap(values[name]).dtype) for s in how.moments}
            moment_values.update({name + suffix: value for suffix, value in moments.items()})
            updates.append(Update(name, values[name], op.wrap(held_gradients[name]), moments))
        before, op.on_node = op.on_node, lambda node: node.metadata_props.__setitem__(PHASE, UPDATE)
        written.extend(node.outputs[0] for node in add_updates(op, how, updates, rate, step))
        op.on_node = before

    def accumulate(parameter: ir.Value, gradient: Any) -> None:
        name = str(parameter.name)
        value = gradient.value
        if value.producer() is not None and value.name not in gradients.values():
            value.name = op.fresh(f"{name}_grad")
        gradients[name] = str(value.name)
        held_gradients[name] = value
        if fused is not None:
            update([name], fused)
        if in_graph:
            return
        buffer = _graph_input(name + GRADIENT_BUFFER, gradient.shape, gradient.dtype)
        buffers.append(buffer)
        (flag,) = op.node(OVERWRITER, buffer, value, reset, domain=MS, outputs=[name + GRADIENT_OUT], like=[((1,), ir.DataType.BOOL)])
        outs.append(flag.value)

    differentiate(op, loss, targets, forward.stop_gradient, accumulate)
    trainable = tuple(name for name in forward.trainable if name in gradients)
    optimizer = fused or optimizer.resolved({name: op.wrap(values[name]).shape for name in trainable})
    unreached = tuple(name for name in forward.trainable if name not in gradients)
    op.on_node = lambda node: node.metadata_props.__setitem__(PHASE, UPDATE)
    if in_graph and fused is None:
        update(trainable, optimizer)
    moments = {name: op.wrap(value).shape for name, value in moment_values.items()}
    rates = [rate, *([step] if optimizer.counts_steps else [])] if in_graph else []
    written += _write_state(op, {name: (values[name], new) for name, new in state_values.items() if name in values})

    batch_names = [spec.name for spec in (*forward.inputs, *forward.labels)]
    batch = [values[name] for name in batch_names if name in values]
    held = [values[name] for name in [*trainable, *unreached, *forward.frozen, *forward.state] if name in values]
    _split_dropout(op)
    graph.outputs[:] = outs
    merge_casts(graph)
    broadcast_expands(graph)
    remove_dead(graph, [*outs, *written])
    lower(graph, target)
    if conv_layout == "nchwc":
        block_convolutions(op)
    for node in graph:
        node.name = f"{node.op_type}:{next(v.name for v in node.outputs if v.name)}"
    kept = [v for v in held if v.uses()]
    graph.inputs[:] = [*batch, *rates, *kept, *moment_values.values(), *buffers, *([reset] if target.in_place else [])]
    kept_names = {v.name for v in kept}
    return TrainingGraph(
        model=forward.model,
        loss=forward.loss,
        inputs=forward.inputs,
        labels=forward.labels,
        trainable=trainable,
        frozen=tuple(n for n in (*unreached, *forward.frozen) if n in kept_names),
        state=tuple(n for n in forward.state if n in kept_names),
        moments=moments,
        gradients={name: gradients[name] for name in trainable},
        weights={v.name: weights[v.name].astype(v.dtype.numpy()) for v in kept if v.name and v.dtype},
        optimizer=optimizer,
        source=forward.source,
    )


def _graph_input(name: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def weights_become_inputs(graph: ir.Graph, names: list[str]) -> dict[str, Array]:
    """Turn initializers into graph inputs: as inputs the runtime neither folds nor copies them."""
    weights: dict[str, Array] = {}
    for name in names:
        value = graph.initializers.pop(name, None)
        if value is None:
            continue
        assert value.const_value is not None
        weights[name] = np.array(value.const_value.numpy())
        value.const_value = None
        graph.inputs.append(value)
    return weights


def _split_dropout(op: GraphBuilder) -> None:
    """Give every dropout's output a node of its own that computes it from input and mask.

    The mask (one byte an element) is drawn once and kept; the output may then be recomputed like any other value.
    """
    op.on_node = None
    for node in [n for n in op.graph if n.op_type == "Dropout"]:
        if len(node.outputs) < 2 or not node.outputs[1].name:  # no gradient needs the mask; a comparison with torch does
            node.resize_outputs(2)
            mask = node.outputs[1]
            mask.name, mask.shape, mask.type = op.fresh(f"{node.outputs[0].name}_mask"), node.outputs[0].shape, ir.TensorType(ir.DataType.BOOL)
        output, kept = node.outputs
        following = next((n for n in _after(op.graph, node)), None)
        before, op.before = op.before, following
        op.metadata = dict(node.metadata_props)
        masked = op.node("DropoutGrad", node.inputs[0], kept, node.inputs[1], node.inputs[2], domain=MS, like=[output])[0]
        op.before, op.metadata = before, {}
        output.replace_all_uses_with(masked.value)
        name = str(output.name)
        output.name, masked.value.name = op.fresh(f"{name}_unmasked"), name


def _after(graph: ir.Graph, node: ir.Node) -> Iterator[ir.Node]:
    nodes = list(graph)
    yield from nodes[nodes.index(node) + 1 :]


def _write_state(op: GraphBuilder, state: Mapping[str, tuple[ir.Value, ir.Value]]) -> list[ir.Value]:
    """Write the next value of each state tensor over the present one; returns the flags, which nobody needs to see.

    The writing kernel knows float32 only, so a counter (``num_batches_tracked``) is held as float32 in the training graph: exact up to
    2**24 steps.
    """
    flags: list[ir.Value] = []
    for name, (old, new) in state.items():
        next_value = op.wrap(new)
        if old.dtype != ir.DataType.FLOAT:
            assert old.dtype is not None
            step = _step(old, new)
            # A counter that only its own sum reads needs no integers at all.
            next_value = next_value.cast(ir.DataType.FLOAT) if step is None else op.wrap(old)
            hold_as_float(op.graph, old)
            next_value = next_value if step is None else next_value + step
        (flag,) = op.node(
            OVERWRITER,
            old,
            next_value,
            np.asarray([True]),
            domain=MS,
            outputs=[f"{name}.update.out"],
            like=[((1,), ir.DataType.BOOL)],
        )
        flags.append(flag.value)
    return flags


def _step(old: ir.Value, new: ir.Value) -> float | None:
    """What is added to a counter to give its next value, where that is a constant."""
    node = new.producer()
    if node is None or node.op_type != "Add" or node.domain or old not in node.inputs:
        return None
    other = node.inputs[1] if node.inputs[0] is old else node.inputs[0]
    constant = other.const_value if other is not None else None
    return float(constant.numpy().reshape(())) if constant is not None and constant.size == 1 else None


def hold_as_float(graph: ir.Graph, value: ir.Value) -> None:
    """Give a graph input the type float32 and its readers a cast back."""
    dtype = value.dtype
    assert dtype is not None
    readers = [(use.node, use.idx) for use in value.uses()]
    value.type = ir.TensorType(ir.DataType.FLOAT)
    op = GraphBuilder(graph, before=next(iter(graph)))
    op.metadata = {PHASE: FORWARD}
    back = op.wrap(value).cast(dtype)
    for node, index in readers:
        node.replace_input_with(index, back.value)
