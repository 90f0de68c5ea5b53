"""The reproduction of Checkmate's evaluation: scaling by batch, curves of strategies, the largest batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.checkmate_paper import __main__ as program
from benchmarks.checkmate_paper import networks as settings
from benchmarks.checkmate_paper.draw import overhead_plot
from benchmarks.checkmate_paper.measure import BASELINES, curves, largest_batch, search_largest_batch
from benchmarks.checkmate_paper.networks import CAPACITY, Network, ScaledProblem, instance_problem
from onnxremat.scheduler import Problem, bytes_floor, evaluate


def chain(length: int, size: int) -> dict[str, object]:
    """A chain and its backward pass, each op reading the activation of its layer, as a plain instance."""
    ops: list[dict[str, object]] = [{"name": f"f{i}", "cost": 10, "bytes": size, "inputs": [i - 1] if i else []} for i in range(length)]
    for i in reversed(range(length)):
        before = len(ops) - 1
        ops.append({"name": f"b{i}", "cost": 20, "bytes": size, "inputs": sorted({i, before}), "backward": True})
    return {"name": "chain", "ops": ops}


@pytest.fixture
def instances(tmp_path: Path) -> Path:
    (tmp_path / "chain.json").write_text(json.dumps(chain(16, 100_000_000)), encoding="utf-8")
    return tmp_path


def network() -> Network:
    return Network("Chain", "", (1, 1), False, 10, None, instance="chain", parameters=1_000_000)


def test_scaling_by_batch(instances: Path) -> None:
    scaled = instance_problem(network(), instances)
    base, twice = scaled.at(10), scaled.at(20)
    assert base.resident_bytes == twice.resident_bytes == 8_000_000
    assert [2 * t.bytes for t in base.tensors] == [t.bytes for t in twice.tensors]
    assert [2 * op.seconds for op in base.ops] == [op.seconds for op in twice.ops]


def test_a_line_through_two_batches_has_its_constant() -> None:
    small, large = (Problem.from_json(chain(3, size)) for size in (130, 230))  # 30 + 10 a sample
    scaled = ScaledProblem((small, large), (10, 20))
    assert scaled.at(50).tensors[0].bytes == 530
    with pytest.raises(ValueError, match="another one"):
        ScaledProblem((small, Problem.from_json(chain(4, 230))), (10, 20))


def test_largest_batch_is_exact(instances: Path) -> None:
    scaled = instance_problem(network(), instances)
    order = list(range(32))
    batch = largest_batch(scaled, order)
    assert evaluate(scaled.at(batch), order).peak_bytes <= CAPACITY < evaluate(scaled.at(batch + 1), order).peak_bytes
    # More than one extra forward pass is not taken.
    assert largest_batch(scaled, [*range(16), *list(range(16)) * 2, *range(16, 32)]) == 0


def test_ours_goes_at_least_as_far_as_every_baseline(instances: Path) -> None:
    scaled = instance_problem(network(), instances)
    problem = scaled.at(10)
    found = curves(problem, BASELINES, [], 5.0)
    assert found["keep_all"].points == [(evaluate(problem, range(32)).peak_bytes, 1.0)]
    for curve in found.values():
        costs = [cost for _, cost in curve.points]
        assert costs == sorted(costs, reverse=True) and [b for b, _ in curve.points] == sorted(b for b, _ in curve.points)
    proposed = [sequence for curve in found.values() for sequence in curve.proposed]
    best = max(largest_batch(scaled, sequence) for sequence in proposed)
    assert best > largest_batch(scaled, range(32))
    ours, bound = search_largest_batch(scaled, "auto", [], 1.0, 0.02)
    assert best * 0.98 <= ours <= bound
    assert bytes_floor(scaled.at(bound)) <= CAPACITY < bytes_floor(scaled.at(bound + 1))


def test_runs_and_resumes(instances: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(settings.NETWORKS, "Chain", network())
    arguments = ["x", "--results", str(tmp_path / "out"), "--instances", str(instances), "--quick", "--no-own", "--time-limit", "0.5", "Chain"]
    monkeypatch.setattr(sys, "argv", arguments)
    program.main()
    first = capsys.readouterr().out
    assert "Chain.published.quick: auto" in first and "| Chain | published | 32 |" in first
    (tmp_path / "out" / "Chain.published.quick.auto.json").unlink()
    program.main()
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line.startswith("Chain.published")] == ["Chain.published.quick: auto"]
    assert "<svg" in (tmp_path / "out" / "Chain.published.quick.svg").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "Nothing"])
    with pytest.raises(SystemExit, match="no network 'Nothing'"):
        program.main()


def test_a_curve_without_points_is_named() -> None:
    assert "griewank_ap (no plan)" in overhead_plot("t", {"auto": [(5e9, 1.1)], "griewank_ap": []}, 9_000_000_000)
