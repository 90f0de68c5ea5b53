"""Swap, recompute and both on a twelve-layer MLP: predicted time, and the peak measured in the capped mode.

    python -m benchmarks.swap [--bandwidth 1GiB/s] [--budgets 60% 45% 30%] [--time-limit 30] [--spill-dir DIR]

Without ``--bandwidth`` that of the folder is measured.  Every artifact is verified bit for bit; a row says where a budget is out of reach.
Exit code 1 where both together are predicted to be slower than the better of the two.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxremat
from benchmarks.common import machine, table
from onnxremat.errors import BudgetInfeasible
from onnxremat.units import format_bytes

#: Name of a way to save memory -> options of ``compile``.
WAYS: dict[str, dict[str, str]] = {
    "recompute": {"swap": "none"},
    "swap": {"swap": "disk", "strategy": "swap_only"},
    "both": {"swap": "disk"},
}


def measure(way: str, budget: str, options: argparse.Namespace, folder: Path) -> tuple[list[str], float]:
    """Compile, verify and measure one artifact; a row of the table, and the predicted overhead: infinity where the budget is out of reach."""
    chosen: dict[str, Any] = dict(WAYS[way])
    if chosen["swap"] != "none":
        chosen |= {"swap_bandwidth": options.bandwidth, "spill_dir": options.spill_dir}
    try:
        artifact = onnxremat.compile(
            "tests.factories:mlp12",
            folder / f"{way}-{budget}",
            inputs=["x=32768x32"],
            labels=["labels=32768:int64:8"],
            loss="cross_entropy",
            optimizer="sgd",
            budget=budget,
            time_limit=options.time_limit,
            **chosen,
        )
    except BudgetInfeasible as error:
        return [budget, way, "-", "-", "-", f"needs {format_bytes(error.minimum_budget_bytes)}", "-", "-"], math.inf
    manifest = artifact.manifest
    memory, time, plan, checked = (manifest[key] for key in ("memory", "time", "plan", "verification"))
    overhead = time["seconds_predicted"] / time["seconds_unscheduled"] - 1
    row = [
        budget,
        way,
        str(plan["recomputed_ops"]),
        str(plan["swapped_tensors"]),
        f"{overhead:+.1%}",
        format_bytes(checked["peak_measured_bytes"]),
        f"{checked['peak_measured_bytes'] / memory['peak_unscheduled_bytes']:.1%}",
        "yes" if checked["bitwise_equal"] else "NO",
    ]
    return row, overhead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default=None)
    parser.add_argument("--budgets", nargs="+", default=["60%", "45%", "30%"])
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--spill-dir", default=None)
    options = parser.parse_args()
    print(machine())
    rows, slower = [], []
    with tempfile.TemporaryDirectory() as folder:
        for budget in options.budgets:
            found = {way: measure(way, budget, options, Path(folder)) for way in WAYS}
            rows += [row for row, _ in found.values()]
            best = min(overhead for _, overhead in found.values())
            if found["both"][1] > best + 1e-9:
                slower.append(budget)
    print(table(["budget", "way", "recomputes", "swapped", "time", "peak measured", "of unscheduled", "bit-equal"], rows))
    if slower:
        sys.exit(f"both together are slower than the better of the two at {', '.join(slower)}")


if __name__ == "__main__":
    main()
