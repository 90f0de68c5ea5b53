"""What the exporter tests share: run a forward graph on ONNX Runtime with dropout off, and the same in torch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import nn

from onnxremat.exporters import ForwardGraph, InputSpec

Arrays = dict[str, np.ndarray[Any, Any]]


def sample_all(graph: ForwardGraph, seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    return {spec.name: spec.sample(rng) for spec in (*graph.inputs, *graph.labels)}


def run_onnx(graph: ForwardGraph, feeds: Mapping[str, np.ndarray[Any, Any]], dropout: bool = False) -> Arrays:
    """All graph outputs, by name, unoptimised; without ``dropout`` every ratio is set to 0 in a copy."""
    model = ir.serde.deserialize_model(ir.serde.serialize_model(graph.model))
    if not dropout:
        zero = ir.tensor(np.array(0, np.float32), name="no_dropout")
        value = ir.Value(name="no_dropout", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.FLOAT), const_value=zero)
        model.graph.register_initializer(value)
        for node in model.graph:
            if node.op_type == "Dropout":
                node.replace_input_with(1, value)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    ort.set_seed(7)  # seed 0, which torch.manual_seed(0) passes on, gives the first two dropouts one mask
    session = ort.InferenceSession(ir.serde.serialize_model(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def without_dropout(module: nn.Module) -> nn.Module:
    """A copy, in the same modes, whose dropouts never drop."""
    clone = copy.deepcopy(module)
    for sub in clone.modules():
        if isinstance(sub, nn.modules.dropout._DropoutNd):
            sub.p = 0.0
        for name, rate in list(vars(sub).items()):
            if "dropout" in name and isinstance(rate, float):
                setattr(sub, name, 0.0)
    return clone


def close(got: np.ndarray[Any, Any], wanted: torch.Tensor | np.ndarray[Any, Any], tolerance: float = 1e-4, floor: float = 1e-6) -> None:
    """Relative to the largest magnitude of what is wanted, or to ``floor`` where that is smaller."""
    reference = wanted.detach().numpy() if isinstance(wanted, torch.Tensor) else wanted
    assert got.shape == reference.shape
    assert np.isfinite(got).all() == np.isfinite(reference).all()
    scale = max(float(np.abs(reference).max(initial=0)), floor)
    error = float(np.abs(got - reference).max(initial=0))
    assert error <= tolerance * scale, (error, got, reference)


def same_as_torch(graph: ForwardGraph, module: nn.Module, seed: int = 1, tolerance: float = 1e-4) -> tuple[Arrays, nn.Module]:
    """Runs both sides once and compares outputs and new state; returns the ONNX outputs and the torch module after its step."""
    feeds = sample_all(graph, seed)
    got = run_onnx(graph, feeds)
    reference = without_dropout(module)
    own = [spec.name for spec in graph.inputs] + ([spec.name for spec in graph.labels] if graph.loss in graph.outputs else [])
    tensors = {name: torch.from_numpy(feeds[name].copy()) for name in own}
    result = reference(*tensors.values())
    flat = tensors_of(result)
    assert len(flat) == len(graph.outputs)
    for name, wanted in zip(graph.outputs, flat, strict=True):
        close(got[name], wanted, tolerance)
    buffers = dict(reference.named_buffers())
    for name, output in graph.state.items():
        close(got[output], buffers[name], tolerance, floor=1e-3)  # means of zero-mean activations are all rounding
    return got, reference


def tensors_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [t for item in result.values() for t in tensors_of(item)]
    if isinstance(result, list | tuple):
        return [t for item in result for t in tensors_of(item)]
    if result is None:
        return []
    return [t for item in vars(result).values() for t in tensors_of(item)]


def op_counts(graph: ForwardGraph) -> Counter[str]:
    return Counter(node.op_type for node in graph.model.graph)


def x(*shape: int) -> InputSpec:
    return InputSpec("x", shape)
