"""Training the same models with torch, with ONNX Runtime's own artifacts, and with onnxremat: step time, peak, largest batch.

    python -m benchmarks.side_by_side -o DIR [--turns 7] [--budgets 100%,70%,50%,35%] [--batches] [MODEL ...]

Every side runs forward, backward and AdamW on the same batch with the same threads, each in a process of its own, and they take turns step by
step.  Times are medians; relative ones are medians of the ratios of neighbouring turns.  Results are kept in DIR, one file a model, and what is
there is not run again.  ``--batches`` also looks for the largest batch in the memory that torch eager needs for the given one, up to 8 times that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table
from benchmarks.side_by_side.cases import MODELS
from benchmarks.side_by_side.sides import largest_batch
from benchmarks.turns import in_turns, ratio
from onnxremat.files import write_text
from onnxremat.runtime import worker

HEADER = ["model", "batch", "side", "step s", "time", "peak MiB", "peak", "mapped MiB", "largest batch"]
TORCH = ("eager", "checkpoint", "budget 0.5")
_MOST = 8
#: Of each side its seconds, peak, and more.
Found = dict[str, dict[str, Any]]


def _call(job: str, **arguments: Any) -> Any:
    return worker.call(f"benchmarks.side_by_side.sides:{job}", **arguments)


def _attempt(work: Callable[[], Any]) -> Any:
    """What the work gives, or why it does not."""
    try:
        return work()
    except Exception as error:
        return {"error": " ".join(str(error).split())[-160:]}


def compare(name: str, found: Found, folder: Path, options: argparse.Namespace) -> Found:
    """All sides of one model: side -> seconds, peak, and more, added to what is found."""
    model = MODELS[name]
    sides: dict[str, tuple[str, dict[str, Any]]] = {}
    for how in TORCH:
        sides[f"torch {how}"] = "torch_side", {"model": name, "batch": model.batch, "how": how}
    generated = folder / "generated"
    generated.mkdir()
    written = {"model": name, "batch": model.batch, "folder": str(generated)}
    failed = _attempt(lambda: _call("generate_job", **written))
    if failed:
        found["ORT generate_artifacts"] = failed
    else:
        sides["ORT generate_artifacts"] = "generated_side", written
    for budget in options.budgets.split(","):
        side, target = f"onnxremat {budget}", str(folder / f"onnxremat_{budget.rstrip('%')}")
        figures = _attempt(
            lambda budget=budget, target=target: _call(
                "compile_job", model=name, batch=model.batch, folder=target, budget=budget, limit=options.time_limit
            )
        )
        if "error" in figures:
            found[side] = figures
            continue
        found[side] = {"compiled": figures}
        sides[side] = "onnxremat_side", {"folder": target}
    runs = in_turns({side: (f"benchmarks.side_by_side.sides:{maker}", arguments) for side, (maker, arguments) in sides.items()}, options.turns)
    for side, run in runs.items():
        entry = found.setdefault(side, {})
        entry |= {"error": run.error} if run.error else {"seconds": run.seconds, "peak": run.figures["peak"]}
    for how in TORCH:
        if "error" not in found[f"torch {how}"]:
            found[f"torch {how}"]["mapped"] = _call("peak_of", maker="torch_side", model=name, batch=model.batch, how=how, mapped=True)
    return found


def largest_batches(name: str, found: Found, folder: Path, options: argparse.Namespace) -> Found:
    """Adds the largest batch of each side in the memory that torch eager needs at the given one, judged by what is best for torch."""
    model = MODELS[name]
    limit = found["torch eager"]["mapped"]
    # A process of ours holds its session besides what is planned: a budget leaves room for that.
    compiled = [entry for entry in found.values() if "compiled" in entry and "peak" in entry]
    session = max((entry["peak"] - entry["compiled"]["peak_predicted_bytes"] for entry in compiled), default=0) + limit // 100
    plan = {"budget": str(limit - session), "limit": options.time_limit}

    def torch_fits(how: str) -> Callable[[int], bool]:
        return lambda batch: bool(_call("peak_of", maker="torch_side", model=name, batch=batch, how=how, mapped=True) <= limit)

    def compiles(batch: int) -> bool:
        target = folder / f"batch_{batch}"
        result = _attempt(lambda: _call("compile_job", model=name, batch=batch, folder=str(target), **plan))
        if "error" in result:
            return False
        fits = _call("peak_of", maker="onnxremat_side", folder=str(target)) <= limit
        shutil.rmtree(target)
        if fits:
            found["onnxremat at the limit"] = {"compiled": result, "largest": batch}
        return bool(fits)

    found["torch eager"]["largest"] = model.batch
    for how in TORCH[1:]:
        if "error" not in found[f"torch {how}"]:
            found[f"torch {how}"]["largest"] = largest_batch(torch_fits(how), model.batch, _MOST * model.batch)
    largest_batch(compiles, model.batch, _MOST * model.batch)
    return found


def rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    """The table's rows of one model; time and peak relative to torch eager."""
    eager = found["torch eager"]
    size = eager["peak"]
    out = []
    for side, entry in found.items():
        row = [name, str(MODELS[name].batch), side]
        if "error" in entry:
            row += ["fails: " + entry["error"][:70], "", "", "", "", ""]
        elif "seconds" in entry:
            seconds, of_eager = statistics.median(entry["seconds"]), ratio(entry["seconds"], eager["seconds"])
            mapped = f"{entry['mapped'] / 2**20:.0f}" if "mapped" in entry else ""
            row += [f"{seconds:.2f}", f"{of_eager:.2f}", f"{entry['peak'] / 2**20:.0f}", f"{entry['peak'] / size:.2f}", mapped]
            row += [str(entry.get("largest", ""))]
        else:
            row += ["", "", "", "", "", f"{entry['largest']} (predicted {_overhead(entry['compiled']):+.1%})"]
        out.append(row)
    return out


def _overhead(figures: dict[str, Any]) -> float:
    return float(figures["seconds_predicted"] / figures["seconds_unscheduled"] - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="results, one file a model")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--budgets", default="100%,70%,50%,35%", help="shares of the activations")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS", help="of planning, each (default 30)")
    parser.add_argument("--batches", action="store_true", help="also look for the largest batch in the memory of torch eager")
    options = parser.parse_args()
    print(machine())
    options.output.mkdir(parents=True, exist_ok=True)
    every: list[list[str]] = []
    for name in options.models:
        path = options.output / f"{name.replace(' ', '_').replace(',', '')}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        folder = options.output / "work"
        todo = [] if found else [compare]
        if options.batches and "largest" not in found.get("torch eager", {}):
            todo.append(largest_batches)
        for work in todo:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            found = work(name, found, folder, options)
            write_text(path, json.dumps(found, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
        every += rows(name, found)
        print(table(HEADER, rows(name, found)), flush=True)
    print()
    print(table(HEADER, every))


if __name__ == "__main__":
    main()
