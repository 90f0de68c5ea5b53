"""A chart of lines as SVG, or as PNG by Pillow: one layout, two ways to draw it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..errors import OnnxRematError, UsageError
from ..files import write_text

__all__ = ["Chart", "Series", "check_picture", "save_picture"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 960, 540, 84, 56, 232, 62
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#b4540a", "#8250df", "#0a7d91", "#bf3989", "#6b7d1f", "#59636e", "#a0522d")
_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 4), (3, 3), (10, 3, 2, 3))
_INK, _SOFT, _GRID, _PAGE = "#1b1f24", "#59636e", "#d9dee4", "#ffffff"
#: PNG is drawn so many times larger and scaled down, and comes out so many times larger than the SVG's units.
_SUPERSAMPLING, _SCALE = 4, 2


@dataclass(frozen=True)
class Series:
    """A named line through points, left to right."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Chart:
    """Lines over two axes; the vertical one starts at zero or below."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class _Line:
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float
    dash: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Dot:
    x: float
    y: float
    colour: str
    radius: float = 3.4


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    anchor: str = "start"
    size: int = 13
    colour: str = _SOFT
    upright: bool = False


def check_picture(path: Path) -> None:
    """Refuse a picture that can't be drawn, before anything is computed for it; raises UsageError or OnnxRematError."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"{path}: a picture is .svg or .png")
    if path.suffix.lower() == ".png":
        _pillow()


def save_picture(chart: Chart, path: Path) -> None:
    """Write a chart, whole or not at all, in the format that the name's ending says.

    Raises:
        UsageError: the ending is another than .svg or .png.
        OnnxRematError: .png without Pillow, or the file can't be written.
    """
    check_picture(path)
    try:
        if path.suffix.lower() == ".svg":
            write_text(path, _svg(_layout(chart)))
        else:
            _write_png(_layout(chart), path)
    except OSError as error:
        raise OnnxRematError(f"can't write {path}: {error.strerror or error}") from error


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from at or above ``low`` to at or below ``high``."""
    rough = max((high - low) / count, 1e-12)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _layout(chart: Chart) -> list[_Line | _Dot | _Text]:
    xs = [x for s in chart.series for x, _ in s.points] or [0.0, 1.0]
    ys = [y for s in chart.series for _, y in s.points] or [0.0, 1.0]
    margin = 0.04 * (max(xs) - min(xs)) or 0.5
    low, high = min(xs) - margin, max(xs) + margin
    floor, top = min(0.0, *ys), max(*ys, 1e-9)
    top += 0.06 * (top - floor)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * (x - low) / (high - low), bottom - (bottom - _TOP) * (y - floor) / (top - floor)

    parts: list[_Line | _Dot | _Text] = [
        _Text(_LEFT, 24, chart.title, size=17, colour=_INK),
        _Text(_LEFT, 44, chart.subtitle),
        _Text((_LEFT + right) / 2, _HEIGHT - 16, chart.x_label, "middle"),
        _Text(22, (_TOP + bottom) / 2, chart.y_label, "middle", upright=True),
    ]
    for tick in _ticks(floor, top, 6):
        _, y = at(low, tick)
        parts += [_Line(((_LEFT, y), (right, y)), _GRID, 1), _Text(_LEFT - 9, y + 4.5, f"{tick:g}", "end")]
    for tick in _ticks(low, high, 7):
        x, _ = at(tick, floor)
        parts += [_Line(((x, bottom), (x, bottom + 5)), _SOFT, 1), _Text(x, bottom + 21, f"{tick:g}", "middle")]
    parts.append(_Line(((_LEFT, bottom), (right, bottom)), _SOFT, 1))
    for number, series in reversed(list(enumerate(chart.series))):  # the first lies on top
        colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
        points = tuple(at(x, y) for x, y in series.points)
        if len(points) > 1:
            parts.append(_Line(points, colour, 2, dash))
        parts += [_Dot(x, y, colour) for x, y in points]
        y = _TOP + 8 + 19 * number
        parts += [_Line(((right + 20, y), (right + 44, y)), colour, 2, dash), _Dot(right + 32, y, colour)]
        parts.append(_Text(right + 52, y + 4.5, series.name, colour=_INK))
    return parts


def _svg(parts: Sequence[_Line | _Dot | _Text]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="{_PAGE}"/>',
    ]
    for part in parts:
        if isinstance(part, _Line):
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in part.points)
            dash = f' stroke-dasharray="{" ".join(map(str, part.dash))}"' if part.dash else ""
            lines.append(f'<path d="{path}" fill="none" stroke="{part.colour}" stroke-width="{part.width:g}"{dash}/>')
        elif isinstance(part, _Dot):
            lines.append(f'<circle cx="{part.x:.1f}" cy="{part.y:.1f}" r="{part.radius:g}" fill="{part.colour}"/>')
        else:
            turn = f' transform="rotate(-90 {part.x:.1f} {part.y:.1f})"' if part.upright else ""
            place = f'x="{part.x:.1f}" y="{part.y:.1f}" text-anchor="{part.anchor}" font-size="{part.size}" fill="{part.colour}"'
            lines.append(f"<text {place}{turn}>{escape(part.text)}</text>")
    return "\n".join([*lines, "</svg>\n"])


def _pillow() -> Any:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise OnnxRematError("a .png picture needs Pillow: pip install pillow, or write .svg") from None
    return Image, ImageDraw, ImageFont


def _write_png(parts: Sequence[_Line | _Dot | _Text], path: Path) -> None:
    Image, ImageDraw, ImageFont = _pillow()
    fine = _SUPERSAMPLING * _SCALE
    canvas = Image.new("RGB", (_WIDTH * fine, _HEIGHT * fine), _PAGE)
    draw = ImageDraw.Draw(canvas)
    for part in parts:
        if isinstance(part, _Line):
            for stroke in _strokes(part):
                draw.line([(x * fine, y * fine) for x, y in stroke], fill=part.colour, width=round(part.width * fine), joint="curve")
        elif isinstance(part, _Dot):
            x, y, r = part.x * fine, part.y * fine, part.radius * fine
            draw.ellipse((x - r, y - r, x + r, y + r), fill=part.colour)
        else:
            font = ImageFont.load_default(part.size * fine)
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
            if not part.upright:
                draw.text((part.x * fine, part.y * fine), part.text, fill=part.colour, font=font, anchor=anchor)
                continue
            width, height = math.ceil(draw.textlength(part.text, font=font)), 2 * part.size * fine
            label = Image.new("RGB", (width, height), _PAGE)
            ImageDraw.Draw(label).text((width / 2, height * 0.7), part.text, fill=part.colour, font=font, anchor="ms")
            turned = label.rotate(90, expand=True)
            canvas.paste(turned, (round(part.x * fine - 0.7 * height), round(part.y * fine - width / 2)))
    small = canvas.resize((_WIDTH * _SCALE, _HEIGHT * _SCALE), Image.Resampling.LANCZOS)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            small.save(file, "PNG", optimize=True)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _strokes(line: _Line) -> list[list[tuple[float, float]]]:
    """The line, cut into its dashes."""
    if not line.dash:
        return [list(line.points)]
    strokes: list[list[tuple[float, float]]] = []
    pattern, index = [*line.dash, *line.dash], 0
    left, drawn = float(pattern[0]), True
    for (x0, y0), (x1, y1) in zip(line.points, line.points[1:], strict=False):
        length, spent = math.hypot(x1 - x0, y1 - y0), 0.0
        while spent < length:
            step = min(left, length - spent)
            if drawn:
                a, b = spent / length, (spent + step) / length
                strokes.append([(x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)])
            spent, left = spent + step, left - step
            if left <= 0:
                index = (index + 1) % len(pattern)
                left, drawn = float(pattern[index]), index % 2 == 0
    return strokes
