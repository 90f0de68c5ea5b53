"""The ``zoo`` command: list, compile, report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..console import columns, print_json, say
from ..errors import OK, UsageError
from ..models.zoo import ManifestError, ZooEntry, load_zoo, read_manifest
from .options import running_options, search_options, seconds, step_settings, swapping_options, training_options, whole_number

__all__ = ["add_parser"]


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add ``zoo list``, ``zoo compile`` and ``zoo report`` to the commands."""
    zoo = commands.add_parser("zoo", help="compile many models for many budgets")
    actions = zoo.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = actions.add_parser("list", parents=[common], help="the models")
    _add_manifest(listing)
    listing.set_defaults(run=_list)

    compile_ = actions.add_parser(
        "compile",
        parents=[common, search_options(), swapping_options(), training_options(), running_options()],
        help="compile them, each in a process of its own",
    )
    _add_manifest(compile_)
    compile_.add_argument("--budget", action="append", default=[], metavar="BUDGET,...", help="such as 80%%,60%%,2GiB,min; repeatable")
    compile_.add_argument("--activation-budget", action="append", default=[], metavar="PERCENT,...", help="such as 70%%,50%%; repeatable")
    compile_.add_argument("--or-min", action="store_true", help="where a budget is infeasible, compile for the smallest one found")
    compile_.add_argument("-o", "--output", required=True, metavar="DIR", type=Path, help="artifacts, results and index go here")
    compile_.add_argument("--jobs", type=whole_number(1), default=1, metavar="N", help="at a time, on this machine (default 1)")
    compile_.add_argument("--scheduler-address", metavar="ADDRESS", help="of a dask scheduler, whose workers run the jobs and share DIR")
    compile_.add_argument("--resume", action="store_true", help="go on with what an earlier run left in DIR")
    compile_.add_argument("--keep-going", action="store_true", help="start further jobs after one has failed")
    compile_.add_argument("--timeout", type=seconds, metavar="SECONDS", help="of a job; left out, none")
    compile_.add_argument("--quick", action="store_true", help="the models at their quick sizes")
    compile_.add_argument("--no-verify", action="store_true", help="do not compare the numbers when done")
    compile_.set_defaults(run=_compile)

    report = actions.add_parser("report", parents=[common], help="table, index.json and index.html of what a run has finished")
    report.add_argument("folder", metavar="DIR", type=Path)
    report.set_defaults(run=_report)


def _add_manifest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", nargs="?", type=Path, metavar="MANIFEST", help="a .yaml like models/zoo.yaml; left out, our own")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="models whose name or tag matches; repeatable")


def _entries(options: argparse.Namespace) -> Sequence[ZooEntry]:
    from ..zoo.run import choose

    try:
        entries = load_zoo() if options.manifest is None else read_manifest(options.manifest)
    except ManifestError as error:
        raise UsageError(str(error)) from error
    return choose(entries, options.only)


def _list(options: argparse.Namespace) -> int:
    entries = _entries(options)
    if options.json:
        print_json({"models": [_described(entry) for entry in entries]})
        return OK
    rows = [(e.name, " ".join(e.inputs), e.loss, ", ".join(e.tags), "; ".join(e.limits)) for e in entries]
    for line in columns(("model", "inputs", "loss", "tags", "known limits"), rows, left=5):
        say(line)
    return OK


def _described(entry: ZooEntry) -> dict[str, Any]:
    keys = ("name", "inputs", "labels", "loss", "batch", "tags", "limits")
    quick = None if entry.quick is None else {"source": entry.source(True), "inputs": entry.quick.inputs, "labels": entry.quick.labels}
    return {key: getattr(entry, key) for key in keys} | {"source": entry.source(), "quick": quick}


def _compile(options: argparse.Namespace) -> int:
    from ..api import make_request
    from ..zoo.index import index_of, table, write_index
    from ..zoo.progress import Progress
    from ..zoo.run import executor, exit_code, finished, make_jobs, run_folder, run_jobs

    if options.timeout == 0:
        raise UsageError("--timeout 0 leaves no job any time: give more, or leave it out")
    step = step_settings(options)
    make_request("a model", strategy=options.strategy, **step)  # what can't be is said before any job begins
    settings = step | {
        "optimizer": asdict(step["optimizer"]),
        "strategy": options.strategy,
        "time_limit": options.time_limit,
        "work_limit": options.work_limit,
        "verify": not options.no_verify,
    }
    budgets, activations = _split(options.budget), _split(options.activation_budget)
    jobs = make_jobs(_entries(options), budgets, activations, options.output, settings, options.quick, options.or_min)
    with run_folder(options.output, options.resume):
        outcomes = {job.key: done for job in jobs if (done := finished(job)) is not None}
        left = [job for job in jobs if job.key not in outcomes]
        progress = Progress(len(left), options.quiet)
        with executor(options.jobs, options.scheduler_address) as pool:
            try:
                for outcome in run_jobs(left, pool, options.timeout, options.keep_going):
                    outcomes[outcome.key] = outcome
                    progress.add(outcome)
            finally:
                progress.close()
        ended = [outcomes[job.key] for job in jobs if job.key in outcomes]
        write_index(options.output, ended)
        if options.json:
            print_json(index_of(ended))
        else:
            for line in table(ended):
                say(line)
            _summary(len(jobs), ended, options)
    return exit_code(ended)


def _summary(total: int, ended: Sequence[Any], options: argparse.Namespace) -> None:
    failed, skipped = sum(not o.ok for o in ended), total - len(ended)
    say(
        f"{len(ended) - failed} of {total} compiled, {failed} failed"
        + (f", {skipped} not begun (--keep-going goes on after a failure, --resume begins them)" if skipped else "")
        + f": {options.output / 'index.html'}"
    )


def _split(texts: Sequence[str]) -> list[str]:
    return [part for text in texts for part in text.split(",") if part.strip()]


def _report(options: argparse.Namespace) -> int:
    from ..zoo.index import index_of, load_outcomes, table, write_index

    outcomes = load_outcomes(options.folder)
    write_index(options.folder, outcomes)
    if options.json:
        print_json(index_of(outcomes))
    else:
        for line in table(outcomes):
            say(line)
    return OK
