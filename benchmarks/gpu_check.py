"""Everything that only a GPU can show, in one run: kernels, numbers, peaks, step times, and swapping to the host with and without overlap.

    python -m benchmarks.gpu_check -o DIR [--models resnet18 gpt2-small] [--quick] [--steps 20]
    python -m benchmarks.gpu_check -o DIR --provider cpu --quick        # the same program without a GPU: no swap to the host

Needs Linux, an NVIDIA driver, Python 3.11 and

    pip install onnxruntime-training==1.19.2        # with the libraries of CUDA 11.8 and cuDNN 8 on LD_LIBRARY_PATH
    pip install --no-deps . && pip install onnx onnx-ir onnxscript numpy scipy torch   # torch of the CPU will do

Every check is a process of its own, and its result a file in DIR: an interrupted run goes on where it was.  The tables are printed and written
to DIR/tables.txt, all figures to DIR/results.json.  The exit code is 1 where a check failed.

What is measured:

- *kernels*: which nodes the CUDA provider leaves to the CPU, by operator, and the copies that the runtime adds for them.
- *numbers*: loss, gradients and state of the scheduled step against the unscheduled one, bit for bit, and of that against torch on the CPU.
- *peak*: the smallest arena in which the step runs, found by halving the interval (the runtime shows no statistics of its arena), against the
  one that was predicted; and what the driver says that the process took in all, libraries included.
- *seconds*: median of the steps, update included, against the predicted time of forward and backward; with swaps also without copy streams.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Case, machine, table
from onnxremat import Artifact, __version__
from onnxremat.api import compile as compile_model
from onnxremat.artifact import TRAINING
from onnxremat.errors import OnnxRematError, OutOfBudget
from onnxremat.files import write_json
from onnxremat.runtime import worker
from onnxremat.runtime.cuda import Cuda, measured_bandwidth, require_cuda
from onnxremat.units import format_bytes

#: Warm-up steps that no time is taken of.
_WARM = 3
#: The interval that the smallest arena is known to, relative.
_PRECISION = 0.01


def gpt2_small() -> object:
    from onnxremat.models.transformer import gpt2

    return gpt2(layers=12, hidden=768, heads=12, vocab=50257, seq=512)


CASES = {
    "resnet18": Case("resnet18", "benchmarks.common:resnet18", ("x=64x3x224x224",), "cross_entropy"),
    "gpt2-small": Case("gpt2-small", "benchmarks.gpu_check:gpt2_small", ("input_ids=8x512:int64:50257",), "cross_entropy:class_axis=-1"),
}
#: The same families, for a look at whether everything works.
QUICK = {
    "resnet18": Case("resnet18", "tests.factories:tiny_cnn", ("x=32x3x32x32",), "cross_entropy"),
    "gpt2-small": Case("gpt2-small", "tests.factories:mlp12", ("x=8192x32",), "cross_entropy"),
}


@dataclass(frozen=True)
class Variant:
    """One way to fit a step into memory.

    Attributes:
        name: in the tables.
        options: of ``compile``.
    """

    name: str
    options: dict[str, Any]


def variants(cuda: bool) -> list[Variant]:
    """Unscheduled, at half the activations and at the minimum; on CUDA each by recomputing, by swapping and by both."""
    found = [Variant("unscheduled", {})]
    ways: dict[str, dict[str, Any]] = {"recompute": {}}
    if cuda:
        ways |= {"swap": {"swap": "host", "strategy": "swap_only"}, "both": {"swap": "host"}}
    for budget, options in {"50%": {"activation_budget": "50%"}, "min": {"budget": "min"}}.items():
        found += [Variant(f"{budget} {way}", options | chosen) for way, chosen in ways.items() if (budget, way) != ("min", "swap")]
    return found


class Results:
    """Results of checks, one file each.

    Args:
        folder: where they lie; made if needed.
        say: told what is being done.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder, say
        (folder / "checks").mkdir(parents=True, exist_ok=True)
        self.all: dict[str, dict[str, Any]] = {}

    def check(self, name: str, inputs: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a check: from its file where that is of the same inputs and no failure, else by running it.

        An error of onnxremat's becomes ``{"error": its line}``; the run goes on.
        """
        text = json.dumps({"version": __version__, **inputs}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = self.folder / "checks" / f"{name.replace('/', '_').replace(' ', '_')}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if found.get("inputs") != digest or "error" in found["result"]:
            self._say(name)
            begin = time.perf_counter()
            try:
                result = run()
            except OnnxRematError as error:
                result = {"error": " ".join(str(error).split())}
            found = {"inputs": digest, "seconds": time.perf_counter() - begin, "result": result}
            write_json(path, found)
        self.all[name] = found["result"]
        return self.all[name]


def _cuda_of(job: dict[str, Any] | None) -> Cuda | None:
    return None if job is None else Cuda(**job)


def kernels_job(artifact: str, cuda: dict[str, Any] | None) -> dict[str, Any]:
    """In a worker: operator -> number of nodes on the GPU and on the CPU, and the copies that were added."""
    from onnxremat.runtime.placement import CPU, Nodes
    from onnxremat.runtime.session import Options, partition_of

    path = Artifact.load(artifact).file(TRAINING)
    nodes, partition = Nodes.of(path), partition_of(path, Options(cuda=_cuda_of(cuda)))
    counts: dict[str, Counter[str]] = {"cpu": Counter(), "gpu": Counter()}
    added = 0
    for stream, device in zip(partition["streams"], partition["devices"], strict=True):
        for name in stream:
            if name in nodes.op_types:
                counts["cpu" if device == CPU else "gpu"][nodes.op_types[name]] += 1
            else:
                added += 1
    return {"on_gpu": dict(counts["gpu"]), "on_cpu": dict(counts["cpu"]), "copies_added": added}


def numbers_job(artifact: str, steps: int, provider: str) -> dict[str, Any]:
    """In a worker: the scheduled step against the unscheduled one and against torch."""
    from onnxremat.verification import verify_artifact

    return asdict(verify_artifact(Artifact.load(artifact), steps=steps, measure=False, provider=provider))


def steps_job(artifact: str, steps: int, copy_streams: bool, cuda: dict[str, Any] | None) -> dict[str, Any]:
    """In a worker: seconds of steps in the plan's arena, and what the process took."""
    from onnxremat.runtime.cuda_trainer import CudaTrainer
    from onnxremat.runtime.run import run_artifact

    loaded = Artifact.load(artifact)
    chosen = _cuda_of(cuda)
    trainer = None if chosen is None else CudaTrainer(loaded, cuda=chosen, copy_streams=copy_streams)
    result = run_artifact(loaded, _WARM + steps, trainer=trainer)
    seconds = result.step_seconds[_WARM:]
    return {"seconds": statistics.median(seconds), "losses": result.losses, "peak_measured_bytes": result.peak_measured_bytes}


def fits_job(artifact: str, arena_bytes: int, cuda: dict[str, Any] | None) -> bool:
    """In a worker: whether two steps run in an arena of this size."""
    from onnxremat.runtime.run import make_trainer, run_artifact

    loaded = Artifact.load(artifact)
    loaded.manifest["memory"]["arena_bytes"] = arena_bytes
    try:
        run_artifact(loaded, 2, trainer=make_trainer(loaded, _cuda_of(cuda)))
    except OutOfBudget:
        return False
    return True


def smallest_arena(artifact: Path, cuda: dict[str, Any] | None) -> dict[str, Any]:
    """The smallest arena that the step runs in, to ``_PRECISION``; 0 where it does not even run in the plan's."""
    planned = int(Artifact.load(artifact).manifest["memory"]["arena_bytes"])

    def fits(size: int) -> bool:
        found: bool = worker.call("benchmarks.gpu_check:fits_job", artifact=str(artifact), arena_bytes=size, cuda=cuda)
        return found

    if not fits(planned):
        return {"planned_bytes": planned, "smallest_bytes": 0}
    low, high = 0, planned
    while high - low > _PRECISION * planned:
        # What is a little below the plan's is the likely answer.
        middle = int(0.95 * planned) if low == 0 and high == planned else (low + high) // 2
        middle -= middle % 256
        low, high = (low, middle) if fits(middle) else (middle, high)
    return {"planned_bytes": planned, "smallest_bytes": high}


def check_model(results: Results, case: Case, options: argparse.Namespace, cuda: dict[str, Any] | None) -> list[dict[str, Any]]:
    """All checks of a model; a row of figures for each variant."""
    rows = []
    for variant in variants(cuda is not None):
        name = f"{case.name} {variant.name}"
        folder = results.folder / "artifacts" / name.replace(" ", "_").replace("%", "")
        inputs = {"case": asdict(case), "variant": asdict(variant), "cuda": cuda, "time_limit": options.time_limit, "costs": options.costs}

        def build(folder: Path = folder, variant: Variant = variant) -> dict[str, Any]:
            artifact = compile_model(
                case.source,
                folder,
                inputs=case.inputs,
                loss=case.loss,
                verify=False,
                time_limit=options.time_limit,
                costs=options.costs,
                provider=options.provider,
                allow_cpu_nodes=cuda is not None,
                **variant.options,
            )
            return {key: artifact.manifest[key] for key in ("memory", "time", "plan", "swap")}

        row: dict[str, Any] = {"model": case.name, "variant": variant.name, "compiled": results.check(f"{name} compiled", inputs, build)}
        rows.append(row)
        if "error" in row["compiled"]:
            continue
        path = str(folder)
        if variant.name == "unscheduled":
            row["kernels"] = results.check(
                f"{name} kernels", inputs, lambda path=path: worker.call("benchmarks.gpu_check:kernels_job", artifact=path, cuda=cuda)
            )
        row["numbers"] = results.check(
            f"{name} numbers",
            inputs,
            lambda path=path: worker.call("benchmarks.gpu_check:numbers_job", artifact=path, steps=2, provider=options.provider),
        )
        row["peak"] = results.check(f"{name} peak", inputs, lambda path=path: smallest_arena(Path(path), cuda))
        for streams in (True, False) if row["compiled"]["plan"]["swapped_tensors"] else (True,):
            key = "steps" if streams else "steps_in_turns"
            row[key] = results.check(
                f"{name} {key}",
                inputs | {"steps": options.steps},
                lambda path=path, streams=streams: worker.call(
                    "benchmarks.gpu_check:steps_job", artifact=path, steps=options.steps, copy_streams=streams, cuda=cuda
                ),
            )
    return rows


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """The tables as text, and the errors below them."""
    figures, kernels, faults = [], [], []
    for row in rows:
        where = [row["model"], row["variant"]]
        parts = {k: v for k, v in row.items() if isinstance(v, dict)}
        faults += [f"{' '.join(where)}, {key}: {value['error']}" for key, value in parts.items() if "error" in value]
        good = {key: value for key, value in parts.items() if "error" not in value}
        figures.append([*where, *_cells(good)])
        if "kernels" in good:
            on_cpu = ", ".join(f"{kind} {count}" for kind, count in sorted(good["kernels"]["on_cpu"].items())) or "none"
            kernels.append([row["model"], str(sum(good["kernels"]["on_gpu"].values())), on_cpu, str(good["kernels"]["copies_added"])])
    heading = ["model", "variant", "recomputed", "swapped", "bit-equal", "torch error", "arena planned", "smallest", "off", "process took"]
    heading += ["s predicted", "s measured", "s, copies in turns"]
    text = [table(heading, figures)]
    if kernels:
        text += ["", table(["model", "nodes on the GPU", "nodes on the CPU", "copies added"], kernels)]
    return [*text, *(["", "failed:", *faults] if faults else [])]


def _cells(good: dict[str, dict[str, Any]]) -> list[str]:
    compiled, numbers, peak = good.get("compiled"), good.get("numbers"), good.get("peak")
    cells = ["-"] * 11
    if compiled is not None:
        cells[0], cells[1] = str(compiled["plan"]["recomputed_ops"]), str(compiled["plan"]["swapped_tensors"])
        cells[8] = f"{compiled['time']['seconds_predicted']:.4f}"
    if numbers is not None:
        torch = numbers["max_relative_error_torch"]
        cells[2], cells[3] = "yes" if numbers["bitwise_equal"] else "NO", "-" if torch is None else f"{torch:.1e}"
    if peak is not None:
        cells[4], cells[5] = format_bytes(peak["planned_bytes"]), format_bytes(peak["smallest_bytes"])
        cells[6] = f"{peak['smallest_bytes'] / peak['planned_bytes'] - 1:+.1%}"
    if "steps" in good:
        cells[7], cells[9] = format_bytes(good["steps"]["peak_measured_bytes"]), f"{good['steps']['seconds']:.4f}"
    if "steps_in_turns" in good:
        cells[10] = f"{good['steps_in_turns']['seconds']:.4f}"
    return cells


def failures(rows: list[dict[str, Any]]) -> int:
    """Checks that ended in an error, and those whose numbers are not right."""
    parts = [value for row in rows for value in row.values() if isinstance(value, dict)]
    wrong = sum("numbers" in row and "error" not in row["numbers"] and not row["numbers"]["passed"] for row in rows)
    tight = sum(row.get("peak", {}).get("smallest_bytes") == 0 for row in rows)
    return sum("error" in value for value in parts) + wrong + tight


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--provider", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--costs", choices=("measured", "analytic"), default="measured")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    cuda: dict[str, Any] | None = None
    about: dict[str, Any] = {"machine": machine(), "python": platform.python_version(), "onnxremat": __version__, "provider": options.provider}
    if options.provider == "cuda":
        chosen = Cuda(options.device)
        try:
            driver = require_cuda(chosen)
            pace = measured_bandwidth(chosen)
        except OnnxRematError as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 1
        about |= {"gpu": driver.name(options.device), "driver": driver.version(), "memory_bytes": driver.memory(options.device)[1]}
        about |= {"bytes_per_second_out": pace[0], "bytes_per_second_in": pace[1]}
        cuda = {"device": options.device, "options": {}, "allow_cpu_nodes": True}
    results = Results(options.output, lambda text: print(f"... {text}", file=sys.stderr, flush=True))
    rows = [row for name in options.models for row in check_model(results, (QUICK if options.quick else CASES)[name], options, cuda)]
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), "", *tables(rows)]
    (options.output / "tables.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(options.output / "results.json", {"about": about, "rows": rows})
    print("\n".join(lines))
    return 1 if failures(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
