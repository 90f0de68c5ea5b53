"""A training run with its loss, time and peak from the same process and the same steps."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..artifact import Artifact
from ..errors import UsageError
from ..exporters import InputSpec
from .cuda import Cuda
from .cuda_trainer import CudaTrainer
from .trainer import Trainer, random_batches

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run showed.

    Attributes:
        losses: one per step.
        step_seconds: wall seconds of each step, update included; the first contains the warm-up.
        peak_measured_bytes: bytes resident by count plus what the process really grew by during the steps.
        providers: execution providers that ran it.
    """

    losses: list[float]
    step_seconds: list[float]
    peak_measured_bytes: int
    providers: list[str]


def make_trainer(artifact: Artifact, cuda: Cuda | None, **options: Any) -> Trainer:
    """A trainer on a GPU, or on the CPU; ``options`` are those of ``Trainer``."""
    return Trainer(artifact, **options) if cuda is None else CudaTrainer(artifact, cuda=cuda, **options)


def run_artifact(
    artifact: Artifact,
    steps: int,
    batches: Iterator[Mapping[str, Array]] | None = None,
    threads: int = 0,
    scheduled: bool = True,
    capped: bool = True,
    on_step: Callable[[int, float, float], None] | None = None,
    trainer: Trainer | None = None,
    accumulate: int = 1,
) -> RunResult:
    """Train for some steps.

    Args:
        artifact: what to train.
        steps: how many steps.
        batches: the data; random where there is none.
        threads: intra-op threads.
        scheduled: the scheduled step, or the unscheduled one.
        capped: within the plan's arena.
        on_step: called after each step with its number, loss and seconds.
        trainer: one that has not run a step yet; made where there is none.
        accumulate: batches of one step.

    Raises:
        OutOfBudget: a step exceeded the budget and was stopped.
    """
    batches = batches or random_batches([*artifact.inputs, *artifact.labels], seed=0)
    trainer = trainer or make_trainer(artifact, artifact.cuda, threads=threads, scheduled=scheduled, capped=capped)
    trainer.touch()
    losses: list[float] = []
    seconds: list[float] = []
    meter = trainer.meter()
    for number in range(steps):
        read = [next(batches) for _ in range(accumulate)]
        meter.before_step()
        begin = time.perf_counter()
        losses.append(trainer.train_step(*read))
        seconds.append(time.perf_counter() - begin)
        meter.after_step()
        if on_step is not None:
            on_step(number, losses[-1], seconds[-1])
    return RunResult(losses, seconds, trainer.resident_bytes + meter.grown, trainer.providers)


def measure_job(artifact: str, steps: int, threads: int = 0, scheduled: bool = True, capped: bool = True) -> dict[str, Any]:
    """In a worker: a run on random data, as JSON."""
    return asdict(run_artifact(Artifact.load(artifact), steps, threads=threads, scheduled=scheduled, capped=capped))


def file_batches(path: Path, specs: list[InputSpec], partial: str = "drop", seed: int = 0) -> Iterator[dict[str, Array]]:
    """Batches from an ``.npz`` file with one array per input and label, shuffled anew each epoch, endlessly.

    Args:
        path: the file; first axes are samples.
        specs: inputs and labels of the artifact; first dimensions are the batch.
        partial: the last, partial batch of an epoch: "drop" leaves it out, "wrap" fills it from the next epoch's beginning.
        seed: of the shuffling.

    Raises:
        UsageError: the file lacks an array, an array has the wrong shape or dtype, or there are fewer samples than a batch.
    """
    try:
        data = np.load(path, allow_pickle=False)
        if not isinstance(data, np.lib.npyio.NpzFile):
            raise UsageError(f"{path} holds one array without a name: write the arrays with numpy.savez")
        with data:
            if any(spec.name not in data.files for spec in specs):
                raise UsageError(f"{path} must have the arrays {', '.join(s.name for s in specs)}; it has {', '.join(data.files)}")
            arrays = {spec.name: data[spec.name] for spec in specs}
    except FileNotFoundError:
        raise UsageError(f"there is no data file {path}") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is not an .npz file of plain arrays: {error}") from error
    scalars = [name for name, array in arrays.items() if array.ndim == 0]
    if scalars:
        raise UsageError(f"'{scalars[0]}' in {path} is a single number, the artifact wants samples along its first axis")
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise UsageError(f"the arrays of {path} have different numbers of samples: {counts}")
    for spec in specs:
        if arrays[spec.name].shape[1:] != spec.shape[1:]:
            raise UsageError(f"'{spec.name}' in {path} has samples of shape {arrays[spec.name].shape[1:]}, the artifact wants {spec.shape[1:]}")
        if not np.can_cast(arrays[spec.name].dtype, spec.dtype, "same_kind"):
            raise UsageError(f"'{spec.name}' in {path} is {arrays[spec.name].dtype}, the artifact wants {spec.dtype}")
    samples, size = next(iter(counts.values())), specs[0].shape[0]
    if samples < size:
        raise UsageError(f"{path} has {samples} samples, fewer than a batch of {size}")
    return _epochs(arrays, samples, size, partial, seed)


def _epochs(arrays: Mapping[str, Array], samples: int, size: int, partial: str, seed: int) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    order = rng.permutation(samples)
    while True:
        while len(order) >= size:
            taken, order = order[:size], order[size:]
            yield {name: array[taken] for name, array in arrays.items()}
        fresh = rng.permutation(samples)
        order = np.concatenate([order, fresh]) if partial == "wrap" else fresh
