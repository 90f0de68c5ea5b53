"""What the cap costs in time, and what ONNX Runtime's own arena adds to a plan's memory: the same step run three ways.

    python -m benchmarks.default_arena [--budget 50] [--target ort-training,onnxruntime] [--rounds 3] [--steps 5] [CASE ...]

``capped`` is the runner's way, within the plan's arena.  ``own arena`` has the same order and options, but the arena that a session makes
for itself, which grows by doubling.  ``defaults`` is a session as everyone makes it: all optimizations, the runtime's order, dead buffers handed
on.  A file for onnxruntime-training is not meant for that (its recomputes would be merged away), so there the unscheduled step is run
so; what the plan recomputes is then part of its ratio.  Every run is a process of its own, and the ways take turns.  Peaks are what the process
grew by, and what is resident by count; the budget is a share of the activations, or the smallest that was found.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import CASES, Case, machine, table
from benchmarks.peaks import compile_case
from onnxremat.artifact import Artifact
from onnxremat.runtime import worker
from onnxremat.runtime.run import run_artifact
from onnxremat.runtime.session import LEVELS, Options
from onnxremat.runtime.trainer import Trainer
from onnxremat.targets import ONNXRUNTIME, ORT_TRAINING

CAPPED, OWN, DEFAULTS = "capped", "own arena", "defaults"
WAYS = (CAPPED, OWN, DEFAULTS)
HEADER = ["model", "target", "budget", "predicted MiB", *(f"{way} MiB" for way in WAYS), *(f"{way} s" for way in WAYS)]
HEADER += ["capped of own arena", "capped of defaults"]


class DefaultTrainer(Trainer):
    """Trains in sessions with the runtime's defaults."""

    def _reserve(self, options: Options, capped: bool) -> Options:
        return replace(options, level=LEVELS[-1], file_order=False, reuse=True)


def job(artifact: str, way: str, steps: int, threads: int) -> dict[str, Any]:
    """In a worker: some steps one way, as JSON."""
    found = Artifact.load(artifact)
    if way == DEFAULTS:
        trainer: Trainer = DefaultTrainer(found, threads=threads, capped=False, scheduled=not found.target.training_package)
    else:
        trainer = Trainer(found, threads=threads, capped=way == CAPPED)
    return asdict(run_artifact(found, steps, trainer=trainer))


def row_of(case: Case, target: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """A line of the table."""
    artifact, label = compile_case(
        case, folder / "artifact", options.budget, target=target, costs="analytic", verify=False, time_limit=options.time_limit
    )
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks = dict.fromkeys(WAYS, 0)
    for _ in range(options.rounds):
        for way in WAYS:
            run = worker.call(
                "benchmarks.default_arena:job", artifact=str(artifact.path), way=way, steps=options.steps, threads=options.threads
            )
            seconds[way] += run["step_seconds"][1:]
            peaks[way] = max(peaks[way], run["peak_measured_bytes"])
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    predicted = artifact.manifest["memory"]["peak_predicted_bytes"]
    return [
        case.name,
        target,
        label,
        *(f"{size / 2**20:.1f}" for size in (predicted, *peaks.values())),
        *(f"{value:.3f}" for value in medians.values()),
        *(f"{medians[CAPPED] / medians[way]:.3f}" for way in (OWN, DEFAULTS)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--budget", default="100", help="percent of the activations, or min")
    parser.add_argument("--target", default=f"{ORT_TRAINING.name},{ONNXRUNTIME.name}")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for planning")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run; the first is not timed")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(machine())
    rows = []
    for name in options.cases:
        for target in options.target.split(","):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row_of(CASES[name], target, Path(folder), options))
            print("  ".join(rows[-1]), flush=True)
    print()
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
