"""Measured peak against prediction and budget, and bit-equality, over combinations in which every pair of choices meets.

    python -m benchmarks.combinations [--quick] [-o DIR] [--only PATTERN] [--costs analytic]

The choices are the model, the budget (a share of the activations, or the smallest that is found), how memory is saved, the target, and when
parameters are updated.  Each combination is compiled, compared with the unscheduled step and measured, in processes of its own; its result
is a file in the folder, whole or not at all, and a later run goes on with what is missing or failed.  Where a budget can't be met, the
smallest feasible one is taken.  Swaps are planned with a fixed bandwidth, so that plans don't depend on the disk.  Exit code 1 where
a peak is more than 2 % and 4 MiB off its prediction or exceeds the budget, or a bit differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Case, machine, table
from benchmarks.peaks import CELLS, Peak, compile_case
from onnxremat.errors import OnnxRematError
from onnxremat.files import write_json
from onnxremat.optimizers import FUSED, SEPARATE, Optimizer
from onnxremat.runtime import worker
from onnxremat.targets import ONNXRUNTIME, ORT_TRAINING
from onnxremat.verification import compare_schedules

_LANGUAGE = "cross_entropy:class_axis=-1"
_FULL, _QUICK = "(hidden=512, heads=8, vocab=16384, seq=256)", "(hidden=256, heads=4, vocab=4096, seq=128)"
#: Size -> models.
SIZES: dict[str, dict[str, Case]] = {
    "full": {
        "resnet50": Case("resnet50", "zoo:resnet50", ("x=8x3x224x224",), "cross_entropy"),
        "unet": Case("unet", "onnxremat.models.unet:unet", ("x=4x3x256x256",), "cross_entropy"),
        "gpt2": Case("gpt2", "onnxremat.models.transformer:gpt2" + _FULL, ("ids=8x256:int64:16384",), _LANGUAGE),
        "bert": Case("bert", "onnxremat.models.transformer:bert_mlm" + _FULL, ("ids=8x256:int64:16384",), _LANGUAGE),
    },
    "quick": {
        "resnet50": Case("resnet50", "onnxremat.models.resnet:resnet50(num_classes=100)", ("x=4x3x128x128",), "cross_entropy"),
        "unet": Case("unet", "onnxremat.models.unet:unet(width=32)", ("x=2x3x128x128",), "cross_entropy"),
        "gpt2": Case("gpt2", "onnxremat.models.transformer:gpt2" + _QUICK, ("ids=4x128:int64:4096",), _LANGUAGE),
        "bert": Case("bert", "onnxremat.models.transformer:bert_mlm" + _QUICK, ("ids=4x128:int64:4096",), _LANGUAGE),
    },
}
BANDWIDTH = "1GiB/s"
#: Name of a way to save memory -> options of ``compile``.
WAYS: dict[str, dict[str, str]] = {
    "recompute": {},
    "swap": {"swap": "disk", "swap_bandwidth": BANDWIDTH, "strategy": "swap_only"},
    "both": {"swap": "disk", "swap_bandwidth": BANDWIDTH},
}
#: What is combined -> its values.
FACTORS: dict[str, tuple[str, ...]] = {
    "model": tuple(SIZES["full"]),
    "budget": ("70", "50", "35", "min"),
    "way": tuple(WAYS),
    "target": (ORT_TRAINING.name, ONNXRUNTIME.name),
    "update": (SEPARATE, FUSED),
}
Combination = dict[str, str]


def exists(combination: Mapping[str, str]) -> bool:
    """Whether a combination can be compiled: the operators that swap to a disk are not standard ones."""
    return combination["target"] != ONNXRUNTIME.name or combination["way"] == "recompute"


def pairs(combination: Mapping[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """The pairs of (factor, value) that meet in a combination."""
    return set(itertools.combinations(combination.items(), 2))


def covering_array(factors: Mapping[str, Sequence[str]], valid: Callable[[Mapping[str, str]], bool] = lambda _: True) -> list[Combination]:
    """Combinations in which each pair of values of two factors that occurs in a valid combination occurs: a covering array of strength two.

    Greedy and deterministic: next comes the valid combination with the most pairs that have not met (Cohen et al., AETG, IEEE TSE 1997), of
    several one whose values were chosen least.
    """
    candidates = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    candidates = [candidate for candidate in candidates if valid(candidate)]
    missing = set().union(*map(pairs, candidates))
    chosen: list[Combination] = []
    used: Counter[tuple[str, str]] = Counter()
    while missing:
        chosen.append(max(candidates, key=lambda c: (len(pairs(c) & missing), -sum(used[item] for item in c.items()))))
        missing -= pairs(chosen[-1])
        used.update(chosen[-1].items())
    return chosen


def measure(combination: Combination, size: str, costs: str, time_limit: float, steps: int) -> dict[str, Any]:
    """In a worker: compile, compare and measure a combination; its result as JSON."""
    begin = time.perf_counter()
    options = {
        "target": combination["target"],
        "optimizer": Optimizer("adamw", update=combination["update"]),
        "costs": costs,
        "time_limit": time_limit,
        "verify": False,  # the schedules are compared below, without torch
    }
    with tempfile.TemporaryDirectory() as folder:
        case = SIZES[size][combination["model"]]
        artifact, label = compile_case(case, Path(folder) / "artifact", combination["budget"], **options, **WAYS[combination["way"]])
        different = compare_schedules(artifact, steps=3)
        peak = Peak.of(artifact, steps)
        seconds, plan = artifact.manifest["time"], artifact.manifest["plan"]
        return {
            "label": label,
            "peak": asdict(peak),
            "different": different,
            "overhead": seconds["seconds_predicted"] / seconds["seconds_unscheduled"] - 1,
            "recomputed": plan["recomputed_ops"],
            "swapped": plan["swapped_tensors"],
            "allocator": artifact.manifest["memory"]["allocator"],
            "seconds": time.perf_counter() - begin,
        }


def passed(result: Mapping[str, Any]) -> bool:
    """Whether a result is what was promised: the peak as predicted and within the budget, every bit equal."""
    if "error" in result:
        return False
    peak = Peak(**result["peak"])
    return peak.met and peak.within and not result["different"]


def row(combination: Combination, result: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    named = [combination["model"], combination["way"], combination["target"], combination["update"]]
    if "error" in result:
        return [*named, combination["budget"], result["error"], *[""] * (len(HEADER) - len(named) - 3), "NO"]
    equal, good = "NO" if result["different"] else "yes", "yes" if passed(result) else "NO"
    counts = [str(result["recomputed"]), str(result["swapped"])]
    return [*named, result["label"], *Peak(**result["peak"]).cells(), equal, f"{result['overhead']:+.1%}", *counts, good]


HEADER = ["model", "way", "target", "update", "budget", *CELLS, "bit-equal", "overhead", "recomputed", "swapped", "passed"]


def finished(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result in a file, where it is one of these settings and no error."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return None if found["settings"] != settings or "error" in found["result"] else found["result"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("combinations"), metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="small sizes: about a minute each on two cores")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of combinations, such as 'unet-*'")
    parser.add_argument("--costs", default="measured", choices=["measured", "analytic"])
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of planning")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    settings = {"size": "quick" if options.quick else "full", **{name: getattr(options, name) for name in ("costs", "time_limit", "steps")}}
    print(machine())
    rows, failed = [], 0
    for combination in covering_array(FACTORS, exists):
        name = "-".join(combination.values())
        if not fnmatch.fnmatch(name, options.only):
            continue
        path = options.output / f"{name}.json"
        result = finished(path, settings)
        if result is None:
            try:
                result = worker.call("benchmarks.combinations:measure", combination=combination, **settings)
            except OnnxRematError as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            write_json(path, {"combination": combination, "settings": settings, "result": result})
        rows.append(row(combination, result))
        failed += not passed(result)
        print(table(HEADER, rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(HEADER, rows))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
