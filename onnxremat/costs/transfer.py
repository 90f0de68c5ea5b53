"""The swap channel of a step: where to, how fast, how much."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ..cache import cached_json
from ..errors import UsageError
from ..runtime.cuda import Cuda, available, require_cuda
from ..runtime.cuda import measured_bandwidth as measured_bandwidth_of_gpu
from ..scheduler import Problem, Transfer
from ..spill import Bandwidth, library_path, lies_in_memory, measured_bandwidth, spill_directory
from ..units import format_bytes, parse_bytes
from .measured import machine_key

#: Bytes that a step may swap out at one time where nobody sets a bound: what problems may count at most.
_UNBOUNDED = 2**52
SWAPS = ("none", "disk", "host")


@dataclass(frozen=True, slots=True)
class Swap:
    """What may be swapped, as a user says it.

    Attributes:
        kind: "none", "disk" for a file that custom operators write, or "host" for the memory of the host that a GPU is in.
        bandwidth: out and back; None: measured, in the folder or on the GPU.
        limit_bytes: the most bytes that are away at one time; None for no limit.
        directory: the folder; None for that of the environment (:func:`onnxremat.spill.spill_directory`).
        cuda: the GPU whose tensors are swapped.
    """

    kind: str = "none"
    bandwidth: Bandwidth | None = None
    limit_bytes: int | None = None
    directory: Path | None = None
    cuda: Cuda | None = None

    @classmethod
    def parse(
        cls,
        kind: str,
        bandwidth: str | None = None,
        limit: str | None = None,
        directory: str | Path | None = None,
        cuda: Cuda | None = None,
    ) -> Swap:
        """From options; raises UsageError, also where they say something of a swap that is not wanted."""
        if kind not in SWAPS:
            raise UsageError(f"--swap takes none, disk or host, not '{kind}'")
        if kind == "host" and cuda is None:
            raise UsageError(
                "--swap host: on the CPU tensors lie in the host's memory anyway, so moving them there frees none: use --swap disk, or "
                "--provider cuda"
            )
        if kind == "disk" and cuda is not None:
            raise UsageError("--swap disk is for the CPU: its operators read the host's memory; use --swap host")
        if kind == "none" and (bandwidth is not None or limit is not None):
            raise UsageError(f"--swap-bandwidth and --swap-bytes say how to swap: give --swap {'host' if cuda else 'disk'} as well")
        if kind != "disk" and directory is not None:
            raise UsageError("--spill-dir names a folder for what is swapped to disk: give --swap disk as well")
        size = None if limit is None else parse_bytes(limit)
        if size == 0:
            raise UsageError("--swap-bytes 0 leaves nowhere to swap to: give a positive size, or --swap none")
        return cls(kind, None if bandwidth is None else parse_bandwidth(bandwidth), size, None if directory is None else Path(directory), cuda)


def parse_bandwidth(text: str) -> Bandwidth:
    """``"2GiB/s"``, or ``"1GiB/s:3GiB/s"`` for out and in; raises UsageError."""
    parts = [re.fullmatch(r"\s*(.*?)\s*/\s*s\s*", part) for part in text.split(":")]
    if not 1 <= len(parts) <= 2 or any(part is None for part in parts):
        raise UsageError(f"'{text}' is not a bandwidth: write 2GiB/s, or 1GiB/s:3GiB/s for out and in")
    rates = [parse_bytes(part.group(1)) for part in parts if part is not None]
    if not all(rates):
        raise UsageError(f"a bandwidth of '{text}' moves nothing: give more than 0")
    return Bandwidth(float(rates[0]), float(rates[-1]))


def swap_channel(swap: Swap) -> Transfer | None:
    """The channel for a problem; None where nothing is to be swapped.

    Raises:
        SpillUnavailable: the operators can't be had on this machine.
        RuntimeUnavailable: there is no GPU here to measure.
        OnnxRematError: the folder can't be measured.
    """
    if swap.kind == "none":
        return None
    limit = _UNBOUNDED if swap.limit_bytes is None else swap.limit_bytes
    if swap.kind == "host":
        pace = swap.bandwidth or _gpu_bandwidth(swap.cuda or Cuda())
        return Transfer(pace.out, pace.into, limit, overlap=True)
    library_path()
    rates = swap.bandwidth or bandwidth_of(spill_directory(swap.directory))
    return Transfer(rates.out, rates.into, limit)


def _gpu_bandwidth(cuda: Cuda) -> Bandwidth:
    if not available():
        raise UsageError("--swap host: there is no GPU here to measure: say how fast it copies, such as --swap-bandwidth 12GiB/s")
    name = require_cuda(cuda).name(cuda.device)
    key = hashlib.sha256(f"{machine_key(0)}|{name}|{cuda.device}".encode()).hexdigest()[:24]
    return Bandwidth(**cached_json("bandwidth", key, lambda: dict(zip(("out", "into"), measured_bandwidth_of_gpu(cuda), strict=True))))


def bandwidth_of(directory: Path) -> Bandwidth:
    """Measured once for each file system and machine."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        device = 0  # the measurement says what is wrong
    key = hashlib.sha256(f"{machine_key(0)}|{device}|{os.path.realpath(directory)}".encode()).hexdigest()[:24]
    return Bandwidth(**cached_json("bandwidth", key, lambda: asdict(measured_bandwidth(directory))))


def swap_note(swap: Swap, problem: Problem, swapped: int, recomputed: int) -> str:
    """What is to be said of a plan's swaps: why there are none, or what is odd about the folder; empty where nothing is."""
    channel = problem.transfer
    if channel is None:
        return ""
    if swapped and swap.kind == "host":
        return ""
    if swapped:
        where = spill_directory(swap.directory)
        return f"{where} lies in memory, so swapping to it saves none: choose another folder with --spill-dir" if lies_in_memory(where) else ""
    if not recomputed:
        return "nothing is swapped: the step fits without"
    pace = f"{format_bytes(channel.bytes_per_second_out)}/s out and {format_bytes(channel.bytes_per_second_in)}/s in"
    return f"nothing is swapped: at {pace}, no plan with swaps was found that is faster and can be placed"


__all__ = ["SWAPS", "Swap", "bandwidth_of", "parse_bandwidth", "swap_channel", "swap_note"]
