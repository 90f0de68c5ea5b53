"""Processes that take turns, step by step, so that each sees the same moods of the machine."""

from __future__ import annotations

import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

#: Between two turns: the threads of the process before have stopped spinning by then.
_REST_SECONDS = 0.05


@dataclass
class Runs:
    """What one process did.

    Attributes:
        seconds: of each step.
        figures: what ``step.figures()`` told at the end, where the step has that.
        error: why it stopped, empty where it did not.
    """

    seconds: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def complete(self) -> Runs:
        """These; raises RuntimeError where the process stopped before the end."""
        if self.error:
            raise RuntimeError(self.error)
        return self


def in_turns(makers: Mapping[str, tuple[str, Mapping[str, Any]]], turns: int) -> dict[str, Runs]:
    """Steps of several processes, in turns.

    Args:
        makers: name -> ``module:function`` and its arguments; the function returns the step, as something to call.
        turns: steps that count, of every process; one before warms up.
    """
    context = multiprocessing.get_context("spawn")
    pipes = {name: context.Pipe() for name in makers}
    processes = [context.Process(target=_serve, args=(pipes[name][1], *makers[name]), daemon=True) for name in makers]
    for process in processes:
        process.start()
    for _, theirs in pipes.values():
        theirs.close()  # a process that dies is then an end of file
    runs = {name: Runs() for name in makers}
    for turn in range(1 + turns):
        for name, run in runs.items():
            seconds = None if run.error else _ask(pipes[name][0], "step", run)
            if turn and seconds is not None:
                run.seconds.append(seconds)
            time.sleep(_REST_SECONDS)
    for name, run in runs.items():
        if not run.error:
            run.figures = _ask(pipes[name][0], "figures", run) or {}
        pipes[name][0].close()
    for process in processes:
        process.join()
    return runs


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios of neighbouring turns."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _ask(pipe: Connection, question: str, run: Runs) -> Any:
    """The answer; None where the process failed, and why in ``run``."""
    try:
        pipe.send(question)
        answer, run.error = pipe.recv()
    except (EOFError, OSError):
        answer, run.error = None, "the process ended"
    return answer


def _serve(pipe: Connection, function: str, arguments: Mapping[str, Any]) -> None:
    module, name = function.split(":")
    step: Callable[[], object] | None = None
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            if step is None:
                step = getattr(importlib.import_module(module), name)(**arguments)
                assert step is not None
            begin = time.perf_counter()
            if question == "step":
                step()
                pipe.send((time.perf_counter() - begin, ""))
            else:
                pipe.send((step.figures() if hasattr(step, "figures") else None, ""))
        except Exception as error:
            pipe.send((None, " ".join(f"{type(error).__name__}: {error}".split())[-160:]))
