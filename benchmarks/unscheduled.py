"""The unscheduled step on ONNX Runtime against torch eager: same batch, same threads, two processes that take turns.

    python -m benchmarks.unscheduled [--turns 20] [--threads 2] [CASE ...]

Prints median seconds of forward + backward, the median of the ratios of neighbouring turns with its quartiles, and where the time goes by
operator on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxremat
from benchmarks.common import CASES, machine, table
from benchmarks.turns import in_turns, ratio
from onnxremat.runtime import worker


def torch_step(case: str, threads: int) -> Callable[[], object]:
    """Forward and backward in torch eager."""
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

    return step


def ort_step(artifact: str, threads: int) -> Callable[[], object]:
    """Forward and backward of the unscheduled graph."""
    from onnxremat.artifact import Artifact
    from onnxremat.runtime.trainer import Trainer, random_batches

    found = Artifact.load(artifact)
    trainer = Trainer(found, threads=threads, capped=False, scheduled=False)
    batch = next(random_batches([*found.inputs, *found.labels], 0))
    return lambda: trainer.accumulate(batch)


def torch_operators(case: str, threads: int) -> dict[str, float]:
    """In a worker: seconds by operator of one step in torch eager."""
    import torch

    step = torch_step(case, threads)
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        step()
    return {e.key: e.self_cpu_time_total * 1e-6 for e in recorded.key_averages()}


def ort_operators(artifact: str, threads: int) -> dict[str, float]:
    """In a worker: seconds by operator of one step of the unscheduled graph."""
    import numpy as np

    from onnxremat.artifact import UNSCHEDULED, Artifact
    from onnxremat.runtime.session import Options, make_session, run_profiled, sample_arrays

    path, options = Artifact.load(artifact).file(UNSCHEDULED), Options(threads=threads)
    rows, _ = run_profiled(path, sample_arrays(make_session(path, options), np.random.default_rng(0)), 3, options)
    totals: Counter[str] = Counter()
    for row in rows[-1]:
        totals[row["op_type"]] += row["seconds"]
    return dict(totals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(machine())
    headers = ["model", "batch", "torch eager s", "ONNX Runtime s", "ratio", "quartiles"]
    rows, profiles = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            case, target = CASES[name], Path(folder) / name
            onnxremat.compile(case.source, target, inputs=case.inputs, loss=case.loss, costs="analytic", verify=False)
            arguments: dict[str, dict[str, Any]] = {
                "torch": {"case": name, "threads": options.threads},
                "ort": {"artifact": str(target), "threads": options.threads},
            }
            makers = {side: (f"benchmarks.unscheduled:{side}_step", given) for side, given in arguments.items()}
            seconds = {side: run.complete().seconds for side, run in in_turns(makers, options.turns).items()}
            medians = [f"{statistics.median(seconds[side]):.3f}" for side in makers]
            low, _, high = statistics.quantiles([o / t for o, t in zip(seconds["ort"], seconds["torch"], strict=True)], n=4)
            ratios = [f"{ratio(seconds['ort'], seconds['torch']):.2f}", f"{low:.2f} to {high:.2f}"]
            rows.append([name, ", ".join(case.inputs), *medians, *ratios])
            print(table(headers, rows[-1:]), flush=True)
            for side, given in arguments.items():
                found = worker.call(f"benchmarks.unscheduled:{side}_operators", **given)
                top = Counter(found).most_common(12)
                profiles.append(f"{name}, {side}: " + ", ".join(f"{op} {spent * 1e3:.0f} ms" for op, spent in top))
    print()
    print(table(headers, rows))
    print()
    print("\n".join(profiles))


if __name__ == "__main__":
    main()
