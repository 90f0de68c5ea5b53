"""Plans for published instances within published budgets, beside what others reached: ``python -m benchmarks.scheduler --instances DIR``.

With ``--large``, plans for large problems of known shape instead (see ``synthetic.py``): the seconds to the first plan count there.
``python -m benchmarks.scheduler --own [MODEL...]`` plans training graphs of our own likewise, within shares of their activations.

DIR holds plain instances (see ``scheduler/files.py``).  Each plan is scored by the simulator and, with ``--scorer FILE``, by a program
that is called as ``FILE INSTANCE SEQUENCE`` and prints a JSON object with ``valid``, ``peak_percent`` and ``overhead_percent``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import machine
from benchmarks.scheduler.own import OWN, own_problem
from benchmarks.scheduler.synthetic import gpt_step, layered
from onnxremat.scheduler import Infeasible, Problem, Progress, evaluate, solve
from onnxremat.scheduler.annealer import library

# File stem -> budget in percent of the peak of the instance's own order -> the least cost increase published for it, percent.
# Checkmate and MOCCASIN as published with MOCCASIN (ICML 2023), FastSA (NeurIPS 2023), PyTorch's min-cut and knapsack, a plain annealer.
PUBLISHED = {
    "rl1_n100": {90: 0.0, 80: 0.0, 70: 4.75},
    "rl2_n250": {90: 0.0, 80: 0.0, 70: 2.6},
    "rl4_n1000": {90: 0.21, 80: 1.72, 70: 5.70},
    "fcn8_b32": {90: 0.0, 80: 0.1, 70: 0.892},
    "resnet50_b256": {90: 0.1, 80: 0.279, 70: 0.574, 50: 1.634},
    "mobilenet_b512": {80: 0.370, 60: 1.148, 50: 1.666},
    "unet_b32": {80: 2.145, 60: 4.451, 50: 6.967},
    "gpt12_b8_t512": {85.1: 1.43, 72.0: 4.28, 52.5: 10.88, 38.5: 16.84, 29.2: 20.74, 19.9: 25.0},
}
# Name -> problem and budget in percent of the base order's peak.
LARGE = {
    "gpt-100": (lambda: gpt_step(100), 50.0),
    "layered-1000": (lambda: layered(1000), 70.0),
    "layered-5000": (lambda: layered(5000), 70.0),
}
HEADER = ("instance", "budget %", "cost +%", "bound +%", "gap", "peak/budget", "seconds", "published +%", "first plan")


@dataclass(frozen=True)
class Row:
    """A cell of the table; None where there is no plan."""

    name: str
    budget: float
    cost: float | None
    bound: float | None
    peak: float | None
    seconds: float
    published: float | None
    first: float | None = None

    def text(self) -> list[str]:
        def show(value: float | None, digits: int = 3) -> str:
            return "-" if value is None else f"{value:.{digits}f}"

        gap = None if self.cost is None or self.bound is None else self.cost - self.bound
        cells = [show(self.cost), show(self.bound), show(gap), show(self.peak, 4), show(self.seconds, 1), show(self.published)]
        cells.append(show(self.first, 1))
        return [self.name, f"{self.budget:g}", *cells]


def measure(problem: Problem, path: Path | None, percent: float, published: float | None, options: argparse.Namespace) -> Row:
    """Plan one problem, of an instance where there is a path, within one budget."""
    name = problem.name if path is None else path.stem
    base = evaluate(problem, range(len(problem.ops)))
    budget = int(base.peak_bytes * percent / 100 + 1e-6)
    first: list[float] = []

    def tell(progress: Progress) -> None:
        if progress.seconds is not None and not first:
            first.append(progress.elapsed)

    started = time.monotonic()
    try:
        plan = solve(problem, budget, options.strategy, options.time_limit, options.seed, tell, bound_seconds=options.time_limit / 3)
    except Infeasible:
        return Row(name, percent, None, None, None, time.monotonic() - started, published, None)
    seconds = time.monotonic() - started
    judged = evaluate(problem, plan.sequence)
    cost = 100 * (judged.seconds / base.seconds - 1)
    if judged.peak_bytes > budget:
        raise SystemExit(f"{name} at {percent} %: the plan exceeds its budget")
    if options.scorer is not None and path is not None:
        score(options.scorer, path, plan.sequence, cost, 100 * judged.peak_bytes / base.peak_bytes)
    bound = 100 * (plan.seconds_lower_bound / base.seconds - 1)
    return Row(name, percent, cost, bound, judged.peak_bytes / budget, seconds, published, *first[:1])


def score(scorer: Path, instance: Path, sequence: tuple[int, ...], cost: float, peak: float) -> None:
    """Have another program judge the sequence; ends the benchmark where it disagrees."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sequence.json"
        file.write_text(json.dumps(sequence), encoding="utf-8")
        done = subprocess.run([sys.executable, str(scorer), str(instance), str(file)], capture_output=True, text=True)
    verdict = json.loads(done.stdout) if done.stdout else {"valid": False, "why": done.stderr.strip()}
    agree = verdict["valid"] and abs(verdict["overhead_percent"] - cost) < 1e-3 and abs(verdict["peak_percent"] - peak) < 1e-3
    if not agree:
        raise SystemExit(f"{instance.stem}: the scorer finds {verdict}, the simulator a cost of +{cost:.4f} % and a peak of {peak:.4f} %")


def own(options: argparse.Namespace) -> None:
    """Plan training graphs of our own, 50 and 25 % of their activations by default, and show each as a row."""
    unknown = sorted({*options.own} - {*OWN})
    if unknown:
        raise SystemExit(f"there is no model {unknown[0]}; there are {', '.join(OWN)}")
    widths = [12, 7, 9, 11, 10, 9, 9]
    header = ("model", "ops", "budget %", "overhead %", "bound %", "gap", "seconds")
    print("  ".join(text.rjust(width) for text, width in zip(header, widths, strict=True)))
    for name in options.own or OWN:
        problem = own_problem(OWN[name], options.problems)
        base = evaluate(problem, range(len(problem.ops)))
        for percent in options.budget or [50.0, 25.0]:
            budget = problem.resident_bytes + int((base.peak_bytes - problem.resident_bytes) * percent / 100)
            started = time.monotonic()
            try:
                plan = solve(problem, budget, options.strategy, options.time_limit, options.seed, bound_seconds=options.time_limit / 3)
            except Infeasible as error:
                activations = base.peak_bytes - problem.resident_bytes
                floor, smallest = (100 * (b - problem.resident_bytes) / activations for b in (error.lower_bound_bytes, error.minimum_budget_bytes))
                verdict = "proven infeasible" if error.lower_bound_bytes > budget else "none found"
                cells = ["-", "-", "-", f"{time.monotonic() - started:.1f}", f"  {verdict}: floor {floor:.1f} %, smallest found {smallest:.1f} %"]
            else:
                cost, bound = (100 * (s / base.seconds - 1) for s in (plan.seconds, plan.seconds_lower_bound))
                cells = [f"{cost:.3f}", f"{bound:.3f}", f"{cost - bound:.3f}", f"{time.monotonic() - started:.1f}"]
            row = [name, str(len(problem.ops)), f"{percent:g}", *cells]
            print("  ".join(text.rjust(width) for text, width in zip(row, [*widths, 0], strict=False)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description="plans for published instances, as a table")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--instances", type=Path, help="folder with the instances (*.json)")
    what.add_argument("--large", action="store_true", help="large problems of known shape instead: " + ", ".join(LARGE))
    what.add_argument("--own", nargs="*", metavar="MODEL", help=f"our own training graphs, all or some of {', '.join(OWN)}")
    parser.add_argument("--problems", type=Path, help="folder in which the problems of --own are kept from run to run")
    parser.add_argument("--only", action="append", default=[], help="names of instances to take, by their beginning; may be repeated")
    parser.add_argument("--budget", action="append", type=float, default=[], help="percent, with --own of the activations; may be repeated")
    parser.add_argument("--time-limit", type=float, help="seconds for a plan, its bound included (default 60, with --own 120)")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scorer", type=Path, help="a program that judges the sequences as well")
    options = parser.parse_args()
    if options.time_limit is None:
        options.time_limit = 60.0 if options.own is None else 120.0
    print(machine())
    print(f"annealer: {'compiled' if library() else 'the Python twin'}; {options.time_limit:g} s each, seed {options.seed}")
    if options.own is not None:
        own(options)
        return
    widths = [16, 8, 9, 9, 8, 11, 8, 12, 10]
    print("  ".join(text.rjust(width) for text, width in zip(HEADER, widths, strict=True)))
    known = dict.fromkeys(LARGE) if options.large else {p.stem: p for p in sorted(options.instances.glob("*.json"))}
    known = {name: path for name, path in known.items() if not options.only or any(name.startswith(o) for o in options.only)}
    for name, path in known.items():
        problem = LARGE[name][0]() if path is None else Problem.load(path)
        published = PUBLISHED.get(name, {})
        for percent in options.budget or [*published] or ([LARGE[name][1]] if path is None else [80.0, 60.0]):
            row = measure(problem, path, percent, published.get(percent), options)
            print("  ".join(text.rjust(width) for text, width in zip(row.text(), widths, strict=True)), flush=True)
    if not known:
        raise SystemExit("nothing matches --only")


if __name__ == "__main__":
    main()
