"""The largest batch within a budget."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxremat.cli import main
from onnxremat.errors import BudgetInfeasible, UsageError
from onnxremat.exporters import InputSpec, Loss
from onnxremat.fit import Search
from onnxremat.pipeline import Request, search_of
from onnxremat.tradeoff import maxbatch
from onnxremat.tradeoff.maxbatch import batch_axes, largest_batch
from tests.scheduler.graphs import chain

MIB = 2**20
REQUEST = Request("a:b", (InputSpec("x", (4, 3)),), (InputSpec("y", (4,), "int64", 2),), Loss.of("cross_entropy"), time_limit=1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Instead of an export, a chain whose buffers grow with the batch."""
    requests: list[Request] = []

    def problem(request: Request) -> Any:
        requests.append(request)
        return chain(12, size=request.inputs[0].shape[0] * MIB // 2, resident=8 * MIB)

    monkeypatch.setattr(maxbatch, "source_problem", problem)
    return requests


def test_the_largest_batch_by_doubling_and_bisection(asked: list[Request]) -> None:
    found = largest_batch(REQUEST, 64 * MIB, 1.5, {})
    tried = {t.batch: t.fits for t in found.trials}
    best = found.best.batch
    assert tried[best] and not tried[best + 1] and best > 4, tried
    assert found.best.peak_bytes is not None and found.best.peak_bytes <= 64 * MIB < found.best.peak_unscheduled_bytes
    assert found.best.overhead is not None and 0 < found.best.overhead <= 0.5
    assert len(asked) == len(tried) and all(r.inputs[0].shape == (b, 3) and r.labels[0].shape == (b,) for r, b in _pairs(asked))
    plain = largest_batch(REQUEST, 64 * MIB, 1.0, {})
    assert plain.best.batch < best and plain.best.overhead == 0


def _pairs(requests: list[Request]) -> list[tuple[Request, int]]:
    return [(r, r.labels[0].shape[0]) for r in requests]


def test_no_batch_fits(asked: list[Request]) -> None:
    with pytest.raises(BudgetInfeasible, match=r"not even a batch of one fits 9\.0 MiB") as caught:
        largest_batch(REQUEST, 9 * MIB, 1.5, {})
    assert caught.value.minimum_budget_bytes > 9 * MIB


def test_axes() -> None:
    x, scale, ids = InputSpec("x", (4, 3)), InputSpec("scale", ()), InputSpec("ids", (7, 4), "int64", 9)
    assert batch_axes([x, scale], {}) == {"x": 0}
    assert batch_axes([x, ids], {"x": 0, "ids": 1}) == {"x": 0, "ids": 1}
    for named, message in (
        ({}, r"\(x 4, ids 7\): name it by --batch-dim"),
        ({"z": 0}, "no such input"),
        ({"x": 2}, "has 2 axes"),
    ):
        with pytest.raises(UsageError, match=message):
            batch_axes([x, ids], named)


def test_the_command_asks_for_what_is_compiled(asked: list[Request], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["maxbatch", "tests.factories:tiny_mlp", "--input", "x=2x12", "--loss", "mse", "--budget", "64MiB", "--time-limit", "1", "--quiet"]
    assert main([*arguments, "--target", "onnxruntime", "--update", "fused", "--json"]) == 0
    assert {(r.target, r.optimizer.update, r.costs) for r in asked} == {("onnxruntime", "fused", "analytic")}
    assert search_of(asked[0]) == Search("auto", 1.0, portable=True)
    asked.clear()
    assert main([*arguments, "--provider", "cuda", "--swap", "host", "--swap-bandwidth", "1GiB/s", "--json"]) == 0
    assert {(r.provider, r.swap.kind) for r in asked} == {("cuda", "host")}
    assert search_of(asked[0]) == Search("auto", 1.0)
    asked.clear()
    assert main([*arguments, "--swap", "disk", "--json"]) == 0
    assert search_of(asked[0]) == Search("auto", 1.0, fixed=True)


def test_a_budget_too_small_for_a_batch_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["maxbatch", "tests.factories:tiny_mlp", "--input", "x=2x12", "--loss", "mse", "--budget", "1MiB", "--time-limit", "1", "--quiet"]
    assert main([*arguments, "--json"]) == 3
    shown = capsys.readouterr()
    assert "not even a batch of one fits 1.0 MiB" in shown.err
    assert json.loads(shown.out)["minimum_budget_bytes"] > 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "lots"], "'lots' is not a size"),
        (["--budget", "1GiB", "--overhead", "0.9"], "at least 1"),
        (["--budget", "1GiB", "--batch-dim", "x"], "is not NAME=AXIS"),
        (["--budget", "1GiB", "--target", "onnxruntime", "--swap", "disk"], "leave one of them out"),
        ([], "required"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["maxbatch", "tests.factories:tiny_mlp", *arguments]) == 2
    assert message in capsys.readouterr().err
