"""A run: the jobs of a manifest and budgets, on this machine or on a cluster, into a folder that an interrupted run goes on with."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ERROR, OK, OnnxRematError, UsageError
from ..locks import try_lock
from ..models.zoo import ManifestError, ZooEntry
from ..units import Budget
from .jobs import Job, Outcome, kill_all, run_job

__all__ = ["choose", "executor", "exit_code", "finished", "make_jobs", "run_folder", "run_jobs"]

_LOCK = ".lock"


def choose(entries: Mapping[str, ZooEntry], patterns: Sequence[str]) -> list[ZooEntry]:
    """The models whose name or one of whose tags matches one of the patterns, shell-style; all of them without patterns.

    Raises:
        UsageError: a pattern matches none.
    """
    chosen = []
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(word, pattern) for e in entries.values() for word in (e.name, *e.tags)):
            raise UsageError(f"no model is called or tagged '{pattern}': the manifest has {', '.join(entries)}")
    for entry in entries.values():
        if not patterns or any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns for word in (entry.name, *entry.tags)):
            chosen.append(entry)
    return chosen


def make_jobs(
    entries: Sequence[ZooEntry],
    budgets: Sequence[str],
    activation_budgets: Sequence[str],
    folder: Path,
    options: Mapping[str, Any],
    quick: bool = False,
    or_min: bool = False,
) -> list[Job]:
    """A job for each model and budget, those of a model one after another.

    Args:
        entries: the models.
        budgets: sizes, percentages or ``min``.
        activation_budgets: percentages.
        folder: of the run.
        options: further arguments of ``onnxremat.compile``, as those of a job.
        quick: the models at their quick sizes.
        or_min: where a budget is infeasible, the smallest one that is found.

    Raises:
        UsageError: a budget is none, or is named twice, or a model has no quick size.
    """
    wanted = [(text.strip(), False) for text in budgets] + [(text.strip(), True) for text in activation_budgets]
    if not wanted:
        raise UsageError("name at least one budget: --budget 80%,60%,min or --activation-budget 50%")
    for text, activations in wanted:
        Budget.parse(text, activations_only=activations)
    jobs = []
    for entry in entries:
        small = entry.quick
        try:
            source = entry.source(quick)
        except ManifestError as error:
            raise UsageError(str(error)) from error
        inputs, labels = (small.inputs, small.labels) if quick and small else (entry.inputs, entry.labels)
        for text, activations in wanted:
            jobs.append(Job(entry.name, source, inputs, labels, entry.loss, text, activations, or_min, dict(options), str(folder.resolve())))
    keys = [job.key for job in jobs]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"the budgets make two jobs called {key}: name each once")
    return jobs


@contextmanager
def run_folder(folder: Path, resume: bool) -> Iterator[None]:
    """The folder of a run, made where it is missing, and held against a second run within the block.

    Raises:
        OnnxRematError: another run holds it, it can't be written, or it has results and this run is not to go on with them.
    """
    try:
        for name in ("results", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        held = try_lock(folder / _LOCK)
    except OSError as error:
        raise OnnxRematError(f"can't write to {folder}: {error.strerror or error}") from error
    if held is None:
        raise OnnxRematError(f"another run is at work in {folder}: wait for it, or choose another folder with -o")
    with held:
        if not resume and any((folder / "results").glob("*.json")):
            raise OnnxRematError(f"{folder} has results of an earlier run: go on with it by --resume, or choose another folder with -o")
        yield


def finished(job: Job) -> Outcome | None:
    """The outcome of a job that an earlier run has finished well, of the same model, options and version; None where there is none."""
    outcome = Outcome.load(job.result)
    whole = outcome is not None and outcome.ok and outcome.fingerprint == job.fingerprint and (job.artifact / "manifest.json").is_file()
    return outcome if whole else None


@contextmanager
def executor(jobs: int, scheduler_address: str | None) -> Iterator[Executor]:
    """What runs the jobs: threads that each wait for a process, or the workers of a dask cluster.

    Raises:
        OnnxRematError: dask.distributed is not installed, or there is no scheduler at the address.
    """
    if scheduler_address is None:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                kill_all()
                raise
        return
    try:
        from distributed import Client
    except ImportError:
        raise OnnxRematError("--scheduler-address needs dask.distributed: pip install 'onnxremat[cluster]'") from None
    try:
        client = Client(scheduler_address, timeout=20)
    except (OSError, ValueError) as error:
        raise OnnxRematError(f"there is no dask scheduler at {scheduler_address}: {' '.join(str(error).split())}") from error
    with client, client.get_executor(pure=False, retries=0) as cluster:
        yield cluster


def run_jobs(jobs: Sequence[Job], pool: Executor, timeout: float | None, keep_going: bool) -> Iterator[Outcome]:
    """Outcomes as they come; after a failure, unless it is to keep going, only of the jobs that run already.

    Args:
        jobs: what to run.
        pool: runs them.
        timeout: wall seconds of each.
        keep_going: start further jobs after a failure.
    """
    futures: dict[Future[Outcome], Job] = {pool.submit(run_job, job, timeout): job for job in jobs}
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            if future.cancelled():
                continue
            error = future.exception()
            outcome = future.result() if error is None else Outcome.failed(futures[future], f"its worker is lost: {error}")
            yield outcome
            if not outcome.ok and not keep_going:
                pending = {other for other in pending if not other.cancel()}


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0 where all went well; what the failures have in common, else 1."""
    codes = {o.exit_code for o in outcomes if not o.ok}
    return OK if not codes else codes.pop() if len(codes) == 1 else ERROR
