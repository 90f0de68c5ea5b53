"""Training from an artifact: no PyTorch, the step in the plan's order, the plan's memory as a hard cap."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ..artifact import CHECKPOINT, EVAL, TRAINING, UNSCHEDULED, Artifact, checkpoint_name, load_checkpoint, save_checkpoint
from ..errors import ArtifactError, UsageError
from ..exporters import InputSpec
from ..files import whole_folder
from ..ops import MS
from ..optimizers import MOMENT_INPUTS, STEP, optimizer_groups
from ..spill import require_room
from . import arena, memory
from .block import Block, fixed_session
from .cuda import DeviceArray, DeviceMeter
from .ort import require_training_package
from .rates import Schedule
from .session import BoundSession, Options, make_session, with_random_seeds

Array = npt.NDArray[Any]

#: Elements of a parameter that the optimizer updates at a time: what it copies is bounded by this, whatever the parameter's size.
SLICE = 1 << 16
#: What ``save`` writes beside the checkpoint.
OPTIMIZER_STATE = "optimizer_state.npz"


class Trainer:
    """A training run.

    Args:
        artifact: an artifact or the path of one.
        threads: intra-op threads; 0 leaves it to the runtime.
        capped: hold the step within the plan's memory by a registered arena (one size per process); off, the session has its own.
        scheduled: run the scheduled step; off, the unscheduled one (the reference).
        seed: of the dropout masks, which are then the same in every session; without one they differ from process to process.
        schedule: number of the step, counted from 0 -> learning rate; without one ``learning_rate`` is used as it stands.
        clip_grad_norm: gradients are scaled down to this global norm; None takes the artifact's, 0 leaves them.
        spill_dir: folder that swapped tensors go to, where the plan swaps; None leaves it to the environment (``ONNXREMAT_SPILL_DIR``).

    Attributes:
        learning_rate: used by the next update; the schedule sets it where there is one.
        steps_done: updates so far.
        parameters: trainable and frozen parameters and state, updated in place.
        gradients: accumulated gradients by parameter name (empty where the update is part of the graph).

    Raises:
        ArtifactError: the artifact is damaged, or the runtime reorders it or drops recomputes.
        SpillUnavailable, SpillFailed: the plan swaps to disk, and the operators for that can't be had, or the folder can't be used.
        UsageError: another norm to clip to than the one that is part of the graph.
    """

    def __init__(
        self,
        artifact: Artifact | str | Path,
        threads: int = 0,
        capped: bool = True,
        scheduled: bool = True,
        seed: int | None = None,
        schedule: Schedule | None = None,
        clip_grad_norm: float | None = None,
        spill_dir: str | Path | None = None,
    ) -> None:
        self.artifact = artifact if isinstance(artifact, Artifact) else Artifact.load(artifact)
        manifest = self.artifact.manifest
        self._target = self.artifact.target
        if self._target.training_package:
            require_training_package()
        if scheduled and manifest["plan"]["swapped_tensors"]:
            self._require_room(manifest["swap"], spill_dir)
        self._options = self._reserve(Options(threads=threads, spill_dir=None if spill_dir is None else Path(spill_dir)), capped)
        self.optimizer = self.artifact.optimizer
        self.learning_rate = self.optimizer.learning_rate
        self.schedule = schedule
        self.clip_grad_norm = self.optimizer.clip_grad_norm if clip_grad_norm is None else clip_grad_norm
        if not math.isfinite(self.clip_grad_norm) or self.clip_grad_norm < 0:
            raise UsageError(f"a gradient norm of {self.clip_grad_norm} makes no sense: give a number from 0 up")
        if self.optimizer.in_graph and self.clip_grad_norm != self.optimizer.clip_grad_norm:
            raise UsageError("the update is part of this artifact's graph, and so is its gradient clipping: compile with another --clip-grad-norm")
        self.steps_done = 0
        self.parameters = {name: np.asarray(a, order="C") for name, a in self.artifact.parameters().items()}
        self._roles = manifest["roles"]
        in_graph = self.optimizer.in_graph
        self.gradients: dict[str, Array] = {} if in_graph else {n: np.zeros_like(self.parameters[n]) for n in self._roles["trainable"]}
        # Moments of an update in the graph are part of the checkpoint, as further state.
        self.moments = (
            {} if in_graph else {n + s: np.zeros_like(self.parameters[n]) for n in self._roles["trainable"] for s in self.optimizer.moments}
        )
        self._specs = {spec.name: spec for spec in (*self.artifact.inputs, *self.artifact.labels)}
        self._batch = {name: np.zeros(spec.shape, spec.dtype) for name, spec in self._specs.items()}
        self._rate = np.zeros(1, np.float32)
        self._reset = np.ones(1, np.bool_)
        self._number = np.ones(1, np.int64)
        self._place()
        model = self.artifact.file(TRAINING if scheduled else UNSCHEDULED)
        source = model if seed is None else with_random_seeds(model, seed)
        self._block = Block.of(self.artifact) if capped and scheduled and self._options.cuda is None else None
        block, options = self._block, self._options
        self._step = BoundSession(make_session(source, options)) if block is None else fixed_session(source, block, options)
        self._step.bind({name: array for name, array in self._arrays().items() if name in self._step.inputs})
        self._updates: dict[str, _Update] = {}
        if not in_graph:
            for file, names in optimizer_groups(self.optimizer, self._roles["trainable"]).items():
                self._updates |= dict.fromkeys(names, _Update(self.artifact.file(file), self._options))
        self._eval: BoundSession | None = None

    def _reserve(self, options: Options, capped: bool) -> Options:
        """Make the arena of the plan where the steps are to be capped; the options of all sessions."""
        if capped:
            arena.register(int(self.artifact.manifest["memory"]["arena_bytes"]))
        return options

    def _require_room(self, swap: Mapping[str, Any], spill_dir: str | Path | None) -> None:
        """Raise where there is no room for what a step swaps out."""
        if swap["kind"] != "disk":
            raise UsageError("this artifact swaps from a GPU to its host, and this trainer is for the CPU: use CudaTrainer, or --provider cuda")
        require_room(int(swap["disk_bytes"]), spill_dir)

    def _place(self) -> None:
        """Put the arrays where the steps want them: they are there."""

    def meter(self) -> memory.HostMeter | DeviceMeter:
        """What measures the peak of the steps."""
        return memory.HostMeter()

    def _arrays(self) -> dict[str, Array | DeviceArray]:
        from ..training_graph import GRADIENT_BUFFER, LAZY_RESET

        arrays: dict[str, Array | DeviceArray] = {**self._batch, **self.parameters, **self.moments}
        arrays |= {name + GRADIENT_BUFFER: array for name, array in self.gradients.items()}
        return arrays | {"learning_rate": self._rate, LAZY_RESET: self._reset, STEP: self._number}

    @property
    def resident_bytes(self) -> int:
        """Bytes that the training holds between steps: parameters, gradients, optimizer state, batch."""
        groups = (self.parameters, self.gradients, self.moments, self._batch)
        return sum(a.nbytes for group in groups for a in group.values())

    @property
    def providers(self) -> list[str]:
        """The execution providers of the step, best first."""
        return list(self._step.session.get_providers())

    def touch(self) -> None:
        """Make the arrays resident that the first step would (freshly zeroed memory has no pages yet)."""
        for group in (self.gradients, self.moments, self._batch):
            for array in group.values():
                array[...] = 0

    def train_step(self, *batches: Mapping[str, npt.ArrayLike]) -> float:
        """One step: forward, backward, update. Returns the loss, the mean of several batches.

        Args:
            batches: input and label names to arrays of the artifact's shapes; the gradients of several are averaged.

        Raises:
            UsageError: an array is missing, unknown, of another shape or dtype, or a label no class; or several batches where the
                update is part of the graph.
            OutOfBudget: the step exceeded its memory; the parameters are as before (of a fused update: some are not), but accumulated
                gradients are not.
        """
        if not batches:
            raise UsageError("a step needs a batch")
        if len(batches) > 1 and self.optimizer.in_graph:
            way = "--update separate" if self.optimizer.fused else "adamw, sgd without momentum, or --target onnxruntime"
            raise UsageError(f"gradients can't be accumulated where the update is part of the graph: compile for {way}")
        losses = [self.accumulate(batch, fresh=not number) for number, batch in enumerate(batches)]
        if len(batches) > 1:
            self._scale_gradients(1 / len(batches))
        self.apply_update()
        return sum(losses) / len(losses)

    def accumulate(self, batch: Mapping[str, npt.ArrayLike], fresh: bool = True) -> float:
        """Forward and backward; gradients replace (``fresh``) or add to the accumulated ones. Returns the loss."""
        self._fill(batch)
        self._reset[...] = fresh
        if fresh and not self._target.in_place:  # the graph adds to what is there
            self._zero_gradients()
        self._number[...] = self.steps_done + 1
        if self.schedule is not None:
            self.learning_rate = self.schedule(self.steps_done)
        self._rate[...] = self.learning_rate
        outputs = self._step.run()
        return float(np.asarray(outputs[0]).reshape(()))

    def _zero_gradients(self) -> None:
        for gradient in self.gradients.values():
            gradient[...] = 0

    def _scale_gradients(self, factor: float) -> None:
        for gradient in self.gradients.values():
            gradient *= np.float32(factor)

    def _gradient_norm(self) -> float:
        squares = [float(np.dot(part, part)) for g in self.gradients.values() for part in _slices(g.reshape(-1))]
        return math.sqrt(math.fsum(squares))

    def apply_update(self) -> None:
        """Update the parameters from the accumulated gradients."""
        self.steps_done += 1
        if not self._updates:
            return
        self._clip()
        moments = [(MOMENT_INPUTS[suffix], suffix) for suffix in self.optimizer.moments]
        from ..training_graph import GRADIENT_BUFFER

        arrays = self._arrays()
        for name in self.gradients:
            state = {key: arrays[name + suffix] for key, suffix in moments}
            self._updates[name].apply(arrays[name], arrays[name + GRADIENT_BUFFER], state, self.learning_rate, self.steps_done, self._slice)

    #: Elements that the optimizer updates at a time.
    _slice = SLICE

    def _clip(self) -> None:
        """Scale the gradients to the largest norm (torch.nn.utils.clip_grad_norm_)."""
        if not self.clip_grad_norm:
            return
        scale = self.clip_grad_norm / (self._gradient_norm() + 1e-6)
        if scale < 1:
            self._scale_gradients(scale)

    def evaluate(self, batch: Mapping[str, npt.ArrayLike]) -> tuple[float, dict[str, Array]]:
        """Loss and model outputs in evaluation mode, parameters as they are now.

        Where ``manifest["eval_batch"]["open"]`` the batch may have any size, else the one that the artifact was compiled for.

        Raises:
            UsageError: an array is missing or of another shape.
        """
        if self._eval is None:
            # Beside a block the arena is small: evaluation has the memory of the block instead.
            self._eval = BoundSession(make_session(self.artifact.file(EVAL), replace(self._options, arena=self._block is None)))
        if self._block is not None:
            self._block.give_back()
        arrays = self._arrays() | self._evaluated(batch)
        self._eval.bind({name: arrays[name] for name in self._eval.inputs})
        results = self._eval.run()
        named = dict(zip(self._eval.outputs, results, strict=True))
        loss = named.pop(self._roles["loss"])
        return float(np.asarray(loss).reshape(())), named

    def save(self, folder: str | Path) -> None:
        """Write the checkpoint, of the kind that the artifact has, and ``optimizer_state.npz`` into a new folder, whole or not at all."""
        trainable = set(self._roles["trainable"])
        with whole_folder(Path(folder), (f"{CHECKPOINT}*", OPTIMIZER_STATE)) as staging:
            frozen = {n: a for n, a in self.parameters.items() if n not in trainable}
            save_checkpoint(staging, self._target, {n: self.parameters[n] for n in self._roles["trainable"]}, frozen)
            np.savez(staging / OPTIMIZER_STATE, steps_done=np.asarray(self.steps_done), **self.moments)  # type: ignore[arg-type]

    def restore(self, folder: str | Path) -> None:
        """Continue from what ``save`` wrote.

        Raises:
            ArtifactError: the folder has no such files, or they belong to another model.
        """
        place, checkpoint = Path(folder), checkpoint_name(self._target)
        state_file = place / OPTIMIZER_STATE
        for file in (place / checkpoint, state_file):
            if not file.exists():
                raise ArtifactError(f"there is no saved training state in {place}: it has no {file.name}")
        try:
            state = load_checkpoint(place)
            with np.load(state_file, allow_pickle=False) as saved:
                found = {name: saved[name] for name in saved.files}
        except (ValueError, RuntimeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ArtifactError(f"the saved state in {place} is damaged: {' '.join(str(error).split())[:200]}") from error
        found |= {n: state[n] for n in self.parameters if n in state}
        # Everything is looked at before anything is overwritten.
        for name, array in (*self.parameters.items(), *self.moments.items()):
            if name not in found or found[name].shape != array.shape:
                raise ArtifactError(f"the saved state in {place} has no '{name}' of shape {array.shape}: it belongs to another model")
        if "steps_done" not in found:
            raise ArtifactError(f"{state_file} does not say how many steps were done: it is not a saved training state")
        self.steps_done = int(found["steps_done"])
        for name, array in (*self.parameters.items(), *self.moments.items()):
            array[...] = found[name]

    def _evaluated(self, batch: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """The batch to evaluate: the step's own arrays, or others where it has another size."""
        sizes = {np.shape(batch[name])[:1] for name in self._specs if name in batch}
        is_open = self.artifact.manifest.get("eval_batch", {}).get("open", False)
        if is_open and len(sizes) == 1 and sizes != {spec.shape[:1] for spec in self._specs.values()}:
            (size,) = sizes
            return self._checked(batch, {name: (*size, *spec.shape[1:]) for name, spec in self._specs.items()})
        self._fill(batch)
        return self._batch

    def _fill(self, batch: Mapping[str, npt.ArrayLike]) -> None:
        for name, array in self._checked(batch, {name: spec.shape for name, spec in self._specs.items()}).items():
            self._batch[name][...] = array

    def _checked(self, batch: Mapping[str, npt.ArrayLike], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        """The batch as arrays that can be bound."""
        found: dict[str, Array] = {}
        for name in batch:
            if name not in self._specs:
                raise UsageError(f"the model has no input '{name}'; it has {', '.join(self._specs)}")
        for name, spec in self._specs.items():
            if name not in batch:
                raise UsageError(f"the batch lacks '{name}' ({spec})")
            array = np.asarray(batch[name])
            if array.shape != shapes[name]:
                raise UsageError(
                    f"'{name}' has shape {array.shape}, the artifact was compiled for {spec.shape}: pad the batch, or compile for its shape"
                )
            if not np.can_cast(array.dtype, spec.dtype, "same_kind"):
                raise UsageError(f"'{name}' has dtype {array.dtype}, the artifact wants {spec.dtype}")
            found[name] = np.asarray(array, spec.dtype, order="C")
            if spec in self.artifact.labels:
                self._require_classes(spec, found[name])
            self._require_rows(name, found[name])
        return found

    def _require_rows(self, name: str, array: Array) -> None:
        """Raise UsageError where an index is no row of the embedding that it is looked up in: the kernel would count -1 from the end."""
        rows = self.artifact.manifest["source"].get("table_rows", {}).get(name)
        if rows is None:
            return
        for part in _slices(array.reshape(-1)):
            bad = part[(part < 0) | (part >= rows)]
            if bad.size:
                raise UsageError(f"'{name}' has the value {bad[0]}, and the model looks it up in a table of {rows} rows: mend the data")

    def _require_classes(self, spec: InputSpec, array: Array) -> None:
        """Raise UsageError where a label is negative and not what the loss ignores: the kernels would train -1 as the last class.

        Labels that are too large the kernels refuse themselves.
        """
        source = self.artifact.manifest["source"]
        if source.get("loss") != "cross_entropy" or not spec.is_integer:
            return
        ignored = source.get("loss_options", {}).get("ignore_index", -100)
        for part in _slices(array.reshape(-1)):
            bad = part[(part < 0) & (part != ignored)]
            if bad.size:
                raise UsageError(f"'{spec.name}' has the value {bad[0]}, which is no class: mend the data, or compile with ignore_index={bad[0]}")


def part(array: Array | DeviceArray, start: int, stop: int) -> Array | DeviceArray:
    """Elements of a flattened array, which they are shared with."""
    return array.slice(start, stop) if isinstance(array, DeviceArray) else array.reshape(-1)[start:stop]


def _slices(array: Array) -> Iterator[Array]:
    for start in range(0, array.size, SLICE):
        yield array[start : start + SLICE]


class _Update:
    """The artifact's optimizer model, applied to a slice of a parameter at a time so that it needs next to no memory."""

    def __init__(self, path: Path, options: Options) -> None:
        model = onnx.load(str(path))
        kernel = next((n for n in model.graph.node if n.domain == MS), None)
        self._session = make_session((model if kernel is None else _slice_model(kernel)).SerializeToString(), options)
        self._names = [i.name for i in self._session.get_inputs()]

    def apply(
        self,
        parameter: Array | DeviceArray,
        gradient: Array | DeviceArray,
        moments: Mapping[str, Array | DeviceArray],
        rate: float,
        step: int,
        slice_size: int = SLICE,
    ) -> None:
        flat: dict[str, Array | DeviceArray] = {"params": parameter, "gradients": gradient, **moments}
        scalars: dict[str, Array] = {"learning_rate": np.asarray([rate], np.float32), "step": np.asarray([step], np.int64)}
        bound = BoundSession(self._session)
        bound.bind({name: array for name, array in scalars.items() if name in self._names})
        for start in range(0, parameter.size, slice_size):
            bound.bind({name: part(array, start, start + slice_size) for name, array in flat.items()})
            bound.run_discarding()


def _slice_model(node: onnx.NodeProto) -> onnx.ModelProto:
    """``optimizer_model.onnx`` for one flat tensor: sequences of one, the new values written over the old ones."""
    sequences = [name for name in node.input if name not in ("learning_rate", "step")]
    updated = [name for name in sequences if name != "gradients"]
    nodes = [helper.make_node("SequenceConstruct", [name], [f"{name}_sequence"]) for name in sequences]
    inner = helper.make_node(
        node.op_type,
        [f"{name}_sequence" if name in sequences else name for name in node.input],
        ["updated_flag", *(f"{name}_updated" for name in updated)],
        domain=MS,
    )
    inner.attribute.extend(node.attribute)
    nodes.append(inner)
    for name in updated:
        nodes.append(helper.make_node("SequenceAt", [f"{name}_updated", "first"], [f"{name}_new"]))
        nodes.append(helper.make_node("InPlaceAccumulatorV2", [name, f"{name}_new", "overwrite"], [f"{name}_flag"], domain=MS))
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in sequences]
    if "step" in node.input:
        inputs.append(helper.make_tensor_value_info("step", TensorProto.INT64, [1]))
    inputs.append(helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, [1]))
    graph = helper.make_graph(
        nodes,
        "update",
        inputs,
        [helper.make_tensor_value_info(f"{name}_flag", TensorProto.BOOL, [1]) for name in updated],
        [helper.make_tensor("first", TensorProto.INT64, [], [0]), helper.make_tensor("overwrite", TensorProto.BOOL, [1], [True])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(MS, 1)], ir_version=10)


def random_batches(specs: list[InputSpec], seed: int) -> Iterator[dict[str, Array]]:
    """Endless random batches for the inputs and labels of an artifact."""
    rng = np.random.default_rng(seed)
    while True:
        yield {spec.name: spec.sample(rng) for spec in specs}
