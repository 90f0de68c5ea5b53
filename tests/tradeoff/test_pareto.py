"""The curve of time against budget: its points, its table, and its picture."""

from __future__ import annotations

import importlib.util
import json
import struct
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from onnxremat.cli import main
from onnxremat.commands.tradeoff import chart_of, pareto_table
from onnxremat.errors import OnnxRematError, UsageError
from onnxremat.fit import Search
from onnxremat.tradeoff.pareto import Pareto, pareto
from onnxremat.tradeoff.picture import Chart, Series, save_picture
from tests.scheduler.graphs import chain

MIB = 2**20
STRATEGIES = ("auto", "keep_all", "chen_sqrt")


@pytest.fixture(scope="module")
def found() -> Pareto:
    problem = chain(16, size=4 * MIB, resident=8 * MIB)
    return pareto(problem, STRATEGIES, 4, Search("auto", 3.0))


def test_curves(found: Pareto) -> None:
    curves = {c.strategy: c for c in found.curves}
    assert tuple(curves) == STRATEGIES and found.resident_bytes == 8 * MIB
    auto = curves["auto"].points
    assert auto[0].budget_bytes == found.peak_unscheduled_bytes and auto[0].overhead == 0
    assert len(auto) >= 3 and auto[-1].budget_bytes < 0.6 * found.peak_unscheduled_bytes and auto[-1].recomputed_ops > 0
    for curve in found.curves:
        budgets, seconds = [p.budget_bytes for p in curve.points], [p.seconds for p in curve.points]
        assert budgets == sorted(budgets, reverse=True) and seconds == sorted(seconds), "less memory never takes less time"
        for p in curve.points:
            assert p.peak_bytes <= p.budget_bytes and p.seconds_lower_bound <= p.seconds * (1 + 1e-9)
            assert p.overhead == pytest.approx(p.seconds / found.seconds_unscheduled - 1)
    assert len(curves["keep_all"].points) == 1 and "no plan found below" in curves["keep_all"].reason
    assert not curves["auto"].reason


def test_table_and_chart(found: Pareto) -> None:
    lines = pareto_table(found)
    assert lines[0].split()[:3] == ["strategy", "budget", "of"] and any(line.startswith("auto ") and "100.0%" in line for line in lines)
    assert lines[-1].startswith(("keep_all: no plan found below", "chen_sqrt: no plan found below"))
    chart = chart_of(found)
    assert [s.name for s in chart.series] == list(STRATEGIES) and chart.x_label == "budget, MiB"
    xs = [x for x, _ in chart.series[0].points]
    assert xs == sorted(xs)


CHART = Chart("a <title>", "sub & more", "x", "y", tuple(Series(f"s{i}", ((1.0, 30.0 - i), (2.0, 10.0), (4.0, 0.0))) for i in range(14)))


def test_svg(tmp_path: Path) -> None:
    save_picture(CHART, tmp_path / "p.svg")
    root = xml.etree.ElementTree.parse(tmp_path / "p.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in root.iter(f"{space}text")]
    assert {"a <title>", "sub & more", "x", "y", "s0", "s13"} <= set(texts)
    strokes = {(p.get("stroke"), p.get("stroke-dasharray")) for p in root.iter(f"{space}path")}
    assert len(strokes) >= 14, "each line looks different"
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(0 < float(c.get("cx", -1)) < width and 0 < float(c.get("cy", -1)) < height for c in root.iter(f"{space}circle"))


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed: pip install 'onnxremat[png]'")
def test_png(tmp_path: Path) -> None:
    save_picture(CHART, tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1920, 1080)


def test_pictures_that_can_not_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"a picture is \.svg or \.png"):
        save_picture(CHART, tmp_path / "p.gif")
    with pytest.raises(OnnxRematError, match="can't write"):
        save_picture(CHART, tmp_path / "none" / "p.svg")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(OnnxRematError, match="needs Pillow"):
        save_picture(CHART, tmp_path / "p.png")
    assert not list(tmp_path.iterdir())


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chain(12, size=4 * MIB).save(tmp_path / "p.json")
    arguments = ["pareto", str(tmp_path / "p.json"), "--strategy", "auto,chen_sqrt", "--points", "2", "--time-limit", "1", "--quiet", "--json"]
    assert main([*arguments, "-o", str(tmp_path / "p.svg")]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [c["strategy"] for c in data["curves"]] == ["auto", "chen_sqrt"] and data["curves"][0]["points"][0]["overhead"] == 0
    assert (tmp_path / "p.svg").read_text(encoding="utf-8").startswith("<svg")


def test_swaps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A chain of long ops and a fast disk: swapping beats recomputing."""
    chain(12, seconds=10.0, size=4 * MIB).save(tmp_path / "p.json")
    arguments = ["pareto", str(tmp_path / "p.json"), "--points", "3", "--time-limit", "1", "--quiet", "--swap", "disk", "--swap-bandwidth", "1GiB/s"]
    assert main([*arguments, "--strategy", "auto,swap_only", "--json"]) == 0
    curves = {curve["strategy"]: curve["points"] for curve in json.loads(capsys.readouterr().out)["curves"]}
    for points in curves.values():
        halfway = points[1]
        assert halfway["swapped_tensors"] and not halfway["recomputed_ops"] and 0 < halfway["overhead"] < 0.01
    assert main([*arguments, "--strategy", "all"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[-1] == "swapped" and any(line.startswith("swap_only ") for line in lines)


def test_a_source_is_planned_for_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    source = ["tests.factories:tiny_mlp", "--input", "x=64x12", "--label", "labels=64:int64:4", "--loss", "cross_entropy"]
    limits = ["--points", "2", "--time-limit", "1", "--strategy", "keep_all", "--costs", "analytic", "--quiet", "--json"]
    held = []
    for options in ([], ["--optimizer", "adamw", "--update", "fused"], ["--target", "onnxruntime"]):
        assert main(["pareto", *source, *limits, *options]) == 0
        held.append(json.loads(capsys.readouterr().out)["resident_bytes"])
    separate, fused, portable = held
    parameters = 4 * (12 * 32 + 32 + 32 * 32 + 32 + 32 * 4 + 4)
    assert separate - fused == pytest.approx(parameters, abs=64), "a fused update keeps no gradients"
    assert portable > separate, "the helpers that force the order take memory, too"


@pytest.mark.parametrize("option", [["--target", "onnxruntime"], ["--update", "fused"], ["--provider", "cuda"]])
def test_a_compiled_step_has_its_target(option: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chain(4).save(tmp_path / "p.json")
    assert main(["pareto", str(tmp_path / "p.json"), *option]) == 2
    assert f"compiled already, for a target of its own: leave {option[0]} out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--points", "1"], "at least 2"),
        (["--strategy", "auto,guess"], "guess"),
        (["-o", "p.gif"], "a picture is"),
        (["--points", "x"], "'x' is not a whole number"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["pareto", "none.json", *arguments]) == 2
    assert message in capsys.readouterr().err
