"""What a run came to: a table, index.json and index.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from ..console import columns
from ..errors import OnnxRematError
from ..files import write_json, write_text
from ..units import format_bytes
from .jobs import Outcome

__all__ = ["INDEX", "PAGE", "index_of", "load_outcomes", "table", "write_index"]

INDEX, PAGE = "index.json", "index.html"
_HEADING = ("model", "budget", "bytes", "of peak", "predicted", "measured", "overhead", "recomputed", "compiled in")


def load_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes in a run's folder, in the order of their names.

    Raises:
        OnnxRematError: there are none.
    """
    found = [Outcome.load(path) for path in sorted((folder / "results").glob("*.json"))]
    outcomes = [o for o in found if o is not None]
    if not outcomes:
        raise OnnxRematError(f"{folder} has no results: it is not the folder of a 'zoo compile', or no job of it has ended")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines of a table with a row for each job, and below it the errors."""
    rows = [(o.name, o.label, *_cells(o)) for o in outcomes]
    lines = columns(_HEADING, rows, left=2)
    return lines + [f"{o.key}: {o.error}" for o in outcomes if not o.ok]


def _cells(outcome: Outcome) -> tuple[str, ...]:
    took = f"{outcome.seconds:.0f} s"
    figures = outcome.figures
    if figures is None:
        return ("failed", "", "", "", "", "", took)
    measured = figures.get("peak_measured_bytes")
    before = figures["seconds_unscheduled"]
    overhead = f"{figures['seconds_predicted'] / before - 1:+.1%}" if before else "-"
    return (
        format_bytes(figures["budget_bytes"]) + (" min" if outcome.smallest else ""),
        f"{figures['budget_bytes'] / figures['peak_unscheduled_bytes']:.0%}",
        format_bytes(figures["peak_predicted_bytes"]),
        "-" if measured is None else format_bytes(measured),
        overhead,
        str(figures["recomputed_ops"]),
        took,
    )


def index_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The content of index.json: bytes, seconds, hashes and errors of every job."""
    return {
        "format": "onnxremat-zoo",
        "version": 1,
        "jobs": len(outcomes),
        "failed": sum(not o.ok for o in outcomes),
        "seconds": sum(o.seconds for o in outcomes),
        "processor_seconds": sum(o.processor_seconds for o in outcomes),
        "artifact_bytes": sum(o.artifact_bytes for o in outcomes),
        "results": [asdict(o) | {"artifact": f"{o.name}/{o.label}" if o.ok else None} for o in outcomes],
    }


def write_index(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write index.json and index.html, each whole or not at all.

    Raises:
        OnnxRematError: they can't be written.
    """
    try:
        write_json(folder / INDEX, index_of(outcomes))
        write_text(folder / PAGE, _page(outcomes))
    except OSError as error:
        raise OnnxRematError(f"can't write {folder / INDEX}: {error.strerror or error}") from error


def _page(outcomes: Sequence[Outcome]) -> str:
    good = [o for o in outcomes if o.ok]
    failed = len(outcomes) - len(good)
    templates = files("onnxremat") / "templates"
    report = (templates / "report.html").read_text(encoding="utf-8")
    style = report[report.index("<style>") : report.index("</style>") + len("</style>")]
    cards = [
        ("Models", str(len({o.name for o in outcomes})), f"{len(outcomes)} jobs"),
        ("Compiled", str(len(good)), f"{failed} failed"),
        ("Bit-equal", str(sum(bool((o.figures or {}).get("bitwise_equal")) for o in good)), "to their unscheduled steps"),
        ("Time", _minutes(sum(o.seconds for o in outcomes)), f"of all jobs; {_minutes(sum(o.processor_seconds for o in outcomes))} of processors"),
        ("Artifacts", format_bytes(sum(o.artifact_bytes for o in outcomes)), "on disk"),
    ]
    return Template((templates / "zoo.html").read_text(encoding="utf-8")).substitute(
        style=style,
        when=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        badge='<span class="badge bad">with failures</span>' if failed else '<span class="badge good">all compiled</span>',
        cards="".join(
            f'<div class="card"><span class="name">{escape(n)}</span><b>{escape(v)}</b><span class="note">{escape(t)}</span></div>'
            for n, v, t in cards
        ),
        heading="".join(f"<th{' class=n' if i > 1 else ''}>{escape(name)}</th>" for i, name in enumerate(_HEADING)),
        rows="".join(_row(o) for o in outcomes),
        failures=_failures([o for o in outcomes if not o.ok]),
    )


def _row(outcome: Outcome) -> str:
    cells = _cells(outcome)
    label = escape(outcome.label)
    if outcome.ok:
        label = f'<a href="{quote(outcome.name)}/{quote(outcome.label)}/report.html">{label}</a>'
    first = '<span class="bad">failed</span>' if not outcome.ok else escape(cells[0])
    rest = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells[1:])
    return f'<tr><td class="name">{escape(outcome.name)}</td><td>{label}</td><td class="n">{first}</td>{rest}</tr>'


def _failures(failed: Sequence[Outcome]) -> str:
    if not failed:
        return ""
    rows = "".join(
        f'<tr><td class="name"><a href="logs/{quote(o.key)}.log">{escape(o.key)}</a></td><td class="n">{o.exit_code}</td>'
        f"<td>{escape(o.error)}</td></tr>"
        for o in failed
    )
    heading = '<tr><th>job</th><th class="n">exit code</th><th>error</th></tr>'
    return f'<section id="failures"><h2>What failed</h2><div class="scroll"><table>{heading}{rows}</table></div></section>'


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
