"""Curves as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["overhead_plot"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 420, 62, 34, 210, 52
_STYLES = {
    "auto": ("#1b6ca8", "", 3.0),
    "checkmate_ilp": ("#7a3e9d", "", 1.6),
    "checkmate_lp": ("#b0569f", "6 3", 1.6),
    "chen_sqrt_ap": ("#c4501b", "", 1.6),
    "chen_sqrt_linear": ("#c4501b", "5 3", 1.6),
    "chen_greedy_ap": ("#d99a17", "", 1.6),
    "chen_greedy_linear": ("#d99a17", "5 3", 1.6),
    "griewank_ap": ("#4a8a3c", "", 1.6),
    "griewank_linear": ("#4a8a3c", "5 3", 1.6),
    "keep_all": ("#444444", "", 1.6),
}


def _step(span: float, count: int) -> float:
    rough = span / count
    power = 1.0
    while power > rough:
        power /= 10
    while power * 10 <= rough:
        power *= 10
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)


def overhead_plot(title: str, curves: Mapping[str, Sequence[tuple[float, float]]], full: float) -> str:
    """Overhead against budget.

    Args:
        title: shown above.
        curves: strategy -> (budget in bytes, cost relative to the unscheduled step), by rising budget.
        full: bytes of the unscheduled step.

    Returns:
        An SVG document.
    """
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    points = [point for curve in curves.values() for point in curve]
    low = min([b for b, _ in points] + [full]) * 0.97
    high = full * 1.03
    top = min(2.0, max([1.05, *(cost for _, cost in points)])) * 1.02

    def x(size: float) -> float:
        return _LEFT + (right - _LEFT) * (size - low) / (high - low)

    def y(cost: float) -> float:
        return bottom - (bottom - _TOP) * (cost - 1) / (top - 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/><text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<clipPath id="area"><rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP + 3}"/></clipPath>',
    ]
    step = _step(top - 1, 6)
    for k in range(int((top - 1) / step) + 1):
        at = y(1 + k * step)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{1 + k * step:.3g}</text>')
    step = _step((high - low) / 1e9, 8)
    first = int(low / 1e9 / step) + 1
    for k in range(first, int(high / 1e9 / step) + 1):
        at = x(k * step * 1e9)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{k * step:g}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{bottom + 38}" text-anchor="middle">budget, GB</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">cost / unscheduled cost</text>')
    for row, (name, curve) in enumerate(sorted(curves.items(), key=lambda item: item[0] == "auto")):
        colour, dashes, width = _STYLES.get(name, ("#888", "2 2", 1.6))
        line = f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"'
        if curve:
            # A plan serves every larger budget too, until a cheaper one fits.
            path = f"M{x(curve[0][0]):.1f} {y(curve[0][1]):.1f}" + "".join(f"H{x(b):.1f}V{y(c):.1f}" for b, c in curve[1:]) + f"H{right}"
            parts.append(f'<path d="{path}" fill="none" clip-path="url(#area)" {line}/>')
            parts += [f'<circle cx="{x(b):.1f}" cy="{y(c):.1f}" r="2.6" clip-path="url(#area)" fill="{colour}"/>' for b, c in curve]
        at = _TOP + 14 + 20 * row
        parts.append(f'<path d="M{right + 14} {at - 4}h30" {line}/>')
        parts.append(f'<text x="{right + 50}" y="{at}">{escape(name)}{"" if curve else " (no plan)"}</text>')
    return "".join([*parts, "</svg>"])
