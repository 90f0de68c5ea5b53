"""Progress of a run on stderr: a bar on a terminal, a line for each job elsewhere."""

from __future__ import annotations

import sys
import time
from typing import IO

from ..units import format_bytes
from .jobs import Outcome

__all__ = ["Progress"]

_BAR = 28


class Progress:
    """Counts jobs.

    Args:
        total: jobs of the run.
        quiet: say nothing.
        stream: where to; stderr by default.
    """

    def __init__(self, total: int, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._quiet, self._done, self._failed = total, quiet, 0, 0
        self._begin = time.monotonic()
        self._terminal = self._stream.isatty()
        self._draw()

    def add(self, outcome: Outcome) -> None:
        """A job has ended."""
        self._done += 1
        self._failed += not outcome.ok
        if self._quiet:
            return
        text = f"{outcome.key}: {outcome.error}" if not outcome.ok else f"{outcome.key}: {_figures(outcome)}, {outcome.seconds:.0f} s"
        if not self._terminal:
            self._write(f"onnxremat: [{self._done}/{self._total}] {text}\n")
        elif not outcome.ok:
            self._write(f"\r\x1b[Konnxremat: {text}\n")
        self._draw()

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._terminal and not self._quiet:
            self._write("\r\x1b[K")

    def _draw(self) -> None:
        if self._quiet or not self._terminal or not self._total:
            return
        filled = _BAR * self._done // self._total
        spent = time.monotonic() - self._begin
        left = f", about {spent / self._done * (self._total - self._done) / 60:.0f} min left" if self._done else ""
        failed = f", {self._failed} failed" if self._failed else ""
        self._write(f"\r\x1b[K[{'#' * filled}{'.' * (_BAR - filled)}] {self._done}/{self._total}{failed}{left}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _figures(outcome: Outcome) -> str:
    figures = outcome.figures or {}
    before = figures["seconds_unscheduled"]
    overhead = figures["seconds_predicted"] / before - 1 if before else 0.0
    note = " (the smallest found)" if outcome.smallest else ""
    return f"{format_bytes(figures['budget_bytes'])}{note} of {format_bytes(figures['peak_unscheduled_bytes'])}, {overhead:+.1%}"
