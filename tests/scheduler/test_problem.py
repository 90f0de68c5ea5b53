"""Problems: checks, lookups, files."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from onnxremat.scheduler import Op, Problem, ProblemError, Tensor, Transfer, evaluate

from .graphs import chain, random_problem, transformer


def small(**changes: object) -> Problem:
    ops = (Op("a", 1.0, (), (0,)), Op("b", 2.0, (0,), (1,)))
    tensors = (Tensor("x", 4, 0), Tensor("y", 4, 1))
    return replace(Problem("small", ops, tensors, {"parameters": 1}), **changes)


A, B = small().ops
X, Y = small().tensors
BAD = {
    "cycle": (small(ops=(replace(A, inputs=(1,)), B)), "cycle: a -> b -> a|cycle: b -> a -> b"),
    "self_cycle": (small(ops=(replace(A, inputs=(0,)), B)), "cycle: a -> a"),
    "order": (small(ops=(B, A), tensors=(replace(X, producer=1), replace(Y, producer=0))), "op 'b' reads 'x' before 'a' writes it"),
    "dangling_input": (small(ops=(A, replace(B, inputs=(7,)))), "op 'b': inputs refers to tensor 7"),
    "dangling_output": (small(ops=(A, replace(B, outputs=(-3,)))), "op 'b': outputs refers to tensor -3"),
    "dangling_producer": (small(tensors=(X, replace(Y, producer=9))), "names 9 as producer"),
    "missing_output": (small(ops=(A, replace(B, outputs=()))), "'y' is missing in the outputs of its producer 'b'"),
    "two_writers": (small(ops=(A, replace(B, outputs=(0, 1)))), "written by both 'a' and 'b'"),
    "negative_bytes": (small(tensors=(replace(X, bytes=-1), Y)), "tensor 'x': bytes must be"),
    "huge_bytes": (small(tensors=(replace(X, bytes=2**60), Y)), "tensor 'x': bytes must be"),
    "huge_sum": (small(tensors=(replace(X, bytes=2**52), Y)), "beyond which sums are not exact"),
    "float_bytes": (small(tensors=(replace(X, bytes=1.5), Y)), "tensor 'x': bytes must be"),
    "negative_seconds": (small(ops=(A, replace(B, seconds=-1.0))), "op 'b': seconds must be"),
    "nan_seconds": (small(ops=(A, replace(B, seconds=float("nan")))), "op 'b': seconds must be"),
    "infinite_seconds": (small(ops=(A, replace(B, seconds=float("inf")))), "op 'b': seconds must be"),
    "negative_workspace": (small(ops=(A, replace(B, workspace_bytes=-1))), "op 'b': workspace_bytes must be"),
    "negative_resident": (small(resident={"batch": -1}), "batch must be"),
    "negative_optimizer": (small(optimizer_peak_bytes=-1), "optimizer_peak_bytes must be"),
    "phase": (small(ops=(A, replace(B, phase="sideways"))), "phase must be one of"),
    "alias_cycle": (small(tensors=(replace(X, alias_of=1), replace(Y, alias_of=0))), "chain of aliases never ends"),
    "alias_dangling": (small(tensors=(X, replace(Y, alias_of=5))), "alias_of refers to tensor 5"),
    "alias_unread": (small(ops=(A, replace(B, inputs=())), tensors=(X, replace(Y, alias_of=0))), "which its op 'b' does not read"),
    "persistent_view": (small(tensors=(X, Y, Tensor("v", 1, -1, alias_of=0))), "persistent but a view of 'x'"),
    "writes_computed": (small(ops=(A, replace(B, writes=(0,)))), "op 'b' replaces tensor 'x', which is not a persistent storage"),
    "inplace_input": (small(ops=(A, replace(B, inplace=((1, 1),)))), "in-place input 'y' is not one of its inputs"),
    "inplace_output": (small(ops=(A, replace(B, inplace=((0, 0),)))), "in-place output 'x' is not one of its outputs"),
    "transfer_rate": (small(transfer=Transfer(0.0, 1.0, 1)), "bytes_per_second_out must be a positive number"),
    "old_version": (
        small(ops=(replace(A, writes=(2,)), replace(B, inputs=(0, 2))), tensors=(X, Y, Tensor("s", 1, -1))),
        "op 'b' reads 's' after 'a' has replaced it",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_problem_is_refused_in_one_line(name: str) -> None:
    problem, message = BAD[name]
    with pytest.raises(ProblemError, match=message) as caught:
        problem.check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("problem", [small(), chain(4), transformer(2), Problem("empty", (), (), {})], ids=lambda p: p.name)
def test_files_round_trip(problem: Problem, tmp_path: Path) -> None:
    problem.check()
    problem.save(tmp_path / "p.json")
    assert Problem.load(tmp_path / "p.json") == problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json"]


def test_random_problems_round_trip() -> None:
    for seed in range(40):
        problem = random_problem(random.Random(seed), 9)
        problem.check()
        assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_plain_instances_load(tmp_path: Path) -> None:
    rows = [
        {"name": "a", "cost": 3, "bytes": 5, "inputs": []},
        {"name": "b", "cost": 1, "bytes": 2, "inputs": [0], "backward": True},
        {"name": "c", "cost": 1, "bytes": 9, "inputs": [0]},
    ]
    path = tmp_path / "plain.json"
    path.write_text(json.dumps({"name": "plain", "ops": rows}))
    problem = Problem.load(path)
    assert problem.unit == "unit of the instance"
    assert [op.phase for op in problem.ops] == ["forward", "backward", "forward"]
    assert problem.index.required == (False, True, True)
    # a lives to its last read, b only at its own step.
    assert evaluate(problem, [0, 1, 2]).profile.tolist() == [5, 7, 14]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[]", "expected a JSON object"),
        ("{}", "neither"),
        ('{"format": "other"}', "expected format"),
        ('{"format": "onnxremat-problem", "version": 1}', "the key 'tensors' is missing"),
        ('{"name": "x", "ops": [{"cost": 1, "bytes": 1, "inputs": [4]}]}', "op 0 reads op 4, which does not exist"),
        ('{"name": "x", "ops": [{"cost": 1, "bytes": 1, "inputs": 4}]}', "does not have its type"),
        ('{"name": "x", "ops": [{"cost": NaN, "bytes": 1, "inputs": []}]}', "must be a finite number"),
        ('{"name": "x", "ops": [{"cost": 1, "bytes": "many", "inputs": []}]}', "bytes must be an integer"),
    ],
)
def test_a_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProblemError, match=message):
        Problem.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="No such file"):
        Problem.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    from onnxremat.scheduler.files import write_json

    path = tmp_path / "p.json"
    chain(2).save(path)
    with pytest.raises(ValueError, match="JSON"):
        write_json({"bad": float("nan")}, path)
    assert Problem.load(path) == chain(2)
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
