"""Shapes of ONNX Runtime's fused operators, which ONNX's inference does not know and ONNX Runtime's optimizer does not record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

__all__ = ["infer_fused_shapes"]

Shape = tuple[int, ...]


def infer_fused_shapes(model: ir.Model) -> bool:
    """Gives fused operators whose inputs have static shapes the shapes and dtypes of their outputs, in place; returns whether any is new."""
    changed = False
    for node in model.graph:
        rule = _RULES.get(node.op_type) if node.domain == "com.microsoft" or node.op_type in _STANDARD else None
        if rule is None or all(v.shape is not None and v.dtype is not None for v in node.outputs if v.name):
            continue
        try:
            looks = rule(node)
        except (LookupError, ValueError):  # an input of unknown shape: a later round knows more, or the output is refused by name
            continue
        for value, look in zip(node.outputs, looks, strict=False):
            if value.name and (value.shape is None or value.dtype is None):
                value.shape, value.type = ir.Shape(look[0]), ir.TensorType(look[1])
                changed = True
    return changed


Look = tuple[Shape, ir.DataType]


def _of(node: ir.Node, index: int) -> Look:
    value = node.inputs[index]
    if value is None or value.shape is None or value.dtype is None or not value.shape.is_static():
        raise ValueError
    return tuple(int(d) for d in value.shape.numpy()), value.dtype


def _alike(node: ir.Node) -> Sequence[Look]:
    return [_of(node, 0)]


def _with_mask(node: ir.Node) -> Sequence[Look]:
    shape, dtype = _of(node, 0)
    return [(shape, dtype), (shape, ir.DataType.BOOL)]


def _skip_normalization(node: ir.Node) -> Sequence[Look]:
    """Output, mean, inverse deviation, and the sum of the operands."""
    shape, dtype = _of(node, 0)
    statistic = (*shape[:-1], 1), ir.DataType.FLOAT
    return [(shape, dtype), statistic, statistic, (shape, dtype)]


def _simplified_normalization(node: ir.Node) -> Sequence[Look]:
    shape, dtype = _of(node, 0)
    axis = node.attributes.get_int("axis", -1) % len(shape)
    return [(shape, dtype), ((*shape[:axis], *(1 for _ in shape[axis:])), ir.DataType.FLOAT)]


def _embedding(node: ir.Node) -> Sequence[Look]:
    """Output, mask index, and the sum of the embeddings."""
    (ids, _), (table, dtype) = _of(node, 0), _of(node, 2)
    embedded = (*ids, table[-1]), dtype
    return [embedded, (ids[:1], ir.DataType.INT32), embedded]


def _attention(node: ir.Node) -> Sequence[Look]:
    (shape, dtype), (weight, _) = _of(node, 0), _of(node, 1)
    sizes = node.attributes.get_ints("qkv_hidden_sizes")
    return [((*shape[:-1], int(sizes[2]) if sizes else weight[1] // 3), dtype)]


def _multi_head_attention(node: ir.Node) -> Sequence[Look]:
    (query, dtype), (value, _) = _of(node, 0), _of(node, 2)
    width = value[-1] if len(value) == 3 else value[1] * value[3]
    return [((*query[:2], width), dtype)]


def _product(node: ir.Node) -> Sequence[Look]:
    (left, dtype), (right, _) = _of(node, 0), _of(node, 1)
    batches_transposed = [node.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB")]
    if min(len(left), len(right)) < 2 or any(batches_transposed):
        raise ValueError
    rows = left[-1] if node.attributes.get_int("transA", 0) else left[-2]
    columns = right[-2] if node.attributes.get_int("transB", 0) else right[-1]
    return [((*np.broadcast_shapes(left[:-2], right[:-2]), rows, columns), dtype)]


def _split(node: ir.Node) -> Sequence[Look]:
    shape, dtype = _of(node, 0)
    return [((*shape[:-1], shape[-1] // 2), dtype)]


#: Of the ones that ONNX Runtime registers under ONNX's own domain.
_STANDARD = frozenset({"SimplifiedLayerNormalization"})
_RULES: dict[str, Callable[[ir.Node], Sequence[Look]]] = {
    **dict.fromkeys(("BiasAdd", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "Inverse", "QuickGelu", "RotaryEmbedding", "Trilu"), _alike),
    **dict.fromkeys(("BiasDropout", "BitmaskBiasDropout", "BitmaskDropout"), _with_mask),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skip_normalization),
    **dict.fromkeys(("FusedMatMul", "FusedMatMulActivation", "GemmFastGelu", "TransposeMatMul"), _product),
    "Attention": _attention,
    "BiasSplitGelu": _split,
    "EmbedLayerNormalization": _embedding,
    "MultiHeadAttention": _multi_head_attention,
    "SimplifiedLayerNormalization": _simplified_normalization,
}
