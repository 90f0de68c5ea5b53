"""What the tests of fixed offsets run in workers, without torch."""

from __future__ import annotations

import numpy as np

from onnxremat import Artifact, Trainer
from onnxremat.runtime import arena


def losses_of(trainer: Trainer, steps: int) -> list[float]:
    """Losses of some steps, each with that of an evaluation behind it."""
    specs = (*trainer.artifact.inputs, *trainer.artifact.labels)
    losses = []
    for step in range(steps):
        rng = np.random.default_rng(step)
        batch = {spec.name: spec.sample(rng) for spec in specs}
        losses += [trainer.train_step(batch), trainer.evaluate(batch)[0]]
    return losses


def train_job(artifact: str, arena_bytes: int, steps: int) -> list[float]:
    """In a worker: train in the plan's memory, with an arena of this size beside the block."""
    found = Artifact.load(artifact)
    found.manifest["memory"]["arena_bytes"] = arena_bytes
    losses = losses_of(Trainer(found, threads=1, seed=5), steps)
    assert arena.registered() == arena_bytes
    return losses
