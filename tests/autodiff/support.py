"""One-operator graphs with a scalar loss, their gradients by the engine, by torch's autograd and by finite differences.

A ``Row`` says what to differentiate.  Everything is drawn from a generator seeded by the row's name, and rounded to float32 first, so that
a float64 check sees the same numbers (and the same ties) as a float32 one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from onnxremat.autodiff import differentiate
from onnxremat.errors import ArtifactError
from onnxremat.graph import Expr, GraphBuilder
from onnxremat.normalize import normalize
from onnxremat.ops import MS
from onnxremat.runtime.session import Options, make_session

Array = npt.NDArray[Any]
Sampler = Callable[[np.random.Generator], Array]
Build = Callable[[GraphBuilder, Sequence[Any]], Sequence[Expr]]

OPSET = 20


def normal(*shape: int) -> Sampler:
    """Standard normal floats."""
    return lambda rng: rng.standard_normal(shape)


def positive(*shape: int) -> Sampler:
    """Floats in [0.5, 2)."""
    return lambda rng: rng.uniform(0.5, 2.0, shape)


def spread(*shape: int, low: float = -2.0, high: float = 2.0) -> Sampler:
    """Distinct, evenly spaced floats in random order, none of them a multiple of 1/2: away from kinks and ties of the operators here."""

    def draw(rng: np.random.Generator) -> Array:
        size = int(np.prod(shape))
        values = np.linspace(low, high, size + 2)[1:-1] + 0.013
        near = np.abs(values * 2 - np.round(values * 2)) < 0.06
        return np.asarray(rng.permutation(values + 0.04 * near)).reshape(shape)

    return draw


@dataclass(frozen=True)
class Given:
    """An operand with this content: a graph input; floats are differentiated unless ``constant``, which makes it an initializer."""

    value: Any
    constant: bool = False

    def array(self) -> Array:
        data = np.asarray(self.value)
        return data.astype(np.int64) if data.dtype.kind == "i" else data


def given(value: Any) -> Given:
    return Given(value)


def const(value: Any) -> Given:
    return Given(value, constant=True)


@dataclass(frozen=True)
class Same:
    """The operand with this index once more."""

    index: int


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        op: operator.
        inputs: samplers (differentiated), Given, Same, or None (omitted).
        torch: the same function in torch; takes the differing operands in order (a ``Same`` is not passed), returns one tensor or several.
        attributes: of the node.
        note: what the case is about.
        domain: of the operator.
        outputs: how many outputs the node has.
        used: which outputs the loss reads, in the order in which ``torch`` returns them.
        build: makes several nodes instead of one; gets the operands, returns the outputs that the loss reads.
        normalized: the graph is normalized before it is differentiated.
        fetch: further outputs of the node, by index, that ``torch`` gets after the operands: what was drawn at random.
        step: of finite differences in float32 (float64 takes 1e-5); for a function linear in each input a large one is as exact.
        tolerance: of finite differences in float32, relative to the largest gradient.
        no_difference: why finite differences can't be taken.
        float32_only: why the gradient is checked in float32 alone although the operator runs in float64.
        float32_differences: why differences are taken in float32 although the operator has a kernel of float64.
    """

    op: str
    inputs: Sequence[Sampler | Given | Same | None]
    torch: Callable[..., Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    domain: str = ""
    outputs: int = 1
    used: tuple[int, ...] = (0,)
    build: Build | None = None
    normalized: bool = False
    fetch: tuple[int, ...] = ()
    step: float = 1e-2
    tolerance: float = 5e-3
    no_difference: str = ""
    float32_only: str = ""
    float32_differences: str = ""

    @property
    def name(self) -> str:
        op = f"{self.domain.removeprefix('com.')}.{self.op}" if self.domain else self.op
        return f"{op}-{self.note.replace(' ', '_')}" if self.note else op

    def operands(self) -> list[Array | int | None]:
        """Arrays, floats rounded to float32 and held in float64; an int for the operand that is meant once more; None where omitted."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        found: list[Array | int | None] = []
        for item in self.inputs:
            if item is None or isinstance(item, Same):
                found.append(None if item is None else item.index)
                continue
            array = item.array() if isinstance(item, Given) else np.asarray(item(rng))
            found.append(array.astype(np.float32).astype(np.float64) if array.dtype.kind == "f" else array)
        return found

    def wanted(self, index: int) -> bool:
        """Whether the gradient of an operand is wanted."""
        item, array = self.inputs[index], self.operands()[index]
        return isinstance(array, np.ndarray) and array.dtype.kind == "f" and not (isinstance(item, Given) and item.constant)


@dataclass
class Built:
    """A graph under test: operand index -> name of the input, name of the gradient."""

    model: ir.Model
    op: GraphBuilder
    names: dict[int, str]
    gradients: dict[int, str]
    outputs: list[str]
    fetched: list[str]

    def session(self, outputs: Sequence[str] | None = None) -> Any:
        return make_session(self.bytes(outputs), Options(threads=1))

    def bytes(self, outputs: Sequence[str] | None = None) -> bytes:
        graph = self.model.graph
        if outputs is not None:
            values = {v.name: v for v in [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]}
            graph.outputs[:] = list({id(values[n]): values[n] for n in outputs}.values())
        data: bytes = ir.serde.serialize_model(self.model).SerializeToString()
        return data


def new_builder(name: str = "test") -> GraphBuilder:
    """A builder at the end of an empty graph."""
    return GraphBuilder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET, MS: 1}, name=name))


def add_input(op: GraphBuilder, name: str, shape: Sequence[int], dtype: ir.DataType = ir.DataType.FLOAT) -> Expr:
    value = ir.Value(name=op.fresh(name), shape=ir.Shape(shape), type=ir.TensorType(dtype))
    op.graph.inputs.append(value)
    return op.wrap(value)


def model_of(op: GraphBuilder) -> ir.Model:
    return ir.Model(op.graph, ir_version=10, producer_name="onnxremat")


def loss_weights(index: int, shape: Sequence[int]) -> Array:
    """The fixed random weights by which output ``index`` enters the loss."""
    rng = np.random.default_rng(1000 + index)
    return np.asarray(rng.uniform(0.3, 1.0, shape) * rng.choice([-1.0, 1.0], shape)).astype(np.float32).astype(np.float64)


def build(row: Row, dtype: ir.DataType, backward: bool) -> Built:
    """The forward graph of a row, with gradients of every differentiated operand where asked for."""
    op = new_builder(row.name)
    operands = row.operands()
    numpy_dtype = dtype.numpy()
    exprs: list[Expr | None] = []
    names: dict[int, str] = {}
    for index, array in enumerate(operands):
        if array is None or isinstance(array, int):
            exprs.append(None if array is None else exprs[array])
            continue
        data = array.astype(numpy_dtype) if array.dtype.kind == "f" else array
        item = row.inputs[index]
        if isinstance(item, Given) and item.constant:
            exprs.append(op.const(data))
            continue
        kind = dtype if array.dtype.kind == "f" else ir.DataType.from_numpy(data.dtype)
        expr = add_input(op, f"in{index}", data.shape, kind)
        names[index] = str(expr.value.name)
        exprs.append(expr)
    fetched: list[Expr] = []
    if row.build is not None:
        used = list(row.build(op, exprs))
    else:
        like: Any = None
        if row.domain:
            like = [(tuple(t.shape), dtype) for t in torch_outputs(row, [])]
        made = op.node(row.op, *exprs, domain=row.domain, outputs=row.outputs, like=like, **row.attributes)
        used = [made[i] for i in row.used]
        fetched = [made[i] for i in row.fetch]
    outputs = [str(e.value.name) for e in used]
    loss: Expr | None = None
    if backward:
        for index, y in enumerate(used):
            term = op("ReduceSum", y * op.const(loss_weights(index, y.shape).astype(numpy_dtype)), keepdims=0)
            loss = term if loss is None else loss + term
    gradients: dict[int, str] = {}
    if loss is not None:
        op.graph.outputs.append(loss.value)
        loss_name = str(loss.value.name)
        op.graph.outputs.extend(e.value for e in fetched)
        if row.normalized:
            normalize(op.graph)
            op = GraphBuilder(op.graph)
        values = {v.name: v for v in op.graph.inputs}
        targets = {i: values[n] for i, n in names.items() if row.wanted(i)}
        (end,) = [v for v in op.graph.outputs if v.name == loss_name]
        found = differentiate(op, end, list(targets.values()))
        gradients = {i: str(found[str(t.name)].value.name) for i, t in targets.items() if t.name in found}
    return Built(model_of(op), op, names, gradients, outputs, [str(e.value.name) for e in fetched])


def torch_outputs(row: Row, extra: Sequence[Array], leaves: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The row's function in torch, in float64; ``leaves`` gets the operands."""
    tensors = []
    for index, array in enumerate(row.operands()):
        if isinstance(array, np.ndarray):
            tensor = torch.from_numpy(array.copy())
            if row.wanted(index):
                tensor.requires_grad_(True)
            tensors.append(tensor)
    if leaves is not None:
        leaves.extend(tensors)
    made = row.torch(*tensors, *[torch.from_numpy(np.array(a)) for a in extra])
    return [made] if isinstance(made, torch.Tensor) else list(made)


def torch_gradients(row: Row, extra: Sequence[Array] = ()) -> tuple[list[Array], dict[int, Array]]:
    """Outputs and gradients by torch; an operand that the outputs do not depend on has zeros."""
    leaves: list[torch.Tensor] = []
    outputs = torch_outputs(row, extra, leaves)
    loss = sum(((y * torch.from_numpy(loss_weights(i, y.shape))).sum() for i, y in enumerate(outputs)), torch.zeros((), dtype=torch.float64))
    loss.backward()
    positions = [i for i, a in enumerate(row.operands()) if isinstance(a, np.ndarray)]
    gradients = {i: leaf.grad for i, leaf in zip(positions, leaves, strict=True)}
    zeros = {i: np.zeros(leaf.shape) for i, leaf in zip(positions, leaves, strict=True)}
    return [y.detach().numpy() for y in outputs], {i: zeros[i] if (g := gradients[i]) is None else g.numpy() for i in positions if row.wanted(i)}


def feeds_of(row: Row, built: Built, dtype: ir.DataType) -> dict[str, Array]:
    """Fresh arrays for the graph inputs (a kernel may write into what it is fed)."""
    operands = row.operands()
    feeds = {}
    for index, name in built.names.items():
        array = operands[index]
        assert isinstance(array, np.ndarray)
        feeds[name] = array.astype(dtype.numpy()) if array.dtype.kind == "f" else array.copy()
    return feeds


def has_kernels(data: bytes) -> bool:
    """Whether the runtime has a kernel of this dtype for every node, and its schema that dtype; any other refusal is an error."""
    try:
        make_session(data, Options(threads=1))
    except ArtifactError as error:
        if "NOT_IMPLEMENTED" in str(error) or "Type Error: Type 'tensor(double)' of input parameter" in str(error):
            return False
        raise
    return True


def engine_gradients(row: Row, dtype: ir.DataType) -> tuple[list[Array], dict[int, Array], list[Array]] | None:
    """Outputs, gradients and fetched values as ONNX Runtime computes them; None where a kernel lacks this dtype."""
    built = build(row, dtype, backward=True)
    for node in built.op.graph:
        for value in node.outputs:
            if value.name:
                assert value.dtype is not None and value.shape is not None and value.shape.is_static(), value.name
    wanted = [*built.outputs, *built.fetched, *built.gradients.values()]
    unique = list(dict.fromkeys(wanted))
    data = built.bytes(unique)
    if dtype == ir.DataType.DOUBLE and not has_kernels(data):
        return None
    session = make_session(data, Options(threads=1))
    results = dict(zip(unique, session.run(unique, feeds_of(row, built, dtype)), strict=True))
    operands = row.operands()
    gradients: dict[int, Array] = {}
    for i in range(len(operands)):
        array = operands[i]
        if row.wanted(i) and isinstance(array, np.ndarray):
            gradients[i] = results[built.gradients[i]] if i in built.gradients else np.zeros(array.shape)
    return [results[n] for n in built.outputs], gradients, [results[n] for n in built.fetched]


def difference_gradients(row: Row) -> tuple[ir.DataType, dict[int, Array]]:
    """Central differences of the ONNX operator itself, in float64 where it has a kernel of that type, else float32."""
    dtype = ir.DataType.DOUBLE
    built = build(row, dtype, backward=False)
    if row.float32_differences or not has_kernels(built.bytes(built.outputs)):
        dtype = ir.DataType.FLOAT
        built = build(row, dtype, backward=False)
    session = built.session(built.outputs)
    step = 1e-5 if dtype == ir.DataType.DOUBLE else row.step
    weights: list[Array] = []

    def loss(feeds: dict[str, Array]) -> float:
        outputs = session.run(list(dict.fromkeys(built.outputs)), {n: a.copy() for n, a in feeds.items()})
        if not weights:
            weights.extend(loss_weights(i, y.shape) for i, y in enumerate(outputs))
        return float(sum(np.sum(y.astype(np.float64) * w) for y, w in zip(outputs, weights, strict=True)))

    gradients = {}
    for index, name in built.names.items():
        if not row.wanted(index):
            continue
        feeds = feeds_of(row, built, dtype)
        gradient = np.zeros(feeds[name].shape)
        for position in np.ndindex(*gradient.shape):
            kept = feeds[name][position]
            feeds[name][position] = kept + step
            # What the addition really gave, in this dtype.
            up, high = float(feeds[name][position]), loss(feeds)
            feeds[name][position] = kept - step
            down, low = float(feeds[name][position]), loss(feeds)
            feeds[name][position] = kept
            gradient[position] = (high - low) / (up - down)
        gradients[index] = gradient
    return dtype, gradients


def assert_close(got: Array, wanted: Array, tolerance: float, what: str) -> None:
    """Largest error relative to the largest magnitude wanted (at least 1e-3); equal infinities agree."""
    assert got.shape == wanted.shape, f"{what}: shape {got.shape} instead of {wanted.shape}"
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    assert (np.isfinite(got) == finite).all(), f"{what}: {got} instead of {wanted}"
    assert (got[~finite] == wanted[~finite]).all(), f"{what}: {got} instead of {wanted}"
    scale = max(float(np.abs(wanted[finite]).max(initial=0.0)), 1e-3)
    error = float(np.abs(got[finite] - wanted[finite]).max(initial=0.0)) / scale
    assert error <= tolerance, f"{what}: error {error:.1e} of {scale:.1e}\ngot {got}\nwanted {wanted}"
