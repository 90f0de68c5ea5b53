"""Registering ONNX Runtime's arena with a cap: fast, and an allocation beyond it fails the step with a clean error."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..errors import OnnxRematError
from ..placement import GRANULE
from .ort import onnxruntime

#: The largest chunk that the runtime can be told of: it counts chunks in a C int.
LARGEST_CHUNK = 2**31 - GRANULE

_registered: int | None = None


def arena_settings(capacity: int) -> dict[str, int]:
    """How an arena of ``capacity`` bytes is configured, under the names that every language's bindings take.

    Growing by doubling from an initial chunk of the full size makes one region, in which all free neighbours coalesce; splitting off every
    remainder keeps small requests from taking large blocks.  Beyond ``LARGEST_CHUNK`` the first region would be smaller than the arena: there
    the first allocation must ask for all of it (``needs_claim``).
    """
    chunk = min(capacity, LARGEST_CHUNK)
    return {
        "max_mem": capacity,
        "arena_extend_strategy": 0,
        "initial_chunk_size_bytes": chunk,
        "max_dead_bytes_per_chunk": GRANULE,
        "initial_growth_chunk_size_bytes": chunk,
    }


def register(capacity: int) -> None:
    """Register an arena of ``capacity`` bytes, which all sessions of this process share from now on.

    Raises:
        OnnxRematError: this process has one of another size already (the runtime takes only one).
    """
    global _registered
    if _registered == capacity:
        return
    if _registered is not None:
        raise OnnxRematError(f"this process has an arena of {_registered} bytes already and can't have another of {capacity}: start a new process")
    ort = onnxruntime()
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, ort.OrtArenaCfg(arena_settings(capacity)))
    if needs_claim(capacity):
        _claim(ort, capacity)
    _registered = capacity


def needs_claim(capacity: int) -> bool:
    """Whether an arena of so many bytes is one region only if the first thing that runs in it is its :func:`claim_model`."""
    return capacity > LARGEST_CHUNK


def claim_shape(capacity: int) -> list[int]:
    """What a claim model of an arena of so many bytes is fed as ``shape``."""
    return [capacity // 1024, 256]


def claim_model(capacity: int) -> onnx.ModelProto:
    """A model whose only buffer takes a whole arena, so that the arena becomes one region: ``shape`` (int64[2]) -> ``block`` (float)."""
    graph = helper.make_graph(
        [helper.make_node("ConstantOfShape", ["shape"], ["block"], name="claim")],
        "claim",
        [helper.make_tensor_value_info("shape", TensorProto.INT64, [2])],
        [helper.make_tensor_value_info("block", TensorProto.FLOAT, claim_shape(capacity))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _claim(ort: Any, capacity: int) -> None:
    """Let the registered arena take all of its memory in one region, and the system have the pages until they are used."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = ort.InferenceSession(claim_model(capacity).SerializeToString(), options, providers=["CPUExecutionProvider"])
    try:
        block = session.run_with_ort_values(["block"], {"shape": ort.OrtValue.ortvalue_from_numpy(np.array(claim_shape(capacity), np.int64))})[0]
    except Exception as error:  # the bindings raise a dozen unrelated classes
        raise OnnxRematError(f"there is no memory for an arena of {capacity} bytes: {' '.join(str(error).split())[:200]}") from error
    begin = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (block.data_ptr() + capacity // 1024 * 1024) // mmap.PAGESIZE * mmap.PAGESIZE
    del block
    if hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def registered() -> int | None:
    """Bytes of this process's arena; None where there is none."""
    return _registered
