"""Seconds from a profile of the unscheduled step, workspace from a probe of every kernel: on this machine, cached."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ..cache import cache_folder, cached_json, hash_file, machine_lock
from ..files import write_json
from ..graph import nbytes
from ..ops import traits
from ..problem import Costs
from ..runtime import worker
from ..runtime.cuda import Cuda, provider_options, require_cuda
from ..runtime.ort import TRAINING_VERSION
from ..safetensors import load_tensors, save_tensors
from .workspace import gpu_workspace, known_workspace

Array = npt.NDArray[Any]

#: Kernels that touch less than this are not worth a probe; their scratch is below the resolution of the measurement anyway.
_SMALL = 512 * 1024
#: Growth of the process that the kernel itself did not cause: pages of stacks, tables and counters.
_NOISE = 384 * 1024


def measured_costs(
    graph: ir.Graph, model_path: Path, values: Mapping[str, Array], threads: int = 0, steps: int = 5, cuda: Cuda | None = None
) -> Costs:
    """Profile the unscheduled step and probe its kernels.

    Args:
        graph: the unscheduled training graph.
        model_path: the same graph as a file.
        values: what the step finds in its inputs: weights, state, moments, learning rate.  Others are drawn at random.  With such numbers for
            a variance or a step count the profile would run on NaNs, which some kernels refuse.
        threads: intra-op threads of the machine's runtime; 0 is its default.
        steps: steps to profile; the first is a warm-up, the median of the others counts.
        cuda: the GPU to profile on, each kernel launched when the one before has ended; None for the CPU.

    Returns:
        Seconds and workspace bytes of every node.
    """
    workspace = _workspace(graph, threads) if cuda is None else gpu_workspace(graph)
    digest = hash_file(model_path)[:24]
    device = "" if cuda is None else "-" + _gpu_key(cuda)
    profile = cached_json("profiles", f"{machine_key(threads)}{device}-{digest}", lambda: _profile(model_path, values, threads, steps, cuda))
    return Costs(profile["seconds"], workspace, origin="measured", load=profile["load"])


def _gpu_key(cuda: Cuda) -> str:
    text = f"{require_cuda(cuda).name(cuda.device)}|{sorted(provider_options(cuda).items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _profile(model_path: Path, values: Mapping[str, Array], threads: int, steps: int, cuda: Cuda | None) -> dict[str, Any]:
    """Seconds of each node, and how busy other processes kept the machine meanwhile; by one process at a time."""
    lock = machine_lock()
    with tempfile.TemporaryDirectory() as folder, lock.alone() if lock else nullcontext():
        save_tensors(values, Path(folder) / "values")
        before = processor_seconds()
        rows: list[dict[str, float]] = worker.call(
            "onnxremat.costs.measured:profile_job",
            model=str(model_path),
            values=str(Path(folder) / "values"),
            threads=threads,
            steps=steps,
            cuda=None if cuda is None else {"device": cuda.device, "options": dict(cuda.options), "allow_cpu_nodes": cuda.allow_cpu_nodes},
        )
        after = processor_seconds()
    load = None if before is None or after is None else max(0.0, (after.others - before.others) / max(1e-9, after.clock - before.clock))
    return {"seconds": {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}, "load": load}


@dataclass(frozen=True, slots=True)
class ProcessorSeconds:
    """What the machine's processors have spent.

    Attributes:
        clock: wall time, seconds.
        others: processor seconds spent by other processes than this one and its ended children, since the machine started.
    """

    clock: float
    others: float


def processor_seconds() -> ProcessorSeconds | None:
    """Now; None where the system does not tell (it is not Linux)."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, softirq, steal = ticks
    spent = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return ProcessorSeconds(time.monotonic(), spent - own.user - own.system - own.children_user - own.children_system)


def profile_job(model: str, values: str, threads: int, steps: int, cuda: dict[str, Any] | None = None) -> list[dict[str, float]]:
    """In a worker: node name -> seconds, for each step."""
    if cuda is not None:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # else what is timed is the launch
    from ..runtime.session import Options, make_session, run_profiled, sample_arrays

    options = Options(threads=threads, cuda=None if cuda is None else Cuda(**cuda), copy_streams=False)
    arrays = sample_arrays(make_session(model, options), np.random.default_rng(0))
    arrays |= {name: value for name, value in load_tensors(Path(values)).items() if name in arrays}
    profiled, _ = run_profiled(model, arrays, steps, options)
    return [{row["name"]: row["seconds"] for row in step} for step in profiled]


def machine_key(threads: int) -> str:
    """What a measurement depends on besides the graph."""
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    text = f"{platform.machine()}|{model}|{os.cpu_count()}|{threads}|{TRAINING_VERSION}|1"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def kernel_signature(node: ir.Node) -> str:
    """What decides a kernel's scratch memory: operator, attributes, types, and the constants that are shapes."""
    parts = [node.domain, node.op_type]
    parts += [f"{k}={v.value}" for k, v in sorted(node.attributes.items()) if v.type != ir.AttributeType.TENSOR]
    for value in node.inputs:
        if value is None:
            parts.append("-")
            continue
        parts.append(f"{value.dtype}{value.shape}")
        if value.const_value is not None and value.const_value.size <= 16:
            parts.append(str(value.const_value.numpy().tolist()))
    parts += [f"{v.dtype}{v.shape}" if v.name else "-" for v in node.outputs]
    return "|".join(parts)


def _workspace(graph: ir.Graph, threads: int) -> dict[str, int]:
    by_signature: dict[str, list[ir.Node]] = {}
    formulas: dict[str, int] = {}
    for node in graph:
        exact = known_workspace(node, threads)
        if exact is not None:
            formulas[str(node.name)] = exact
            continue
        touched = sum(nbytes(v) for v in [*node.inputs, *node.outputs] if v is not None and v.name)
        if touched >= _SMALL and not traits(node.op_type, node.domain).view and node.op_type != "InPlaceAccumulatorV2":
            by_signature.setdefault(kernel_signature(node), []).append(node)
    known: dict[str, int] = {}
    missing: list[str] = []
    folder = cache_folder("kernels")
    machine = machine_key(threads)
    paths = {s: folder / f"{machine}-{hashlib.sha256(s.encode()).hexdigest()[:24]}.json" if folder else None for s in by_signature}
    for signature, path in paths.items():
        size = _stored_size(path)
        if size is None:
            missing.append(signature)
        else:
            known[signature] = size
    if missing:
        measured = probe_kernels([by_signature[s][0] for s in missing], dict(graph.opset_imports), threads)
        for signature, size in zip(missing, measured, strict=True):
            known[signature] = size
            path = paths[signature]
            if path is not None:
                with suppress(OSError):
                    write_json(path, size)
    return formulas | {str(node.name): known[s] for s, nodes in by_signature.items() for node in nodes}


def _stored_size(path: Path | None) -> int | None:
    """A cached size; None where there is none, or a damaged one."""
    try:
        return None if path is None else int(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def probe_kernels(nodes: list[ir.Node], opsets: dict[str, int], threads: int = 0) -> list[int]:
    """Scratch bytes of each node's kernel, measured: what the process grows by while it runs, beyond the outputs."""
    models = [single_node_model(node, opsets) for node in nodes]
    sizes: list[int] = worker.call(
        "onnxremat.costs.measured:probe_job",
        models=[m.SerializeToString().hex() for m in models],
        outputs=[sum(nbytes(v) for v in n.outputs if v.name) for n in nodes],
        threads=threads,
    )
    return sizes


def single_node_model(node: ir.Node, opsets: dict[str, int]) -> onnx.ModelProto:
    """A model of one node, its small constants kept, everything else an input."""
    copies: dict[int, ir.Value] = {}
    for value in node.inputs:
        if value is not None:
            small = value.const_value if value.const_value is not None and value.const_value.size <= 4096 else None
            copies.setdefault(id(value), ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=small))
    inputs = [v for v in copies.values() if v.const_value is None]
    constants = [v for v in copies.values() if v.const_value is not None]
    outputs = [ir.Value(name=v.name, shape=v.shape, type=v.type) for v in node.outputs]
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else copies[id(v)] for v in node.inputs],
        list(node.attributes.values()),
        outputs=outputs,
        name="probe",
    )
    graph = ir.Graph(inputs, [v for v in outputs if v.name], nodes=[copy], initializers=constants, opset_imports=opsets, name="probe")
    return ir.to_proto(ir.Model(graph, ir_version=10))


def probe_job(models: list[str], outputs: list[int], threads: int) -> list[int]:
    """In a worker: scratch bytes of each model's kernel, every buffer mapped by itself so that the growth is exact."""
    from ..runtime import memory
    from ..runtime.session import BoundSession, Options, make_session, sample_arrays

    memory.map_large_buffers()
    rng = np.random.default_rng(0)
    results = []
    for text, produced in zip(models, outputs, strict=True):
        session = make_session(bytes.fromhex(text), Options(threads=threads, arena=False))
        bound = BoundSession(session)
        bound.bind(sample_arrays(session, rng))
        bound.run()
        memory.trim()
        memory.reset_peak()
        before = memory.resident_bytes()
        bound.run_discarding()
        grown = memory.peak_resident_bytes() - before - produced
        results.append(grown if grown > _NOISE else 0)
    return results
