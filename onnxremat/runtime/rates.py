"""Learning-rate schedules: functions of the number of the step, counted from 0."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import UsageError

__all__ = ["SCHEDULES", "Schedule", "rate_schedule"]

Schedule = Callable[[int], float]
SCHEDULES = ("constant", "linear", "cosine")


def rate_schedule(name: str, peak: float, steps: int, warmup: int = 0) -> Schedule:
    """A schedule that rises linearly over ``warmup`` steps and then stays, falls linearly, or falls by half a cosine to 0 after ``steps``.

    The cosine is that of Loshchilov and Hutter (ICLR 2017, equation 5) without restarts.

    Raises:
        UsageError: an unknown name, or a warm-up that is not shorter than the run.
    """
    if name not in SCHEDULES:
        raise UsageError(f"there is no learning-rate schedule '{name}': choose {', '.join(SCHEDULES)}")
    if not 0 <= warmup < max(steps, 1):
        raise UsageError(f"a warm-up of {warmup} steps does not fit a run of {steps}: give fewer")

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = min(1.0, (step - warmup) / (steps - warmup))
        return peak * {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[name]

    return rate
