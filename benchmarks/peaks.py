"""Measured peak against prediction and budget, in the fast capped mode, and bit-equality at every budget.

    python -m benchmarks.peaks [--budgets 90,70,50] [CASE ...]

Each budget is a share of the activations; where it can't be reached, the smallest feasible one is taken.  Every run is a process of its
own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnxremat
from benchmarks.common import CASES, Case, machine, table
from onnxremat.artifact import Artifact
from onnxremat.runtime import worker


def compile_case(case: Case, target: Path, percent: str) -> tuple[Artifact, str]:
    """The artifact for an activation budget, or for the smallest feasible budget where that is larger, and which it is."""
    options = {"inputs": case.inputs, "loss": case.loss, "verify": True}
    try:
        return onnxremat.compile(case.source, target, activation_budget=f"{percent}%", **options), f"{percent} %"  # type: ignore[arg-type]
    except onnxremat.BudgetInfeasible as error:
        return onnxremat.compile(case.source, target, budget=error.minimum_budget_bytes, **options), f"minimum ({percent} % refused)"  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--budgets", default="90,70,50")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print(machine())
    header = ["model", "budget", "MiB", "predicted", "measured", "off", "within", "bit-equal", "torch"]
    header += ["step s", "predicted s", "unscheduled s", "planning s"]
    rows = []
    for name in options.cases:
        for percent in options.budgets.split(","):
            with tempfile.TemporaryDirectory() as folder:
                artifact, label = compile_case(CASES[name], Path(folder) / name, percent)
                memory, time, checked = (artifact.manifest[k] for k in ("memory", "time", "verification"))
                run = worker.call("onnxremat.runtime.run:measure_job", artifact=str(artifact.path), steps=options.steps)
                measured, predicted, budget = run["peak_measured_bytes"], memory["peak_predicted_bytes"], memory["budget_bytes"]
                steady = sorted(run["step_seconds"][1:])
                rows.append(
                    [
                        name,
                        label,
                        f"{budget / 2**20:.1f}",
                        f"{predicted / 2**20:.1f}",
                        f"{measured / 2**20:.1f}",
                        f"{measured / predicted - 1:+.2%}",
                        "yes" if measured <= budget else "NO",
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
