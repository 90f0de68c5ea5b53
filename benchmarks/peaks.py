"""Measured peak against prediction and budget, in the fast capped mode, and bit-equality at every budget.

    python -m benchmarks.peaks [--budgets 90,70,50] [CASE ...]

Each budget is a share of the activations; where it can't be reached, the smallest feasible one is taken.  Every run is a process of its
own.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxremat
from benchmarks.common import CASES, Case, machine, table
from onnxremat.artifact import Artifact
from onnxremat.runtime import worker


def compile_case(case: Case, folder: Path, percent: str, **options: Any) -> tuple[Artifact, str]:
    """The artifact for a budget, or for the smallest feasible budget where that is larger, and which it is.

    Args:
        case: the model.
        folder: the artifact's.
        percent: a share of the activations without its sign, such as ``"70"``, or ``"min"``.
        options: further options of ``onnxremat.compile``.
    """
    options |= {"inputs": case.inputs, "loss": case.loss}
    if percent == "min":
        return onnxremat.compile(case.source, folder, budget="min", **options), "minimum"
    try:
        return onnxremat.compile(case.source, folder, activation_budget=f"{percent}%", **options), f"{percent} %"
    except onnxremat.BudgetInfeasible as error:
        return onnxremat.compile(case.source, folder, budget=error.minimum_budget_bytes, **options), f"minimum ({percent} % refused)"


@dataclass(frozen=True)
class Peak:
    """Bytes of a step: what it may hold, what the plan says, and what a process of its own reached."""

    budget: int
    predicted: int
    measured: int
    step_seconds: list[float]

    @classmethod
    def of(cls, artifact: Artifact, steps: int) -> Peak:
        """Run some steps in a process of its own, in the capped mode."""
        memory = artifact.manifest["memory"]
        run = worker.call("onnxremat.runtime.run:measure_job", artifact=str(artifact.path), steps=steps)
        return cls(memory["budget_bytes"], memory["peak_predicted_bytes"], run["peak_measured_bytes"], run["step_seconds"])

    @property
    def within(self) -> bool:
        """Whether the process stayed within the budget."""
        return self.measured <= self.budget

    @property
    def met(self) -> bool:
        """Whether the peak is what was predicted, within 2 % or 4 MiB."""
        return abs(self.measured - self.predicted) <= max(0.02 * self.predicted, 4 * 2**20)

    def cells(self) -> list[str]:
        """Budget, prediction and measurement in MiB, how far the measurement is off, and whether it is within the budget."""
        sizes = [f"{size / 2**20:.1f}" for size in (self.budget, self.predicted, self.measured)]
        return [*sizes, f"{self.measured / self.predicted - 1:+.2%}", "yes" if self.within else "NO"]


#: Titles of ``Peak.cells``.
CELLS = ["MiB", "predicted", "measured", "off", "within"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--budgets", default="90,70,50")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print(machine())
    header = ["model", "budget", *CELLS, "bit-equal", "torch", "step s", "predicted s", "unscheduled s", "planning s"]
    rows = []
    for name in options.cases:
        for percent in options.budgets.split(","):
            with tempfile.TemporaryDirectory() as folder:
                artifact, label = compile_case(CASES[name], Path(folder) / name, percent)
                time, checked = (artifact.manifest[k] for k in ("time", "verification"))
                peak = Peak.of(artifact, options.steps)
                steady = sorted(peak.step_seconds[1:])
                rows.append(
                    [
                        name,
                        label,
                        *peak.cells(),
                        "yes" if checked["bitwise_equal"] else "NO",
                        f"{checked['max_relative_error_torch']:.0e}",
                        f"{steady[len(steady) // 2]:.2f}",
                        f"{time['seconds_predicted']:.2f}",
                        f"{time['seconds_unscheduled']:.2f}",
                        f"{time['solve_seconds']:.0f}",
                    ]
                )
                print(table(header, rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(header, rows))


if __name__ == "__main__":
    main()
