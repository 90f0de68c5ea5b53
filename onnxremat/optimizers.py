"""Optimizers: as a separate model, or as updates inside the training graph.

``AdamWOptimizer`` and ``SGDOptimizerV2`` of com.microsoft update all parameters of one group from accumulated gradients.  Momentum and
weight decay with SGD have no kernel; they become standard operators at the end of the training graph, which write the new values in place.
A fused update runs there too, for each parameter as soon as its gradient is complete.  For runtimes without those kernels every optimizer is
written in standard operators, in the graph or as a model that updates a flat tensor of any length.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from .errors import UsageError
from .graph import Expr, GraphBuilder
from .ops import MS
from .portable.writes import lower_writes
from .writes import OVERWRITER, note_writes

IR_VERSION = 10
OPSET = 20
LEARNING_RATE = "learning_rate"
#: Input of a training graph that holds an update which counts its steps: int64[1], from 1 up.
STEP = "optimizer_step"
#: When parameters are updated: after the step, or each as soon as its gradient is complete.
SEPARATE, FUSED = "separate", "fused"
#: Suffix of a tensor kept for each parameter -> name of the optimizer model's input.
MOMENT_INPUTS = {".first_order_moment": "first_order_moments", ".second_order_moment": "second_order_moments", ".momentum": "momentum"}
#: In ``Optimizer.no_decay``: every parameter of at most one axis.
VECTORS = "vectors"


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How parameters follow their gradients.

    Attributes:
        name: "adamw" (Loshchilov and Hutter, ICLR 2019, bias-corrected as torch.optim.AdamW) or "sgd".
        learning_rate: initial value; the artifact takes another one at every step.
        momentum: of sgd, as torch.optim.SGD without dampening.
        weight_decay: adamw: decoupled; sgd: added to the gradient.
        beta1: decay of adamw's first moment.
        beta2: decay of adamw's second moment.
        epsilon: adamw's denominator guard.
        no_decay: parameters that weight decay leaves alone: names, shell-style patterns, or ``vectors`` for all of at most one axis (biases and
            the scales of normalizations).
        clip_grad_norm: gradients are scaled down to this global norm at most; 0 leaves them.
        update: "separate": after the step, from accumulated gradients; "fused": each parameter's as soon as its gradient is complete, which
            is not kept.
        kernels: the runtime has kernels for AdamW and plain SGD.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    no_decay: tuple[str, ...] = ()
    clip_grad_norm: float = 0.0
    update: str = SEPARATE
    kernels: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "no_decay", tuple(self.no_decay))  # a list where it was read from a manifest
        if self.name not in ("adamw", "sgd"):
            raise UsageError(f"there is no optimizer '{self.name}': choose adamw or sgd")
        numbers = {
            "learning rate": self.learning_rate,
            "momentum": self.momentum,
            "weight decay": self.weight_decay,
            "epsilon": self.epsilon,
            "gradient norm": self.clip_grad_norm,
        }
        for what, value in numbers.items():
            if not math.isfinite(value) or value < 0:
                raise UsageError(f"a {what} of {value} makes no sense: give a number from 0 up")
        if self.name == "adamw" and self.momentum:
            raise UsageError("adamw has no momentum option: its moments are set by beta1 and beta2; or choose sgd")
        if self.update not in (SEPARATE, FUSED):
            raise UsageError(f"there is no update '{self.update}': choose {SEPARATE} or {FUSED}")
        if self.fused and self.clip_grad_norm:
            raise UsageError(
                "clipping needs every gradient before the first update, and a fused update lets each one go: leave out --clip-grad-norm, or "
                f"choose --update {SEPARATE}"
            )
        for what, value in {"momentum": self.momentum, "beta1": self.beta1, "beta2": self.beta2}.items():
            if not 0 <= value < 1:
                raise UsageError(f"a {what} of {value} makes no sense: give a number from 0 to below 1")

    @property
    def in_graph(self) -> bool:
        """Whether the update is part of the training graph: it is fused, or no kernel of the runtime has its form."""
        return self.fused or (self.kernels and self.name == "sgd" and (self.momentum > 0 or self.weight_decay > 0))

    @property
    def fused(self) -> bool:
        return self.update == FUSED

    @property
    def counts_steps(self) -> bool:
        """Whether an update depends on the number of the step."""
        return self.name == "adamw"

    def decay_of(self, name: str) -> float:
        """The weight decay of a parameter; ``no_decay`` holds names (see :meth:`resolved`)."""
        return 0.0 if name in self.no_decay else self.weight_decay

    def resolved(self, shapes: Mapping[str, Sequence[int]]) -> Optimizer:
        """This optimizer with the patterns of ``no_decay`` replaced by the names of parameters that they match.

        Raises:
            UsageError: a pattern matches none.
        """
        exempt: set[str] = set()
        for pattern in self.no_decay:
            found = {n for n, s in shapes.items() if len(s) < 2} if pattern == VECTORS else set(fnmatch.filter(shapes, pattern))
            if not found:
                raise UsageError(f"no trainable parameter matches the pattern '{pattern}' of --no-decay")
            exempt |= found
        return replace(self, no_decay=tuple(name for name in shapes if name in exempt))

    @property
    def moments(self) -> tuple[str, ...]:
        """Suffixes of the tensors kept for each parameter, each of the parameter's size."""
        if self.name == "adamw":
            return (".first_order_moment", ".second_order_moment")
        return (".momentum",) if self.momentum > 0 else ()


def optimizer_model(optimizer: Optimizer, parameters: Sequence[str]) -> onnx.ModelProto:
    """The optimizer model that ``onnxruntime.training.api.Optimizer`` loads: one node over sequences of tensors.

    The order of ``parameters`` is that of the sequences and travels in the model's metadata.
    """
    # The training API insists on a step and a first moment for plain SGD too, though the kernel reads neither.
    sequences = ["params", "gradients", "first_order_moments"]
    inputs = [
        helper.make_tensor_value_info(LEARNING_RATE, TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("step", TensorProto.INT64, [1]),
    ]
    outputs = [helper.make_tensor_value_info("updated_flag", TensorProto.BOOL, [1])]
    if optimizer.name == "adamw":
        sequences.append("second_order_moments")
        node = helper.make_node(
            "AdamWOptimizer",
            [LEARNING_RATE, "step", *sequences],
            ["updated_flag"],
            domain=MS,
            name="AdamWOptimizer",
            alpha=optimizer.beta1,
            beta=optimizer.beta2,
            epsilon=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            adam_mode=0,  # torch's
            correct_bias=1,
        )
    else:
        node = helper.make_node("SGDOptimizerV2", [LEARNING_RATE, "params", "gradients"], ["updated_flag"], domain=MS, name="SGDOptimizerV2")
    inputs += [helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in sequences]
    model = helper.make_model(
        helper.make_graph([node], "optimizer", inputs, outputs),
        producer_name="onnxremat",
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MS, 1)],
        ir_version=IR_VERSION,
    )
    helper.set_model_props(model, {"onnxremat.parameters": "\n".join(parameters)})
    return model


def optimizer_groups(optimizer: Optimizer, parameters: Sequence[str]) -> dict[str, list[str]]:
    """File name of an optimizer model -> the parameters that it updates: one for each weight decay.

    ``optimizer_model.onnx`` updates all of them; where there are two groups there is no such file, as ``onnxruntime.training.api`` would
    apply it to both.
    """
    decayed = [name for name in parameters if optimizer.decay_of(name)]
    exempt = [name for name in parameters if not optimizer.decay_of(name)]
    if not decayed or not exempt:
        return {"optimizer_model.onnx": list(parameters)}
    return {"optimizer_decay.onnx": decayed, "optimizer_no_decay.onnx": exempt}


def optimizer_models(optimizer: Optimizer, parameters: Sequence[str]) -> dict[str, onnx.ModelProto]:
    """File name -> optimizer model of each group of :func:`optimizer_groups`."""
    groups = optimizer_groups(optimizer, parameters)
    make = optimizer_model if optimizer.kernels else standard_optimizer_model
    return {file: make(replace(optimizer, weight_decay=optimizer.decay_of(names[0])), names) for file, names in groups.items()}


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter's update in a graph.

    Attributes:
        name: of the parameter.
        parameter: its value, to be replaced.
        gradient: what it follows.
        moments: suffix (``Optimizer.moments``) -> value, to be replaced.
    """

    name: str
    parameter: ir.Value
    gradient: Expr
    moments: Mapping[str, ir.Value]


def add_updates(op: GraphBuilder, optimizer: Optimizer, updates: Sequence[Update], rate: ir.Value, step: ir.Value | None) -> list[ir.Node]:
    """Add the updates of parameters to a graph, gradients clipped together where the optimizer clips.

    SGD: ``v <- momentum v + (g + decay p); p <- p - rate v`` (torch.optim.SGD, no dampening).  AdamW: Loshchilov and Hutter 2019, algorithm
    2, bias-corrected as torch.optim.AdamW.  Every old value is read by nodes that the new one depends on, and by no others of the update.
    That all other readers of the old value have run before is not expressed here: see ``onnxremat.emit``, which knows the order of all
    readers, recomputed ones included.

    Args:
        op: the builder.
        optimizer: how parameters follow gradients.
        updates: the parameters.
        rate: the learning rate, float32[1].
        step: number of the step from 1 up, int64[1]; only read where ``optimizer.counts_steps``.

    Returns:
        The writing nodes.
    """
    writes: list[ir.Node] = []

    def write(target: ir.Value, new: Expr) -> None:
        flag = f"{target.name}.update.out"
        op.node(OVERWRITER, target, new, np.asarray([True]), domain=MS, outputs=[flag], like=[((1,), ir.DataType.BOOL)])
        writes.extend(use.node for use in target.uses() if use.node.op_type == OVERWRITER and use.idx == 0)

    of = _adamw if optimizer.name == "adamw" else _sgd
    scale = _clipping(op, [u.gradient for u in updates], optimizer.clip_grad_norm) if optimizer.clip_grad_norm and optimizer.in_graph else None
    for update in updates:
        scaled = replace(update, gradient=update.gradient if scale is None else update.gradient * scale)
        of(op, optimizer, scaled, op.wrap(rate).reshape([]), step, write)
    return writes


Write = Callable[[ir.Value, Expr], None]


def _sgd(op: GraphBuilder, optimizer: Optimizer, update: Update, rate: Expr, _: ir.Value | None, write: Write) -> None:
    parameter, step, decay = op.wrap(update.parameter), update.gradient, optimizer.decay_of(update.name)
    if decay:
        step = step + parameter * decay
    if optimizer.momentum:
        velocity = update.moments[".momentum"]
        step = op.wrap(velocity) * optimizer.momentum + step
        write(velocity, step)
    write(update.parameter, parameter - step * rate)


def _adamw(op: GraphBuilder, optimizer: Optimizer, update: Update, rate: Expr, step: ir.Value | None, write: Write) -> None:
    assert step is not None
    gradient, decay = update.gradient, optimizer.decay_of(update.name)
    first, second = (update.moments[suffix] for suffix in optimizer.moments)
    # 1 - beta ** step in float64: with beta2 = 0.999 float32 would leave four digits of the first.
    count = op.wrap(step).reshape([]).cast(ir.DataType.DOUBLE)
    corrections = [1.0 - op("Pow", op.const(beta, ir.DataType.DOUBLE), count) for beta in (optimizer.beta1, optimizer.beta2)]
    of_first, of_second = corrections[0].cast(gradient.dtype), op("Sqrt", corrections[1]).cast(gradient.dtype)
    mean = op.wrap(first) * optimizer.beta1 + gradient * (1.0 - optimizer.beta1)
    square = op.wrap(second) * optimizer.beta2 + (gradient * gradient) * (1.0 - optimizer.beta2)
    parameter = op.wrap(update.parameter)
    if decay:
        parameter = parameter * (1.0 - rate * decay)
    move = mean / (op("Sqrt", square) / of_second + optimizer.epsilon)
    write(first, mean)
    write(second, square)
    write(update.parameter, parameter - move * (rate / of_first))


def standard_optimizer_model(optimizer: Optimizer, parameters: Sequence[str]) -> onnx.ModelProto:
    """The update of any one parameter in standard operators: flat tensors of one length in, their new values out.

    Inputs are ``learning_rate`` float[1], ``step`` int64[1] where it counts, ``params``, ``gradients`` and the moments, each float[n]; each
    output replaces an input (``onnxremat.writes``) and may be bound to its array.  ``parameters`` are noted in the metadata.
    """
    length = 2  # stands for n

    def value(name: str, shape: Sequence[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    rate, step = value(LEARNING_RATE, [1]), value("step", [1], ir.DataType.INT64)
    params, gradients = value("params", [length]), value("gradients", [length])
    moments = {suffix: value(MOMENT_INPUTS[suffix], [length]) for suffix in optimizer.moments}
    graph = ir.Graph([rate], [], nodes=[], opset_imports={"": OPSET}, name="optimizer")
    graph.inputs.extend([*([step] if optimizer.counts_steps else []), params, gradients, *moments.values()])
    op = GraphBuilder(graph)
    decay = replace(optimizer, no_decay=())
    add_updates(op, decay, [Update("params", params, op.wrap(gradients), moments)], rate, step)
    lower_writes(graph)
    for flat in [*graph.inputs, *(v for node in graph for v in node.outputs)]:
        if flat.shape == (length,):
            flat.shape = ir.Shape(["n"])
    model = ir.Model(graph, ir_version=IR_VERSION, producer_name="onnxremat")
    note_writes(model)
    model.metadata_props["onnxremat.parameters"] = "\n".join(parameters)
    return ir.to_proto(model)


def _clipping(op: GraphBuilder, gradients: Sequence[Expr], largest: float) -> Expr:
    """min(1, largest / (global norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; every gradient is needed for it before the first update."""
    squares = [op("ReduceSumSquare", g, keepdims=0) for g in gradients]
    norm = op("Sqrt", op("Sum", *squares) if len(squares) > 1 else squares[0])
    one = op.const(1.0, norm.dtype)
    return op("Min", op("Div", op.const(largest, norm.dtype), norm + 1e-6), one)
