"""Limits of the numbers that functions and options of the command line take."""

from __future__ import annotations

from .errors import UsageError

__all__ = ["LARGEST_SEED", "MOST_THREADS", "require_seconds", "require_whole"]

#: The largest seed that every generator of random numbers on the way takes.
LARGEST_SEED = 2**32 - 1
#: More threads than any machine has cores for; the runtime would try to start them all.
MOST_THREADS = 1024


def require_whole(what: str, number: int, least: int = 0, most: int | None = None) -> None:
    """Raise UsageError where a number, such as "a seed", is not from ``least`` to ``most``."""
    if number < least or (most is not None and number > most):
        raise UsageError(f"{what} must be a whole number of at least {least}{'' if most is None else f' and at most {most}'}, not {number}")


def require_seconds(what: str, seconds: float) -> None:
    """Raise UsageError where a time limit, such as "a time limit", is none that can be kept."""
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{what} must be a number of seconds from 0 up, not {seconds:g}")
