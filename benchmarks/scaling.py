"""Compile time and memory against the size of the graph, by stage.

    python -m benchmarks.scaling [--layers 2,8,32,100,200] [--plan-seconds 20]

GPTs of growing depth, narrow so that the weights are few and the graph is what counts.  Each size is compiled in a process of its own; its
memory is the most that was resident, above what Python and the libraries take before the first stage.  Planning is asked for in two parts: what it
does in any case (no time given), and the search, which takes the time that it is given.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table
from onnxremat.runtime import worker

STAGES = ("export", "normalize", "differentiate", "cost", "plan, least", "plan, search", "place", "emit", "check order")


def gpt(layers: int) -> Any:
    """A narrow GPT of a depth."""
    from onnxremat.models.transformer import gpt2

    return gpt2(layers=layers, hidden=64, heads=2, vocab=256, seq=128)


def _resident() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def compile_job(layers: int, plan_seconds: float) -> dict[str, Any]:
    """In a worker: compile one size to 60 % of its activations, stage by stage."""
    import torch  # noqa: F401  (loaded before the clock starts)

    from onnxremat import pipeline, training_graph
    from onnxremat.artifact import save_model
    from onnxremat.emit import emit
    from onnxremat.exporters import InputSpec, Loss, export_torch
    from onnxremat.optimizers import Optimizer
    from onnxremat.placement import UNLIMITED, place
    from onnxremat.scheduler import Infeasible, evaluate, solve

    seconds: dict[str, float] = {}

    def timed(stage: str, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return run(*arguments, **options)
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began

    module, before = gpt(layers), _resident()
    inputs, loss = (InputSpec.parse("input_ids=4x128:int64:256"),), Loss.parse("cross_entropy:class_axis=-1")
    forward = timed("export", export_torch, module, inputs, (), loss, 0, "gpt")
    normalize = training_graph.normalize
    training_graph.normalize = lambda *a, **k: timed("normalize", normalize, *a, **k)
    training = timed("differentiate", training_graph.build_training_graph, forward, Optimizer(), "nchw")
    seconds["differentiate"] -= seconds["normalize"]
    request = pipeline.Request("gpt", costs="analytic")
    costs = timed("cost", pipeline.node_costs, training, Path(), request, lambda _: None)
    problem = timed("cost", pipeline.training_problem, training, costs, "gpt")
    peak = evaluate(problem, range(len(problem.ops))).profile.max()
    budget = problem.resident_bytes + int(0.6 * (peak - problem.resident_bytes))
    budget = max(budget, problem.optimizer_peak_bytes)
    with contextlib.suppress(Infeasible):
        timed("plan, least", solve, problem, budget, time_limit=0.0, bound_seconds=0.0)
    plan = timed("plan, search", solve, problem, budget, time_limit=plan_seconds, bound_seconds=0.0)
    placement = timed("place", place, problem, plan.sequence, UNLIMITED)
    emitted = timed("emit", emit, training.model, problem, plan, placement.pen_bytes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.onnx"
        timed("emit", save_model, emitted.model, path)
        timed("check order", pipeline.check_order, path, emitted)
    return {"ops": len(problem.ops), "runs": len(plan.sequence), "seconds": seconds, "bytes": _resident() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="2,8,32,100,200")
    parser.add_argument("--plan-seconds", type=float, default=20.0, help="seconds that the search is given")
    options = parser.parse_args()
    print(machine())
    header, rows = ("layers", "ops", *(f"{stage} s" for stage in STAGES), "MiB"), []
    for layers in map(int, options.layers.split(",")):
        found = worker.call("benchmarks.scaling:compile_job", layers=layers, plan_seconds=options.plan_seconds)
        cells = [f"{found['seconds'][stage]:.2f}" for stage in STAGES]
        rows.append([str(layers), str(found["ops"]), *cells, f"{found['bytes'] / 2**20:.0f}"])
        print("  ".join(rows[-1]), flush=True)
    print()
    print(table(header, rows))


if __name__ == "__main__":
    main()
