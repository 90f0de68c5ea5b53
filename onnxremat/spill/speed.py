"""How fast a folder is written to and read from, measured with real files."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import OnnxRematError
from ..units import format_bytes

#: What is written at a time, and in all.
_CHUNK, _CHUNKS = 16 * 2**20, 12


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second to a file (``out``) and back (``into``)."""

    out: float
    into: float


def measured_bandwidth(directory: Path, chunk: int = _CHUNK, chunks: int = _CHUNKS) -> Bandwidth:
    """Write a file of 192 MiB to a folder and read it again.

    The disk's own pace counts, since memory to cache the file in is what there is none of where tensors are swapped: the time to write lasts
    until the data are on the disk, and they are read after the system's cache has let go of them.

    Raises:
        OnnxRematError: the folder can't be written, or has no room.
    """
    data = os.urandom(chunk)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            descriptor = file.fileno()
            os.posix_fallocate(descriptor, 0, chunk * chunks)
            begin = time.perf_counter()
            for k in range(chunks):
                _whole(os.pwrite(descriptor, data, k * chunk), chunk)
            os.fdatasync(descriptor)
            written = time.perf_counter()
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = bytearray(chunk)
            start = time.perf_counter()
            for k in range(chunks):
                _whole(os.preadv(descriptor, [buffer], k * chunk), chunk)
            end = time.perf_counter()
    except OSError as error:
        size = format_bytes(chunk * chunks)
        raise OnnxRematError(
            f"can't measure how fast {directory} is with a file of {size} ({error.strerror or error}): choose another folder with --spill-dir, "
            "or give --swap-bandwidth"
        ) from error
    return Bandwidth(chunk * chunks / max(written - begin, 1e-9), chunk * chunks / max(end - start, 1e-9))


def _whole(done: int, asked: int) -> None:
    if done != asked:
        raise OSError(f"{done} of {asked} bytes were moved")
