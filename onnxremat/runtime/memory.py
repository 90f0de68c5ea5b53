"""What this process really holds, read from the kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ..errors import OnnxRematError

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1


def _field(name: str) -> int:
    try:
        text = _STATUS.read_text(encoding="ascii")
    except OSError as error:
        raise OnnxRematError(f"the resident memory of a process can be measured on Linux only ({error})") from error
    for line in text.splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OnnxRematError(f"the kernel does not report {name} in {_STATUS}")


def resident_bytes() -> int:
    """Resident set size of this process, in bytes."""
    return _field("VmRSS")


def peak_resident_bytes() -> int:
    """The largest resident set size since the start, or since ``reset_peak``, in bytes."""
    return _field("VmHWM")


def available_bytes() -> int | None:
    """Bytes of the machine that processes can still have; None where the system does not tell (it is not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def reset_peak() -> None:
    """Let ``peak_resident_bytes`` start anew from the present size."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def map_large_buffers(threshold: int = 64 * 1024) -> None:
    """Let malloc map every buffer from ``threshold`` bytes on by itself, so that a freed one leaves the process at once (exact, slow)."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    libc.mallopt(_M_MMAP_THRESHOLD, threshold)
    libc.mallopt(_M_TRIM_THRESHOLD, threshold)


def trim() -> None:
    """Give freed memory back to the system."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


class HostMeter:
    """What this process grows by during its steps; what it grows by between them, such as data that are read, is not counted.

    Attributes:
        grown: the most bytes so far.
    """

    def __init__(self) -> None:
        trim()
        self.grown = 0
        self._base: int | None = None
        self._after = 0

    def before_step(self) -> None:
        """Look, and begin to watch."""
        reset_peak()
        self._base = resident_bytes() if self._base is None else self._base + resident_bytes() - self._after

    def after_step(self) -> None:
        """Look how far it went."""
        assert self._base is not None
        self.grown = max(self.grown, peak_resident_bytes() - self._base)
        trim()  # or what is read next lies where the step's own heap was, and the next step seems to need more
        self._after = resident_bytes()
