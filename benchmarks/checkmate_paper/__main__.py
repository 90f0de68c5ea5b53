"""Checkmate's evaluation, reproduced: ``python -m benchmarks.checkmate_paper --results DIR [--instances DIR] [--quick] [NETWORK ...]``.

Overhead against budget and the largest batch on 16 GB at one extra forward pass, in FLOPs, for each network of the paper: from our own graph,
and from the published instance where the folder of ``--instances`` has one.  Results are kept in the folder of ``--results`` as JSON, one file
for a network, a graph and a strategy; what is there for the same settings is not computed again.  Ends with tables and a curve (SVG) for each graph.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.checkmate_paper.draw import overhead_plot
from benchmarks.checkmate_paper.measure import BASELINES, PLANNED, curves, largest_batch, search_largest_batch
from benchmarks.checkmate_paper.networks import Network, ScaledProblem, forward_cost, instance_problem, own_problem, selected
from benchmarks.common import machine, table
from onnxremat.files import write_json, write_text
from onnxremat.scheduler import Problem, bytes_floor, evaluate

#: Budgets in percent of the way from the working set of the largest op, below which there is no plan, to the unscheduled peak.
BUDGETS, QUICK_BUDGETS = (90, 75, 60, 45, 30, 20, 10, 5), (75, 50, 25, 10)
#: With --quick, the paper's program and its relaxation are left out for more ops: they would take most of the time.
QUICK_OPS = 80
#: As printed by the paper's artifact (mlsys20_artifact.md) for VGG19; it gives no figures for the baselines on other networks.
PUBLISHED_BASELINES = {("VGG19", "keep_all"): 164, ("VGG19", "chen_sqrt"): 196, ("VGG19", "chen_greedy"): 260}
_COLUMNS = ("keep_all", "chen_sqrt", "chen_greedy", "griewank", "checkmate_lp", "checkmate_ilp", "auto")


def measure(key: str, network: Network, scaled: ScaledProblem, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one graph, from the folder where they are there."""
    problem = scaled.at(network.batch)
    base = evaluate(problem, range(len(problem.ops)))
    floor = bytes_floor(problem)
    budgets = [floor + (base.peak_bytes - floor) * percent // 100 for percent in (QUICK_BUDGETS if options.quick else BUDGETS)]
    found: dict[str, Any] = {
        "ops": len(problem.ops),
        "peak_bytes": base.peak_bytes,
        "floor_bytes": floor,
        "forward_share": forward_cost(problem) / base.seconds,
        "strategies": {},
    }
    starts: list[tuple[int, ...]] = []
    small = len(problem.ops) <= QUICK_OPS
    for name in (*BASELINES, *(n for n in PLANNED if n == "auto" or small or not options.quick)):
        path = options.results / f"{key}.{name}.json"
        settings = {"budgets": budgets, "time_limit": options.time_limit}
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if result.get("settings") != settings:
            print(f"{key}: {name}", flush=True)
            result = one(problem, scaled, name, budgets, starts, options) | {"settings": settings}
            write_json(path, result)
        starts += [tuple(sequence) for sequence in result["proposed"]]
        found["strategies"][name] = result
    return found


def one(
    problem: Problem, scaled: ScaledProblem, name: str, budgets: list[int], starts: list[tuple[int, ...]], options: argparse.Namespace
) -> dict[str, Any]:
    """The result of one strategy on one graph, as JSON data."""
    curve = curves(problem, [name], budgets, options.time_limit)[name]
    batch = max((largest_batch(scaled, sequence) for sequence in curve.proposed), default=0)
    kept = [sequence for sequence in curve.proposed if batch and largest_batch(scaled, sequence) == batch][:1]
    bound = None
    if name in PLANNED and not curve.refused:
        # Ours starts from the strategies of the literature, which it knows too.
        start = starts if name == "auto" else []
        batch, bound = search_largest_batch(scaled, name, [*start, *curve.proposed], options.time_limit, 0.02 if options.quick else 0.005)
    return {
        "points": curve.points,
        "largest_batch": batch,
        "largest_batch_bound": bound,
        "seconds": curve.seconds,
        "refused": curve.refused,
        "proposed": kept,
    }


def batches(name: str, graph: str, result: dict[str, Any], network: Network) -> list[str]:
    """The row of a graph in the table of largest batches."""
    found = result["strategies"]
    cells = []
    for column in _COLUMNS:
        parts = [n for n in (column, f"{column}_ap", f"{column}_linear") if n in found]
        if not parts:
            cells.append("-")
            continue
        best = max(found[n]["largest_batch"] for n in parts)
        cell = " / ".join(str(found[n]["largest_batch"]) for n in parts) if len(parts) > 1 else str(best)
        if all(found[n]["refused"] for n in parts):
            cell = "too large"
        published = PUBLISHED_BASELINES.get((name, column))
        cells.append(cell if published is None else f"{cell} ({published})")
    paper = "-" if network.paper is None else f"{network.paper}{'+' if network.at_least else ''}"
    return [name, graph, str(result["ops"]), *cells, paper]


def overheads(name: str, graph: str, result: dict[str, Any], percent: int) -> list[str]:
    """The row of a graph in the table of overheads at a budget."""
    budget = result["floor_bytes"] + (result["peak_bytes"] - result["floor_bytes"]) * percent // 100
    cells = []
    for strategy in (*BASELINES, *PLANNED):
        data = result["strategies"].get(strategy, {"points": [], "refused": ""})
        costs = [cost for size, cost in data["points"] if size <= budget]
        cells.append(f"{100 * (min(costs) - 1):+.1f}" if costs else "too large" if data["refused"] else "-")
    return [name, graph, str(percent), *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help="networks to take; all by default")
    parser.add_argument("--results", type=Path, required=True, help="folder where results are kept")
    parser.add_argument("--instances", type=Path, help="folder with the published instances")
    parser.add_argument("--time-limit", type=float, help="seconds for a plan (60, with --quick 8)")
    parser.add_argument("--quick", action="store_true", help="three budgets, short searches, a coarser largest batch")
    parser.add_argument("--no-own", action="store_true", help="leave our own graphs out; needs no torch")
    options = parser.parse_args()
    options.time_limit = options.time_limit or (8.0 if options.quick else 60.0)
    options.results.mkdir(parents=True, exist_ok=True)
    print(machine())
    largest, costs = [], []
    for network in selected(options.networks):
        graphs: dict[str, ScaledProblem] = {}
        if options.instances is not None and network.instance:
            graphs["published"] = instance_problem(network, options.instances)
        if not options.no_own:
            graphs["own"] = own_problem(network, options.results / "problems")
        for graph, scaled in graphs.items():
            key = f"{network.name}.{graph}{'.quick' if options.quick else ''}"
            result = measure(key, network, scaled, options)
            points = {name: [(b, c) for b, c in data["points"]] for name, data in result["strategies"].items()}
            title = f"{network.name}, batch {network.batch}, {graph} graph"
            write_text(options.results / f"{key}.svg", overhead_plot(title, points, result["peak_bytes"]))
            largest.append(batches(network.name, graph, result, network))
            costs += [overheads(network.name, graph, result, percent) for percent in (QUICK_BUDGETS if options.quick else BUDGETS)]
            print(table(("network", "graph", "ops", *_COLUMNS, "paper"), largest[-1:]).splitlines()[-1], flush=True)
    print("\nLargest batch on 16 GB at one extra forward pass; of articulation points / linearised; in brackets the paper's artifact\n")
    print(table(("network", "graph", "ops", *_COLUMNS, "paper"), largest))
    print("\nOverhead in percent of FLOPs, at budgets in percent of the way from the largest working set to the unscheduled peak\n")
    print(table(("network", "graph", "budget %", *BASELINES, *PLANNED), costs))


if __name__ == "__main__":
    main()
