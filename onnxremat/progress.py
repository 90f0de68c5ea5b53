"""What is said while planning, and how Ctrl-C ends it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

from .scheduler import Progress

__all__ = ["Console", "Interruption", "Passing", "planning_messages"]

_TELL_SECONDS = 0.5
#: Between two passing messages where they can't replace each other.
_LINE_SECONDS = 5.0


class Passing(str):
    """A message that the next one replaces where the output can do so."""

    __slots__ = ()


class Console:
    """Messages as lines on a stream (stderr unless told otherwise); passing ones, on a terminal, as one line that is updated."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._open = False
        self._told = float("-inf")

    def __call__(self, message: str) -> None:
        """Show a message."""
        passing = isinstance(message, Passing)
        if self._terminal:
            start = "\r\x1b[K" if self._open else ""
            self._stream.write(f"{start}onnxremat: {message}" + ("" if passing else "\n"))
            self._open = passing
        else:
            now = time.monotonic()
            if passing and now - self._told < _LINE_SECONDS:
                return
            self._told = now if passing else self._told
            self._stream.write(f"onnxremat: {message}\n")
        self._stream.flush()

    def close(self) -> None:
        """End a line that is still open, so that what follows starts on its own."""
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False


def planning_messages(seconds_unscheduled: float, unit: str, say: Callable[[str], None]) -> Callable[[Progress], None]:
    """The solvers' progress as passing messages, not more often than a reader can follow.

    Args:
        seconds_unscheduled: time of the base order.
        unit: of times, short.
        say: told each message.
    """
    told = [float("-inf")]

    def tell(progress: Progress) -> None:
        now = time.monotonic()
        if now - told[0] < _TELL_SECONDS:
            return
        told[0] = now
        clock = f"{progress.elapsed:.1f} s, {progress.left:.0f} s left"
        if progress.seconds is None:
            say(Passing(f"{progress.strategy}: no plan yet, {clock}"))
            return
        over = progress.seconds / seconds_unscheduled - 1 if seconds_unscheduled else 0.0
        gap = "" if progress.gap is None else f", at least {progress.bound:.6g} (gap {progress.gap:.2%})"
        say(Passing(f"{progress.strategy}: {progress.seconds:.6g} {unit} ({over:+.2%}){gap}, {clock}"))

    return tell


class Interruption:
    """Ctrl-C while planning: the first one ends the search with the best plan so far, a second one ends the program as ever.

    The solvers take a KeyboardInterrupt as the order to return what they have.  It is raised where they report progress (:meth:`check`), so
    that it never hits anything half done.  Outside the main thread, where no signal arrives, this does nothing.
    """

    def __init__(self, say: Callable[[str], None] = lambda message: None) -> None:
        self.asked = False
        self._twice = False
        self._pending = False
        self._say = say
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._twice = True
            raise KeyboardInterrupt
        self.asked = self._pending = True
        self._say("interrupted: finishing with the best plan so far; once more to abort")

    def check(self) -> None:
        """Raise KeyboardInterrupt once after the first Ctrl-C."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def settle(self) -> None:
        """After a solver: it has ended, whatever was asked; raises KeyboardInterrupt after a second Ctrl-C, which it took for the first."""
        self._pending = False
        if self._twice:
            raise KeyboardInterrupt
