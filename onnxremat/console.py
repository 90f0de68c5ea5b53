"""What commands print: results on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any


def print_json(data: Any) -> None:
    """One JSON object on a line of its own; a number that JSON has no form for, such as a loss that is not finite, is null."""
    print(json.dumps(_finite(data), allow_nan=False))  # noqa: T201


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def say(text: str) -> None:
    """A line of the result."""
    print(text)  # noqa: T201


def progress(options: argparse.Namespace) -> Any:
    """Tells what happens, unless --quiet was given; takes a message."""
    if options.quiet:
        return lambda message: None
    from .progress import Console

    options.console = Console()
    return options.console


def table(rows: Sequence[tuple[str, str]]) -> None:
    """Name and value of each row, below each other."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def columns(heading: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table with a heading; the first ``left`` columns are aligned left, the others right."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    lines = []
    for row in (heading, *rows):
        cells = [f"{cell:<{w}}" if i < left else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
