"""Fourier transforms of windows as matrix products."""

from __future__ import annotations

import numpy as np

from ..autodiff.context import Context
from ..graph import Expr
from .registry import rewrite


@rewrite("STFT")
def _stft(c: Context) -> Expr:
    """Frames of the signal, times the window, times the matrix of cosines and sines: (batch, frames, bins, 2)."""
    signal = c.x0
    if signal.rank == 3 and signal.shape[2] == 2:
        raise c.refuse("its signal is complex; transform its real and imaginary parts apart")
    batch, length = signal.shape[:2]
    step = int(c.const(1).reshape(()))
    window = c.input(2) if c.has(2) else None
    size = window.shape[0] if window is not None else int(c.const(3).reshape(()))
    frames = (length - size) // step + 1
    bins = size // 2 + 1 if int(c.attr("onesided", 1)) else size
    at = np.arange(frames)[:, None] * step + np.arange(size)
    taken = c.op("Gather", signal.reshape([batch, length]), at, axis=1)
    if window is not None:
        taken = taken * window
    angle = 2 * np.pi * ((np.arange(size)[:, None] * np.arange(bins)) % size) / size
    waves = np.stack([np.cos(angle), -np.sin(angle)], axis=-1).reshape(size, 2 * bins).astype(signal.dtype.numpy())
    return c.op("MatMul", taken, c.op.const(waves)).reshape([batch, frames, bins, 2])
