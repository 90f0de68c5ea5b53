"""The user's cache: what it keeps, when it is made anew, and the locks that keep processes apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxremat import cache, export_cache
from onnxremat.cli import main
from onnxremat.exporters import InputSpec, build_module
from onnxremat.exporters.sources import Feeds, source_feeds
from onnxremat.locks import try_lock

from .factories import ROOT

SOURCE = "remat_cached_model:net(width=5)"
FACTORY = """
from torch import nn

def net(width=4, norm=True):
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width) if norm else nn.Identity(), nn.Dropout(0.5), nn.Linear(width, 2))
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXREMAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "remat_cached_model.py"
    file.write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "remat_cached_model", raising=False)
    return file


def test_the_folder_by_environment(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache.cache_root() == own_cache
    monkeypatch.delenv("ONNXREMAT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root() == tmp_path / "xdg" / "onnxremat"


def test_json_is_made_once_and_again_when_damaged(own_cache: Path) -> None:
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        return {"seconds": 2.5}

    for _ in range(2):
        assert cache.cached_json("profiles", "abc", make) == {"seconds": 2.5}
    assert len(made) == 1
    (own_cache / "profiles" / "abc.json").write_text("{", encoding="utf-8")
    assert cache.cached_json("profiles", "abc", make) == {"seconds": 2.5} and len(made) == 2
    assert json.loads((own_cache / "profiles" / "abc.json").read_text(encoding="utf-8")) == {"seconds": 2.5}


def test_a_cache_that_can_not_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("ONNXREMAT_CACHE", str(tmp_path / "file" / "cache"))
    assert cache.cached_json("profiles", "abc", lambda: 7) == 7
    assert cache.machine_lock() is None and cache.usage()[0].entries == 0


def test_info_and_clear(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.cached_json("profiles", "abc", lambda: 1)
    cache.cached_json("kernels", "abc", lambda: 1)
    assert main(["cache", "info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(own_cache)
    assert {k["kind"]: k["entries"] for k in found["kinds"]} == dict.fromkeys(cache.KINDS, 0) | {"profiles": 1, "kernels": 1}
    assert main(["cache", "clear", "profiles"]) == 0
    assert "1 entries deleted" in capsys.readouterr().out
    assert {use.kind for use in cache.usage() if use.entries} == {"kernels"}
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 1
    assert main(["cache", "clear", "results"]) == 2
    assert "there is no cache of 'results'" in capsys.readouterr().err


def _export(source: str = SOURCE, **given: Any) -> Any:
    feeds = source_feeds(source, [InputSpec("x", (given.pop("batch", 4), 3))], (), "cross_entropy")
    return export_cache.cached_export(build_module(source, given.get("seed", 0)), feeds, given.get("seed", 0), source)


def test_an_export_is_found_again_and_is_the_same(own_cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _export()
    entry = next((own_cache / "exports").iterdir())
    assert entry.stat().st_size > 500

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("exported again")

    with monkeypatch.context() as patched:
        patched.setattr(export_cache, "export_torch", refuse)
        again = _export()
    assert again.roles() == first.roles() and list(again.state) == list(first.state)
    ours, theirs = again.model.graph.initializers, first.model.graph.initializers
    assert list(ours) == list(theirs) and "0.weight" in ours
    for name in ours:
        assert np.array_equal(ours[name].const_value.numpy(), theirs[name].const_value.numpy()), name
    assert [v.name for v in again.model.graph.inputs] == [v.name for v in first.model.graph.inputs]


@pytest.mark.parametrize("change", ["arguments", "batch", "seed", "mode", "code", "damage"])
def test_what_makes_an_export_another_one(own_cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    _export()
    calls: list[str] = []
    original = export_cache.export_torch
    monkeypatch.setattr(export_cache, "export_torch", lambda *a: (calls.append(a[-1]), original(*a))[1])
    _export()
    assert not calls
    if change == "arguments":
        assert list(_export("remat_cached_model:net(width=6)").model.graph.initializers["0.weight"].shape) == [6, 3]
    elif change == "batch":
        assert _export(batch=6).inputs[0].shape == (6, 3)
    elif change == "seed":
        _export(seed=1)
    elif change == "mode":
        module = build_module(SOURCE, 0).eval()
        feeds = Feeds((InputSpec("x", (4, 3)),), (), "cross_entropy")
        assert not export_cache.cached_export(module, feeds, 0, SOURCE).state
    elif change == "code":
        model.write_text(FACTORY + "# edited\n", encoding="utf-8")
        _export()
    else:
        next((own_cache / "exports").iterdir()).write_bytes(b"not onnx")
        _export()
    assert len(calls) == 1


def test_attributes_without_code_or_weights_are_seen() -> None:
    from torch import nn

    def digest(scale: float, act: Any) -> str:
        module = nn.Linear(2, 2)
        nn.init.zeros_(module.weight), nn.init.zeros_(module.bias)
        module.scale, module.act = scale, act
        return export_cache.module_digest(module)

    assert digest(1.0, nn.functional.relu) == digest(1.0, nn.functional.relu)
    assert len({digest(1.0, nn.functional.relu), digest(2.0, nn.functional.relu), digest(1.0, nn.functional.gelu)}) == 3


HOLD = """
import sys, time
from onnxremat.cache import machine_lock
lock = machine_lock()
with lock.{how}():
    print("held", flush=True)
    sys.stdin.readline()
"""


def _holder(how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD.format(how=how)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


ALONE = "from onnxremat.cache import machine_lock\nwith machine_lock().busy():\n    with machine_lock().alone():\n        print('alone', flush=True)"


def test_a_measurement_waits_for_other_work_and_a_kill_frees_the_lock(own_cache: Path) -> None:
    busy = _holder("busy")
    other = _holder("busy")  # work beside work does not wait
    measuring = subprocess.Popen([sys.executable, "-c", ALONE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    other.kill()
    other.wait()
    time.sleep(0.7)
    assert measuring.poll() is None, "it waits for the one that is left"
    busy.kill()
    assert measuring.communicate(timeout=60)[0] == "alone\n"
    busy.wait()
    for process in (busy, other):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close(), process.stdout.close()


def test_try_lock(tmp_path: Path) -> None:
    held = try_lock(tmp_path / "lock")
    assert held is not None and try_lock(tmp_path / "lock") is None
    held.close()
    again = try_lock(tmp_path / "lock")
    assert again is not None
    again.close()


def test_a_profile_notes_the_load() -> None:
    from onnxremat.costs.measured import processor_seconds

    before = processor_seconds()
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1.0)
    after = processor_seconds()
    burner.kill()
    burner.wait()
    assert before is not None and after is not None
    assert (after.others - before.others) / (after.clock - before.clock) > 0.15
