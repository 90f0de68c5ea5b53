"""Training a module for some steps on ONNX Runtime and in torch side by side, dropout on: what the tests of all model families share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import nn

from onnxremat.drawn import given_draws
from onnxremat.exporters import InputSpec, Loss, export_torch
from onnxremat.exporters.module_copy import copy_module
from onnxremat.exporters.trace import bind_inputs
from onnxremat.optimizers import Optimizer
from onnxremat.runtime.session import BoundSession, Options, make_session, seed_nodes
from onnxremat.training_graph import GRADIENT_BUFFER, LAZY_RESET, TrainingGraph, build_training_graph
from tests.exporters.support import tensors_of

Array = npt.NDArray[Any]

TOLERANCE = 1e-4
#: A gradient smaller than this share of all is rounding left over from cancellation (a bias before a BatchNorm): its error is measured by that share.
NEGLIGIBLE = 1e-3
#: Steps over which state must follow torch's.
STEPS = 3


@dataclass
class Comparison:
    """Errors of one side-by-side training, root-mean-square and relative, by tensor name (the worst over the steps)."""

    training: TrainingGraph
    errors: dict[str, float] = field(default_factory=dict)
    excused: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[float, str]:
        """The largest error and whose it is."""
        return max(((e, n) for n, e in self.errors.items()), default=(0.0, ""))


def compare_training(
    module: nn.Module,
    inputs: Sequence[InputSpec | str],
    labels: Sequence[InputSpec | str] = (),
    loss: Loss | str | None = None,
    seed: int = 0,
    steps: int = STEPS,
    batches: Sequence[Mapping[str, Array]] | None = None,
) -> Comparison:
    """Trains ``steps`` steps on both sides from the same parameters and with the same dropout masks and random numbers.

    Each step compares loss and gradients; the state (running statistics) evolves on either side by itself.  Torch computes in float64; what
    its own float32 result is off by, ten times over, counts as rounding (``excused``), to one percent.
    """
    specs = [s if isinstance(s, InputSpec) else InputSpec.parse(s) for s in inputs]
    targets = [s if isinstance(s, InputSpec) else InputSpec.parse(s) for s in labels]
    training = build_training_graph(export_torch(module, specs, targets, loss, seed), Optimizer("sgd"))
    masks, values = training.dropout_masks, training.random_values
    session = _session(training, [*masks, *values], seed)
    arrays = _arrays(training)
    session.bind(arrays)
    sides = {dtype: copy_module(module).to(dtype) for dtype in (torch.float32, torch.float64)}
    rng = np.random.default_rng(seed)
    result = Comparison(training)
    names = [s.name for s in training.inputs] + ([s.name for s in training.labels] if Loss.of(loss) is None or Loss.of(loss).name == "output" else [])
    for step in range(steps):
        batch = batches[step % len(batches)] if batches else {s.name: s.sample(rng) for s in (*training.inputs, *training.labels)}
        for name, array in batch.items():
            if name in arrays:
                arrays[name][...] = array
        outputs = dict(zip(session.outputs, session.run(), strict=True))
        drawn = ([outputs[name] for name in masks], [outputs[name] for name in values])
        found = {"loss": outputs[training.loss]} | {n: arrays[n + GRADIENT_BUFFER].copy() for n in training.trainable}
        found |= {n: arrays[n].copy() for n in training.state}
        wanted = {dtype: _torch_step(clone, training, batch, names, Loss.of(loss), *drawn) for dtype, clone in sides.items()}
        _note(result, found, wanted[torch.float32], wanted[torch.float64])
        for name in training.trainable:
            arrays[name] -= np.float32(0.01) * arrays[name + GRADIENT_BUFFER]
            for clone in sides.values():
                with torch.no_grad():
                    clone.get_parameter(name).copy_(torch.from_numpy(arrays[name]))
    return result


def assert_trains_as_torch(
    module: nn.Module,
    inputs: Sequence[InputSpec | str],
    labels: Sequence[InputSpec | str] = (),
    loss: Loss | str | None = None,
    tolerance: float = TOLERANCE,
    batches: Sequence[Mapping[str, Array]] | None = None,
) -> Comparison:
    """Loss, all gradients and state within ``tolerance``, over three steps.

    A ReLU's argument may lie within rounding of its kink: then the two sides choose different slopes, and neither is wrong.  That is a
    matter of the batch, so another one is tried; a wrong rule fails with each.
    """
    found = []
    for seed in range(3):
        result = compare_training(module, inputs, labels, loss, seed, batches=batches)
        if result.worst[0] <= tolerance:
            return result
        found.append(result.worst)
    raise AssertionError(f"worst relative errors of three tries: {found}")


def _session(training: TrainingGraph, shown: Sequence[str], seed: int) -> BoundSession:
    model = ir.serde.serialize_model(training.model)
    known = {value.name: value for value in model.graph.value_info}
    model.graph.output.extend(known[name] for name in shown)
    seed_nodes(model, seed)
    return BoundSession(make_session(model.SerializeToString(), Options(threads=1)))


def _arrays(training: TrainingGraph) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for value in training.graph.inputs:
        assert value.name and value.dtype is not None and value.shape is not None
        start = training.weights.get(value.name)
        shape = tuple(int(d) for d in value.shape.numpy())
        arrays[value.name] = np.zeros(shape, value.dtype.numpy()) if start is None else np.array(start, order="C")
    if LAZY_RESET in arrays:
        arrays[LAZY_RESET][...] = True
    return arrays


def _torch_step(
    module: nn.Module,
    training: TrainingGraph,
    batch: Mapping[str, Array],
    names: Sequence[str],
    loss: Loss | None,
    masks: Sequence[Array],
    values: Sequence[Array],
) -> dict[str, Array]:
    dtype = next(p.dtype for p in module.parameters() if p.dtype.is_floating_point)
    tensors = {n: torch.from_numpy(np.array(a)) for n, a in batch.items()}
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    keywords = bind_inputs(module, names)
    module.zero_grad()
    with given_draws(masks, values), _default_dtype(dtype), _groups_of_any_dtype():
        called = {n: tensors[n] for n in names}
        output = module(**called) if keywords is not None else module(*called.values())
    flat = tensors_of(output)
    if loss is None or loss.name == "output":
        value = next(t for t in flat if t.is_floating_point() and t.numel() == 1)
    else:
        read = next(t for t in flat if t.is_floating_point() and t.ndim)
        value = loss.torch(read, tensors[training.labels[0].name])
    value.backward()
    found: dict[str, Array] = {"loss": value.detach().numpy()}
    for name in training.trainable:
        gradient = module.get_parameter(name).grad
        assert gradient is not None, f"torch has no gradient for {name}"
        found[name] = (gradient.to_dense() if gradient.is_sparse else gradient).numpy().copy()
    reached = {n for n, p in module.named_parameters() if p.grad is not None and bool((p.grad.to_dense() if p.grad.is_sparse else p.grad).any())}
    assert not reached - set(training.trainable), f"the graph trains no {sorted(reached - set(training.trainable))}"
    return found | {n: module.get_buffer(n).numpy().copy() for n in training.state}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _groups_of_any_dtype() -> Iterator[None]:
    """Products of groups of rows in float64 too, for which torch has no kernel."""
    grouped_mm = F.grouped_mm

    def grouped(rows: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.float64:
            return grouped_mm(rows, weight, offs=offs)
        ends = offs.tolist()
        return torch.cat([rows[a:b] @ weight[e] for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))])

    with patch.object(F, "grouped_mm", grouped):
        yield


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(array, np.float64))))) if array.size else 0.0


def _note(result: Comparison, found: Mapping[str, Array], single: Mapping[str, Array], exact: Mapping[str, Array]) -> None:
    trainable = result.training.trainable
    scale = NEGLIGIBLE * float(np.sqrt(np.mean([_rms(exact[n]) ** 2 for n in trainable])))
    for name, reference in exact.items():
        assert found[name].shape == reference.shape, (name, found[name].shape, reference.shape)
        size = max(_rms(reference), scale if name in trainable else 1e-3)
        error = _rms(found[name].astype(np.float64) - reference) / size
        rounding = _rms(single[name].astype(np.float64) - reference) / size
        error = float("inf") if not np.isfinite(error) else error
        kept = result.excused if TOLERANCE < error <= min(10 * rounding, 1e-2) else result.errors
        kept[name] = max(kept.get(name, 0.0), error)
