"""One job: a model compiled for a budget, in a process of its own, so that whatever ends that process costs only the job."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ERROR, OK, BudgetInfeasible, OnnxRematError
from ..files import write_json

__all__ = ["Job", "Outcome", "kill_all", "run_job"]

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
#: Characters of a dead process's last words that are kept.
_TAIL = 300


@dataclass(frozen=True)
class Job:
    """What to compile, and where to.

    Attributes:
        name: of the model, as in the manifest.
        source: SOURCE with the factory's arguments.
        inputs: texts of InputSpecs.
        labels: texts of InputSpecs.
        loss: text of a loss.
        budget: a size, a percentage or ``min``.
        activations: the percentage is one of activations.
        or_min: where the budget is infeasible, the smallest one that is found.
        options: further arguments of ``onnxremat.compile``, an optimizer as the arguments of one.
        folder: of the run.
    """

    name: str
    source: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    loss: str
    budget: str
    activations: bool
    or_min: bool
    options: dict[str, Any]
    folder: str

    @property
    def label(self) -> str:
        """Short name of the budget, fit for a file name."""
        kind = "activations" if self.activations and self.budget != "min" else "budget"
        return f"{kind}-{self.budget.replace('%', '').strip()}"

    @property
    def key(self) -> str:
        """What tells the job from all others of a run."""
        return f"{self.name}.{self.label}"

    @property
    def artifact(self) -> Path:
        """The artifact's folder."""
        return Path(self.folder) / self.name / self.label

    @property
    def result(self) -> Path:
        """The file of the outcome."""
        return Path(self.folder) / "results" / f"{self.key}.json"

    @property
    def log(self) -> Path:
        """What the job's process said."""
        return Path(self.folder) / "logs" / f"{self.key}.log"

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the artifact, its place apart."""
        from .. import __version__

        parts = asdict(self) | {"folder": "", "version": __version__}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        key, name, label, fingerprint: of the job.
        exit_code: as the command line's; 0 is success.
        error: in one line; empty on success.
        seconds: wall time.
        processor_seconds: of the process and all below it.
        peak_bytes: resident memory of the compiler's process at most.
        figures: of the compilation, bytes and seconds, as ``compile --json`` has them, with those of its verification.
        files: name -> hash of the artifact's files.
        artifact_bytes: of the artifact's files.
        smallest: the budget asked for was infeasible, this is the smallest one found.
        minimum_budget_bytes: where the budget was infeasible and that is the error, one that is not.
    """

    key: str
    name: str
    label: str
    fingerprint: str
    exit_code: int = OK
    error: str = ""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    peak_bytes: int = 0
    figures: dict[str, Any] | None = None
    files: dict[str, str] | None = None
    artifact_bytes: int = 0
    smallest: bool = False
    minimum_budget_bytes: int | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == OK

    @classmethod
    def failed(cls, job: Job, error: str, exit_code: int = ERROR, seconds: float = 0.0) -> Outcome:
        """The outcome of a job that could not say one itself."""
        return cls(job.key, job.name, job.label, job.fingerprint, exit_code, " ".join(error.split()), seconds)

    @classmethod
    def load(cls, path: Path) -> Outcome | None:
        """The outcome in a file; None where there is none that can be read."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError):
            return None


_running: set[subprocess.Popen[bytes]] = set()
_guard = threading.Lock()


def run_job(job: Job, timeout: float | None = None) -> Outcome:
    """Run a job in a process of its own and write its result file; never raises for what goes wrong in the job.

    Args:
        job: its folder must be visible from here.
        timeout: wall seconds after which the process is ended.
    """
    begin = time.monotonic()
    try:
        outcome = _in_process(job, timeout, begin)
    except OSError as error:
        outcome = Outcome.failed(job, f"{error.filename or job.folder}: {error.strerror or error}", seconds=time.monotonic() - begin)
    try:
        write_json(job.result, asdict(outcome))
    except OSError as error:
        reason = f"its result can't be written to {job.result}: {error.strerror or error}"
        outcome = replace(outcome, exit_code=outcome.exit_code or ERROR, error=f"{outcome.error}; {reason}" if outcome.error else reason)
    return outcome


def _in_process(job: Job, timeout: float | None, begin: float) -> Outcome:
    if not Path(job.folder, "results").is_dir():
        raise FileNotFoundError(2, "the run's folder is not there: every worker needs to see it under this path", job.folder)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (_PACKAGE_PARENT, environment.get("PYTHONPATH")) if p)
    with open(job.log, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "onnxremat.zoo.jobs"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # so that it can be ended with all that it started
        )
        with _guard:
            _running.add(process)
        try:
            answer, _ = process.communicate(json.dumps(asdict(job)).encode(), timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return Outcome.failed(job, f"took longer than {timeout:g} s (--timeout)", seconds=time.monotonic() - begin)
        finally:
            with _guard:
                _running.discard(process)
    seconds = time.monotonic() - begin
    if process.returncode == 0:
        return replace(Outcome(**json.loads(answer)), seconds=seconds)
    _kill(process)
    tail = " ".join(job.log.read_text(encoding="utf-8", errors="replace").split())[-_TAIL:]
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        hint = ", as the system does when memory is out" if process.returncode == -signal.SIGKILL else ""
        return Outcome.failed(job, f"its process was ended by {name}{hint}; last words: {tail or 'none'}", seconds=seconds)
    return Outcome.failed(job, f"its process ended with {process.returncode}: {tail or 'no message'}", seconds=seconds)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started, and is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_all() -> None:
    """End the jobs that run in processes of this one."""
    with _guard:
        for process in _running:
            _kill(process)


def main() -> None:
    """Entry point of a job's process: the job on stdin, its outcome on stdout."""
    _end_with_parent()
    job = Job(**json.loads(sys.stdin.buffer.read()))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log
    answers.write(json.dumps(asdict(_compile(job))))
    answers.flush()


def _end_with_parent() -> None:
    """On Linux: when the process that started this one dies, so does this one, and a run that was killed leaves no jobs behind."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _compile(job: Job) -> Outcome:
    from ..cache import machine_lock
    from ..errors import explain

    outcome = Outcome(job.key, job.name, job.label, job.fingerprint)
    lock = machine_lock()
    try:
        with lock.busy() if lock else nullcontext():
            outcome = _artifact(job, outcome)
    except BudgetInfeasible as error:
        outcome = replace(outcome, exit_code=error.exit_code, error=str(error), minimum_budget_bytes=error.minimum_budget_bytes)
    except OnnxRematError as error:
        outcome = replace(outcome, exit_code=error.exit_code, error=" ".join(str(error).split()))
    except Exception as error:  # another layer's: said as the command line says it
        import traceback

        traceback.print_exc()
        code, message = explain(error)
        outcome = replace(outcome, exit_code=code, error=" ".join(str(message).split()))
    own, below = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = own.ru_utime + own.ru_stime + below.ru_utime + below.ru_stime
    return replace(outcome, processor_seconds=spent, peak_bytes=own.ru_maxrss * 1024)


def _artifact(job: Job, outcome: Outcome) -> Outcome:
    from ..api import compile as compile_
    from ..artifact import compile_figures
    from ..optimizers import Optimizer

    options = dict(job.options)
    optimizer = Optimizer(**options.pop("optimizer", {}))

    def attempt(budget: str, activations: bool) -> Any:
        return compile_(
            job.source,
            job.artifact,
            inputs=job.inputs,
            labels=job.labels,
            loss=job.loss,
            budget=None if activations else budget,
            activation_budget=budget if activations else None,
            progress=lambda message: print(message, file=sys.stderr, flush=True),  # noqa: T201
            optimizer=optimizer,
            **options,
        )

    smallest = False
    try:
        artifact = attempt(job.budget, job.activations)
    except BudgetInfeasible:
        if not job.or_min:
            raise
        artifact, smallest = attempt("min", False), True
    checked = artifact.manifest["verification"] or {}
    figures = compile_figures(artifact.manifest) | {
        key: checked.get(key) for key in ("peak_measured_bytes", "bitwise_equal", "max_relative_error_torch")
    }
    files = dict(artifact.manifest["files"])
    size = sum(file.stat().st_size for file in artifact.path.iterdir() if file.is_file())
    return replace(outcome, figures=figures, files=files, artifact_bytes=size, smallest=smallest)


if __name__ == "__main__":
    main()
