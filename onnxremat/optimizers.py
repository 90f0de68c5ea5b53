"""Optimizers: as a separate model where ONNX Runtime has a kernel for them, else as updates inside the training graph.

``AdamWOptimizer`` and ``SGDOptimizerV2`` of com.microsoft update all parameters of one group from accumulated gradients.  Momentum and
weight decay with SGD have no kernel; they become standard operators at the end of the training graph, which write the new values in place.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from .errors import UsageError
from .graph import Expr, GraphBuilder
from .ops import MS

IR_VERSION = 10
OPSET = 20
LEARNING_RATE = "learning_rate"
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
        for what, value in {"momentum": self.momentum, "beta1": self.beta1, "beta2": self.beta2}.items():
            if not 0 <= value < 1:
                raise UsageError(f"a {what} of {value} makes no sense: give a number from 0 to below 1")

    @property
    def in_graph(self) -> bool:
        """Whether the update is part of the training graph (no ONNX Runtime kernel has this form)."""
        return self.name == "sgd" and (self.momentum > 0 or self.weight_decay > 0)

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
    return {file: optimizer_model(replace(optimizer, weight_decay=optimizer.decay_of(names[0])), names) for file, names in groups.items()}


def add_updates(
    op: GraphBuilder,
    optimizer: Optimizer,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    moments: Mapping[str, ir.Value],
    learning_rate: ir.Value,
) -> list[ir.Node]:
    """Add ``v <- momentum v + (g + decay p); p <- p - rate v`` for every parameter (torch.optim.SGD, no dampening).

    The last node of each update writes the new value over the old one.  That every reader of the old value has run before is not expressed
    here:
    see ``onnxremat.emit``, which adds the data edges once the order of all readers, recomputed ones included, is known.

    Returns:
        The writing nodes.
    """
    rate = op.wrap(learning_rate).reshape([])
    overwrite = np.asarray([True])
    writes: list[ir.Node] = []

    def write(target: ir.Value, new: ir.Value, name: str) -> None:
        (flag,) = op.node(
            "InPlaceAccumulatorV2", target, new, overwrite, domain=MS, outputs=[f"{name}.update.out"], like=[((1,), ir.DataType.BOOL)]
        )
        node = flag.value.producer()
        assert node is not None
        writes.append(node)

    scale = _clipping(op, [op.wrap(g) for g in gradients.values()], optimizer.clip_grad_norm) if optimizer.clip_grad_norm else None
    for name, gradient in gradients.items():
        parameter = op.wrap(parameters[name])
        step = op.wrap(gradient) if scale is None else op.wrap(gradient) * scale
        if optimizer.decay_of(name):
            step = step + parameter * optimizer.decay_of(name)
        if optimizer.momentum:
            buffer = op.wrap(moments[f"{name}.momentum"])
            step = buffer * optimizer.momentum + step
            write(buffer.value, step.value, f"{name}.momentum")
        write(parameter.value, (parameter - step * rate).value, name)
    return writes


def _clipping(op: GraphBuilder, gradients: Sequence[Expr], largest: float) -> Expr:
    """min(1, largest / (global norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; every gradient is needed for it before the first update."""
    squares = [op("ReduceSumSquare", g, keepdims=0) for g in gradients]
    norm = op("Sqrt", op("Sum", *squares) if len(squares) > 1 else squares[0])
    one = op.const(1.0, norm.dtype)
    return op("Min", op("Div", op.const(largest, norm.dtype), norm + 1e-6), one)
