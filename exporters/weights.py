"""Which initializers of a foreign file are weights: those that stand where weights stand."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["weight_like_initializers"]

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
}
_BIASES = frozenset({"Add", "Mul", "Sub", "Div"})
_VIEWS = frozenset({"Identity", "Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Flatten", "Expand"})


def weight_like_initializers(model: ir.Model) -> tuple[str, ...]:
    """Float initializers of the main graph read as operands of linear maps, normalisations and embeddings, or as 1-D biases and scales.

    An elementwise operand counts where, without axes of size 1, it is a vector: masks and tables of higher rank, and scalars, do not.
    """
    return tuple(str(name) for name, value in model.graph.initializers.items() if _is_weight(value, value))


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
    return False
