"""An artifact: a folder that ONNX Runtime trains from, without PyTorch and without onnxremat.

training_model.onnx      the scheduled training step
unscheduled_model.onnx   the same step before scheduling: the reference of ``verify``
eval_model.onnx          batch and parameters -> loss and the model's outputs
optimizer_model.onnx     where ONNX Runtime has a kernel for the optimizer
checkpoint               parameters and state at the start; for stock ONNX Runtime checkpoint.safetensors
problem.json, plan.json  what was scheduled, and how
offsets.json             where large tensors lie in a block of memory, in bytes; only where the arena alone does not keep the budget
manifest.json            roles, hashes, versions, the session options it needs, the figures of its verification
report.html              all of that for people
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from .errors import ArtifactError, UsageError
from .exporters import InputSpec
from .optimizers import Optimizer
from .runtime.cuda import Cuda
from .safetensors import load_tensors, save_tensors
from .scheduler import Plan, Problem
from .targets import SPILL_SUFFIX, Target, target_named
from .units import format_bytes

Array = npt.NDArray[Any]

FORMAT = "onnxremat-artifact"
VERSION = 1
TRAINING, UNSCHEDULED, EVAL, OPTIMIZER = "training_model.onnx", "unscheduled_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT, PROBLEM, PLAN, MANIFEST, REPORT = "checkpoint", "problem.json", "plan.json", "manifest.json", "report.html"
#: Which node runs on which stream of the GPU, where the plan swaps to the host; as of a graph without nodes on the CPU.
PARTITION = "partition.json"
OFFSETS = "offsets.json"
#: What makes an arena of 2 GiB and more one region, for programs that register it themselves.
ARENA_CLAIM = "arena_claim.onnx"
#: A checkpoint that no runtime is needed to read.
PORTABLE_CHECKPOINT = "checkpoint.safetensors"
#: Tables of a manifest, and entries that they have at least.
_TABLES = {
    "files": (),
    "roles": ("loss", "outputs", "trainable", "frozen", "state"),
    "memory": ("budget_bytes", "resident", "resident_bytes", "arena_bytes", "peak_predicted_bytes", "peak_unscheduled_bytes"),
    "time": ("costs", "seconds_unscheduled", "seconds_predicted", "seconds_lower_bound", "solve_seconds"),
    "plan": ("strategy", "recomputed_ops", "swapped_tensors"),
    "source": (),
    "optimizer": ("name",),
}
#: Patterns of the names of all files that an artifact may have.
ARTIFACT_FILES = (
    *(TRAINING, UNSCHEDULED, EVAL, "optimizer_*.onnx", "*.onnx.data", ARENA_CLAIM),
    *(f"{CHECKPOINT}*", PROBLEM, PLAN, MANIFEST, REPORT, PARTITION, OFFSETS),
)
#: Models with more constant bytes than this keep them in a file beside: protobuf ends at 2 GiB.
_EXTERNAL_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Artifact:
    """An artifact folder that has been checked to be whole.

    Attributes:
        path: the folder.
        manifest: the content of manifest.json.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def load(cls, path: str | Path) -> Artifact:
        """Open an artifact.

        Raises:
            ArtifactError: the folder is not there, is not an artifact, or a file in it is missing or altered.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ArtifactError(f"there is no artifact folder {folder}: make one with 'onnxremat compile'")
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ArtifactError(f"{folder} is not an artifact: it has no {MANIFEST}") from None
        except ValueError as error:
            raise ArtifactError(f"{folder / MANIFEST} is damaged ({error}): compile again") from error
        if not isinstance(manifest, dict):
            raise ArtifactError(f"{folder / MANIFEST} is damaged (it holds no object): compile again")
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            raise ArtifactError(
                f"{folder / MANIFEST} has format {manifest.get('format')} {manifest.get('version')}; this onnxremat reads {FORMAT} {VERSION}"
            )
        for key, entries in _TABLES.items():
            whole = isinstance(manifest.get(key), dict)
            lacking = next((f"{key}.{entry}" for entry in entries if entry not in manifest[key]), None) if whole else key
            if lacking:
                raise ArtifactError(f"{folder / MANIFEST} is damaged (it has no '{lacking}'): compile again")
        for name, digest in manifest["files"].items():
            file = folder / name
            if not file.is_file():
                raise ArtifactError(f"{folder} is not whole: {name} is missing; compile again")
            if _digest(file) != digest:
                raise ArtifactError(f"{file} is not what the manifest says (its hash differs): compile again")
        found = cls(folder, manifest)
        try:
            _ = (found.inputs, found.labels, found.optimizer, found.target, int(manifest["threads"]))
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            raise ArtifactError(f"{folder / MANIFEST} is damaged ({error}): compile again") from error
        return found

    @cached_property
    def plan(self) -> Plan:
        return Plan.load(self.path / PLAN)

    @cached_property
    def problem(self) -> Problem:
        return Problem.load(self.path / PROBLEM)

    @property
    def inputs(self) -> list[InputSpec]:
        return [InputSpec.parse(text) for text in self.manifest["inputs"]]

    @property
    def labels(self) -> list[InputSpec]:
        return [InputSpec.parse(text) for text in self.manifest["labels"]]

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer(**self.manifest["optimizer"])

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def target(self) -> Target:
        """The runtime that it was compiled for."""
        return target_named(self.manifest["target"].removesuffix(SPILL_SUFFIX), self.provider)

    @property
    def provider(self) -> str:
        """The provider that it was compiled for: ``cpu`` or ``cuda``."""
        return str(self.manifest.get("provider", "cpu"))

    @property
    def cuda(self) -> Cuda | None:
        """The GPU and the provider options that it was compiled for; None for the CPU."""
        if self.provider == "cpu":
            return None
        return Cuda.parse(f"{key}={value}" for key, value in self.manifest["provider_options"].items())

    @property
    def allocator(self) -> str:
        """In words: how the step's buffers get their memory when onnxremat runs it."""
        memory = self.manifest["memory"]
        arena, block = format_bytes(memory["arena_bytes"]), memory.get("block_bytes", 0)
        if not block:
            return f"best-fit arena of {arena}"
        alone = format_bytes(memory["peak_arena_alone_bytes"])
        return f"fixed offsets in {format_bytes(block)}, best-fit arena of {arena} for the rest (an arena alone would peak at {alone})"

    def parameters(self) -> dict[str, Array]:
        """The values in the checkpoint: trainable and frozen parameters and state, by name."""
        return load_checkpoint(self.path)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def has_large_constants(model: ir.Model) -> bool:
    """Whether a model's constants are kept in a file beside it."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None) > _EXTERNAL_BYTES


def save_model(model: ir.Model, path: Path) -> None:
    """Write a model, with its constants in a file beside it where they are large."""
    if has_large_constants(model):
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        ir.save(model, path)


def checkpoint_name(target: Target) -> str:
    """Name of the checkpoint file of a target's artifacts."""
    return CHECKPOINT if target.training_package else PORTABLE_CHECKPOINT


def save_checkpoint(folder: Path, target: Target, trainable: Mapping[str, Array], frozen: Mapping[str, Array]) -> None:
    """Write the checkpoint of a target: one that ``onnxruntime.training.api.CheckpointState`` loads, or a safetensors file."""
    if not target.training_package:
        save_tensors({**trainable, **frozen}, folder / PORTABLE_CHECKPOINT)
        return
    from .runtime.ort import bindings

    def serialize(arrays: Mapping[str, Array]) -> list[bytes]:
        return [onnx.numpy_helper.from_array(np.asarray(a, order="C"), name).SerializeToString() for name, a in arrays.items()]

    bindings().save_checkpoint(serialize(trainable), serialize(frozen), str(folder / CHECKPOINT), False)


def load_checkpoint(folder: Path) -> dict[str, Array]:
    """The tensors of the checkpoint in a folder, of whichever kind it is."""
    if (folder / PORTABLE_CHECKPOINT).exists():
        return load_tensors(folder / PORTABLE_CHECKPOINT)
    from .runtime.ort import bindings

    state = bindings().load_checkpoint(str(folder / CHECKPOINT))
    return {name: np.array(state.get_parameter(name).data.numpy()) for name in state.parameter_names()}


def file_digests(folder: Path) -> dict[str, str]:
    """Hashes of all files of a folder but the manifest and the report."""
    return {f.name: _digest(f) for f in sorted(folder.iterdir()) if f.is_file() and f.name not in (MANIFEST, REPORT)}


def compile_figures(manifest: dict[str, Any]) -> dict[str, Any]:
    """The figures of a compilation under the keys that ``--json`` promises; bytes and seconds."""
    memory, time, plan = manifest["memory"], manifest["time"], manifest["plan"]
    return {
        "budget_bytes": memory["budget_bytes"],
        "peak_unscheduled_bytes": memory["peak_unscheduled_bytes"],
        "peak_predicted_bytes": memory["peak_predicted_bytes"],
        "seconds_unscheduled": time["seconds_unscheduled"],
        "seconds_predicted": time["seconds_predicted"],
        "seconds_lower_bound": time["seconds_lower_bound"],
        "strategy": plan["strategy"],
        "solve_seconds": time["solve_seconds"],
        "recomputed_ops": plan["recomputed_ops"],
        "swapped_tensors": plan["swapped_tensors"],
    }
