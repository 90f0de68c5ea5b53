"""Swapping tensors to a file while a step runs: a pair of custom operators for ONNX Runtime (``_spill.c``), their library, their speed."""

from .library import DIRECTORY_KEY, DIRECTORY_VARIABLE, DOMAIN, library_path, needed, register, require_room, spill_directory, spilling_to
from .probe import lies_in_memory, probe, probe_model
from .speed import Bandwidth, measured_bandwidth

__all__ = [
    "DIRECTORY_KEY",
    "DIRECTORY_VARIABLE",
    "DOMAIN",
    "Bandwidth",
    "library_path",
    "lies_in_memory",
    "measured_bandwidth",
    "needed",
    "probe",
    "probe_model",
    "register",
    "require_room",
    "spill_directory",
    "spilling_to",
]
