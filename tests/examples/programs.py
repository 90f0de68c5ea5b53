"""The example programs in other languages, built where need be, and what a run of one shows from outside."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..portable.stock import ROOT, python_of

EXAMPLES = ROOT / "examples"
NODE_PACKAGE = EXAMPLES / "javascript" / "node_modules" / "onnxruntime-node"


@dataclass(frozen=True)
class Run:
    """What a program showed.

    Attributes:
        losses: one a step.
        grown_bytes: by how much the process became larger at most than it was before its first step, as the kernel tells.
    """

    losses: list[float]
    grown_bytes: int


def javascript() -> list[str]:
    """The command of the JavaScript program; skips the test where there is no Node.js."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    if not NODE_PACKAGE.exists():
        pytest.skip(f"there is no {NODE_PACKAGE}: 'make test' installs it where there is npm")
    return [node, str(EXAMPLES / "javascript" / "train.mjs")]


def c_program(folder: Path) -> str:
    """The C program, compiled with every warning an error; skips the test where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    program = folder / "train"
    sources = sorted(str(file) for file in (EXAMPLES / "c").glob("*.c"))
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(program), *sources, "-ldl", "-lm"], check=True, timeout=100)
    return str(program)


def library_of_node() -> Path:
    """ONNX Runtime's library of the npm package for this kind of machine."""
    javascript()
    libraries = [file for file in NODE_PACKAGE.glob("bin/*/linux/*/libonnxruntime.so*") if file.parent.name == _architecture()]
    assert len(libraries) == 1, libraries
    return libraries[0]


def library_of_wheel() -> Path:
    """ONNX Runtime's library of the current Python package."""
    (library,) = python_of("current").parents[1].glob("lib/*/site-packages/onnxruntime/capi/libonnxruntime.so.*")
    return library


def _architecture() -> str:
    return {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def run(command: Sequence[str]) -> Run:
    """Run a program, looking at its size while it waits before the first step and after the last.

    Without an arena, freed tensors must go back to the system at once for the size to tell what is held.
    """
    process = subprocess.Popen(
        [*command, "--pause"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert process.stdin and process.stderr and process.stdout
    try:
        _await_pause(process)
        before = _status(process.pid, "VmRSS")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak starts anew
        process.stdin.write("\n")
        process.stdin.flush()
        _await_pause(process)
        peak = _status(process.pid, "VmHWM")
        output, errors = process.communicate("\n", timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    return Run([float(line) for line in output.split()], peak - before)


def _await_pause(process: subprocess.Popen[str]) -> None:
    assert process.stderr
    line = process.stderr.readline()
    assert line.startswith("paused"), line + process.stderr.read()


def _status(process: int, key: str) -> int:
    """Bytes of an entry of /proc/PID/status."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
