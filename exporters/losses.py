"""Losses: one description, an ONNX form appended to a forward graph, and the torch form it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from .errors import ExportError
from .forward_graph import ForwardGraph, InputSpec
from .loss_ops import BUILDERS
from .roles import unique_name

if TYPE_CHECKING:
    import torch

__all__ = ["LOSSES", "Loss", "append_loss"]

LOSSES = ("cross_entropy", "mse", "l1", "bce_with_logits", "output")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("reduction", "output", "ignore_index", "label_smoothing", "weights", "class_axis"),
    "mse": ("reduction", "output"),
    "l1": ("reduction", "output"),
    "bce_with_logits": ("reduction", "output"),
    "output": ("output",),
}


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss by name and options, with the semantics of ``torch.nn.functional``.

    Attributes:
        name: one of ``LOSSES``; ``output`` is the model's own scalar output.
        reduction: ``mean`` or ``sum``.
        output: the model output that the loss reads; default: the first float one (for ``output``: the first float scalar).
        ignore_index: label value that cross_entropy leaves out.
        label_smoothing: of cross_entropy, in [0, 1].
        weights: class weights of cross_entropy, float, shape (C,).
        class_axis: 1 or -1; default: 1, or -1 where only that fits (logits (N, T, V) with labels (N, T)).
    """

    name: str
    reduction: str = "mean"
    output: str | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    weights: np.ndarray[Any, Any] | None = None
    class_axis: int | None = None

    def __post_init__(self) -> None:
        """Checks names and ranges.

        Raises:
            ExportError: naming the option.
        """
        what = f"loss {self.name}"
        if self.name not in LOSSES:
            raise ExportError(what, "no such loss", f"use one of {', '.join(LOSSES)}")
        if self.reduction not in ("mean", "sum"):
            raise ExportError(f"{what}: reduction={self.reduction}", "a training loss is a scalar", "use mean or sum")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ExportError(f"{what}: label_smoothing={self.label_smoothing}", "out of range", "use a value from 0 to 1")
        if self.class_axis not in (None, 1, -1):
            raise ExportError(f"{what}: class_axis={self.class_axis}", "out of range", "use 1 or -1")

    @classmethod
    def of(cls, loss: Loss | str | None) -> Loss | None:
        """A loss from any of the forms that callers use."""
        return cls.parse(loss) if isinstance(loss, str) else loss

    @classmethod
    def parse(cls, text: str) -> Loss:
        """Reads ``NAME[:OPTION=VALUE,...]``, such as ``cross_entropy:ignore_index=-100,label_smoothing=0.1,weights=path.npy``.

        Raises:
            ExportError: naming the loss or the option that is wrong.
        """
        name, _, rest = text.partition(":")
        if name not in LOSSES:
            raise ExportError(f"loss {name!r}", "no such loss", f"use one of {', '.join(LOSSES)}")
        values: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if key not in _OPTIONS[name] or not equals:
                raise ExportError(f"loss {name}: option {item!r}", "not understood", f"use OPTION=VALUE with {', '.join(_OPTIONS[name])}")
            try:
                values[key] = _READERS[key](value)
            except (ValueError, OSError) as error:
                raise ExportError(f"loss {name}: option {item!r}", str(error), "give a value of the right kind") from error
        return cls(name, **values)

    def options(self) -> dict[str, Any]:
        """Options that differ from their defaults, JSON-able; ``Loss(name, **options)`` (weights as an array) is this loss again."""
        plain = Loss(self.name)
        found = {key: getattr(self, key) for key in _OPTIONS[self.name] if key != "weights"}
        found = {key: value for key, value in found.items() if value != getattr(plain, key)}
        if self.weights is not None:
            found["weights"] = np.asarray(self.weights).tolist()
        return found

    @classmethod
    def from_options(cls, name: str, options: dict[str, Any]) -> Loss:
        """The inverse of :meth:`options`."""
        values = dict(options)
        if values.get("weights") is not None:
            values["weights"] = np.asarray(values["weights"], np.float32)
        return cls(name, **values)

    def axis(self, logits: Sequence[int], labels: Sequence[int] | None) -> int:
        """The class axis for these shapes.

        Raises:
            ExportError: when the shapes fit neither axis, or both and the user has not chosen.
        """
        logits, first, last = tuple(logits), (*logits[:1], *logits[2:]), tuple(logits[:-1])
        if labels is None:
            if len(logits) == 3 and self.class_axis is None:
                raise ExportError(
                    f"loss cross_entropy: logits {logits}",
                    "the class axis may be 1 or the last one",
                    "say class_axis=1 or class_axis=-1, or give the labels",
                )
            return self.class_axis or 1
        labels = tuple(labels)
        fits = [axis for axis, shape in ((1, first), (-1, last)) if labels == shape and self.class_axis in (None, axis)]
        if len(logits) < 3 and fits:
            return 1
        if len(fits) == 2:
            raise ExportError(f"loss cross_entropy: logits {logits}", "the class axis may be 1 or the last one", "say class_axis=1 or class_axis=-1")
        if not fits:
            fitting = " or ".join(str(shape) for shape in dict.fromkeys((first, last)))
            raise ExportError(f"loss cross_entropy: labels {labels}", f"they do not fit logits {logits}", f"labels of shape {fitting} do")
        return fits[0]

    def label_spec(self, shape: Sequence[int], dtype: str) -> InputSpec:
        """The label that fits a model output of this shape and dtype."""
        if self.name != "cross_entropy":
            return InputSpec("target", tuple(shape), dtype)
        axis = self.axis(shape, None)
        classes = shape[axis]
        rest = tuple(shape[:-1]) if axis == -1 else (*shape[:1], *shape[2:])
        return InputSpec("labels", rest, "int64", classes)

    def torch(self, output: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        """The same loss in torch: the reference of a verification.

        Args:
            output: the model's output that the loss reads.
            label: the label; None for ``output``, which returns ``output`` itself.
        """
        import torch
        import torch.nn.functional as F

        if self.name == "output" or label is None:
            return output
        if self.name == "cross_entropy":
            if self.axis(output.shape, label.shape) == -1 and output.ndim > 2:
                output, label = output.reshape(-1, output.shape[-1]), label.reshape(-1)
            weight = None if self.weights is None else torch.as_tensor(np.asarray(self.weights), dtype=output.dtype)
            return F.cross_entropy(
                output,
                label.long(),
                weight,
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
                reduction=self.reduction,
            )
        functions: dict[str, Any] = {"mse": F.mse_loss, "l1": F.l1_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}
        value: torch.Tensor = functions[self.name](output, label, reduction=self.reduction)
        return value


def _weights(path: str) -> np.ndarray[Any, Any]:
    if not Path(path).is_file():
        raise ValueError(f"no such file: {path}")
    return np.asarray(np.load(path), np.float32)


_READERS: dict[str, Any] = {
    "reduction": str,
    "output": str,
    "ignore_index": int,
    "label_smoothing": float,
    "weights": _weights,
    "class_axis": int,
}


def append_loss(graph: ForwardGraph, loss: Loss | None, labels: Sequence[InputSpec] = ()) -> None:
    """Appends a loss to a forward graph, in place, and makes it graph output 0.

    Args:
        graph: its outputs are set; labels that are model inputs already are in ``graph.labels``.
        loss: None takes the first float scalar output when there is one, and leaves the graph without a loss otherwise.
        labels: at most one for a loss by name; derived from the output it reads when empty.

    Raises:
        ExportError: when there is no such output, or the label does not fit it.
    """
    graph.source["loss"] = None if loss is None else loss.name
    graph.source["loss_options"] = {} if loss is None else loss.options()
    if loss is None or loss.name == "output":
        _own_scalar(graph, loss)
    else:
        _by_name(graph, loss, labels)
    graph.source["labels"] = [str(spec) for spec in graph.labels]


def _own_scalar(graph: ForwardGraph, loss: Loss | None) -> None:
    wanted = loss.output if loss is not None else None
    values = {str(v.name): v for v in graph.model.graph.outputs if v.name in graph.outputs}
    scalars = [n for n in graph.outputs if values[n].dtype is not None and values[n].dtype.is_floating_point() and _dims(values[n]) == ()]  # type: ignore[union-attr]
    if wanted is not None:
        scalars = [n for n in scalars if n == wanted]
    if not scalars:
        if loss is None:
            return
        shapes = ", ".join(f"{n} {_dims(values[n])}" for n in graph.outputs)
        raise ExportError(
            "loss output", f"the model returns no float scalar {wanted or ''} (it returns {shapes})", "name a loss, such as cross_entropy"
        )
    graph.loss = scalars[0]
    outputs = graph.model.graph.outputs
    outputs.remove(values[scalars[0]])
    outputs.insert(0, values[scalars[0]])


def _by_name(graph: ForwardGraph, loss: Loss, labels: Sequence[InputSpec]) -> None:
    model = graph.model
    logits = _read_output(graph, loss)
    dtype = logits.dtype.numpy().name  # type: ignore[union-attr]
    if len(labels) > 1:
        raise ExportError(f"loss {loss.name}", f"it takes one label, {len(labels)} are given", "drop the others, or let the model compute its loss")
    label = labels[0] if labels else loss.label_spec(_dims(logits), dtype)
    _check_label(loss, label, _dims(logits), dtype)
    taken = {spec.name for spec in graph.inputs}
    if label.name in taken:
        if labels:
            raise ExportError(f"label {label.name}", "an input has the same name", "rename the label")
        label = replace(label, name=unique_name(label.name, taken))
    _make_way(model, label.name)
    value = ir.Value(name=label.name, shape=ir.Shape(label.shape), type=ir.TensorType(ir.DataType.from_numpy(np.dtype(label.dtype))))
    model.graph.inputs.append(value)
    names = {str(v.name) for node in model.graph for v in node.outputs} | set(model.graph.initializers) | {str(v.name) for v in model.graph.inputs}
    scalar = BUILDERS[loss.name](model, loss, logits, value, names)
    scalar.name = unique_name("loss", names)
    scalar.shape, scalar.type = ir.Shape(()), ir.TensorType(logits.dtype)  # type: ignore[arg-type]
    model.graph.outputs.insert(0, scalar)
    graph.labels = (label,)
    graph.loss = scalar.name


def _make_way(model: ir.Model, name: str) -> None:
    """Renames an inner value that bears the label's name; a graph output or initializer of that name is the user's to rename."""
    if name in model.graph.initializers or any(v.name == name for v in model.graph.outputs):
        raise ExportError(f"label {name}", "an output or parameter of the model has the same name", "rename the label")
    taken = {str(v.name) for node in model.graph for v in node.outputs} | set(model.graph.initializers)
    for node in model.graph:
        for value in node.outputs:
            if value.name == name:
                value.name = unique_name(name, taken)


def _read_output(graph: ForwardGraph, loss: Loss) -> ir.Value:
    values = {str(v.name): v for v in graph.model.graph.outputs}
    if loss.output is not None and loss.output not in graph.outputs:
        raise ExportError(f"loss {loss.name}: output={loss.output}", "the model has no such output", f"it has {', '.join(graph.outputs)}")
    names = [loss.output] if loss.output is not None else list(graph.outputs)
    for name in names:
        value = values[name]
        if value.dtype is not None and value.dtype.is_floating_point() and (loss.output is not None or _dims(value)):
            return value
    raise ExportError(f"loss {loss.name}", f"no float output to read among {', '.join(graph.outputs)}", "name one with output=NAME")


def _dims(value: ir.Value) -> tuple[int, ...]:
    if value.shape is None or not value.shape.is_static():
        raise ExportError(f"output {value.name}", f"its shape {value.shape} is not static", "give static input shapes")
    return tuple(int(d) for d in value.shape.numpy())


def _check_label(loss: Loss, label: InputSpec, shape: tuple[int, ...], dtype: str) -> None:
    what = f"label {label.name} of loss {loss.name}"
    if loss.name != "cross_entropy":
        if label.shape != shape or label.dtype != dtype:
            raise ExportError(what, f"{label.dtype} {label.shape} does not fit the output {dtype} {shape}", "give it the output's shape and dtype")
        return
    if label.dtype not in ("int64", "int32"):
        raise ExportError(what, f"dtype {label.dtype} is not a class index", "use int64 (class probabilities are not supported)")
    if len(shape) < 2:
        raise ExportError(f"loss {loss.name}", f"logits of shape {shape} have no class axis", "return logits of shape (N, C, ...)")
    classes = shape[loss.axis(shape, label.shape)]
    if label.high is not None and label.high > classes:
        raise ExportError(what, f"values up to {label.high - 1} exceed {classes} classes", f"use an upper end of at most {classes}")
    if loss.weights is not None and np.shape(loss.weights) != (classes,):
        raise ExportError(f"loss {loss.name}: weights", f"shape {np.shape(loss.weights)} does not fit {classes} classes", f"give ({classes},)")
