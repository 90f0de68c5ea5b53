"""The arena alone against fixed offsets beside a smaller one, for the same plan: bytes, measured peak and time of a step.

    python -m benchmarks.allocators [--budget 50] [--time-limit 30] [--steps 4] [--rounds 3] [CASE ...]

The budget is a share of the activations; where it can't be reached, the smallest one that was found is taken.  Bytes are those of the
activations: arena, its tables, and block.  Every run is a process of its own, and the two ways take turns; the times compared are those of the
fastest steps, and the processor's in all steps but the first, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxremat
from benchmarks.common import CASES, Case, machine, table
from onnxremat.artifact import MANIFEST, OFFSETS, Artifact
from onnxremat.fit import Scheduled, Search, fit_arena_alone, fit_with_block
from onnxremat.pipeline import offsets_by_name
from onnxremat.placement import UNLIMITED, bookkeeping_bytes
from onnxremat.runtime import worker
from onnxremat.runtime.run import run_artifact
from onnxremat.runtime.trainer import Trainer

HEADER = ["model", "budget", "live MiB", "arena MiB", "fixed MiB", "gain %"]
HEADER += ["arena peak", "measured", "fixed peak", "measured", "time ratio", "processor ratio", "equal"]


def compiled(case: Case, folder: Path, percent: str, time_limit: float) -> Artifact:
    """The case for a share of its activations, or for the smallest budget that an error names."""
    options = {"inputs": case.inputs, "loss": case.loss, "costs": "analytic", "verify": False, "time_limit": time_limit}
    try:
        return onnxremat.compile(case.source, folder, activation_budget=f"{percent}%", **options)  # type: ignore[arg-type]
    except onnxremat.BudgetInfeasible as error:
        return onnxremat.compile(case.source, folder, budget=error.minimum_budget_bytes, **options)  # type: ignore[arg-type]


def placed(artifact: Artifact, folder: Path, scheduled: Scheduled) -> Path:
    """A copy of an artifact whose step is given memory as it is scheduled here."""
    shutil.copytree(artifact.path, folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"].pop(OFFSETS, None)
    manifest["memory"] |= {"arena_bytes": scheduled.arena_bytes, "block_bytes": scheduled.placement.block_bytes}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    (folder / OFFSETS).write_text(json.dumps(offsets_by_name(artifact.problem, scheduled)), encoding="utf-8")
    return folder


def job(artifact: str, steps: int, threads: int) -> dict[str, Any]:
    """In a worker: some steps with the same dropout masks each time, with their wall and processor seconds."""
    found = Artifact.load(artifact)
    processor = [time.process_time()]
    trainer = Trainer(found, threads=threads, seed=1)
    run = run_artifact(found, steps, trainer=trainer, on_step=lambda *_: processor.append(time.process_time()))
    return asdict(run) | {"processor_seconds": [b - a for a, b in itertools.pairwise(processor)][1:]}


def row_of(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """One line of the table."""
    artifact = compiled(case, folder / "artifact", options.budget, options.time_limit)
    problem, plan = artifact.problem, artifact.plan
    beside = fit_with_block(problem, plan, UNLIMITED, Search())
    assert beside is not None, "an endless arena holds any step"
    ways = {"arena": fit_arena_alone(problem, plan), "fixed": beside}
    folders = {name: placed(artifact, folder / name, scheduled) for name, scheduled in ways.items()}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    peaks, losses = dict.fromkeys(ways, 0), {}
    for _ in range(options.rounds):
        for name, path in folders.items():
            run = worker.call("benchmarks.allocators:job", artifact=str(path), steps=options.steps, threads=options.threads)
            wall[name] += run["step_seconds"][1:]
            processor[name] += run["processor_seconds"]
            peaks[name], losses[name] = max(peaks[name], run["peak_measured_bytes"]), run["losses"]
    taken = {n: s.placement.arena_bytes + s.placement.block_bytes + bookkeeping_bytes(s.arena_bytes) for n, s in ways.items()}
    figures = [ways["arena"].placement.live_bytes, taken["arena"], taken["fixed"]]
    cells = [case.name, f"{plan.budget_bytes / 2**20:.1f}", *(f"{size / 2**20:.1f}" for size in figures)]
    cells.append(f"{100 * (1 - taken['fixed'] / taken['arena']):.1f}")
    cells += [f"{size / 2**20:.1f}" for name in ways for size in (ways[name].peak_bytes, peaks[name])]
    cells.append(f"{min(wall['fixed']) / min(wall['arena']):.3f}")
    cells.append(f"{statistics.median(processor['fixed']) / statistics.median(processor['arena']):.3f}")
    return [*cells, "yes" if losses["arena"] == losses["fixed"] else "NO"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--budget", default="50", help="percent of the activations")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for planning")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first is not timed")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    print(machine())
    rows = []
    for name in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(CASES[name], options, Path(folder)))
        print("  ".join(rows[-1]), flush=True)
    print()
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
