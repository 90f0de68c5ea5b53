"""Sessions that run a graph in the order of its file, hold no dead buffer, and rewrite nothing."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from .. import spill
from ..errors import ArtifactError, OutOfBudget, RuntimeUnavailable, SpillFailed
from ..files import write_json
from ..ops import traits
from ..writes import writes_of
from .cuda import PROVIDER, Cuda, DeviceArray, provider_options, require_cuda
from .ort import onnxruntime
from .placement import Nodes, check_on_gpu, names_streams, with_streams

Array = npt.NDArray[Any]

#: What a session needs so that order and memory are the plan's, as written into a manifest.
SESSION_OPTIONS: dict[str, Any] = {
    "graph_optimization_level": "ORT_DISABLE_ALL",
    "execution_order": "PRIORITY_BASED",
    "execution_mode": "ORT_SEQUENTIAL",
    "enable_mem_pattern": False,
    "enable_mem_reuse": False,
    "config": {"session.use_env_allocators": "1", "session.use_device_allocator_for_initializers": "1"},
}

#: Graph optimization levels, fewest first.
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@dataclass(frozen=True, slots=True)
class Options:
    """How a session runs.

    Attributes:
        threads: intra-op threads; 0 leaves it to the runtime.
        arena: use the registered arena of this process, or the session's own where none is registered; off, every buffer is mapped by
        itself.
        profile: directory for a profile of the run; None for none.
        level: graph optimizations that the runtime may make (one of ``LEVELS``).
        file_order: run the nodes in the order of the file; off, in the runtime's own.
        spill_dir: folder that swapped tensors go to; None leaves it to the environment (``onnxremat.spill``).
        cuda: the GPU to run on; None for the CPU.
        gpu_bytes: most bytes of the session's own arena on the GPU; None for no limit.
        copy_streams: nodes that name a stream (``onnxremat.copies``) run on it; off, copies take turns with what computes.
        reuse: the runtime may hand dead buffers on and lay out a pattern of its own, as it does by default.
    """

    threads: int = 0
    arena: bool = True
    profile: Path | None = None
    level: str = "ORT_DISABLE_ALL"
    file_order: bool = True
    spill_dir: Path | None = None
    cuda: Cuda | None = None
    gpu_bytes: int | None = None
    copy_streams: bool = True
    reuse: bool = False

    @property
    def providers(self) -> list[Any]:
        """What the bindings take."""
        if self.cuda is None:
            return ["CPUExecutionProvider"]
        return [(PROVIDER, provider_options(self.cuda, self.gpu_bytes)), "CPUExecutionProvider"]


def make_session(model: str | Path | bytes, options: Options = Options(), plan_dump: Path | None = None) -> Any:
    """A session over a model file or its bytes.

    Raises:
        ArtifactError: the runtime refuses the model.
        RuntimeUnavailable: a provider that was asked for is not there.
        SpillUnavailable: the model swaps to disk, and the operators for that can't be had.
        SpillFailed: the folder to swap to can't be used.
    """
    ort = onnxruntime()
    if options.cuda is not None:
        require_cuda(options.cuda)
    settings = ort.SessionOptions()
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, options.level)
    settings.execution_order = ort.ExecutionOrder.PRIORITY_BASED if options.file_order else ort.ExecutionOrder.DEFAULT
    settings.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    settings.enable_mem_pattern = options.reuse
    settings.enable_mem_reuse = options.reuse
    settings.enable_cpu_mem_arena = options.arena
    settings.intra_op_num_threads = options.threads
    settings.log_severity_level = 4
    settings.use_deterministic_compute = options.cuda is not None  # the same numbers in every run: kernels of the CPU give them anyway
    for key, value in SESSION_OPTIONS["config"].items():
        settings.add_session_config_entry(key, value if options.arena else "0")
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile / "profile")
    if plan_dump is not None:
        settings.add_session_config_entry("session.node_partition_config_file", str(plan_dump))
    elif options.cuda is not None or (options.copy_streams and names_streams(model)):
        return _placed_session(model, Nodes.of(model), options)
    source = model if isinstance(model, bytes) else str(model)
    if spill.needed(model):
        spill.register(settings, options.spill_dir)
    try:
        session = ort.InferenceSession(source, settings, providers=options.providers)
    except Exception as error:  # the bindings raise a dozen unrelated classes
        if _SPILL in str(error):
            raise _spill_failed(str(error)) from error
        raise ArtifactError(f"ONNX Runtime refuses the model: {_one_line(error)}") from error
    if options.cuda is not None and session.get_providers()[0] != PROVIDER:
        raise RuntimeUnavailable(
            f"{PROVIDER} was asked for, but the session fell back to {session.get_providers()[0]}: the libraries of CUDA 11.8 and cuDNN 8 are "
            "not found; install them or put them on LD_LIBRARY_PATH, or use --provider cpu"
        )
    return session


@contextmanager
def silenced() -> Iterator[None]:
    """Let what compiled code prints on stdout go nowhere."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _placed_session(model: str | Path | bytes, nodes: Nodes, options: Options) -> Any:
    """A session whose copies have streams of their own, and that leaves no node of the GPU's to the CPU unless that is allowed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "partition.json"
        session = make_session(model, replace(options, profile=None), path)
        partition = json.loads(path.read_text(encoding="utf-8"))
        if options.cuda is not None and not options.cuda.allow_cpu_nodes:
            check_on_gpu(partition, nodes)
        if options.copy_streams and nodes.streams:
            write_json(path, with_streams(partition, nodes.streams))
        elif options.profile is None:
            return session
        del session
        with silenced():  # the runtime tells on stdout which buffers copies share
            return make_session(model, options, path)


#: How the swap operators begin what they say.
_SPILL = "onnxremat.spill: "


def _spill_failed(text: str) -> SpillFailed:
    return SpillFailed(f"a tensor was not swapped: {' '.join(text[text.rindex(_SPILL) + len(_SPILL) :].split())[:500]}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


class BoundSession:
    """A session whose inputs are arrays that stay where they are: nothing is copied in, in-place writes reach the caller's arrays.

    An output that replaces an input (``onnxremat.writes``) is bound to that input's array, and is none of ``outputs``.
    """

    def __init__(self, session: Any, outputs: Sequence[str] | None = None) -> None:
        self.session = session
        self._replaces = writes_of(session.get_modelmeta().custom_metadata_map)
        named = list(outputs) if outputs is not None else [o.name for o in session.get_outputs()]
        self.outputs = [name for name in named if name not in self._replaces]
        self.inputs = [i.name for i in session.get_inputs()]
        self._binding = session.io_binding()
        self._held: dict[str, Array | DeviceArray] = {}
        for name in self.outputs:
            self._binding.bind_output(name)

    def bind(self, arrays: Mapping[str, Array | DeviceArray]) -> None:
        """Bind arrays (C-contiguous, of the declared dtypes) of the host or of the GPU to the inputs of their names."""
        for name, array in arrays.items():
            if isinstance(array, DeviceArray):
                self._held[name] = array
                self._binding.bind_input(name, array.kind, array.device, array.dtype.type, array.shape, array.address)
                continue
            if not array.flags.c_contiguous:
                raise ValueError(f"the array for '{name}' is not contiguous")
            self._held[name] = array
            self._binding.bind_cpu_input(name, array)
        self._bind_replaced()

    def bind_output_memory(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], address: int) -> None:
        """Let the runtime write an output that is none of ``outputs`` to memory of the caller's, which must outlive the runs."""
        self._binding.bind_output(name, "cpu", 0, np.dtype(dtype).type, list(shape), address)

    def _bind_replaced(self) -> None:
        for output, name in self._replaces.items():
            array = self._held.get(name)
            if array is None:
                self._binding.bind_output(output)
            elif isinstance(array, DeviceArray):
                self._binding.bind_output(output, array.kind, array.device, array.dtype.type, array.shape, array.address)
            else:
                self._binding.bind_output(output, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self) -> list[Array]:
        """One run; returns the outputs in the order of ``outputs``.

        Raises:
            OutOfBudget: the capped arena refused an allocation.
            SpillFailed: the disk is full, or failed.
        """
        self._run()
        results: list[Array] = [np.array(value.numpy()) for value in self._binding.get_outputs()[: len(self.outputs)]]
        self._release_outputs()
        return results

    def run_discarding(self) -> None:
        """One run whose outputs nobody wants."""
        self._run()
        self._release_outputs()

    def _run(self) -> None:
        try:
            self.session.run_with_iobinding(self._binding)
        except Exception as error:  # the bindings raise a dozen unrelated classes
            text = " ".join(str(error).split())
            if "Available memory of" in text or "bfc_arena" in text.lower() or "Failed to allocate" in text:
                raise OutOfBudget(
                    f"the step exceeds the memory it was given and was stopped ({_shortage(text)}); compile for a larger budget"
                ) from error
            if _SPILL in text:
                raise _spill_failed(text) from error
            raise ArtifactError(f"the step failed in ONNX Runtime: {text[:500]}") from error

    def _release_outputs(self) -> None:
        """Outputs live in the arena: let them go, or the next step finds less room."""
        for name in self.outputs:
            self._binding.bind_output(name)
        self._bind_replaced()


def _shortage(text: str) -> str:
    """What the arena said: how much was asked for, how much was there."""
    found = re.search(r"Available memory of (\d+) is smaller than requested bytes of (\d+)", text)
    node = re.search(r"Name:'([^']+)'", text)
    where = f" in '{node.group(1)}'" if node else ""
    return f"{found.group(2)} bytes were asked for{where}, no free block of the arena is as large" if found else text[-200:] + where


def session_with_partition(model: str | Path | bytes, options: Options = Options()) -> tuple[Any, dict[str, Any]]:
    """A session, and which nodes of its model it runs on which device, and on which of its streams, as it plans it itself.

    The session writes its plan to a file that does not exist yet when asked for its node partition.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "partition.json"
        session = make_session(model, options, plan_dump=path)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return session, found


def partition_of(model: str | Path | bytes, options: Options = Options()) -> dict[str, Any]:
    """Which nodes of a model a session runs on which device, and on which of its streams."""
    return session_with_partition(model, options)[1]


def execution_streams(model: str | Path | bytes, options: Options = Options()) -> list[list[str]]:
    """Of each stream of a session of this model the names of its nodes in the order in which it will run them, as the session itself plans it.

    On the CPU there is one stream; with a GPU there is one for each device.
    """
    streams: list[list[str]] = partition_of(model, options)["streams"]
    return streams


def execution_order(model: str | Path | bytes, options: Options = Options()) -> list[str]:
    """The names of the nodes of :func:`execution_streams`, one stream after another."""
    return [name for stream in execution_streams(model, options) for name in stream]


def run_profiled(
    model: str | Path | bytes, arrays: Mapping[str, Array], steps: int, options: Options = Options()
) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """Run some steps under the profiler.

    Returns:
        For each step the kernel events in the order they ran (``name``, ``op_type``, ``seconds``, ``output_bytes``), and the wall seconds
        of each step.
    """
    import time

    with tempfile.TemporaryDirectory() as folder:
        session = make_session(model, replace(options, profile=Path(folder)))
        bound = BoundSession(session)
        bound.bind(arrays)
        walls = []
        for _ in range(steps):
            begin = time.perf_counter()
            bound.run()
            walls.append(time.perf_counter() - begin)
        path = session.end_profiling()
        with open(path, encoding="utf-8") as file:
            events = json.load(file)
        os.unlink(path)
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    kernels.sort(key=lambda e: e["ts"])
    rows = [
        {
            "name": e["name"].removesuffix("_kernel_time"),
            "op_type": e["args"].get("op_name", ""),
            "seconds": e["dur"] * 1e-6,
            "output_bytes": int(e["args"].get("output_size", 0)),
        }
        for e in kernels
    ]
    per_step = len(rows) // steps if steps else 0
    return [rows[i * per_step : (i + 1) * per_step] for i in range(steps)], walls


def sample_arrays(session: Any, rng: np.random.Generator) -> dict[str, Array]:
    """Arrays for every input of a session: small random floats, zeros for integers (always valid indices), ones for booleans."""
    dtypes = {
        "tensor(float)": np.float32,
        "tensor(double)": np.float64,
        "tensor(int64)": np.int64,
        "tensor(int32)": np.int32,
        "tensor(bool)": np.bool_,
        "tensor(float16)": np.float16,
    }
    arrays: dict[str, Array] = {}
    for entry in session.get_inputs():
        dtype = np.dtype(dtypes[entry.type])
        if dtype == np.bool_:
            arrays[entry.name] = np.ones(entry.shape, dtype)
        elif np.issubdtype(dtype, np.integer):
            arrays[entry.name] = np.zeros(entry.shape, dtype)
        else:
            arrays[entry.name] = np.array(rng.standard_normal(entry.shape) * 0.05, dtype)
    return arrays


def with_random_seeds(model: Path, seed: int) -> bytes:
    """A model with a seed in every operator that draws, by which that is drawn again: each node its own, the same in every schedule of a graph.

    Without seeds masks and numbers differ from process to process.
    """
    proto = onnx.load(str(model))
    seed_nodes(proto, seed)
    return bytes(proto.SerializeToString())


def seed_nodes(proto: onnx.ModelProto, seed: int) -> None:
    """Give every operator that draws a seed of its own, in place, by the order of the nodes' names."""
    drawing = sorted((node for node in proto.graph.node if traits(node.op_type, node.domain).random), key=lambda node: str(node.name))
    for i, node in enumerate(drawing, 1):
        kept = [attribute for attribute in node.attribute if attribute.name != "seed"]
        del node.attribute[:]
        value = seed * len(drawing) + i
        node.attribute.extend([*kept, onnx.helper.make_attribute("seed", value if "Dropout" in node.op_type else float(value))])


def with_extra_outputs(model: bytes, names: Sequence[str]) -> bytes:
    """A model that also returns some of its inner values."""
    proto = onnx.load_from_string(model)
    known = {value.name: value for value in proto.graph.value_info}
    proto.graph.output.extend(known[name] for name in names)
    return bytes(proto.SerializeToString())
