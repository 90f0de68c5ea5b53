"""What a gradient rule sees of the node it differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ..errors import DifferentiationError
from ..exporters.places import place_of
from ..graph import Expr, GraphBuilder

#: Metadata of a node that normalization could not rewrite: why.
REFUSAL = "onnxremat.refusal"


def describe(node: ir.Node) -> str:
    """The node's operator and name, with the module and source line where the exporter recorded them."""
    return f"{node.op_type} node '{node.name}'{place_of(node)}"


class Context:
    """One forward node and the gradients of its outputs.

    Attributes:
        op: the builder; ``op("Mul", a, b)`` adds a node to the backward graph.
        node: the forward node.
        x: its inputs (None: omitted).
        g: the gradients of its outputs (None: zero).
    """

    def __init__(self, op: GraphBuilder, node: ir.Node, grads: Sequence[Expr | None], wanted: Sequence[bool]) -> None:
        self.op = op
        self.node = node
        self.x = [None if v is None else op.wrap(v) for v in node.inputs]
        self.g = list(grads)
        self._wanted = list(wanted)

    def wants(self, index: int) -> bool:
        """Whether the gradient of this input is needed at all."""
        return index < len(self._wanted) and self._wanted[index]

    @property
    def y(self) -> Expr:
        """The first output."""
        return self.op.wrap(self.node.outputs[0])

    @property
    def x0(self) -> Expr:
        return self.input(0)

    @property
    def x1(self) -> Expr:
        return self.input(1)

    def input(self, index: int) -> Expr:
        value = self.x[index] if index < len(self.x) else None
        if value is None:
            raise self.refuse(f"its input {index} is omitted")
        return value

    def has(self, index: int) -> bool:
        return index < len(self.x) and self.x[index] is not None

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or the default."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        return list(value) if isinstance(value, list | tuple) else value

    def const(self, index: int) -> npt.NDArray[Any]:
        """The content of an input that must be a constant."""
        value = self.input(index).value
        if value.const_value is None:
            raise self.refuse(f"its input '{value.name}' is not a constant, so the shapes depend on data")
        return value.const_value.numpy()

    def axes(self, index: int | None = None, attribute: str = "axes", rank: int | None = None) -> tuple[int, ...]:
        """The axes given by an input or attribute, non-negative and sorted; all axes where there are none."""
        rank = self.x0.rank if rank is None else rank
        values: Any = None
        if index is not None and self.has(index):
            values = self.const(index).tolist()
        elif attribute in self.node.attributes:
            values = self.attr(attribute)
        if not values:
            return () if self.attr("noop_with_empty_axes", 0) else tuple(range(rank))
        return tuple(sorted({int(a) % rank for a in values}))

    def saved(self, index: int, shape: Sequence[int], dtype: ir.DataType, name: str) -> Expr:
        """An optional output of the forward node, switched on for the backward pass if it was not there."""
        node = self.node
        if len(node.outputs) <= index:
            node.resize_outputs(index + 1)
        value = node.outputs[index]
        if not value.name:
            value.name = self.op.fresh(name)
            value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
        return self.op.wrap(value)

    def refuse(self, reason: str) -> DifferentiationError:
        """The error for a node that this rule can't differentiate."""
        return DifferentiationError(f"can't differentiate {describe(self.node)}: {reason}")


def inverse(perm: Sequence[int]) -> list[int]:
    """The inverse permutation."""
    return [int(i) for i in np.argsort(perm)]
