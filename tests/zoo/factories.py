"""Factories that end badly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import nn


def killed() -> nn.Module:
    """As when the system runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hangs() -> nn.Module:
    """Until somebody ends it; tells its process by a file where it is asked to."""
    if "ONNXREMAT_TEST_PID" in os.environ:
        Path(os.environ["ONNXREMAT_TEST_PID"]).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(600)
    raise AssertionError
