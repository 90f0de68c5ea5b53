"""The benchmark that needs a GPU, without one: what it would do, what it says, that it goes on where it was; and a small run on the CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.common import Case
from benchmarks.gpu_check import CASES, QUICK, Results, Variant, failures, parse, tables, variants
from onnxremat.errors import OnnxRematError

from .factories import MLP_INPUT

COMPILED = {"plan": {"recomputed_ops": 3, "swapped_tensors": 2}, "time": {"seconds_predicted": 0.25}}


def row(**parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "variant": "50% both", **parts}


def test_each_budget_is_met_by_recomputing_by_swapping_and_by_both() -> None:
    assert [v.name for v in variants(True)] == ["unscheduled", "50% recompute", "50% swap", "50% both", "min recompute", "min both"]
    assert [v.name for v in variants(False)] == ["unscheduled", "50% recompute", "min recompute"]
    assert all("swap" not in v.options for v in variants(False))
    assert set(CASES) == set(QUICK)
    assert parse(["-o", "x", "--models", "resnet18", "--quick"]).models == ["resnet18"]
    with pytest.raises(SystemExit):
        parse(["-o", "x", "--models", "unknown"])


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("gpu_check: onnxruntime-training-cpu has no CUDA provider: ")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_checks_are_done_once_unless_they_failed(tmp_path: Path) -> None:
    done: list[str] = []

    def run(answer: str) -> dict[str, Any]:
        done.append(answer)
        if answer == "fails":
            raise OnnxRematError("no\nroom")
        return {"answer": answer}

    def again(inputs: int, answer: str) -> dict[str, Any]:
        return Results(tmp_path, lambda text: None).check("a b/c", {"inputs": inputs}, lambda: run(answer))

    assert again(1, "fails") == {"error": "no room"}
    assert again(1, "first") == again(1, "second") == {"answer": "first"}
    assert again(2, "third") == {"answer": "third"}
    assert done == ["fails", "first", "third"]


def test_tables_show_what_is_there_and_failures_count() -> None:
    numbers = {"bitwise_equal": True, "max_relative_error_torch": 2e-6, "passed": True}
    good = row(
        compiled=COMPILED,
        kernels={"on_gpu": {"Conv": 5}, "on_cpu": {"Size": 2, "Resize": 1}, "copies_added": 4},
        numbers=numbers,
        peak={"planned_bytes": 100 * 2**20, "smallest_bytes": 98 * 2**20},
        steps={"seconds": 0.5, "peak_measured_bytes": 2**30},
        steps_in_turns={"seconds": 0.75},
    )
    text = "\n".join(tables([good]))
    assert "| m | 50% both | 3 | 2 | yes | 2.0e-06 | 100.0 MiB | 98.0 MiB | -2.0% | 1.0 GiB | 0.2500 | 0.5000 | 0.7500 |" in text
    assert "| m | 5 | Resize 1, Size 2 | 4 |" in text
    assert failures([good]) == 0
    assert failures([row(compiled=COMPILED, numbers=numbers | {"passed": False, "bitwise_equal": False})]) == 1
    assert failures([row(compiled=COMPILED, peak={"planned_bytes": 1, "smallest_bytes": 0})]) == 1
    failed = row(compiled=COMPILED, steps={"error": "the step exceeds the memory"})
    assert failures([failed]) == 1
    assert "m 50% both, steps: the step exceeds the memory" in "\n".join(tables([failed]))


@pytest.mark.slow
def test_a_small_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "QUICK", {"resnet18": Case("resnet18", "tests.factories:tiny_mlp", (MLP_INPUT,), "cross_entropy")})
    monkeypatch.setattr(gpu_check, "variants", lambda cuda: [Variant("unscheduled", {})])
    monkeypatch.setattr(gpu_check, "_PRECISION", 0.3)
    arguments = ["-o", str(tmp_path), "--provider", "cpu", "--quick", "--models", "resnet18", "--steps", "2", "--costs", "analytic"]
    assert gpu_check.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "| resnet18 | unscheduled | 0 | 0 | yes |" in shown
    assert (tmp_path / "tables.txt").read_text(encoding="utf-8") == shown
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["rows"][0]
    assert 0 < found["peak"]["smallest_bytes"] <= found["peak"]["planned_bytes"]
    assert found["kernels"]["on_gpu"] == {}
    monkeypatch.setattr(gpu_check, "compile_model", lambda *a, **k: argparse.Namespace())  # which a second run does not need
    assert gpu_check.main(arguments) == 0
