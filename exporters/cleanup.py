"""From what an exporter writes to a lean graph: inlined, folded, without no-ops, every value with a static shape and dtype."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from .constants import fold_gather_elements, narrow_constants, separate_statistics, share_constants
from .control_flow import refuse_control_flow, unroll_control_flow
from .errors import ExportError
from .explicit_pads import make_ceilings_explicit, make_pads_explicit
from .fused_shapes import infer_fused_shapes
from .narrow_floats import refuse_narrow_arithmetic
from .noop import remove_noops
from .places import place_of
from .quiet import quiet

__all__ = ["RANDOM_OPS", "clean", "infer_shapes"]

RANDOM_OPS = frozenset({"Dropout", "RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Multinomial", "Bernoulli"})
"""Operators that draw numbers: never folded, never merged."""
_SEQUENCES = frozenset({"SequenceEmpty", "SequenceConstruct", "SequenceInsert", "SequenceErase", "SplitToSequence"})
_FEW = 1024
_LONG = 1 << 16
"""Elements of a vector from which on data propagation is left out: onnx notes a dimension of 140 bytes for each one at each step."""
_FOLD_BYTES = 64 << 20
"""Constants above this many bytes are computed at run time: folding them would make them resident for good."""


def clean(model: ir.Model, protected: Collection[str]) -> None:
    """Inlines functions, folds constants and removes no-ops, in place.

    Args:
        model: the graph as exported; graph outputs are already set.
        protected: initializers that must stay what they are: parameters, float buffers and state.  Nothing computed from them is folded.

    Raises:
        ExportError: when a value has no static shape afterwards, or onnx.checker refuses the graph.
    """
    keep = frozenset(protected)

    def should_fold(node: ir.Node) -> bool | None:
        if node.op_type in RANDOM_OPS or node.op_type in ("BatchNormalization", "GatherElements"):
            return False
        inputs = [value for value in node.inputs if value is not None]
        if any(value.name in keep for value in inputs):
            return False
        if node.op_type == "ConstantOfShape" and _is_small(node.inputs[0]):
            return True  # the folder leaves it alone by itself, and shapes are made of it
        # Beyond its size limits the folder refuses by itself; Shape reads no values and is always worth folding.
        return None

    passes.InlinePass()(model)
    before = -1
    while before != len(model.graph):
        before = len(model.graph)
        make_ceilings_explicit(model)
        _shapes(model)
        optimizer.fold_constants(model, input_size_limit=_FOLD_BYTES, output_size_limit=_FOLD_BYTES, should_fold=should_fold)
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        unroll_control_flow(model)
        fold_gather_elements(model, keep)
        remove_noops(model, keep)
        passes.RemoveUnusedNodesPass()(model)
    refuse_control_flow(model)
    narrow_constants(model, keep)
    passes.RemoveUnusedNodesPass()(model)
    share_constants(model, keep)
    separate_statistics(model)
    make_pads_explicit(model)
    passes.RemoveUnusedOpsetsPass()(model)
    model.functions.clear()  # all inlined
    passes.TopologicalSortPass()(model)


def _is_small(shape: ir.Value | None) -> bool:
    """Whether a value is a known shape of a few elements."""
    tensor = ir.convenience.get_const_tensor(shape) if shape is not None else None
    return tensor is not None and int(np.prod(tensor.numpy())) <= _FEW


def _shapes(model: ir.Model) -> None:
    """Shape inference with data propagation (in graphs without long vectors; folding constants does as much, in more rounds), strict about
    contradictions.

    What an earlier run knew only in part is asked for again: since then a constant may have been folded, and inference does not refine.
    """
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static() and not value.is_graph_output():
                value.shape = None
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.shape is not None and not value.shape.is_static():
            value.shape = ir.Shape(value.const_value.shape.numpy())
    _mark_sequences(model)
    vectors = (v.shape for node in model.graph for v in node.outputs if v.shape is not None and len(v.shape) == 1)
    short = all(not isinstance(shape[0], int) or shape[0] < _LONG for shape in vectors)
    known = False
    while not known:  # what is behind a fused operator is inferred in the next round
        with quiet():
            passes.ShapeInferencePass(check_type=True, strict_mode=True, data_prop=short)(model)
            _mark_sequences(model)
        known = not infer_fused_shapes(model)


def _mark_sequences(model: ir.Model) -> None:
    """Sequences have the type of a sequence: the pass takes their elements' for it, which the next inference then contradicts."""
    for node in model.graph:
        if node.op_type in _SEQUENCES and not node.domain:
            (value,) = node.outputs
            if value.dtype is not None:
                value.type = ir.SequenceType(ir.TensorType(value.dtype))


def infer_shapes(model: ir.Model) -> None:
    """Gives every value a static shape and a dtype, and runs onnx.checker.

    Raises:
        ExportError: naming the first value without them, an operator in float16 or bfloat16, or the checker's complaint.
    """
    _shapes(model)
    values = list(model.graph.inputs) + [value for node in model.graph for value in node.outputs]
    for value in values:
        if not value.name:
            continue
        if isinstance(value.type, ir.SequenceType):
            continue
        if value.shape is None or value.dtype is None or not value.shape.is_static():
            if not value.uses() and not value.is_graph_output() and value.producer() is not None:
                continue  # an optional output that nobody reads
            node = value.producer()
            where = f"{node.op_type} {node.name}{place_of(node)}" if node is not None else "graph input"
            _refuse_conflicts(model)
            shape = "unknown" if value.shape is None else str(value.shape)
            raise ExportError(
                f"value {value.name} of {where}",
                f"its shape {shape} is not static",
                "give static input shapes, and no data-dependent shapes",
            )
    refuse_narrow_arithmetic(model)
    try:
        passes.CheckerPass(full_check=False)(model)
    except onnx.checker.ValidationError as error:
        raise ExportError("the exported graph", f"onnx.checker refuses it: {error}", "report the model that led here") from error


def _refuse_conflicts(model: ir.Model) -> None:
    """Raises ExportError where shapes are missing because the types of an operator's inputs contradict each other."""
    try:
        onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        text = str(error).replace("[ShapeInferenceError]", "").replace("[TypeInferenceError]", "").strip()
        raise ExportError("the exported graph", f"types contradict each other: {text}", "check the dtypes and shapes of the inputs") from error
