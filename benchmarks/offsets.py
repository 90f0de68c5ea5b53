"""Offline offset assignment on instances of dynamic storage allocation.

    python -m benchmarks.offsets --instances DIR

DIR holds files ``NAME.CAPACITY.csv`` with the columns ``id,lower,upper,size``: a buffer lives from lower up to, not including, upper.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from benchmarks.common import machine, table
from onnxremat.placement import Buffer, assign_offsets, check_offsets

HEADER = ("instance", "buffers", "live bytes", "capacity", "achieved", "within", "seconds")


def load_buffers(path: Path) -> list[Buffer]:
    """The buffers of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Buffer(int(row["lower"]), int(row["upper"]) - 1, int(row["size"])) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, required=True, help="folder with the instances (*.CAPACITY.csv)")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for an instance")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(machine())
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
