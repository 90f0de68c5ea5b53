"""Training on CUDA: parameters, gradients, optimizer state and batch stay on the GPU from step to step.

Not run on a GPU yet: ``benchmarks/gpu_check.py`` is what shows it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from ..artifact import Artifact
from ..errors import OutOfBudget
from ..training_graph import GRADIENT_BUFFER
from ..writes import MODEL_WRITES
from .cuda import Cuda, DeviceArray, DeviceMeter, Slab, claim, register_arena, require_cuda
from .memory import available_bytes
from .session import BoundSession, Options, make_session
from .trainer import SLICE, Trainer, part

Array = npt.NDArray[Any]

#: Bytes of the arena for each element that the optimizer updates at a time: it holds copies of all that it reads and writes.
_BYTES_PER_ELEMENT = 128
_LARGEST_SLICE = 1 << 22


class CudaTrainer(Trainer):
    """A training run on a GPU.

    ``parameters``, ``gradients`` and ``moments`` are copies on the host: :meth:`pull` brings them up to date, :meth:`push` makes changes to them
    count.  ``save`` and ``restore`` do so by themselves.

    Args:
        artifact: an artifact, or the path of one, compiled for CUDA or not (without swap to disk).
        cuda: the GPU; None for the artifact's, or the first one.
        copy_streams: copies to the host and back run beside the ops; off, they take turns with them.
        options: those of ``Trainer``.

    Raises:
        RuntimeUnavailable: there is no GPU, driver or package for it, or nodes would run on the CPU.
    """

    def __init__(self, artifact: Artifact | str | Path, cuda: Cuda | None = None, copy_streams: bool = True, **options: Any) -> None:
        loaded = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
        self._cuda = cuda or loaded.cuda or Cuda()
        self._driver = require_cuda(self._cuda)
        self._meter = DeviceMeter(self._driver, self._cuda.device)
        self._copy_streams = copy_streams
        self._capacity: int | None = None
        self._device: Slab | None = None
        self._sessions: dict[tuple[str, int], BoundSession] = {}
        super().__init__(loaded, **options)

    def _reserve(self, options: Options, capped: bool) -> Options:
        found = replace(options, cuda=self._cuda, copy_streams=self._copy_streams)
        capacity = int(self.artifact.manifest["memory"]["arena_bytes"])
        self._slice = max(SLICE, min(_LARGEST_SLICE, capacity // _BYTES_PER_ELEMENT))
        if not capped:
            return replace(found, arena=False)
        register_arena(capacity, self._cuda)
        claim(capacity, lambda model: BoundSession(make_session(model, found)))
        return replace(found, gpu_bytes=capacity)

    def _require_room(self, swap: Mapping[str, Any], spill_dir: str | Path | None) -> None:
        if swap["kind"] != "host":
            return super()._require_room(swap, spill_dir)
        there = available_bytes()
        if there is not None and int(swap["host_bytes"]) > there:
            raise OutOfBudget(
                f"a step swaps {swap['host_bytes']} bytes to the host, which has {there} free: compile with a smaller --host-budget, or end "
                "what else uses its memory"
            )

    def _place(self) -> None:
        arrays: dict[str, Array] = {**self._batch, **self.parameters, **self.moments}
        self._device = Slab(self._driver, self._cuda.device, arrays | {n + GRADIENT_BUFFER: g for n, g in self.gradients.items()})

    def _arrays(self) -> dict[str, Array | DeviceArray]:
        return super()._arrays() | (self._device.arrays if self._device is not None else {})

    def _slab(self) -> Slab:
        assert self._device is not None
        return self._device

    @property
    def resident_bytes(self) -> int:
        """The meter sees what is on the GPU, so nothing is counted beside it."""
        return 0

    def meter(self) -> DeviceMeter:
        return self._meter

    def _mirrors(self) -> dict[str, Array]:
        return {**self.parameters, **self.moments, **{n + GRADIENT_BUFFER: g for n, g in self.gradients.items()}}

    def pull(self) -> None:
        """Copy parameters, gradients and moments from the GPU into the arrays of the host."""
        for name, array in self._mirrors().items():
            self._slab().read_into(name, array)

    def push(self) -> None:
        """Copy them to the GPU."""
        for name, array in self._mirrors().items():
            self._slab().write(name, array)

    def touch(self) -> None:
        """Everything is on the GPU already."""

    def _fill(self, batch: Mapping[str, npt.ArrayLike]) -> None:
        super()._fill(batch)
        for name, array in self._batch.items():
            self._slab().write(name, array)

    def _zero_gradients(self) -> None:
        for name in self.gradients:
            self._slab().zero(name + GRADIENT_BUFFER)

    def _scale_gradients(self, factor: float) -> None:
        for piece in self._gradient_parts():
            session = self._arithmetic("scale", piece.size)
            session.bind({"x": piece, "factor": np.asarray([factor], np.float32)})
            session.run_discarding()

    def _gradient_norm(self) -> float:
        squares = []
        for piece in self._gradient_parts():
            session = self._arithmetic("squares", piece.size)
            session.bind({"x": piece})
            squares.append(float(session.run()[0].reshape(())))
        return math.sqrt(math.fsum(squares))

    def _gradient_parts(self) -> list[DeviceArray]:
        found = []
        for name in self.gradients:
            whole = self._slab().arrays[name + GRADIENT_BUFFER]
            found += [p for s in range(0, whole.size, self._slice) if isinstance(p := part(whole, s, s + self._slice), DeviceArray)]
        return found

    def _arithmetic(self, kind: str, size: int) -> BoundSession:
        if (kind, size) not in self._sessions:
            self._sessions[kind, size] = BoundSession(make_session(arithmetic_model(kind, size), self._options))
        return self._sessions[kind, size]

    def save(self, folder: str | Path) -> None:
        self.pull()
        super().save(folder)

    def restore(self, folder: str | Path) -> None:
        super().restore(folder)
        self.push()

    def close(self) -> None:
        """Give the memory of the arrays back; no step may follow."""
        self._slab().close()


def arithmetic_model(kind: str, size: int) -> bytes:
    """A model on ``x`` of ``size`` floats: ``scale``, x * factor written over x, or ``squares``, the sum of x * x."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size])]
    if kind == "scale":
        nodes = [helper.make_node("Mul", ["x", "factor"], ["y"], name="scale")]
        inputs.append(helper.make_tensor_value_info("factor", TensorProto.FLOAT, [1]))
    else:
        nodes = [helper.make_node("ReduceSumSquare", ["x"], ["y"], name="squares", keepdims=1)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [size if kind == "scale" else 1])]
    model = helper.make_model(helper.make_graph(nodes, kind, inputs, outputs), opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if kind == "scale":
        helper.set_model_props(model, {MODEL_WRITES: json.dumps({"y": "x"})})
    return bytes(model.SerializeToString())
