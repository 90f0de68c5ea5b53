"""Processes of the benchmarks that take turns."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.turns import in_turns, ratio


class Sleeper:
    """Sleeps, and counts its steps."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._steps = seconds, 0

    def __call__(self) -> None:
        time.sleep(self._seconds)
        self._steps += 1

    def figures(self) -> dict[str, int]:
        return {"steps": self._steps, "process": os.getpid()}


def failing(message: str) -> Sleeper:
    raise ValueError(message)


def dying() -> object:
    return lambda: os._exit(3)


def test_each_is_timed_in_a_process_of_its_own() -> None:
    name = f"{__name__}:Sleeper"
    runs = in_turns({"quick": (name, {"seconds": 0.01}), "slow": (name, {"seconds": 0.1})}, turns=3)
    assert [len(run.seconds) for run in runs.values()] == [3, 3]
    assert 3 < ratio(runs["slow"].seconds, runs["quick"].seconds) < 15
    assert all(run.figures["steps"] == 4 for run in runs.values())  # one to warm up
    assert len({os.getpid(), *(run.figures["process"] for run in runs.values())}) == 3


def test_one_that_fails_stops_no_other() -> None:
    makers = {
        "fails": (f"{__name__}:failing", {"message": "no kernel"}),
        "dies": (f"{__name__}:dying", {}),
        "runs": (f"{__name__}:Sleeper", {"seconds": 0.001}),
    }
    runs = in_turns(makers, turns=2)
    assert runs["fails"].error == "ValueError: no kernel" and runs["dies"].error == "the process ended"
    assert len(runs["runs"].complete().seconds) == 2
    with pytest.raises(RuntimeError, match="no kernel"):
        runs["fails"].complete()


def test_ratios_are_of_neighbouring_turns() -> None:
    assert ratio([1.0, 20.0, 3.0], [2.0, 10.0, 3.0]) == 1.0
