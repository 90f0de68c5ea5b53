"""What the cap costs in time, and what ONNX Runtime's own arena adds to a plan's memory: the same step run three ways.

    python -m benchmarks.default_arena [--budget 50] [--target ort-training,onnxruntime] [--turns 15] [CASE ...]

``capped`` is the runner's way, within the plan's arena.  ``own arena`` has the same order and options, but the arena that a session makes
for itself, which grows by doubling.  ``defaults`` is a session as everyone makes it: all optimizations, the runtime's order, dead buffers handed
on.  A file for onnxruntime-training is not meant for that (its recomputes would be merged away), so there the unscheduled step is run
so; what the plan recomputes is then part of its ratio.  Every way is a process of its own, and they take turns step by step; ratios are medians of
neighbouring turns.  Peaks are what the process grew by, and what is resident by count; the budget is a share of the activations, or the smallest
that was found.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.common import CASES, Case, machine, table
from benchmarks.peaks import compile_case
from benchmarks.turns import in_turns, ratio
from onnxremat.artifact import Artifact
from onnxremat.runtime.session import LEVELS, Options
from onnxremat.runtime.trainer import Trainer, random_batches
from onnxremat.targets import ONNXRUNTIME, ORT_TRAINING

CAPPED, OWN, DEFAULTS = "capped", "own arena", "defaults"
WAYS = (CAPPED, OWN, DEFAULTS)
HEADER = ["model", "target", "budget", "predicted MiB", *(f"{way} MiB" for way in WAYS), *(f"{way} s" for way in WAYS)]
HEADER += ["capped of own arena", "capped of defaults"]


class DefaultTrainer(Trainer):
    """Trains in sessions with the runtime's defaults."""

    def _reserve(self, options: Options, capped: bool) -> Options:
        return replace(options, level=LEVELS[-1], file_order=False, reuse=True)


class Steps:
    """Training steps one way, and the peak of the process."""

    def __init__(self, artifact: str, way: str, threads: int) -> None:
        found = Artifact.load(artifact)
        if way == DEFAULTS:
            self._trainer: Trainer = DefaultTrainer(found, threads=threads, capped=False, scheduled=not found.target.training_package)
        else:
            self._trainer = Trainer(found, threads=threads, capped=way == CAPPED)
        self._batch = next(random_batches([*found.inputs, *found.labels], seed=0))
        self._trainer.touch()
        self._meter = self._trainer.meter()

    def __call__(self) -> None:
        self._meter.before_step()
        self._trainer.train_step(self._batch)
        self._meter.after_step()

    def figures(self) -> dict[str, int]:
        """The peak in bytes."""
        return {"peak": self._trainer.resident_bytes + self._meter.grown}


def row_of(case: Case, target: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """A line of the table."""
    artifact, label = compile_case(
        case, folder / "artifact", options.budget, target=target, costs="analytic", verify=False, time_limit=options.time_limit
    )
    given = {"artifact": str(artifact.path), "threads": options.threads}
    made = in_turns({way: ("benchmarks.default_arena:Steps", {**given, "way": way}) for way in WAYS}, options.turns)
    runs = {way: run.complete() for way, run in made.items()}
    predicted = artifact.manifest["memory"]["peak_predicted_bytes"]
    return [
        case.name,
        target,
        label,
        *(f"{size / 2**20:.1f}" for size in (predicted, *(run.figures["peak"] for run in runs.values()))),
        *(f"{statistics.median(run.seconds):.3f}" for run in runs.values()),
        *(f"{ratio(runs[CAPPED].seconds, runs[way].seconds):.3f}" for way in (OWN, DEFAULTS)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--budget", default="100", help="percent of the activations, or min")
    parser.add_argument("--target", default=f"{ORT_TRAINING.name},{ONNXRUNTIME.name}")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for planning")
    parser.add_argument("--turns", type=int, default=15, help="steps of each way; one before is not timed")
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
