"""Offline offset assignment: on instances of dynamic storage allocation, and as the bound for the arena of our own plans.

    python -m benchmarks.offsets --instances DIR
    python -m benchmarks.offsets --plans [CASE ...]

DIR holds files ``NAME.CAPACITY.csv`` with the columns ``id,lower,upper,size``: a buffer lives from lower up to, not including, upper.  With
``--plans``, training steps are planned into shares of their activations, and what the runtime's best-fit arena takes, compacted, is compared with
what the same order would take if every buffer could be placed by an offset of its own.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from benchmarks.common import CASES, machine, table
from benchmarks.scheduler.own import own_problem
from onnxremat.errors import BudgetInfeasible
from onnxremat.fit import Scheduled, Search, needed_budget, schedule_unscheduled
from onnxremat.placement import UNLIMITED, Buffer, assign_offsets, check_offsets, compact, place, step_buffers
from onnxremat.schedule import schedule
from onnxremat.scheduler import Problem

HEADER = ("instance", "buffers", "live bytes", "capacity", "achieved", "within", "seconds")


def load_buffers(path: Path) -> list[Buffer]:
    """The buffers of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Buffer(int(row["lower"]), int(row["upper"]) - 1, int(row["size"])) for row in csv.DictReader(file)]


def planned(problem: Problem, budget: int, search: Search) -> Scheduled:
    """A plan for the budget, or for the smallest for which this search finds one, about."""
    while True:
        try:
            return schedule(problem, budget, search)
        except BudgetInfeasible as error:
            # A little more than the least that was found, which the next search may miss.
            budget = error.minimum_budget_bytes * 102 // 100


def plans(names: list[str], percents: list[int], seconds: float, seed: int, folder: Path | None) -> None:
    """The table of our own plans."""
    header = ("model", "budget %", "ops", "live MiB", "offsets MiB", "arena MiB", "compacted MiB", "offsets +%", "compacted +%", "gain %")
    rows = []
    for name in names:
        problem = own_problem(CASES[name], folder)
        whole = schedule_unscheduled(problem).arena_bytes
        for percent in percents:
            budget = needed_budget(problem, whole * percent // 100)
            scheduled = planned(problem, budget, Search(time_limit=seconds, seed=seed))
            # The pipeline's compaction ends where the budget is kept; here it goes on, within the same live bytes.
            sequence = compact(problem, scheduled.plan.sequence, scheduled.plan.peak_bytes, 0, seconds, seed)
            buffers = step_buffers(problem, sequence)
            found = assign_offsets(buffers, seconds=seconds, seed=seed)
            check_offsets(buffers, found.offsets, found.bytes)
            arena, live = place(problem, sequence, UNLIMITED).arena_bytes, found.live_bytes
            sizes = [f"{size / 2**20:.1f}" for size in (live, found.bytes, scheduled.placement.arena_bytes, arena)]
            shares = [f"{100 * (found.bytes / live - 1):.2f}", f"{100 * (arena / live - 1):.2f}", f"{100 * (1 - found.bytes / arena):.2f}"]
            rows.append([name, str(percent), str(len(scheduled.plan.sequence)), *sizes, *shares])
            print("  ".join(rows[-1]), flush=True)
    print()
    print(table(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--instances", type=Path, help="folder with the instances (*.CAPACITY.csv)")
    what.add_argument("--plans", nargs="*", metavar="CASE", choices=list(CASES), help="training steps to plan; all by default")
    parser.add_argument("--budgets", default="70,50", help="for --plans: percent of the unscheduled step's arena")
    parser.add_argument("--problems", type=Path, help="for --plans: folder where the problems are kept between runs")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for an instance, or for each step of --plans")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine())
    if options.plans is not None:
        plans(options.plans or list(CASES), [int(p) for p in options.budgets.split(",")], options.time_limit, options.seed, options.problems)
        return
    rows = []
    for path in sorted(options.instances.glob("*.csv")):
        capacity = int(path.stem.rpartition(".")[2])
        buffers = load_buffers(path)
        found = assign_offsets(buffers, capacity, options.time_limit, options.seed)
        check_offsets(buffers, found.offsets, found.bytes)
        cells = [len(buffers), found.live_bytes, capacity, found.bytes, "yes" if found.bytes <= capacity else "NO", f"{found.seconds:.2f}"]
        rows.append([path.stem.rpartition(".")[0], *map(str, cells)])
        print("  ".join(rows[-1]), flush=True)
    if not rows:
        raise SystemExit(f"no instance in {options.instances}")
    print()
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
