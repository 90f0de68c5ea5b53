"""The unscheduled step on ONNX Runtime against torch eager: same batch, same threads, processes interleaved.

    python -m benchmarks.unscheduled [--rounds 3] [--steps 5] [--threads 2] [CASE ...]

Prints the ratio of median seconds of forward + backward, and where the time goes by operator on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import onnxremat
from benchmarks.common import CASES, machine, table
from onnxremat.runtime import worker


def torch_job(case: str, steps: int, threads: int, profile: bool = False) -> dict[str, Any]:
    """In a worker: seconds of each forward + backward in torch eager, and microseconds by operator."""
    import time

    import numpy as np
    import torch

    from onnxremat.exporters import InputSpec, Loss, build_module
    from onnxremat.verification import call_module

    torch.set_num_threads(threads)
    chosen = CASES[case]
    module, loss = build_module(chosen.source, 0), Loss.parse(chosen.loss)
    rng = np.random.default_rng(0)
    batch = {s.name: torch.from_numpy(s.sample(rng)) for s in map(InputSpec.parse, chosen.inputs)}
    with torch.no_grad():
        output = call_module(module, batch)
    label = torch.from_numpy(loss.label_spec(tuple(output.shape), "float32").sample(rng))

    def step() -> None:
        module.zero_grad(set_to_none=True)
        loss.torch(call_module(module, batch), label).backward()

    step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    operators: dict[str, float] = {}
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            step()
        operators = {e.key: e.self_cpu_time_total * 1e-6 for e in recorded.key_averages()}
    return {"seconds": seconds, "operators": operators}


def ort_job(artifact: str, steps: int, threads: int, profile: bool = False) -> dict[str, Any]:
    """In a worker: seconds of each forward + backward of the unscheduled graph, and seconds by operator."""
    import numpy as np

    from onnxremat.artifact import UNSCHEDULED, Artifact
    from onnxremat.runtime.session import Options, make_session, run_profiled, sample_arrays
    from onnxremat.runtime.trainer import Trainer, random_batches

    found = Artifact.load(artifact)
    if profile:
        path, options = found.file(UNSCHEDULED), Options(threads=threads)
        rows, _ = run_profiled(path, sample_arrays(make_session(path, options), np.random.default_rng(0)), 3, options)
        totals: Counter[str] = Counter()
        for row in rows[-1]:
            totals[row["op_type"]] += row["seconds"]
        return {"seconds": [], "operators": dict(totals)}
    import time

    trainer = Trainer(found, threads=threads, capped=False, scheduled=False)
    batch = next(random_batches([*found.inputs, *found.labels], 0))
    trainer.accumulate(batch)
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        trainer.accumulate(batch)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "operators": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(machine())
    rows, profiles = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            case, target = CASES[name], Path(folder) / name
            onnxremat.compile(case.source, target, inputs=case.inputs, loss=case.loss, costs="analytic", verify=False)
            sides: dict[str, list[float]] = {"torch": [], "ort": []}
            for _ in range(options.rounds):
                sides["torch"] += worker.call("benchmarks.unscheduled:torch_job", case=name, steps=options.steps, threads=options.threads)[
                    "seconds"
                ]
                sides["ort"] += worker.call(
                    "benchmarks.unscheduled:ort_job", artifact=str(target), steps=options.steps, threads=options.threads
                )["seconds"]
            medians = {side: statistics.median(values) for side, values in sides.items()}
            rows.append(
                [
                    name,
                    ", ".join(case.inputs),
                    f"{medians['torch']:.3f}",
                    f"{medians['ort']:.3f}",
                    f"{medians['ort'] / medians['torch']:.2f}",
                ]
            )
            print(table(["model", "batch", "torch eager s", "ONNX Runtime s", "ratio"], rows[-1:]), flush=True)
            for side, job, arguments in (("torch", "torch_job", {"case": name}), ("ONNX Runtime", "ort_job", {"artifact": str(target)})):
                found = worker.call(f"benchmarks.unscheduled:{job}", steps=1, threads=options.threads, profile=True, **arguments)[
                    "operators"
                ]
                top = Counter(found).most_common(12)
                profiles.append(f"{name}, {side}: " + ", ".join(f"{op} {seconds * 1e3:.0f} ms" for op, seconds in top))
    print()
    print(table(["model", "batch", "torch eager s", "ONNX Runtime s", "ratio"], rows))
    print()
    print("\n".join(profiles))


if __name__ == "__main__":
    main()
