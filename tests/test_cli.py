"""Every command in this process: what it prints, what it returns, and what it leaves behind when it fails."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxremat import Artifact
from onnxremat import compile as compile_
from onnxremat.artifact import TRAINING
from onnxremat.cli import main
from onnxremat.errors import UsageError

from .factories import CNN_INPUT, CNN_LABEL, MLP_INPUT, MLP_LABEL, ROOT, alter_model

MLP = ["tests.factories:tiny_mlp", "--input", MLP_INPUT, "--label", MLP_LABEL, "--loss", "cross_entropy", "--costs", "analytic"]
QUICK = ["--budget", "32MiB", "--time-limit", "2", "--no-verify", "--quiet"]
COMPILE_KEYS = {
    *("budget_bytes", "peak_unscheduled_bytes", "peak_predicted_bytes", "seconds_unscheduled", "seconds_predicted"),
    *("seconds_lower_bound", "strategy", "solve_seconds", "recomputed_ops", "swapped_tensors"),
}

Capture = pytest.CaptureFixture[str]


def _json(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command with --json: one object on stdout and nothing else there."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.endswith("\n") and out.count("\n") == 1
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(found, dict)
    return found


def _fails(capsys: Capture, code: int, *arguments: str) -> str:
    """Run a command that fails: the exit code, one line on stderr, nothing on stdout. Returns the line."""
    capsys.readouterr()
    assert main([*arguments, "--quiet"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("onnxremat: ") and "Traceback" not in lines[0] and "internal error" not in lines[0]
    return lines[0]


def _forward(path: Path, op_type: str = "Tanh", domain: str = "") -> Path:
    """A small forward .onnx file with a weight."""
    weight = onnx.numpy_helper.from_array(np.ones((3, 2), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="product"), helper.make_node(op_type, ["h"], ["y"], name="last", domain=domain)]
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3]), helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 2])]
    graph = helper.make_graph(nodes, "forward", info[:1], info[1:], [weight])
    opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path))
    return path


def test_export(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "forward.onnx"
    found = _json(capsys, "export", *MLP[:-2], "-o", str(file))
    assert found["output"] == str(file) and found["trainable"] == 6 and found["nodes"] > 3
    names = {i.name for i in onnx.load(str(file)).graph.input}
    assert "x" in names
    assert main(["export", *MLP[:-2], "-o", str(file), "-q"]) == 0
    assert "6 trainable parameters" in capsys.readouterr().out


def test_compile_run_inspect_verify_plan(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    found = _json(capsys, "compile", *MLP, *QUICK, "-o", str(folder))
    assert set(found) >= COMPILE_KEYS | {"artifact"}
    assert found["artifact"] == str(folder) and found["budget_bytes"] == 32 * 2**20
    assert 0 < found["peak_predicted_bytes"] <= found["budget_bytes"]
    assert found["seconds_lower_bound"] <= found["seconds_predicted"]
    assert [p.name for p in tmp_path.iterdir()] == ["made"], "nothing is left beside the artifact"

    ran = _json(capsys, "run", str(folder), "--steps", "3", "--uncapped", "--save", str(tmp_path / "state"))
    assert set(ran) >= {"losses", "step_seconds", "peak_measured_bytes", "providers"}
    assert len(ran["losses"]) == len(ran["step_seconds"]) == 3
    assert ran["providers"] == ["CPUExecutionProvider"] and ran["peak_measured_bytes"] > 0
    assert (tmp_path / "state" / "checkpoint").exists()

    inspected = _json(capsys, "inspect", str(folder))
    assert inspected["format"] == "onnxremat-artifact" and inspected["verification"] is None

    planned = _json(capsys, "plan", str(folder / "problem.json"), "--budget", "100%", "--time-limit", "2", "-o", str(tmp_path / "p.json"))
    assert set(planned) >= COMPILE_KEYS | {"feasible"} and planned["feasible"] is True and "artifact" not in planned
    assert json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["format"] == "onnxremat-plan"

    for arguments in (["inspect", str(folder)], ["run", str(folder), "--steps", "2", "--uncapped"]):
        assert main([*arguments, "--quiet"]) == 0
        captured = capsys.readouterr()
        assert "budget" in captured.out and captured.err == ""


def test_compile_replaces_an_older_artifact_and_nothing_else(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / "link").symlink_to(made)
    for update in ("separate", "fused"):  # into the empty folder, then over the artifact, of which fewer files are left
        _json(capsys, "compile", *MLP, *QUICK, "-o", str(tmp_path / "link"), "--update", update)
        assert Artifact.load(made).manifest["update"] == update
        assert (made / "optimizer_model.onnx").exists() == (update == "separate")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "made"] and (tmp_path / "link").is_symlink()

    (made / "notes.txt").write_text("mine", encoding="utf-8")
    before = {p.name: p.read_bytes() for p in made.iterdir()}
    assert "'notes.txt' in it was not written by onnxremat" in _fails(capsys, 1, "compile", *MLP, *QUICK[:-1], "-o", str(made))
    assert {p.name: p.read_bytes() for p in made.iterdir()} == before
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert "is there already and no folder" in _fails(capsys, 1, "compile", *MLP, *QUICK[:-1], "-o", str(tmp_path / "file"))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder" in _fails(capsys, 1, "compile", *MLP, *QUICK[:-1], "-o", ".")


def test_a_saved_state_does_not_replace_the_artifact(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(mlp_artifact.path, folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert "was not written" in _fails(capsys, 1, "run", str(folder), "--steps", "1", "--uncapped", "--save", str(folder))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    for _ in range(2):  # a state may be replaced by the next one
        _json(capsys, "run", str(folder), "--steps", "1", "--uncapped", "--save", str(tmp_path / "state"))


def test_verify(capsys: Capture, cnn_artifact: Artifact) -> None:
    found = _json(capsys, "verify", str(cnn_artifact.path), "--steps", "1")
    assert set(found) >= {"passed", "bitwise_equal", "max_relative_error_torch", "state_equal"}
    assert found["passed"] and found["bitwise_equal"] and found["state_equal"]
    assert 0 < found["max_relative_error_torch"] < 0.01


def test_verify_of_a_tampered_artifact_returns_4(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path) -> None:
    shutil.copytree(mlp_artifact.path, tmp_path / "bad")

    def break_(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "Tanh")
        node.op_type = "Sigmoid"

    alter_model(tmp_path / "bad", TRAINING, break_)
    found = _json(capsys, "verify", str(tmp_path / "bad"), "--steps", "1", code=4)
    assert found["passed"] is False and found["bitwise_equal"] is False and "differs from the unscheduled step" in found["reason"]


def test_doctor(capsys: Capture) -> None:
    found = _json(capsys, "doctor")
    checks = {f["check"]: f for f in found["findings"]}
    assert found["ok"] and checks["training kernels"]["status"] == "ok" and "torch" in checks and "cache" in checks


def test_doctor_tells_two_runtimes_in_one_folder(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxremat.runtime import ort

    monkeypatch.setattr(ort, "installed_packages", lambda: {"onnxruntime-training-cpu": "1.19.2", "onnxruntime": "1.23.0"})
    ort.onnxruntime.cache_clear()
    try:
        found = _json(capsys, "doctor", code=1)
        error = next(f for f in found["findings"] if f["check"] == "onnxruntime")
        assert error["status"] == "error" and "pip uninstall" in error["fix"] and "break each other" in error["fix"]
        line = _fails(capsys, 1, "compile", *MLP, "--no-verify", "-o", "unused_artifact")
        assert "onnxruntime-training-cpu and onnxruntime" in line and "pip install onnxruntime-training-cpu==1.19.2" in line
        assert not Path("unused_artifact").exists()
    finally:
        ort.onnxruntime.cache_clear()


def test_a_missing_runtime_is_told(capsys: Capture, monkeypatch: pytest.MonkeyPatch, mlp_artifact: Artifact) -> None:
    from onnxremat.runtime import ort

    monkeypatch.setattr(ort, "installed_packages", dict)
    monkeypatch.setattr(ort.importlib.util, "find_spec", lambda name: None)
    ort.onnxruntime.cache_clear()
    ort.bindings.cache_clear()
    try:
        line = _fails(capsys, 1, "run", str(mlp_artifact.path), "--uncapped")
        assert "onnxruntime is not installed: pip install onnxruntime-training-cpu==1.19.2" in line
    finally:
        ort.onnxruntime.cache_clear()
        ort.bindings.cache_clear()


def test_an_infeasible_budget_names_one_that_works(capsys: Capture, tmp_path: Path) -> None:
    arguments = ["compile", *MLP, "--time-limit", "2", "--no-verify", "--quiet", "-o", str(tmp_path / "a")]
    found = _json(capsys, *arguments, "--budget", "4MiB", code=3)
    assert found["feasible"] is False and found["exit_code"] == 3
    minimum = found["minimum_budget_bytes"]
    assert minimum > 4 * 2**20 and str(minimum) in found["error"]
    assert list(tmp_path.iterdir()) == []
    again = _json(capsys, *arguments, "--budget", f"{minimum}B")
    assert again["peak_predicted_bytes"] <= again["budget_bytes"] == minimum


def test_the_smallest_budget(capsys: Capture, tmp_path: Path) -> None:
    cnn = ["tests.factories:tiny_cnn", "--input", CNN_INPUT, "--label", CNN_LABEL, "--loss", "cross_entropy", "--costs", "analytic", "--quiet"]
    found = _json(capsys, "compile", *cnn, "--time-limit", "4", "--no-verify", "-o", str(tmp_path / "a"), "--budget", "min")
    assert found["recomputed_ops"] > 0 and found["peak_predicted_bytes"] <= found["budget_bytes"] < 0.9 * found["peak_unscheduled_bytes"]
    planned = _json(capsys, "plan", str(tmp_path / "a"), "--time-limit", "4", "--quiet", "--budget", "min")
    assert planned["feasible"] and planned["peak_predicted_bytes"] <= planned["budget_bytes"] < found["budget_bytes"], "live bytes alone"


def test_without_a_budget_the_step_is_not_reduced(capsys: Capture, tmp_path: Path) -> None:
    found = _json(capsys, "compile", *MLP, "--time-limit", "2", "--no-verify", "--quiet", "-o", str(tmp_path / "a"))
    assert found["recomputed_ops"] == 0


def test_plan_with_an_infeasible_budget(capsys: Capture, mlp_artifact: Artifact) -> None:
    problem = str(mlp_artifact.path / "problem.json")
    found = _json(capsys, "plan", problem, "--budget", "1kB", "--time-limit", "2", code=3)
    again = _json(capsys, "plan", problem, "--budget", f"{found['minimum_budget_bytes']}B", "--time-limit", "2")
    assert found["feasible"] is False and again["feasible"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compile", "missing.onnx"], 1, "missing.onnx"),
        (["compile", "no.such.module:factory", "--input", "x=2x3"], 1, "no.such"),
        (["compile", "tests.factories:nothing", "--input", "x=2x3"], 1, "nothing"),
        (["compile", "tests.factories:raising", "--input", "x=2x3", "--loss", "mse"], 1, "this factory fails"),
        (["compile", "zoo:nothing"], 1, "nothing"),
        (["compile", *MLP[:1], "--input", "x=8x13", "--label", MLP_LABEL, "--loss", "cross_entropy"], 1, "x"),
        (["compile", *MLP[:1], "--input", "x=8x12:int64:3", "--label", MLP_LABEL, "--loss", "cross_entropy"], 1, "x"),
        (["compile", *MLP[:1], "--input", "x=8x12:float99", "--loss", "cross_entropy"], 2, "float99"),
        (["compile", *MLP[:1], "--input", "x=8xa", "--loss", "cross_entropy"], 2, "8xa"),
        (["compile", *MLP[:1], "--input", MLP_INPUT, "--loss", "hinge"], 2, "hinge"),
        (["compile", *MLP[:1], "--input", MLP_INPUT], 1, "loss"),
        (["compile", *MLP, "--budget", "20MiB", "--activation-budget", "50%"], 2, "not both"),
        (["compile", *MLP, "--activation-budget", "20MiB"], 2, "percentage"),
        (["compile", *MLP, "--budget", "lots"], 2, "'lots' is not a budget"),
        (["compile", *MLP, "--budget", "0%"], 2, "0%"),
        (["compile", *MLP, "--budget", "32MiB", "--strategy", "guess"], 2, "guess"),
        (["compile", *MLP, "--momentum", "0.9"], 2, "adamw has no momentum"),
        (["compile", *MLP, "--lr", "nan"], 2, "learning rate"),
        (["compile", *MLP, "--optimizer", "lion"], 2, "lion"),
        (["compile", *MLP, "--threads", "many"], 2, "many"),
    ],
)
def test_bad_compilations(capsys: Capture, tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    line = _fails(capsys, code, *arguments, "--no-verify", "-o", str(tmp_path / "out" / "a"))
    assert message in line
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [], "nothing half-written"


def test_an_operator_without_a_rule(capsys: Capture, tmp_path: Path) -> None:
    file = _forward(tmp_path / "f.onnx", "Det2", "com.example")
    line = _fails(capsys, 1, "compile", str(file), "--loss", "mse", "--no-verify", "-o", str(tmp_path / "a"))
    assert "Det2" in line
    assert [p.name for p in tmp_path.iterdir()] == ["f.onnx"]


def test_a_file_that_is_no_model(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "f.onnx").write_bytes(b"not a model at all")
    line = _fails(capsys, 1, "compile", str(tmp_path / "f.onnx"), "--loss", "mse", "-o", str(tmp_path / "a"))
    assert "f.onnx" in line


def test_a_forward_file_compiles(capsys: Capture, tmp_path: Path) -> None:
    file = _forward(tmp_path / "f.onnx")
    found = _json(capsys, "compile", str(file), "--loss", "mse", "--costs", "analytic", *QUICK, "--optimizer", "sgd", "-o", str(tmp_path / "a"))
    assert found["recomputed_ops"] == 0
    verified = _json(capsys, "verify", str(tmp_path / "a"), "--steps", "1")
    assert verified["bitwise_equal"] and verified["max_relative_error_torch"] is None


def test_damaged_artifacts(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path) -> None:
    for command in ("run", "verify", "inspect"):
        assert "there is no artifact folder" in _fails(capsys, 1, command, str(tmp_path / "none"))
    assert "has no manifest.json" in _fails(capsys, 1, "inspect", str(tmp_path))
    bad = tmp_path / "bad"
    shutil.copytree(mlp_artifact.path, bad)
    model = (bad / TRAINING).read_bytes()
    (bad / TRAINING).write_bytes(model[:-10])
    assert "its hash differs" in _fails(capsys, 1, "run", str(bad), "--uncapped")
    (bad / TRAINING).unlink()
    assert f"{TRAINING} is missing" in _fails(capsys, 1, "verify", str(bad))
    (bad / "manifest.json").write_text("{", encoding="utf-8")
    assert "is damaged" in _fails(capsys, 1, "inspect", str(bad))
    (bad / "manifest.json").write_text("[]", encoding="utf-8")
    assert "manifest.json" in _fails(capsys, 1, "inspect", str(bad))
    (bad / "manifest.json").write_text('{"format": "onnxremat-artifact", "version": 1}', encoding="utf-8")
    assert "has no 'files'" in _fails(capsys, 1, "inspect", str(bad))
    (bad / "manifest.json").write_bytes(b"\xff\xfe\x00")
    assert "is damaged" in _fails(capsys, 1, "inspect", str(bad))


@pytest.mark.parametrize(
    ("key", "content"),
    [
        *(("inputs", content) for content in (["x"], 3)),
        *(("optimizer", content) for content in ({"nam": 1}, {"name": "adamw", "nam": 1}, {"name": "adagrad"})),
        *(("memory", content) for content in ({}, [])),
        *((key, []) for key in ("roles", "plan", "time", "files", "source")),
        ("target", "another"),
        ("threads", "many"),
    ],
)
def test_a_manifest_that_was_edited(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path, key: str, content: Any) -> None:
    shutil.copytree(mlp_artifact.path, tmp_path / "bad")
    (tmp_path / "bad" / "manifest.json").write_text(json.dumps(mlp_artifact.manifest | {key: content}), encoding="utf-8")
    for command in ("run", "verify", "inspect"):
        assert "manifest.json is damaged (" in _fails(capsys, 1, command, str(tmp_path / "bad"))


def test_bad_runs(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path) -> None:
    folder = str(mlp_artifact.path)
    np.savez(tmp_path / "short.npz", x=np.zeros((3, 12), np.float32), labels=np.zeros(3, np.int64))
    np.savez(tmp_path / "lacks.npz", x=np.zeros((8, 12), np.float32))
    assert "at least 1" in _fails(capsys, 2, "run", folder, "--steps", "0")
    assert "there is no data file" in _fails(capsys, 2, "run", folder, "--uncapped", "--data", str(tmp_path / "none.npz"))
    assert "fewer than a batch" in _fails(capsys, 2, "run", folder, "--uncapped", "--data", str(tmp_path / "short.npz"))
    assert "must have the arrays x, labels" in _fails(capsys, 2, "run", folder, "--uncapped", "--data", str(tmp_path / "lacks.npz"))


def test_a_loss_that_is_not_finite_is_null(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path) -> None:
    """JSON has no NaN."""
    np.savez(tmp_path / "d.npz", x=np.full((8, 12), np.nan, np.float32), labels=np.zeros(8, np.int64))
    found = _json(capsys, "run", str(mlp_artifact.path), "--steps", "2", "--uncapped", "--quiet", "--data", str(tmp_path / "d.npz"))
    assert found["losses"] == [None, None]


def test_run_on_a_data_file(capsys: Capture, mlp_artifact: Artifact, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 64)
    x = np.eye(4, 12, dtype=np.float32)[labels] * 3
    np.savez(tmp_path / "d.npz", x=x, labels=labels)
    found = _json(capsys, "run", str(mlp_artifact.path), "--steps", "40", "--uncapped", "--quiet", "--data", str(tmp_path / "d.npz"))
    assert found["losses"][-1] < 0.3 * found["losses"][0]


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        ("compile", "--time-limit", ("-1", "nan", "inf", "soon")),
        ("plan", "--time-limit", ("-1",)),
        ("pareto", "--time-limit", ("-1",)),
        ("maxbatch", "--time-limit", ("nan",)),
        ("zoo compile", "--time-limit", ("-1",)),
        ("zoo compile", "--timeout", ("-1", "nan")),
        ("zoo compile", "--jobs", ("0", "1.5")),
        ("compile", "--seed", ("-1", "99999999999999999999999", "x")),
        *((command, "--seed", ("-1", str(2**32))) for command in ("export", "plan", "run", "verify", "pareto", "maxbatch")),
        *((command, "--threads", ("-1", "999999")) for command in ("compile", "run", "zoo compile", "pareto", "maxbatch")),
        ("run", "--steps", ("0", "-1", "many")),
        ("verify", "--steps", ("0",)),
        ("run", "--accumulate", ("0",)),
        ("run", "--warmup", ("-1",)),
        ("compile", "--work-limit", ("-1",)),
        ("pareto", "--points", ("1",)),
    ],
)
def test_numbers_outside_their_limits(capsys: Capture, command: str, option: str, values: tuple[str, ...]) -> None:
    for value in values:
        line = _fails(capsys, 2, *command.split(), option, value)
        assert f"argument {option}: " in line and value in line and f"see onnxremat {command} --help" in line


def test_numbers_outside_their_limits_from_python(tmp_path: Path) -> None:
    for fields in ({"time_limit": -1}, {"time_limit": float("nan")}, {"seed": -1}, {"seed": 2**32}, {"threads": -1}, {"work_limit": -1}):
        with pytest.raises(UsageError, match=f"not {next(iter(fields.values()))}"):
            compile_("tests.factories:tiny_mlp", tmp_path / "a", **fields)


def test_options_have_one_name(capsys: Capture) -> None:
    """Else ``--js`` would print JSON, but not where the command fails."""
    assert "unrecognized arguments: --js; see onnxremat zoo list --help" in _fails(capsys, 2, "zoo", "list", "--js")


@pytest.mark.parametrize("arguments", [["zoo", "list"], ["zoo", "list", "--only", "squeezenet"]])
def test_nobody_reads_the_results(arguments: list[str]) -> None:
    program = [sys.executable, "-m", "onnxremat", *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    assert done.returncode == 1 and done.stderr.startswith(b"onnxremat: ") and done.stderr.endswith(b": No space left on device\n")
    assert done.stderr.count(b"\n") == 1


def test_ctrl_c_is_json_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxremat.commands.zoo.load_zoo", interrupt)
    assert _json(capsys, "zoo", "list", code=130) == {"error": "interrupted", "exit_code": 130}


def test_sigterm_leaves_nothing_half_written(tmp_path: Path) -> None:
    """As a batch system ends a job that takes too long: in the middle of writing an artifact."""
    program = f"""
import os, signal, sys, time
from pathlib import Path
from onnxremat import cli, doctor, files

def write():
    with files.whole_folder(Path({str(tmp_path / "out")!r}), ()) as staging:
        (staging / "half").write_text("...")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

doctor.examine = write
sys.argv = ["onnxremat", "doctor", "--json"]
sys.exit(cli.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 143 and json.loads(done.stdout) == {"error": "terminated", "exit_code": 143}, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_usage(capsys: Capture) -> None:
    assert "required" in _fails(capsys, 2)
    assert "invalid choice" in _fails(capsys, 2, "bake")
    assert "required" in _fails(capsys, 2, "compile", "zoo:resnet18")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("onnxremat ")


def test_errors_are_json_too(capsys: Capture, tmp_path: Path) -> None:
    found = _json(capsys, "inspect", str(tmp_path), code=1)
    assert found["exit_code"] == 1 and "manifest.json" in found["error"]


def test_debug_shows_the_traceback(capsys: Capture, tmp_path: Path) -> None:
    assert main(["inspect", str(tmp_path), "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and err.strip().splitlines()[-1].startswith("onnxremat: ")


@pytest.mark.parametrize("writer", ["onnx_ir.save", "onnx.save", "onnxremat.files.write_text"])
def test_a_full_disk_leaves_nothing(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writer: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "manifest.json").write_text("old", encoding="utf-8")

    def full(*arguments: Any, **options: Any) -> None:
        for argument in arguments:
            if isinstance(argument, Path) or (isinstance(argument, str) and argument.startswith("/")):
                Path(argument).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, full)
    line = _fails(capsys, 1, "compile", *MLP, "--budget", "32MiB", "--time-limit", "2", "--no-verify", "-o", str(tmp_path / "a"))
    assert "No space left on device" in line and str(tmp_path / "a") in line
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["manifest.json"], "what was there before is there still"


def test_an_export_into_a_missing_folder(capsys: Capture, tmp_path: Path) -> None:
    line = _fails(capsys, 1, "export", *MLP[:-2], "-o", str(tmp_path / "missing" / "folder" / "f.onnx"))
    assert "f.onnx" in line or "folder" in line
    assert list(tmp_path.rglob("*.onnx")) == []


def test_a_place_that_can_not_be_written(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    line = _fails(capsys, 1, "compile", *MLP, "--budget", "32MiB", "--no-verify", "-o", str(tmp_path / "file" / "a"))
    assert "can't write" in line and (tmp_path / "file").read_text(encoding="utf-8") == "a file"


def test_a_verification_that_fails_leaves_nothing(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module("onnxremat.verification")
    monkeypatch.setattr(module, "compare_schedules", lambda *a, **k: ["0.weight"])
    line = _fails(capsys, 4, "compile", *MLP, "--budget", "32MiB", "--time-limit", "2", "-o", str(tmp_path / "a"))
    assert "'0.weight' differs" in line and "--no-verify" in line
    assert list(tmp_path.iterdir()) == []
