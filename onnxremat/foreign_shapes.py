"""Shapes of every value of a training graph, the gradient operators of com.microsoft included.

ONNX infers the shapes of its own operators.  For those of com.microsoft, which it doesn't know, a table says what each output looks like; a
value that is named ``X_grad`` and has no row looks like ``X``, as ONNX Runtime's gradient builder names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.reference
import onnx_ir as ir

from .errors import OnnxRematError
from .graph import static_shape
from .graph.builder import infer_outputs
from .ops import MS, traits

Shape = tuple[int, ...]
#: What a rule says of one output: the value it looks like, or its shape and dtype; None leaves it to ONNX or to the file.
Look = ir.Value | tuple[Shape, ir.DataType] | None

WAY_OUT = "pin the graph's inputs with --input NAME=SHAPE, or export with static shapes"
#: Integer values up to this many elements are followed as numbers, because shapes are made of them.
_FOLDED_ELEMENTS = 1024


def infer_static_shapes(graph: ir.Graph) -> None:
    """Give every value a static shape and a dtype, node by node, following small integers as numbers."""
    by_name = {str(v.name): v for v in [*graph.inputs, *graph.initializers.values()] if v.name}
    opsets = graph.opset_imports
    for node in graph:
        _apply_rule(node)
        if not all(is_static(v) for v in node.outputs if v.name):
            reason = _infer_node(node, opsets, by_name)
            unknown = next((v for v in node.outputs if v.name and not is_static(v)), None)
            if unknown is not None:
                raise _unknown(unknown, node, reason)
        by_name |= {v.name: v for v in node.outputs if v.name}
        _fold(node, opsets)


def _unknown(value: ir.Value, node: ir.Node, reason: str) -> OnnxRematError:
    return OnnxRematError(f"the shape of '{value.name}', made by {node.op_type} '{node.name}', stays unknown ({reason}): {WAY_OUT}")


def is_static(value: ir.Value) -> bool:
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
        if source is not None and not is_static(value):
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


def int_attribute(node: ir.Node, name: str, default: int) -> int:
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
    if min(len(left), len(right)) < 2 or int_attribute(node, "transBatchA", 0) or int_attribute(node, "transBatchB", 0):
        raise ValueError("vectors and transposed batches have no rule")
    rows = left[-1] if int_attribute(node, "transA", 0) else left[-2]
    columns = right[-2] if int_attribute(node, "transB", 0) else right[-1]
    return [((*np.broadcast_shapes(left[:-2], right[:-2]), rows, columns), _dtype(node, 0))]


def _reduce_sum(node: ir.Node) -> list[Look]:
    shape, axes = static_shape(_input(node, 0)), _ints(node, 1)
    if not axes:
        axes = () if int_attribute(node, "noop_with_empty_axes", 0) else tuple(range(len(shape)))
    gone = {axis % len(shape) for axis in axes} if shape else set()
    if int_attribute(node, "keepdims", 1):
        return [(tuple(1 if i in gone else d for i, d in enumerate(shape)), _dtype(node, 0))]
    return [(tuple(d for i, d in enumerate(shape) if i not in gone), _dtype(node, 0))]


def _concat(node: ir.Node) -> list[Look]:
    shapes = [static_shape(_input(node, i)) for i in range(len(node.inputs))]
    axis = int_attribute(node, "axis", 0) % len(shapes[0])
    joined = list(shapes[0])
    joined[axis] = sum(shape[axis] for shape in shapes)
    return [(tuple(joined), _dtype(node, 0)), ((len(shapes),), ir.DataType.INT64)]


def _split(node: ir.Node) -> list[Look]:
    shape = static_shape(_input(node, 0))
    axis = int_attribute(node, "axis", 0) % len(shape)
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
    if rule is None or all(is_static(v) for v in node.outputs if v.name):
        return
    try:
        looks = rule(node)
    except ValueError as error:
        unknown = next(v for v in node.outputs if v.name and not is_static(v))
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
        results = [np.asarray(shape[int_attribute(node, "start", 0) : int_attribute(node, "end", len(shape))], np.int64)]
    elif node.op_type == "Size":
        results = [np.asarray(np.prod(static_shape(_input(node, 0)), dtype=np.int64))]
    elif node.op_type == "ConcatTraining":
        axis = int_attribute(node, "axis", 0)
        joined = np.concatenate([_numbers(v) for v in node.inputs], axis) if known else None
        results = [joined, np.asarray([static_shape(_input(node, i))[axis] for i in range(len(node.inputs))], np.int64)]
    elif node.op_type == "BroadcastGradientArgs" and known:
        results = [np.asarray(axes, np.int64) for axes in _broadcast_axes(node)]
    elif node.domain in ("", "ai.onnx") and known and all(is_small_integer(v) for v in node.outputs if v.name):
        results = _evaluate(node, opsets)
    else:
        return
    for value, result in zip((v for v in node.outputs if v.name), results, strict=False):
        if result is not None and is_small_integer(value):
            value.const_value = ir.tensor(result, name=value.name)


def _is_known(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= _FOLDED_ELEMENTS and not value.is_graph_input()


def is_small_integer(value: ir.Value) -> bool:
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
