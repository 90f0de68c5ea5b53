"""What counts as a step's memory, and what as its caller's."""

from __future__ import annotations

import ctypes

import numpy as np

from onnxremat.runtime import memory, worker

MIB = 2**20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def job() -> int:
    """In a worker: two steps that take 16 MiB each, and 16 MiB of data that are read between them, all from a heap that keeps what is freed."""
    for setting in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(setting, 2**30)
    meter = memory.HostMeter()
    data = []
    for _ in range(2):
        meter.before_step()
        scratch = np.ones(16 * MIB, np.uint8)
        del scratch
        meter.after_step()
        data.append(np.ones(16 * MIB, np.uint8))
    return meter.grown


def test_data_in_what_a_step_has_freed_are_not_the_next_steps() -> None:
    assert abs(worker.call("tests.runtime.test_meter:job") - 16 * MIB) < MIB
