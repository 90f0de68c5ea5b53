"""Stock ONNX Runtimes in environments of their own, and what is run in them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Folder of one environment a version; ``make .venv-stock/.installed`` makes them.
FOLDER = Path(os.environ.get("ONNXREMAT_STOCK", ROOT / ".venv-stock"))
VERSIONS = ("1.19.2", "current")


def python_of(version: str) -> Path:
    """The interpreter whose onnxruntime is of a version; skips the test where there is none."""
    path = FOLDER / version / "bin" / "python"
    if not path.exists():
        pytest.skip(f"there is no {path}: 'make test' makes it from requirements-stock-{version}.txt; ONNXREMAT_STOCK names another folder")
    return path


def in_stock(version: str, job: str, *arguments: str) -> Any:
    """What a function of ``tests/portable/jobs.py`` returns in a stock environment, as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python_of(version)), str(Path(__file__).with_name("jobs.py")), job, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
