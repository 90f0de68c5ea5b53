"""Progress of planning: one line on a terminal, some lines elsewhere; and what Ctrl-C does in the midst of it."""

from __future__ import annotations

import io
import signal
import time

import pytest

from onnxremat.fit import Search
from onnxremat.progress import Console, Interruption, Passing, planning_messages
from onnxremat.schedule import schedule
from onnxremat.scheduler import Progress, evaluate
from tests.scheduler.graphs import transformer


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_passing_messages_as_one_line() -> None:
    stream = _Terminal()
    console = Console(stream)
    for message in ("planning", Passing("auto: 5 s"), Passing("auto: 4 s"), "verifying", Passing("last")):
        console(message)
    console.close()
    erase = "\r\x1b[K"
    assert stream.getvalue() == (
        f"onnxremat: planning\nonnxremat: auto: 5 s{erase}onnxremat: auto: 4 s{erase}onnxremat: verifying\nonnxremat: last\n"
    )


def test_elsewhere_messages_are_plain_lines_and_passing_ones_few() -> None:
    stream = io.StringIO()
    console = Console(stream)
    for message in ("planning", *(Passing(f"auto: {k} s") for k in range(100)), "verifying"):
        console(message)
    console.close()
    assert stream.getvalue() == "onnxremat: planning\nonnxremat: auto: 0 s\nonnxremat: verifying\n"


def test_a_message_holds_incumbent_bound_gap_and_time_left() -> None:
    said: list[str] = []
    tell = planning_messages(2.0, "s", said.append)
    tell(Progress("auto", 2.2, 1.0, bound=2.0, left=9.0))
    tell(Progress("auto", 2.1, 1.1, bound=2.0, left=8.9))
    assert said == ["auto: 2.2 s (+10.00%), at least 2 (gap 10.00%), 1.0 s, 9 s left"]
    planning_messages(2.0, "s", said.append)(Progress("auto", None, 1.0, left=9.0))
    assert said[1:] == ["auto: no plan yet, 1.0 s, 9 s left"]
    assert all(isinstance(message, Passing) for message in said)


BIG = 2**16


def _scheduled(interrupts: int) -> tuple[float, int, int]:
    """Seconds, peak and budget of planning that is interrupted so many times once it has a plan."""
    from dataclasses import replace

    problem = transformer(12)
    problem = replace(problem, tensors=tuple(replace(t, bytes=t.bytes * BIG) for t in problem.tensors))
    budget = int(0.75 * evaluate(problem, range(len(problem.ops))).peak_bytes)
    left = [interrupts]
    began = time.monotonic()

    def tell(progress: Progress) -> None:
        while progress.seconds is not None and left[0]:
            left[0] -= 1
            signal.raise_signal(signal.SIGINT)

    with Interruption() as interruption:
        found = schedule(problem, budget, Search("auto", 120.0), tell, interruption)
    return time.monotonic() - began, found.peak_bytes, budget


def test_ctrl_c_ends_planning_with_the_best_plan_so_far() -> None:
    before = signal.getsignal(signal.SIGINT)
    seconds, peak, budget = _scheduled(1)
    assert seconds < 60 and peak <= budget
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_aborts() -> None:
    with pytest.raises(KeyboardInterrupt):
        _scheduled(2)


def test_an_interruption_is_announced_and_raised_once() -> None:
    said: list[str] = []
    with Interruption(said.append) as interruption:
        interruption.check()
        interruption.settle()
        signal.raise_signal(signal.SIGINT)
        assert interruption.asked and len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
        interruption.check()
        interruption.check()
        interruption.settle()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.settle()
