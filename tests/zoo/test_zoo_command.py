"""``zoo compile`` on small models: what it leaves, what a bad job costs, how an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from onnxremat import Artifact
from onnxremat.cli import main
from onnxremat.locks import try_lock
from onnxremat.zoo import jobs as jobs_module
from onnxremat.zoo.jobs import Job, Outcome, run_job
from onnxremat.zoo.progress import Progress
from onnxremat.zoo.run import exit_code, run_jobs
from tests.factories import ROOT

MANIFEST = str(Path(__file__).parent / "manifest.yaml")
FAST = ["--costs", "analytic", "--time-limit", "1", "--no-verify", "--threads", "1", "--quiet"]
Capture = pytest.CaptureFixture[str]


def _zoo(capsys: Capture, folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["zoo", "compile", MANIFEST, "-o", str(folder), *FAST, "--json", *arguments]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models for a budget each, and one that can't be built."""
    folder = tmp_path_factory.mktemp("zoo") / "run"
    only = ["--only", "mlp", "--only", "norm", "--only", "raises"]
    code = main(["zoo", "compile", MANIFEST, "-o", str(folder), *FAST, *only, "--budget", "32MiB", "--jobs", "2", "--keep-going"])
    assert code == 1
    return folder


def test_a_run_leaves_artifacts_results_index_and_page(finished_run: Path) -> None:
    index = json.loads((finished_run / "index.json").read_text(encoding="utf-8"))
    assert (index["format"], index["jobs"], index["failed"]) == ("onnxremat-zoo", 3, 1)
    by_name = {row["name"]: row for row in index["results"]}
    assert list(by_name) == ["mlp", "norm", "raises"], "in the manifest's order, whoever ended first"
    assert "this factory fails" in by_name["raises"]["error"] and by_name["raises"]["exit_code"] == 1
    for name in ("mlp", "norm"):
        row = by_name[name]
        artifact = Artifact.load(finished_run / row["artifact"])
        assert row["files"] == artifact.manifest["files"] and row["error"] == ""
        assert row["figures"]["budget_bytes"] == 32 * 2**20 and row["figures"]["peak_predicted_bytes"] > 0
        assert row["artifact_bytes"] > 10_000 and row["seconds"] > 0 and row["processor_seconds"] > 0 and row["peak_bytes"] > 2**20
        assert artifact.manifest["source"]["spec"] == f"tests.factories:{'tiny_mlp' if name == 'mlp' else 'norm_mlp'}"
    page = (finished_run / "index.html").read_text(encoding="utf-8")
    assert 'href="mlp/budget-32MiB/report.html"' in page and 'href="logs/raises.budget-32MiB.log"' in page and "<script" not in page
    assert "$" not in page.replace("$schema", "")
    assert sorted(p.name for p in (finished_run / "results").iterdir()) == [f"{n}.budget-32MiB.json" for n in ("mlp", "norm", "raises")]


def test_report_writes_the_index_anew(finished_run: Path, capsys: Capture) -> None:
    (finished_run / "index.json").unlink()
    assert main(["zoo", "report", str(finished_run)]) == 0
    out = capsys.readouterr().out
    assert "norm    budget-32MiB" in out and "raises.budget-32MiB: " in out and "this factory fails" in out
    assert json.loads((finished_run / "index.json").read_text(encoding="utf-8"))["failed"] == 1
    assert main(["zoo", "report", str(finished_run.parent)]) == 1
    assert "has no results" in capsys.readouterr().err


def test_an_index_that_can_not_be_written_is_one_json_object(finished_run: Path, capsys: Capture, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "results", tmp_path / "results")
    (tmp_path / "index.json").mkdir()
    capsys.readouterr()
    assert main(["zoo", "report", str(tmp_path), "--json"]) == 1
    assert "can't write" in json.loads(capsys.readouterr().out)["error"]
    found = _zoo(capsys, tmp_path, "--only", "raises", "--budget", "32MiB", "--resume", code=1)
    assert "can't write" in found["error"]


def test_resume_runs_only_what_is_not_finished(finished_run: Path, capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    capsys.readouterr()
    arguments = ["--only", "mlp", "--only", "norm", "--budget", "32MiB"]
    assert main(["zoo", "compile", MANIFEST, "-o", str(folder), *FAST, *arguments]) == 1
    assert "has results of an earlier run: go on with it by --resume" in capsys.readouterr().err
    before = {name: (folder / name / "budget-32MiB" / "manifest.json").stat().st_mtime_ns for name in ("mlp", "norm")}
    result = folder / "results" / "norm.budget-32MiB.json"
    result.write_text(result.read_text(encoding="utf-8")[:40], encoding="utf-8")  # as a full disk or a power failure may leave it
    found = _zoo(capsys, folder, *arguments, "--resume")
    assert found["failed"] == 0 and found["jobs"] == 2
    after = {name: (folder / name / "budget-32MiB" / "manifest.json").stat().st_mtime_ns for name in ("mlp", "norm")}
    assert after["mlp"] == before["mlp"] and after["norm"] > before["norm"]


def test_other_options_are_another_job() -> None:
    base = Job("mlp", "a:b", ("x=8x12",), (), "mse", "80%", False, False, {"threads": 1}, "one")
    assert base.fingerprint == Job(**(dataclasses.asdict(base) | {"folder": "two"})).fingerprint
    for change in ({"source": "a:c"}, {"inputs": ("x=4x12",)}, {"budget": "70%"}, {"options": {"threads": 2}}, {"or_min": True}):
        assert Job(**(dataclasses.asdict(base) | change)).fingerprint != base.fingerprint
    labels = [dataclasses.replace(base, budget=b, activations=a).label for b, a in (("80%", False), ("80%", True), ("min", True), ("2GiB", False))]
    assert labels == ["budget-80", "activations-80", "budget-min", "budget-2GiB"]


@pytest.mark.slow
def test_jobs_are_for_the_target_that_is_named(capsys: Capture, tmp_path: Path) -> None:
    def compiled(*arguments: str) -> dict[str, Any]:
        found = _zoo(capsys, tmp_path / "run", "--only", "mlp", "--budget", "32MiB", "--resume", *arguments)
        assert (found["jobs"], found["failed"]) == (1, 0), found
        manifest = Artifact.load(tmp_path / "run" / "mlp" / "budget-32MiB").manifest
        return manifest | {"written": (tmp_path / "run" / "mlp" / "budget-32MiB" / "manifest.json").stat().st_mtime_ns}

    portable = compiled("--target", "onnxruntime", "--update", "fused", "--optimizer", "sgd", "--momentum", "0.9")
    assert (portable["target"], portable["update"], portable["swap"]) == ("onnxruntime", "fused", None)
    assert portable["optimizer"] | {"momentum": 0.9, "learning_rate": 0.01, "name": "sgd"} == portable["optimizer"]
    again = compiled("--target", "onnxruntime", "--update", "fused", "--optimizer", "sgd", "--momentum", "0.9")
    assert again["written"] == portable["written"], "finished jobs are known by their options"
    swapping = compiled("--swap", "disk", "--swap-bandwidth", "1GiB/s", "--spill-dir", str(tmp_path))
    assert (swapping["target"], swapping["swap"]["bytes_per_second_out"]) == ("ort-training", 2**30)
    on_gpu = compiled("--provider", "cuda", "--swap", "host", "--swap-bandwidth", "8GiB/s", "--provider-option", "device_id=1")
    assert (on_gpu["provider"], on_gpu["swap"]["kind"], on_gpu["provider_options"]["device_id"]) == ("cuda", "host", "1")


def test_a_job_that_is_killed_and_one_that_hangs(tmp_path: Path) -> None:
    outcome = run_job(_job(tmp_path, "tests.zoo.factories:killed"))
    assert outcome.exit_code == 1 and "was ended by SIGKILL, as the system does when memory is out" in outcome.error
    begin = time.monotonic()
    outcome = run_job(_job(tmp_path, "tests.zoo.factories:hangs"), timeout=3)
    assert "took longer than 3 s (--timeout)" in outcome.error and time.monotonic() - begin < 60
    assert Outcome.load(_job(tmp_path, "tests.zoo.factories:hangs").result) == outcome


def _job(folder: Path, source: str) -> Job:
    for name in ("results", "logs"):
        (folder / name).mkdir(exist_ok=True)
    return Job(source.rpartition(":")[2], source, ("x=8x12",), (), "mse", "32MiB", False, False, {"costs": "analytic"}, str(folder))


def test_a_full_disk_is_an_error_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(jobs_module, "write_json", full)
    monkeypatch.setattr(jobs_module, "_in_process", lambda job, *a: Outcome(job.key, job.name, job.label, job.fingerprint))
    outcome = run_job(_job(tmp_path, "tests.factories:tiny_mlp"))
    assert outcome.exit_code == 1 and "can't be written" in outcome.error and "No space left on device" in outcome.error


def test_a_worker_that_does_not_see_the_folder(tmp_path: Path) -> None:
    outcome = run_job(dataclasses.replace(_job(tmp_path, "tests.factories:tiny_mlp"), folder=str(tmp_path / "elsewhere")))
    assert outcome.exit_code == 1 and "every worker needs to see it" in outcome.error


def test_two_runs_in_one_folder(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    held = try_lock(tmp_path / "run" / ".lock")
    assert held is not None
    with held:
        assert main(["zoo", "compile", MANIFEST, "-o", str(tmp_path / "run"), "--only", "mlp", "--budget", "min", "--resume", *FAST]) == 1
    assert "another run is at work in" in capsys.readouterr().err


@pytest.fixture
def hanging_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A run whose one job hangs, and the job's process."""
    told = tmp_path / "pid"
    environment = os.environ | {"ONNXREMAT_TEST_PID": str(told)}
    command = [sys.executable, "-m", "onnxremat", "zoo", "compile", MANIFEST, "--only", "hangs", "--budget", "min", "-o", str(tmp_path / "run")]
    # A shell that runs the tests in the background has its children ignore Ctrl-C.
    run = subprocess.Popen([*command, *FAST], cwd=ROOT, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    deadline = time.monotonic() + 120
    while not (told.exists() and told.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield run, int(told.read_text(encoding="utf-8"))
    run.kill()
    run.wait()


def _gone(process: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the job is told of its parent's end by Linux")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_ends_takes_its_jobs_along(hanging_run: tuple[subprocess.Popen[bytes], int], how: int) -> None:
    run, job = hanging_run
    run.send_signal(how)
    assert run.wait(30) == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert _gone(job)


class _Now(Executor):
    """Runs what is submitted when its result is wanted, one after another."""

    def __init__(self, results: dict[str, int]) -> None:
        self.results, self.begun = results, []  # type: ignore[var-annotated]

    def submit(self, fn: Any, /, job: Any, *rest: Any) -> Any:
        future: Future[Outcome] = Future()
        if not self.begun:
            self.begun.append(job.key)
            future.set_result(Outcome(job.key, job.name, job.label, "", self.results[job.name]))
        return future


def test_a_failure_stops_further_jobs_unless_told_to_keep_going() -> None:
    names = ("first", "second", "third")
    jobs = [Job(n, "a:b", (), (), "mse", "min", False, False, {}, "d") for n in names]
    outcomes = list(run_jobs(jobs, _Now(dict.fromkeys(names, 1)), None, keep_going=False))
    assert [o.name for o in outcomes] == ["first"]


def test_exit_codes() -> None:
    def of(*codes: int) -> int:
        return exit_code([Outcome("k", "n", "l", "f", code) for code in codes])

    assert (of(0, 0), of(0, 3, 3), of(3, 4), of()) == (0, 3, 1, 0)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress() -> None:
    good = Outcome(
        "a.min",
        "a",
        "min",
        "",
        figures={"budget_bytes": 2**20, "peak_unscheduled_bytes": 2**21, "seconds_unscheduled": 1.0, "seconds_predicted": 1.5},
    )
    bad = Outcome("b.min", "b", "min", "", 1, "it broke")
    plain, bar, silent = io.StringIO(), _Terminal(), io.StringIO()
    for progress in (Progress(2, stream=plain), Progress(2, stream=bar), Progress(2, quiet=True, stream=silent)):
        progress.add(good)
        progress.add(bad)
        progress.close()
    assert plain.getvalue().splitlines() == ["onnxremat: [1/2] a.min: 1.0 MiB of 2.0 MiB, +50.0%, 0 s", "onnxremat: [2/2] b.min: it broke"]
    assert "[##############..............] 1/2" in bar.getvalue() and "b.min: it broke\n" in bar.getvalue() and "2/2, 1 failed" in bar.getvalue()
    assert silent.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml", "--budget", "min"], "none.yaml: No such file"),
        ([MANIFEST], "name at least one budget"),
        ([MANIFEST, "--budget", "80%,lots"], "'lots' is not a budget: write a size such as 512MiB, a share such as 60%, or min"),
        ([MANIFEST, "--activation-budget", "2GiB"], "takes a percentage"),
        ([MANIFEST, "--budget", "80%,80%"], "two jobs called mlp.budget-80"),
        ([MANIFEST, "--budget", "80%", "--only", "alexnet"], "no model is called or tagged 'alexnet'"),
        ([MANIFEST, "--budget", "80%", "--quick"], "norm has no quick size"),
        ([MANIFEST, "--budget", "80%", "--jobs", "0"], "--jobs: it must be a whole number of at least 1, not 0"),
        ([MANIFEST, "--budget", "80%", "--timeout", "-1"], "--timeout: it must be a number of seconds from 0 up"),
        ([MANIFEST, "--budget", "80%", "--timeout", "0"], "--timeout 0 leaves no job any time"),
        ([MANIFEST, "--budget", "80%", "--strategy", "guess"], "guess"),
        ([MANIFEST, "--budget", "80%", "--target", "onnxruntime", "--swap", "disk"], "leave one of them out"),
        ([MANIFEST, "--budget", "80%", "--target", "onnxruntime", "--provider", "cuda"], "--target onnxruntime with --provider cuda is not there"),
        ([MANIFEST, "--budget", "80%", "--swap", "host"], "on the CPU tensors lie in the host's memory anyway"),
        ([MANIFEST, "--budget", "80%", "--provider-option", "device_id=1"], "give --provider cuda as well"),
        ([MANIFEST, "--budget", "80%", "--update", "fused", "--clip-grad-norm", "1"], "leave out --clip-grad-norm"),
    ],
)
def test_bad_usage(capsys: Capture, tmp_path: Path, arguments: list[str], message: str) -> None:
    capsys.readouterr()
    assert main(["zoo", "compile", *arguments, "-o", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_list(capsys: Capture) -> None:
    assert main(["zoo", "list", "--only", "batchnorm", "--only", "gpt*", "--json"]) == 0
    models = {m["name"]: m for m in json.loads(capsys.readouterr().out)["models"]}
    assert "gpt2" in models and "unet" in models and "vgg16" not in models
    assert models["unet"]["quick"]["source"] == "onnxremat.models.unet:unet(width=4, depth=3)" and models["unet"]["batch"] == 4
    assert main(["zoo", "list", MANIFEST]) == 0
    assert "killed" in capsys.readouterr().out


@pytest.mark.slow
def test_on_a_cluster(tmp_path: Path, capsys: Capture) -> None:
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed: pip install 'onnxremat[cluster]'")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        arguments = ["--only", "mlp", "--only", "killed", "--budget", "32MiB", "--keep-going", "--scheduler-address", cluster.scheduler_address]
        found = _zoo(capsys, tmp_path / "run", *arguments, code=1)
    errors = {row["name"]: row["error"] for row in found["results"]}
    assert errors["mlp"] == "" and "SIGKILL" in errors["killed"]
    assert Artifact.load(tmp_path / "run" / "mlp" / "budget-32MiB").plan.budget_bytes == 32 * 2**20


def test_a_cluster_that_is_not_there(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    code = main(["zoo", "compile", MANIFEST, "--budget", "min", "--only", "mlp", "-o", str(tmp_path / "run"), "--scheduler-address", "tcp://x:1"])
    assert code == 1 and "pip install 'onnxremat[cluster]'" in capsys.readouterr().err
