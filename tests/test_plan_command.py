"""``onnxremat plan``: what it reads, what it compares, what it writes, and how it refuses."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from onnxremat import Artifact
from onnxremat.artifact import TRAINING
from onnxremat.cli import main
from onnxremat.scheduler import Infeasible, Problem, plan_from_sequence

Capture = pytest.CaptureFixture[str]
LAYERS = 12


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """A plain instance: a chain of layers, forward and backward, with costs in a unit of its own."""
    ops: list[dict[str, Any]] = [{"name": f"f{i}", "cost": 3, "bytes": 100, "inputs": [i - 1] if i else []} for i in range(LAYERS)]
    for i in range(LAYERS - 1, -1, -1):
        reads = sorted({len(ops) - 1, i})
        ops.append({"name": f"b{i}", "cost": 5, "bytes": 100, "inputs": reads, "backward": True})
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({"name": "chain", "ops": ops}), encoding="utf-8")
    return path


def planned(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    assert main(["plan", *arguments, "--json", "--quiet"]) == code
    captured = capsys.readouterr()
    assert code or not captured.err
    return json.loads(captured.out)


def test_the_smallest_budget_is_met_by_what_it_rests_on(capsys: Capture, instance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the search for the fastest plan may not come upon one as small again."""

    def finds_none(problem: Problem, budget: int, strategy: str, *_: Any, **__: Any) -> Any:
        raise Infeasible(budget, 0, strategy, budget)

    monkeypatch.setattr("onnxremat.plan_file.solve", finds_none)
    found = planned(capsys, str(instance), "--budget", "min", "--time-limit", "1")
    assert found["feasible"] and found["strategy"] == "auto" and found["recomputed_ops"] > 0
    assert found["peak_predicted_bytes"] == found["budget_bytes"] < found["peak_unscheduled_bytes"]


def test_an_instance_is_planned_in_its_own_unit(capsys: Capture, instance: Path, tmp_path: Path) -> None:
    sequence, plan = tmp_path / "sequence.json", tmp_path / "plan.json"
    arguments = (str(instance), "--budget", "60%", "--time-limit", "3", "--save-sequence", str(sequence), "-o", str(plan))
    found = planned(capsys, *arguments)
    assert found["unit"] == "unit of the instance" and found["seconds_unscheduled"] == 8 * LAYERS
    assert found["seconds_unscheduled"] < found["seconds_predicted"] <= 11 * LAYERS and found["gap"] >= 0
    runs = json.loads(sequence.read_text(encoding="utf-8"))
    problem = Problem.load(instance)
    again = plan_from_sequence(problem, runs, found["budget_bytes"])
    assert (again.seconds, again.peak_bytes) == (found["seconds_predicted"], found["peak_predicted_bytes"])
    assert [op for _, op in json.loads(plan.read_text(encoding="utf-8"))["steps"]] == runs


def test_all_strategies_are_compared(capsys: Capture, instance: Path) -> None:
    found = planned(capsys, str(instance), "--budget", "50%", "--strategy", "all", "--time-limit", "3")
    rows = {row["strategy"]: row for row in found["strategies"]}
    assert {"auto", "keep_all", "chen_sqrt", "chen_greedy", "griewank", "rotor", "checkmate_ilp", "checkmate_lp", "moccasin"} <= set(rows)
    assert "mincut_knapsack" in rows and "rotor_ap" not in rows
    assert rows["keep_all"]["feasible"] is False and rows["keep_all"]["minimum_budget_bytes"] == found["peak_unscheduled_bytes"]
    plans = [row for row in found["strategies"] if row["feasible"]]
    assert found["strategies"][: len(plans)] == plans, "plans come first"
    assert found["seconds_predicted"] == plans[0]["seconds_predicted"] == min(row["seconds_predicted"] for row in plans)
    for row in plans:
        assert row["peak_predicted_bytes"] <= found["budget_bytes"] and row["gap"] >= 0 and row["solve_seconds"] >= 0
    assert rows["auto"]["seconds_predicted"] <= rows["rotor"]["seconds_predicted"]

    assert main(["plan", str(instance), "--budget", "50%", "--strategy", "all", "--time-limit", "1", "-q"]) == 0
    text = capsys.readouterr().out
    assert "overhead" in text and "keep_all: budget" in text and all(name in text for name in rows)


def test_no_strategy_within_the_budget(capsys: Capture, instance: Path) -> None:
    found = planned(capsys, str(instance), "--budget", "1%", "--strategy", "all", "--time-limit", "1", code=3)
    assert found["feasible"] is False
    again = planned(capsys, str(instance), "--budget", f"{found['minimum_budget_bytes']}B", "--strategy", "all", "--time-limit", "1")
    assert again["feasible"] is True


def test_progress_goes_to_stderr(capsys: Capture, instance: Path) -> None:
    assert main(["plan", str(instance), "--budget", "60%", "--time-limit", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert "auto: " in captured.err and json.loads(captured.out)["feasible"]


def test_artifacts_and_their_graphs_are_read(capsys: Capture, mlp_artifact: Artifact) -> None:
    for path in (mlp_artifact.path, mlp_artifact.path / TRAINING, mlp_artifact.path / "problem.json"):
        found = planned(capsys, str(path), "--strategy", "rotor", "--time-limit", "2")
        assert found["feasible"] is True and found["unit"] == "seconds" and found["strategy"] == "rotor"


def test_without_time_there_is_the_best_known_plan(capsys: Capture, instance: Path) -> None:
    assert planned(capsys, str(instance), "--time-limit", "0")["recomputed_ops"] == 0
    assert planned(capsys, str(instance), "--time-limit", "0", "--strategy", "all")["recomputed_ops"] == 0


GOOD = {"cost": 1, "bytes": 4, "inputs": []}


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([{**GOOD, "inputs": [1]}, {**GOOD, "inputs": [0]}], "cycle"),
        ([{**GOOD, "inputs": [0]}], "cycle"),
        ([{**GOOD, "inputs": [7]}], "reads op 7, which does not exist"),
        ([{**GOOD, "inputs": [-1]}], "reads op -1, which does not exist"),
        ([{**GOOD, "inputs": [0.0]}], "reads op 0.0, which does not exist"),
        ([{**GOOD, "bytes": -4}], "bytes must be"),
        ([{**GOOD, "bytes": 2**60}], "bytes must be"),
        ([{**GOOD, "bytes": 1.5}], "bytes must be"),
        ([{**GOOD, "bytes": None}], "bytes must be"),
        ([{**GOOD, "bytes": 2**52}, {**GOOD, "bytes": 2**52}], "beyond which sums are not exact"),
        ([{**GOOD, "cost": -1}], "must be a finite number"),
        ([{**GOOD, "cost": float("nan")}], "must be a finite number"),
        ([{**GOOD, "cost": float("inf")}], "must be a finite number"),
        ([{**GOOD, "cost": "1"}], "must be a finite number"),
        ([{**GOOD, "cost": 10**400}], "must be a finite number"),
        ([{"bytes": 4, "inputs": []}], "the key 'cost' is missing"),
        ([7], "does not have its type"),
        ("none", "does not have its type"),
        ({"a": 1}, "does not have its type"),
        (None, "does not have its type"),
    ],
)
def test_a_bad_instance_is_refused_in_one_line(capsys: Capture, tmp_path: Path, ops: object, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"name": "bad", "ops": ops}), encoding="utf-8")
    assert main(["plan", str(path), "--strategy", "all"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert "internal error" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--strategy", "magic"], 2, "there is no strategy 'magic'"),
        (["--time-limit", "-1"], 2, "--time-limit: it must be"),
        (["--time-limit", "nan"], 2, "--time-limit: it must be"),
        (["--budget", "-5MiB"], 2, "expected one argument"),
        (["--budget", "0%"], 2, "leaves no memory"),
        (["--budget", "nan%"], 2, "is not a budget"),
        (["--input", "x=2x3"], 1, "--input"),
    ],
)
def test_bad_options_are_refused_in_one_line(capsys: Capture, instance: Path, arguments: list[str], code: int, message: str) -> None:
    assert main(["plan", str(instance), *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


def test_a_zero_byte_instance_needs_nothing(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"name": "zero", "ops": [{"cost": 0, "bytes": 0, "inputs": [0] if i else []} for i in range(4)]}), encoding="utf-8")
    found = planned(capsys, str(path), "--strategy", "all", "--time-limit", "2")
    assert (found["peak_predicted_bytes"], found["seconds_predicted"], found["gap"]) == (0, 0.0, 0.0)


def test_an_empty_instance_has_an_empty_plan(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"name": "empty", "ops": []}), encoding="utf-8")
    assert planned(capsys, str(path), "--strategy", "all", "--time-limit", "1")["recomputed_ops"] == 0


def test_a_work_limit_is_kept_and_judged(capsys: Capture, instance: Path, tmp_path: Path) -> None:
    sequences = []
    for k in range(2):
        path = tmp_path / f"{k}.json"
        planned(capsys, str(instance), "--budget", "60%", "--work-limit", "5000", "--save-sequence", str(path))
        sequences.append(json.loads(path.read_text(encoding="utf-8")))
    assert sequences[0] == sequences[1]
    assert main(["plan", str(instance), "--work-limit", "few"]) == 2
    assert "'few' is not a whole number" in capsys.readouterr().err


def test_a_plan_goes_to_a_pipe(tmp_path: Path) -> None:
    """What is there and no file is written to, not replaced."""
    path, pipe = tmp_path / "chain.json", tmp_path / "pipe"
    path.write_text(json.dumps({"name": "chain", "ops": [{"cost": 1, "bytes": 1, "inputs": []}]}), encoding="utf-8")
    os.mkfifo(pipe)
    read = threading.Thread(target=lambda: got.append(pipe.read_text(encoding="utf-8")))
    got: list[str] = []
    read.start()
    assert main(["plan", str(path), "--time-limit", "1", "-q", "--save-sequence", str(pipe)]) == 0
    read.join(10)
    assert json.loads(got[0]) == [0] and stat.S_ISFIFO(pipe.stat().st_mode)
