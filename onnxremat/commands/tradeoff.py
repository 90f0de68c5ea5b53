"""The commands ``pareto`` and ``maxbatch``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import columns, print_json, progress, say
from ..errors import OK, UsageError
from ..units import format_bytes, parse_bytes
from .options import running_options, seconds, step_settings, swapping_options, training_options, whole_number

if TYPE_CHECKING:
    from ..fit import Search
    from ..pipeline import Request
    from ..scheduler import Problem
    from ..tradeoff.pareto import Pareto
    from ..tradeoff.picture import Chart

__all__ = ["add_parsers"]


def add_parsers(commands: Any, common: argparse.ArgumentParser, model: argparse.ArgumentParser) -> None:
    """Add both to the commands; ``model`` has the options that name a model."""
    step = [swapping_options(), running_options()]
    pareto = commands.add_parser(
        "pareto", parents=[common, model, training_options(), *step], help="time against budget, from 100 %% down to the minimum"
    )
    pareto.add_argument("--strategy", default="all", metavar="NAME,...", help="the strategies to compare (default all)")
    pareto.add_argument("--points", type=whole_number(2), default=6, metavar="N", help="budgets from 100 %% to the smallest found (default 6)")
    pareto.add_argument("-o", "--output", metavar="FILE.svg|FILE.png", type=Path, action="append", default=[], help="a picture; repeatable")
    _add_time_limit(pareto)
    pareto.set_defaults(run=_pareto)

    maxbatch = commands.add_parser("maxbatch", parents=[common, model, training_options("analytic"), *step], help="the largest batch within a budget")
    maxbatch.add_argument("--budget", required=True, metavar="SIZE", help="such as 16GiB: everything a step holds")
    maxbatch.add_argument(
        "--overhead", type=float, default=1.33, metavar="FACTOR", help="of the unscheduled step's time (default 1.33, about one more forward pass)"
    )
    maxbatch.add_argument(
        "--batch-dim", action="append", default=[], metavar="NAME=AXIS", help="of each input and label that has one; left out, the first of all"
    )
    maxbatch.add_argument("--strategy", default="auto", metavar="NAME", help="of planning (default auto)")
    _add_time_limit(maxbatch)
    maxbatch.set_defaults(run=_maxbatch)


def _add_time_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--time-limit", type=seconds, default=10.0, metavar="SECONDS", help="of planning, each time (default 10)")


def _request(options: argparse.Namespace, strategy: str) -> Request:
    from ..api import make_request

    return make_request(
        options.source,
        inputs=options.input,
        labels=options.label,
        loss=options.loss,
        strategy=strategy,
        time_limit=options.time_limit,
        seed=options.seed,
        freeze=tuple(options.freeze),
        train_mode=options.train_mode,
        **step_settings(options),
    )


def _step(options: argparse.Namespace) -> tuple[Problem, Search]:
    """The problem of a source, or the one in a problem file or an artifact, and how to plan it."""
    from ..fit import Search
    from ..pipeline import search_of, source_problem

    if _is_file(options.source):
        return _problem_of_file(options), Search("auto", options.time_limit, options.seed)
    request = _request(options, "auto")
    return source_problem(request, progress(options)), search_of(request)


def _problem_of_file(options: argparse.Namespace) -> Problem:
    from ..costs.transfer import Swap, swap_channel
    from ..foreign import problem_from_file
    from ..runtime.cuda import Cuda

    for option, default in (("target", "ort-training"), ("update", "separate"), ("provider", None)):
        if getattr(options, option) != default:
            raise UsageError(f"{options.source} is a step that is compiled already, for a target of its own: leave --{option} out")
    gpu = Cuda() if options.swap == "host" else None
    swap = Swap.parse(options.swap, options.swap_bandwidth, options.swap_bytes, options.spill_dir, gpu)
    problem = problem_from_file(Path(options.source), ())
    return problem if swap.kind == "none" else replace(problem, transfer=swap_channel(swap))


def _is_file(source: str) -> bool:
    """Whether a source is a problem file or an artifact, and none that is compiled."""
    path = Path(source)
    return path.is_dir() or path.suffix == ".json"


def _pareto(options: argparse.Namespace) -> int:
    from ..api import known_strategy
    from ..scheduler import distinct_strategies
    from ..tradeoff.pareto import pareto
    from ..tradeoff.picture import check_picture, save_picture

    for path in options.output:
        check_picture(path)
    names = options.strategy.split(",")
    strategies = distinct_strategies() if options.strategy == "all" else tuple(known_strategy(name.strip()) for name in names)
    problem, search = _step(options)
    if options.strategy == "all" and problem.transfer is not None:
        strategies += ("swap_only",)
    found = pareto(problem, strategies, options.points, search, progress(options))
    for path in options.output:
        save_picture(chart_of(found), path)
    if options.json:
        print_json(asdict(found))
        return OK
    for line in pareto_table(found):
        say(line)
    return OK


def pareto_table(found: Pareto) -> list[str]:
    """Lines of a table with a row for each point, and below it what strategies could not do."""
    rows = []
    swaps = any(p.swapped_tensors for curve in found.curves for p in curve.points)
    for curve in found.curves:
        for p in curve.points:
            gap = p.seconds / p.seconds_lower_bound - 1 if p.seconds_lower_bound else 0.0
            share = p.budget_bytes / found.peak_unscheduled_bytes
            cells = (format_bytes(p.budget_bytes), f"{share:.1%}", format_bytes(p.peak_bytes), f"{p.seconds:.4g}", f"{p.overhead:+.2%}")
            rows.append((curve.strategy, *cells, f"{gap:.2%}", str(p.recomputed_ops), *([str(p.swapped_tensors)] if swaps else [])))
    unit = "s" if found.unit == "seconds" else found.unit
    heading = ("strategy", "budget", "of peak", "peak", f"time, {unit}", "overhead", "gap", "recomputed", *(["swapped"] if swaps else []))
    lines = columns(heading, rows) if rows else []
    return lines + [f"{c.strategy}: {c.reason.removeprefix(c.strategy + ': ')}" for c in found.curves if c.reason]


def chart_of(found: Pareto) -> Chart:
    """Overhead against budget, a line for each strategy that has points."""
    from ..tradeoff.picture import Chart, Series

    scale, unit = (2**30, "GiB") if found.peak_unscheduled_bytes >= 4 * 2**30 else (2**20, "MiB")
    series = [Series(c.strategy, tuple((p.budget_bytes / scale, 100 * p.overhead) for p in reversed(c.points))) for c in found.curves if c.points]
    peak, resident = format_bytes(found.peak_unscheduled_bytes), format_bytes(found.resident_bytes)
    unscheduled = f"unscheduled {peak}, of which {resident} resident"
    return Chart(found.name, unscheduled, f"budget, {unit}", "overhead over the unscheduled step, %", tuple(series))


def _maxbatch(options: argparse.Namespace) -> int:
    from ..tradeoff.maxbatch import largest_batch

    if not options.overhead >= 1:
        raise UsageError(f"--overhead is a factor of the unscheduled step's time, at least 1, not {options.overhead:g}")
    budget = parse_bytes(options.budget)
    axes = _axes(options.batch_dim)
    found = largest_batch(_request(options, options.strategy), budget, options.overhead, axes, say=progress(options))
    if options.json:
        print_json({"budget_bytes": budget, "overhead_limit": options.overhead, "batch": found.best.batch, **asdict(found)})
        return OK
    rows = []
    for t in found.trials:
        peak, over = ("-", "-") if t.overhead is None else (format_bytes(t.peak_bytes or 0), f"{t.overhead:+.1%}")
        rows.append((str(t.batch), format_bytes(t.peak_unscheduled_bytes), peak, over, "yes" if t.fits else "no"))
    for line in columns(("batch", "unscheduled", "peak", "overhead", "fits"), rows):
        say(line)
    say(f"largest batch within {format_bytes(budget)} at {options.overhead:g} times the time: {found.best.batch}")
    return OK


def _axes(texts: Sequence[str]) -> dict[str, int]:
    axes = {}
    for text in texts:
        name, equals, axis = text.partition("=")
        if not equals or not name or not axis.isdecimal():
            raise UsageError(f"--batch-dim '{text}' is not NAME=AXIS, such as ids=1")
        axes[name] = int(axis)
    return axes
