"""Which constants of a foreign file are weights: those that stand where weights stand."""

from __future__ import annotations

import ast

import numpy as np
import onnx_ir as ir

from .places import scope_of
from .roles import unique_name

__all__ = ["lift_weights", "separate_statistics_from_weights", "weight_like_initializers"]

_POSITIONS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "Einsum": (0, 1, 2),
    "Gather": (0,),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "PRelu": (1,),
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "Attention": (1, 2),
    "BiasGelu": (1,),
    "EmbedLayerNormalization": (2, 3, 4, 5, 6),
    "FastGelu": (1,),
    "FusedConv": (1, 2),
    "FusedGemm": (0, 1, 2),
    "FusedMatMul": (0, 1),
    "MultiHeadAttention": (3,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
}
#: metadata_props keys that torch's exporter leaves on initializers: what it was, and what it was folded from.
_KIND, _FOLDED = "pkg.torch.export.graph_signature.InputSpec.kind", "pkg.onnxscript.optimizer.folded_from"
_RECURRENT = ("LSTM", "GRU", "RNN")
_BIASES = frozenset({"Add", "Mul", "Sub", "Div"})
_VIEWS = frozenset({"Identity", "Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Flatten", "Expand"})


def weight_like_initializers(model: ir.Model) -> tuple[str, ...]:
    """Float initializers of the main graph read as operands of linear maps, normalisations and embeddings, or as 1-D biases and scales.

    An elementwise operand counts where, without axes of size 1, it is a vector: masks and tables of higher rank, and scalars, do not.
    What the file itself calls a buffer or a constant does not count either.
    """
    return tuple(str(name) for name, value in model.graph.initializers.items() if not _is_constant(value) and _is_weight(value, value))


def _is_constant(initializer: ir.Value) -> bool:
    """Whether torch's exporter says that an initializer is no parameter, nor folded from one."""
    metadata = initializer.metadata_props
    if _KIND in metadata:
        return metadata[_KIND] != "PARAMETER"
    if _FOLDED not in metadata:
        return False
    # Parameters of a submodule have dotted names, which values of the traced program never have.
    names = ast.literal_eval(metadata[_FOLDED])
    own = any("." in name or name in ("weight", "bias") for name in names)
    return not own and (initializer.const_value is None or sum(int(d) > 1 for d in initializer.const_value.shape.numpy()) < 2)


def separate_statistics_from_weights(model: ir.Model) -> None:
    """Undoes, in place, what both exporters of torch do to equal tensors: a running mean of zeros and a bias of zeros are one initializer.

    No model ties running statistics to anything else, so where an initializer is both, its readers get copies of their own.
    """
    graph = model.graph
    taken = set(graph.initializers) | {str(v.name) for node in graph for v in node.outputs}
    for name, value in list(graph.initializers.items()):
        readers = _readers(value)
        statistic = [user.op_type == "BatchNormalization" and i in (3, 4) for user, i, _ in readers]
        if value.const_value is None or not any(statistic) or len(set(statistic)) < 2:
            continue
        module = str(name).rpartition(".")[0]
        first = next((r for r in readers if scope_of(r[0]) == module), readers[0])
        for user, i, behind in readers:
            if (user, i) == (first[0], first[1]):
                user.replace_input_with(i, value)
                continue
            # Behind an Identity stands the name that the tensor had.
            wanted = str(behind.name) if behind is not value else f"{user.name or user.op_type}.{i}"
            copy = unique_name(wanted, taken - {wanted} if behind is not value else taken)
            tensor = ir.tensor(np.array(value.const_value.numpy()), name=copy)
            new = ir.Value(name=copy, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor)
            if user.op_type == "InstanceNormalization" and behind is value:
                new.metadata_props[_KIND] = "CONSTANT_TENSOR"  # the ones and zeros of one without scale and bias, merged with a fresh module's
            user.replace_input_with(i, new)
            if behind is not value and not behind.uses():
                producer = behind.producer()
                assert producer is not None
                graph.remove(producer, safe=True)
            graph.register_initializer(new)


def _readers(value: ir.Value) -> list[tuple[ir.Node, int, ir.Value]]:
    """Who reads a value, directly or behind Identity nodes: node, input, and the value that stands there."""
    found: list[tuple[ir.Node, int, ir.Value]] = []
    for user, i in value.uses():
        if user.op_type == "Identity" and not user.outputs[0].is_graph_output():
            found += _readers(user.outputs[0])
        else:
            found.append((user, i, value))
    return found


def lift_weights(model: ir.Model) -> None:
    """Weights and running statistics that Constant and ConstantOfShape nodes hold become initializers, in place.

    A file that has weights as initializers holds none in Constant nodes: those are numbers of some formula, such as the ones and zeros of a
    normalization without scale and bias.
    """
    graph = model.graph
    as_initializers = bool(weight_like_initializers(model))
    for node in list(graph):
        if node.op_type not in ("Constant", "ConstantOfShape") or node.domain not in ("", "ai.onnx") or node.outputs[0].is_graph_output():
            continue
        tensor = _held(node)
        if tensor is None:
            continue
        out = node.outputs[0]
        value = ir.Value(name=str(out.name), shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor)
        constant = as_initializers and node.op_type == "Constant"
        if (constant or not _is_weight(value, out)) and not any(u.op_type == "BatchNormalization" for u, _ in out.uses()):
            continue
        ir.convenience.replace_all_uses_with(out, value)
        graph.remove(node, safe=True)
        graph.register_initializer(value)


def _held(node: ir.Node) -> ir.TensorProtocol | None:
    """The float tensor of one axis or more that a node always gives."""
    if node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        return tensor if tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) else None
    shape = ir.convenience.get_const_tensor(node.inputs[0]) if node.inputs[0] is not None else None
    fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    if shape is None or not np.issubdtype(fill.dtype, np.floating) or not shape.size:
        return None
    return ir.tensor(np.full(shape.numpy(), fill.reshape(()), fill.dtype), name=node.outputs[0].name)


def _is_weight(initializer: ir.Value, value: ir.Value) -> bool:
    tensor = initializer.const_value
    if tensor is None or not tensor.dtype.is_floating_point():
        return False
    for user, position in value.uses():
        if user.domain not in ("", "ai.onnx", "com.microsoft"):
            continue
        if position in _POSITIONS.get(user.op_type, ()):
            return True
        if user.op_type in _BIASES and sum(int(d) > 1 for d in tensor.shape.numpy()) == 1:
            return True
        if user.op_type in _VIEWS and position == 0 and _is_weight(initializer, user.outputs[0]):
            return True
        if user.op_type in ("Slice", "Concat") and _feeds_recurrent(user.outputs[0]):
            return True
    return False


def _feeds_recurrent(value: ir.Value) -> bool:
    """Whether a value becomes a weight of a recurrent layer: torch's gates are cut apart and joined in ONNX's order."""
    return any(
        position in _POSITIONS[user.op_type]
        if user.op_type in _RECURRENT
        else user.op_type in ("Slice", "Concat", *_VIEWS) and _feeds_recurrent(user.outputs[0])
        for user, position in value.uses()
    )
