"""Run inside a stock environment: no torch, no onnxruntime-training there. ``python jobs.py JOB ARTIFACT ...`` prints JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from onnxremat.artifact import TRAINING, UNSCHEDULED, Artifact
from onnxremat.runtime.ort import onnxruntime
from onnxremat.runtime.run import run_artifact
from onnxremat.runtime.session import LEVELS, BoundSession, Options, execution_order, make_session, run_profiled, with_random_seeds
from onnxremat.runtime.trainer import Trainer
from onnxremat.safetensors import load_tensors


def levels(path: str) -> dict[str, Any]:
    """At every level in the default order: digests of the scheduled and the unscheduled step's numbers, loss, and the executed order."""
    artifact = Artifact.load(path)
    result: dict[str, Any] = {"version": onnxruntime().__version__}
    for level in LEVELS:
        options = Options(threads=1, arena=False, level=level, file_order=False)
        rows = {}
        for name in (TRAINING, UNSCHEDULED):
            model = with_random_seeds(artifact.file(name), 1)
            arrays = _arrays(artifact, model)
            bound = BoundSession(make_session(model, options))
            bound.bind({n: arrays[n] for n in bound.inputs})
            losses = []
            for _ in range(3):
                for n in arrays:
                    if n.endswith("_grad.accumulation.buffer"):
                        arrays[n][...] = 0
                losses += [float(np.ravel(bound.run()[0])[0])]
            digest = hashlib.sha256(b"".join(arrays[n].tobytes() for n in sorted(arrays)))
            rows[name] = {"losses": losses, "digest": digest.hexdigest()}
        arrays = _arrays(artifact, artifact.file(TRAINING).read_bytes())
        steps, _ = run_profiled(artifact.file(TRAINING), arrays, 1, options)
        rows["order"] = [event["name"] for event in steps[0]]
        rows["planned"] = execution_order(artifact.file(TRAINING))
        result[level] = rows
    return result


def _arrays(artifact: Artifact, model: bytes) -> dict[str, Any]:
    """The checkpoint, one batch, moments and gradient buffers of zeros."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = dict(artifact.parameters())
    for entry in make_session(model, Options(arena=False)).get_inputs():
        dtype = {"tensor(int64)": np.int64, "tensor(bool)": np.bool_}.get(entry.type, np.float32)
        arrays.setdefault(entry.name, np.zeros(entry.shape, dtype))
    for spec in (*artifact.inputs, *artifact.labels):
        arrays[spec.name] = spec.sample(rng)
    for name, value in (("learning_rate", artifact.optimizer.learning_rate), ("optimizer_step", 1)):
        if name in arrays:
            arrays[name][...] = value
    return arrays


def train(path: str, accumulate: str = "1") -> dict[str, Any]:
    """Losses of six steps on one batch under the cap, and whether the training package or torch was loaded."""
    artifact = Artifact.load(path)
    rng = np.random.default_rng(0)
    batch = {spec.name: spec.sample(rng) for spec in (*artifact.inputs, *artifact.labels)}
    trainer = Trainer(artifact, threads=1, seed=3)
    result = run_artifact(artifact, 6, iter([batch] * 100), trainer=trainer, accumulate=int(accumulate))
    evaluated, _ = trainer.evaluate(batch)
    trainer.save(Path(path).parent / f"saved-{onnxruntime().__version__}")
    digest = hashlib.sha256(b"".join(trainer.parameters[n].tobytes() for n in sorted(trainer.parameters))).hexdigest()
    again = Trainer(artifact, threads=1, seed=3)
    again.restore(Path(path).parent / f"saved-{onnxruntime().__version__}")
    restored = hashlib.sha256(b"".join(again.parameters[n].tobytes() for n in sorted(again.parameters))).hexdigest()
    foreign = [name for name in ("torch", "onnxruntime.training") if sys.modules.get(name)]
    return {
        "losses": result.losses,
        "evaluated": evaluated,
        "peak": result.peak_measured_bytes,
        "restored": restored == digest,
        "foreign": foreign,
        "parameters": {n: float(np.square(a.astype(np.float64)).sum()) for n, a in trainer.parameters.items()},
    }


def follow(path: str, data: str, steps: int, saved: str) -> dict[str, Any]:
    """Losses of some steps on the batches of a safetensors file, in order, again and again; the checkpoint after them is saved."""
    trainer = Trainer(path, threads=1)
    samples = load_tensors(Path(data))
    sizes = {spec.name: spec.shape[0] for spec in (*trainer.artifact.inputs, *trainer.artifact.labels)}
    batches = min(len(samples[name]) // size for name, size in sizes.items())
    losses = []
    for step in range(int(steps)):
        first = step % batches
        losses.append(trainer.train_step({name: samples[name][first * size : (first + 1) * size] for name, size in sizes.items()}))
    trainer.save(saved)
    return {"losses": losses}


if __name__ == "__main__":
    print(json.dumps({"levels": levels, "train": train, "follow": follow}[sys.argv[1]](*sys.argv[2:])))  # noqa: T201
