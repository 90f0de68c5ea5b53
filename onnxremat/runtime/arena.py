"""Registering ONNX Runtime's arena with a cap: fast, and an allocation beyond it fails the step with a clean error."""

from __future__ import annotations

from ..errors import OnnxRematError
from ..placement import GRANULE
from .ort import onnxruntime

_registered: int | None = None


def arena_settings(capacity: int) -> dict[str, int]:
    """How an arena of ``capacity`` bytes is configured, under the names that every language's bindings take.

    Growing by doubling from an initial chunk of the full size makes one region, in which all free neighbours coalesce; splitting off every
    remainder keeps small requests from taking large blocks.
    """
    return {
        "max_mem": capacity,
        "arena_extend_strategy": 0,
        "initial_chunk_size_bytes": capacity,
        "max_dead_bytes_per_chunk": GRANULE,
        "initial_growth_chunk_size_bytes": capacity,
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
        raise OnnxRematError(
            f"this process has an arena of {_registered} bytes already and can't have another of {capacity}: start a new process"
        )
    ort = onnxruntime()
    info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(info, ort.OrtArenaCfg(arena_settings(capacity)))
    _registered = capacity


def registered() -> int | None:
    """Bytes of this process's arena; None where there is none."""
    return _registered
