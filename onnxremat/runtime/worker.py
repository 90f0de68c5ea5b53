"""Work that needs a process of its own: for memory that is measured, for an arena of another size, for kernels that may crash.

``call("module:function", **arguments)`` runs a function of JSON-able arguments and result in a fresh interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import OnnxRematError, RuntimeUnavailable

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def call(function: str, **arguments: Any) -> Any:
    """The result of ``function`` (``onnxremat.some.module:name``) in a new process.

    Raises:
        OnnxRematError: of the class that the function raised, or that the process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(json.dumps({"function": function, "arguments": arguments}), encoding="utf-8")
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (_PACKAGE_PARENT, environment.get("PYTHONPATH")) if p)
        process = subprocess.run(
            [sys.executable, "-m", "onnxremat.runtime.worker", str(job), str(result)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not result.exists():
            tail = " ".join(process.stderr.split())[-300:]
            how = f"was ended by signal {-process.returncode}" if process.returncode < 0 else f"exited with {process.returncode}"
            raise RuntimeUnavailable(f"the worker process for {function.partition(':')[2]} {how}: {tail or 'no message'}")
        answer = json.loads(result.read_text(encoding="utf-8"))
    if "error" in answer:
        kind = getattr(errors, answer["kind"], OnnxRematError)
        raise (kind if kind is not errors.BudgetInfeasible else OnnxRematError)(answer["error"])
    return answer["result"]


def main() -> None:
    """Entry point of the worker process."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module, _, name = job["function"].partition(":")
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(**job["arguments"])}
    except OnnxRematError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
