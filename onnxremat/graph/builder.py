"""A graph builder that knows the type of everything it makes.

Every node is shape-inferred as it is added, so that no value is ever without dtype and shape (kernels such as MaxPoolGrad crash the process
without them, and the memory model needs the bytes).  Equal pure expressions are built once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ..ops import traits

Scalar = float | int | bool
Operand = "Expr | ir.Value | Scalar | npt.NDArray[Any] | None"
#: What an output looks like: another value's type, or (shape, dtype).
OutputType = "Expr | ir.Value | tuple[Sequence[int], ir.DataType]"


def static_shape(value: ir.Value) -> tuple[int, ...]:
    """The shape of a value as integers; raises ValueError naming the value where a dimension is unknown."""
    if value.const_value is not None:
        return tuple(int(d) for d in value.const_value.shape.numpy())
    if value.shape is None or not all(isinstance(d, int) for d in value.shape):
        raise ValueError(f"the shape of '{value.name}' is not static ({value.shape}); pin its dimensions with --input")
    return tuple(int(d) for d in value.shape.numpy())


def nbytes(value: ir.Value) -> int:
    """Bytes of a value's buffer, by its static shape and dtype."""
    if value.dtype is None:
        raise ValueError(f"the dtype of '{value.name}' is unknown")
    return int(np.prod(static_shape(value), dtype=np.int64)) * max(1, int(value.dtype.itemsize))


class Expr:
    """A value of the graph with arithmetic, so that gradient rules read as mathematics."""

    __slots__ = ("op", "value")

    def __init__(self, op: GraphBuilder, value: ir.Value) -> None:
        self.op, self.value = op, value

    @property
    def shape(self) -> tuple[int, ...]:
        return static_shape(self.value)

    @property
    def dtype(self) -> ir.DataType:
        assert self.value.dtype is not None
        return self.value.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __add__(self, other: Any) -> Expr:
        return self.op("Add", self, other)

    def __radd__(self, other: Any) -> Expr:
        return self.op("Add", other, self)

    def __sub__(self, other: Any) -> Expr:
        return self.op("Sub", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return self.op("Sub", other, self)

    def __mul__(self, other: Any) -> Expr:
        return self.op("Mul", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return self.op("Mul", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return self.op("Div", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return self.op("Div", other, self)

    def __neg__(self) -> Expr:
        return self.op("Neg", self)

    def reshape(self, shape: Sequence[int]) -> Expr:
        if tuple(shape) == self.shape:
            return self
        # By default a 0 copies the dimension of the input.
        return self.op("Reshape", self, np.asarray(shape, np.int64), allowzero=1 if 0 in shape else None)

    def transpose(self, perm: Sequence[int]) -> Expr:
        return self if list(perm) == list(range(self.rank)) else self.op("Transpose", self, perm=list(perm))

    def cast(self, dtype: ir.DataType) -> Expr:
        return self if dtype == self.dtype else self.op("Cast", self, to=int(dtype))

    def sum(self, axes: Sequence[int], keepdims: bool = False) -> Expr:
        if not axes:
            return self
        axes = [axis % self.rank for axis in axes]
        if all(self.shape[axis] == 1 for axis in axes):
            return self if keepdims else self.reshape([size for axis, size in enumerate(self.shape) if axis not in axes])
        return self.op("ReduceSum", self, np.asarray(list(axes), np.int64), keepdims=int(keepdims))

    def expand(self, shape: Sequence[int]) -> Expr:
        return self if tuple(shape) == self.shape else self.op("Expand", self, np.asarray(shape, np.int64))

    def slice(self, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int] | None = None) -> Expr:
        lists = [starts, ends, axes] + ([steps] if steps is not None else [])
        return self.op("Slice", self, *[np.asarray(v, np.int64) for v in lists])


class GraphBuilder:
    """Adds typed nodes to a graph, at its end or before a given node.

    ``op("Add", a, b)`` adds a node and returns its output; keyword arguments are attributes.  Operands may be values, Python scalars (of
    the dtype of the first value operand) and NumPy arrays (become deduplicated initializers).
    """

    def __init__(self, graph: ir.Graph, prefix: str = "", before: ir.Node | None = None) -> None:
        self.graph = graph
        self.prefix = prefix
        self.before = before
        self._made: dict[Any, list[ir.Value]] = {}
        self._constants: dict[Any, ir.Value] = {}
        self._taken: set[str] = {v.name for node in graph for v in node.outputs if v.name}
        self._taken |= {v.name for v in graph.inputs if v.name} | set(graph.initializers)
        self._taken |= {node.name for node in graph if node.name}
        self._serial = 0
        self.metadata: dict[str, str] = {}
        self.on_node: Callable[[ir.Node], None] | None = None

    def wrap(self, value: ir.Value) -> Expr:
        return Expr(self, value)

    def forget(self) -> None:
        """Build equal expressions anew from here on."""
        self._made.clear()

    def fresh(self, hint: str) -> str:
        """A name that nothing in the graph has."""
        name = f"{self.prefix}{hint}"
        while name in self._taken:
            self._serial += 1
            name = f"{self.prefix}{hint}_{self._serial}"
        self._taken.add(name)
        return name

    def const(self, array: npt.ArrayLike, dtype: ir.DataType | None = None, name: str = "const") -> Expr:
        """An initializer with this content; equal contents share one."""
        data = np.asarray(array, dtype=None if dtype is None else dtype.numpy())
        key = (data.dtype.str, data.shape, data.tobytes()) if data.nbytes <= 4096 else (id(array), data.nbytes)
        value = self._constants.get(key)
        if value is None:
            tensor = ir.tensor(data, dtype=dtype, name=self.fresh(name))
            value = ir.Value(name=tensor.name, shape=ir.Shape(data.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self.wrap(value)

    def __call__(self, op_type: str, *operands: Any, **attributes: Any) -> Expr:
        """One node with one output; see ``node`` for the keywords ``domain`` and ``like``."""
        return self.node(op_type, *operands, **attributes)[0]

    def node(
        self,
        op_type: str,
        *operands: Any,
        domain: str = "",
        outputs: int | Sequence[str] = 1,
        like: Sequence[Any] | None = None,
        **attributes: Any,
    ) -> list[Expr]:
        """Add one node.

        Args:
            op_type: the operator.
            operands: its inputs; None for an omitted optional one.
            domain: the operator's domain.
            outputs: how many outputs, or their names ("" for an omitted one).
            like: the types of the outputs where ONNX can't infer them: values, or (shape, dtype) pairs.
            attributes: the node's attributes.

        Returns:
            The outputs.

        Raises:
            ValueError: the types of the operands do not fit the operator.
        """
        values = self._operands(operands)
        names = list(outputs) if not isinstance(outputs, int) else None
        count = outputs if isinstance(outputs, int) else len(outputs)
        key: Any = None
        if names is None and traits(op_type, domain).pure:
            key = (domain, op_type, tuple(id(v) for v in values), repr(sorted(attributes.items())), count)
            if key in self._made:
                return [self.wrap(v) for v in self._made[key]]
        attrs = ir.convenience.convert_attributes({k: v for k, v in attributes.items() if v is not None})
        node = ir.Node(domain, op_type, values, attrs, num_outputs=count, name=self.fresh(f"{op_type}_node"), metadata_props=dict(self.metadata))
        for index, value in enumerate(node.outputs):
            hint = names[index] if names is not None else op_type.lower()
            value.name = "" if hint == "" else (self.fresh(hint) if names is None else hint)
            if names is not None and hint:
                self._taken.add(hint)
        self._infer(node, like)
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        if self.on_node is not None:
            self.on_node(node)
        if key is not None:
            self._made[key] = list(node.outputs)
        return [self.wrap(v) for v in node.outputs]

    def _operands(self, operands: Sequence[Any]) -> list[ir.Value | None]:
        dtype = next((_value(o).dtype for o in operands if isinstance(o, Expr | ir.Value)), None)
        values: list[ir.Value | None] = []
        for operand in operands:
            if operand is None:
                values.append(None)
            elif isinstance(operand, Expr | ir.Value):
                values.append(_value(operand))
            elif isinstance(operand, np.ndarray | np.generic):
                values.append(self.const(operand).value)
            else:
                values.append(self.const(operand, dtype).value)
        return values

    def _infer(self, node: ir.Node, like: Sequence[Any] | None) -> None:
        if like is not None:
            for value, pattern in zip(node.outputs, like, strict=True):
                if pattern is None or not value.name:
                    continue
                if isinstance(pattern, tuple):
                    shape, dtype = pattern
                    value.shape, value.type = ir.Shape(shape), ir.TensorType(dtype)
                else:
                    source = _value(pattern)
                    value.shape, value.type = ir.Shape(static_shape(source)), source.type
            return
        infer_outputs(node, self.graph.opset_imports.get(node.domain))


def infer_outputs(node: ir.Node, opset: int | None) -> None:
    """Set shape and dtype of a node's outputs by ONNX's own inference; raises ValueError where it can't tell."""
    version = opset if opset is not None else 1
    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError as error:
        raise ValueError(f"{node.op_type} of domain '{node.domain}' at opset {version} has no schema: say what its outputs are") from error
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None or not value.name:
            continue
        proto = ir.serde.serialize_value(value)
        types[value.name] = proto.type
        if value.const_value is not None and value.const_value.size <= 1024:
            data[value.name] = ir.serde.serialize_tensor(value.const_value)
    opsets = [onnx.helper.make_opsetid(node.domain, version)]
    try:
        inferred = onnx.shape_inference.infer_node_outputs(schema, ir.serde.serialize_node(node), types, data, opset_imports=opsets, ir_version=10)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the operands of {node.op_type} '{node.name}' do not fit: {reason}") from error
    for value in node.outputs:
        if not value.name:
            continue
        found = inferred.get(value.name)
        if found is None:
            raise ValueError(f"the type of output '{value.name}' of {node.op_type} '{node.name}' can't be inferred")
        loaded = ir.serde.deserialize_type_proto_for_type(found)
        value.type, value.shape = loaded, ir.serde.deserialize_type_proto_for_shape(found)
        static_shape(value)


def _value(operand: Expr | ir.Value) -> ir.Value:
    return operand.value if isinstance(operand, Expr) else operand
