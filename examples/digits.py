"""Train a ResNet-18 in 60 % of its activation memory, on the handwritten digits that scikit-learn ships.

    python examples/digits.py

compiles the model into ``demo_out/resnet18``, trains it for 30 steps on ONNX Runtime within the budget, and compares the measured peak
with the predicted one and the gradients with torch's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import onnxremat
from onnxremat.units import format_bytes

OUT = Path("demo_out")
BATCH, STEPS, HELD_OUT = 64, 30, 320


def write_data(train: Path, test: Path) -> None:
    """The digits as 3 x 64 x 64 images, in two .npz files with the arrays ``x`` and ``labels``."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    small = (digits.images[order] / 16.0 - 0.5).astype(np.float32)
    images = np.repeat(np.kron(small, np.ones((8, 8), np.float32))[:, None], 3, axis=1)
    labels = digits.target[order].astype(np.int64)
    np.savez(train, x=images[HELD_OUT:], labels=labels[HELD_OUT:])
    np.savez(test, x=images[:HELD_OUT], labels=labels[:HELD_OUT])


def main() -> int:
    OUT.mkdir(exist_ok=True)
    write_data(OUT / "train.npz", OUT / "test.npz")

    artifact = onnxremat.compile(
        "onnxremat.models.digits:resnet18_digits",
        OUT / "resnet18",
        inputs=[f"x={BATCH}x3x64x64"],
        loss="cross_entropy",
        optimizer=onnxremat.Optimizer("adamw", learning_rate=1e-3),
        activation_budget="60%",
        time_limit=60,
        progress=lambda message: print(f"  {message}", flush=True),
    )
    memory, checked = artifact.manifest["memory"], artifact.manifest["verification"]

    # Training is a process of its own, without PyTorch: this one holds what compiling left behind.
    command = [sys.executable, "-m", "onnxremat", "run", str(artifact.path), "--steps", str(STEPS), "--data", str(OUT / "train.npz")]
    finished = subprocess.run([*command, "--save", str(OUT / "trained"), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(finished.stdout)

    trainer = onnxremat.Trainer(artifact, capped=False)
    trainer.restore(OUT / "trained")
    held_out = np.load(OUT / "test.npz")
    right = 0
    for start in range(0, HELD_OUT, BATCH):
        batch = {name: held_out[name][start : start + BATCH] for name in ("x", "labels")}
        _, outputs = trainer.evaluate(batch)
        right += int((next(iter(outputs.values())).argmax(1) == batch["labels"]).sum())

    first, last = np.mean(result["losses"][:5]), np.mean(result["losses"][-5:])
    measured, predicted, budget = result["peak_measured_bytes"], memory["peak_predicted_bytes"], memory["budget_bytes"]
    seconds = artifact.manifest["time"]
    print(f"loss              {first:.3f} -> {last:.3f} (means of the first and last five steps)")
    print(f"held-out accuracy {right / HELD_OUT:.1%} after {STEPS} steps")
    print(f"budget            {format_bytes(budget)}; the unscheduled step takes {format_bytes(memory['peak_unscheduled_bytes'])}")
    print(f"peak              {format_bytes(measured)} measured, {format_bytes(predicted)} predicted ({measured / predicted - 1:+.2%})")
    overhead = seconds["seconds_predicted"] / seconds["seconds_unscheduled"] - 1
    print(f"time              {overhead:+.1%} predicted for {artifact.plan.recomputed_ops} recomputed ops")
    print(f"gradients         {checked['max_relative_error_torch']:.1e} from torch's; {checked['tolerance_torch']:.1e} is what rounding explains")
    print(f"rescheduled step  bit-equal to the unscheduled one: {checked['bitwise_equal']}")
    print(f"report            {artifact.path / 'report.html'}")
    if not (last < first and measured <= budget and checked["passed"]):
        print("the demo did not go as it should", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
