"""One function for each side that makes a training step, in a process of its own, and tells of the peak of that process.

The peak is what the process grew by over its size before the model was there: parameters, gradients, optimizer state, batch, activations,
scratch, and what an allocator adds.  ``mapped`` lets every large buffer be mapped by itself, so that what torch frees leaves the process at
once: the least that torch can be said to need, at the cost of time.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side_by_side.cases import MODELS, Model
from onnxremat.exporters import InputSpec, Loss
from onnxremat.runtime import memory

THREADS = 2


class Measured:
    """A training step, made and run once to warm up; its figures tell of the peak since then, over the size of the process before it was made."""

    def __init__(self, build: Callable[[], Callable[[], Any]]) -> None:
        memory.trim()
        self._before = memory.resident_bytes()
        self._step = build()
        self._step()
        memory.trim()
        memory.reset_peak()

    def __call__(self) -> None:
        self._step()

    def figures(self) -> dict[str, int]:
        """The peak in bytes."""
        return {"peak": memory.peak_resident_bytes() - self._before}


def peak_of(maker: str, **arguments: Any) -> int:
    """In a worker: the peak in bytes of one step of the side that ``maker`` of this module makes."""
    step: Measured = globals()[maker](**arguments)
    step()
    return step.figures()["peak"]


# torch


def _checkpointed(module: Any, regions: tuple[str, ...]) -> None:
    """Checkpoint the regions, as the documentation of ``torch.utils.checkpoint`` shows it."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    for name, part in module.named_modules():
        if not any(fnmatch.fnmatchcase(name, r) and name.count(".") == r.count(".") for r in regions):
            continue
        if isinstance(part, nn.Sequential) and len(part) > 8:
            part.forward = partial(checkpoint_sequential, nn.Sequential(*part), math.isqrt(len(part)) + 1, use_reentrant=False)
        else:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def _torch_step(model: Model, batch: int, how: str) -> Callable[[], Any]:
    import torch

    module = getattr(importlib.import_module("benchmarks.side_by_side.cases"), model.factory)().train()
    run, loss = module, Loss.parse(model.loss)
    if how == "checkpoint":
        _checkpointed(module, model.regions)
    elif how.startswith("budget"):
        import torch._functorch.config as config

        config.activation_memory_budget = float(how.removeprefix("budget "))
        run = torch.compile(module)
    optimizer = torch.optim.AdamW(module.parameters())
    rng = np.random.default_rng(0)
    x = torch.from_numpy(InputSpec.parse(model.input(batch)).sample(rng))
    with torch.no_grad():
        shape = tuple(module(x[:1]).shape)
    labels = torch.from_numpy(loss.label_spec((batch, *shape[1:]), "float32").sample(rng))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.torch(run(x), labels).backward()
        optimizer.step()

    return step


def torch_side(model: str, batch: int, how: str, mapped: bool = False) -> Measured:
    """torch ``eager``, with ``checkpoint``, or compiled with an activation memory ``budget B``."""
    import torch

    if mapped:
        memory.map_large_buffers()
    torch.set_num_threads(THREADS)
    # Thread pools and libraries come up before the first look at the process.
    warm = torch.nn.Conv2d(3, 16, 3)
    warm(torch.zeros(2, 3, 32, 32)).sum().backward()
    return Measured(lambda: _torch_step(MODELS[model], batch, how))


# ONNX Runtime's own training artifacts


def _generated_step(model: Model, batch: int, folder: Path) -> Callable[[], Any]:
    import onnx
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    rng = np.random.default_rng(0)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    graph = onnx.load(str(folder / "forward.onnx"), load_external_data=False).graph
    weights = {w.name for w in graph.initializer}
    names = [v for v in graph.input if v.name not in weights]
    shapes = [tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in names]
    kinds = [onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in names]
    high = model.classes or 2
    arrays = [
        rng.integers(0, high, s).astype(k) if np.issubdtype(k, np.integer) else rng.standard_normal(s).astype(k)
        for s, k in zip(shapes, kinds, strict=True)
    ]
    module.train()

    def step() -> None:
        module(*arrays)
        optimizer.step()
        module.lazy_reset_grad()

    return step


def generate_job(model: str, batch: int, folder: str) -> None:
    """Write the forward graph, and let ONNX Runtime derive its training artifacts."""
    import onnx
    from onnxruntime.training import artifacts

    from benchmarks.common import Case
    from benchmarks.joint_graph import save_forward

    chosen = MODELS[model]
    case = Case(chosen.name, chosen.source, (chosen.input(batch),), chosen.loss)
    parameters = save_forward(case, Path(folder) / "forward.onnx")
    forward = onnx.load(str(Path(folder) / "forward.onnx"))
    artifacts.generate_artifacts(forward, requires_grad=parameters, optimizer=artifacts.OptimType.AdamW, artifact_directory=folder)
    # It writes the IR version of the installed onnx, which its own runtime may be too old to read.
    for path in Path(folder).glob("*_model.onnx"):
        written = onnx.load(str(path))
        written.ir_version = 10
        onnx.save(written, str(path))


def generated_side(model: str, batch: int, folder: str) -> Measured:
    """Steps of ONNX Runtime's own training artifacts in its training API."""
    import onnxruntime.training.api  # noqa: F401  the library comes up before the first look

    return Measured(lambda: _generated_step(MODELS[model], batch, Path(folder)))


# onnxremat


def compile_job(model: str, batch: int, folder: str, budget: str, limit: float) -> dict[str, Any]:
    """Compile to a share of the activations such as ``70%``, or to bytes; returns the manifest's figures."""
    import onnxremat
    from onnxremat.artifact import compile_figures

    chosen = MODELS[model]
    options: dict[str, Any] = {"activation_budget": budget} if budget.endswith("%") else {"budget": int(budget)}
    artifact = onnxremat.compile(
        chosen.source, folder, inputs=[chosen.input(batch)], loss=chosen.loss, threads=THREADS, verify=False, time_limit=limit, **options
    )
    return compile_figures(artifact.manifest)


def onnxremat_side(folder: str) -> Measured:
    """Capped steps of an artifact."""
    from onnxremat.artifact import Artifact
    from onnxremat.runtime.session import Options, make_session  # noqa: F401  the library comes up before the first look
    from onnxremat.runtime.trainer import Trainer, random_batches

    artifact = Artifact.load(folder)

    def build() -> Callable[[], Any]:
        trainer = Trainer(artifact, threads=THREADS)
        batch = next(random_batches([*artifact.inputs, *artifact.labels], 0))
        return lambda: trainer.train_step(batch)

    return Measured(build)


def largest_batch(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest batch up to ``most`` that fits, by doubling and bisection; 0 where ``start`` does not and nothing below it does."""
    low, high = (0, start) if not fits(start) else (start, start)
    if low:
        while high <= most:
            high *= 2
            if not fits(min(high, most)):
                break
            low = min(high, most)
            if low == most:
                return most
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
