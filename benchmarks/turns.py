"""Processes that take turns, step by step, so that each sees the same moods of the machine."""

from __future__ import annotations

import importlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

#: Between two turns: the threads of the process before have stopped spinning by then.
_REST_SECONDS = 0.05


def in_turns(makers: Mapping[str, tuple[str, Mapping[str, Any]]], turns: int) -> dict[str, list[float]]:
    """Seconds of each step of each process.

    Args:
        makers: name -> ``module:function`` and its arguments; the function returns the step, as something to call.
        turns: steps that count, of every process; one before warms up.
    """
    context = multiprocessing.get_context("spawn")
    pipes = {name: context.Pipe() for name in makers}
    processes = [context.Process(target=_serve, args=(pipes[name][1], *makers[name])) for name in makers]
    for process in processes:
        process.start()
    for _, theirs in pipes.values():
        theirs.close()  # a process that dies is then an end of file
    try:
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(1 + turns):
            for name, (ours, _) in pipes.items():
                ours.send(None)
                seconds[name].append(ours.recv())
                time.sleep(_REST_SECONDS)
        return {name: values[1:] for name, values in seconds.items()}
    finally:
        for ours, _ in pipes.values():
            ours.close()
        for process in processes:
            process.join()


def ratio(over: list[float], under: list[float]) -> float:
    """Median of the ratios of neighbouring turns."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _serve(pipe: Connection, function: str, arguments: Mapping[str, Any]) -> None:
    module, name = function.split(":")
    step: Callable[[], object] = getattr(importlib.import_module(module), name)(**arguments)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        step()
        pipe.send(time.perf_counter() - begin)
