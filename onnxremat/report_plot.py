"""The plot of a report: bytes over the step as inline SVG, scheduled and unscheduled, with its legend and caption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

import numpy as np

from .scheduler import Evaluation, Plan, Problem, Step
from .units import format_bytes

#: The plot in its own units: a column is the finest step that is drawn.
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 1000, 340, 74, 24, 14, 34
_COLUMN = 0.5


def _times(problem: Problem, steps: Sequence[Step]) -> list[float]:
    """Start of every step and the end of the last, in seconds; in steps where nothing takes time."""
    spent = [_duration(problem, step) for step in steps]
    return list(accumulate(spent if any(spent) else [1.0] * len(steps), initial=0.0))


def _duration(problem: Problem, step: Step) -> float:
    if step.kind == "run":
        return problem.ops[step.index].seconds
    assert problem.transfer is not None
    size = problem.tensors[problem.index.root[step.index]].bytes
    rate = problem.transfer.bytes_per_second_out if step.kind == "swap_out" else problem.transfer.bytes_per_second_in
    return size / rate


def _columns(times: Iterable[float], values: Iterable[int], x: Callable[[float], float]) -> list[tuple[float, int]]:
    """Steps narrower than a column are drawn as one, as high as the highest of them."""
    merged: list[tuple[float, int]] = []
    for start, value in zip(times, values, strict=False):
        at = round(x(start) / _COLUMN) * _COLUMN
        if merged and merged[-1][0] == at:
            merged[-1] = (at, max(merged[-1][1], value))
        else:
            merged.append((at, value))
    return merged


def _staircase(columns: Sequence[tuple[float, int]], end: float, y: Callable[[float], float]) -> str:
    parts = [f"M{columns[0][0]:g} {y(columns[0][1]):.1f}"]
    parts += [f"H{at:g}V{y(value):.1f}" for at, value in columns[1:]]
    return "".join([*parts, f"H{end:g}"])


def _ticks(top: float, count: int = 5) -> list[float]:
    rough = top / count
    power = 10 ** np.floor(np.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    return [float(step * i) for i in range(int(top / step) + 1)]


def profile_plot(problem: Problem, plan: Plan, base: Sequence[Step], scheduled: Evaluation, unscheduled: Evaluation) -> str:
    steps, budget = plan.steps, plan.budget_bytes
    after, before = _times(problem, steps), _times(problem, base)
    span = max(after[-1], before[-1])
    top = 1.06 * max(budget, int(scheduled.profile.max()), int(unscheduled.profile.max()))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(time: float) -> float:
        return _LEFT + (right - _LEFT) * time / span

    def y(size: float) -> float:
        return bottom - (bottom - _TOP) * size / top

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Bytes over the step, scheduled and unscheduled">']
    for name, start, end in phase_spans(problem, steps, after):
        left, width = x(start), x(end) - x(start)
        box = f'x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{bottom - _TOP}"'
        parts.append(f'<rect class="phase" {box} fill="var(--{name})"><title>{name}</title></rect>')
        if width > 60:
            parts.append(f'<text x="{left + width / 2:.1f}" y="{_TOP - 8}" text-anchor="middle">{name}</text>')
    unit, scale = ("GiB", 2**30) if top >= 4 * 2**30 else ("MiB", 2**20) if top >= 2**20 else ("KiB", 2**10)
    for tick in _ticks(top / scale):
        at = y(tick * scale)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{right}" stroke="var(--line)"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick:g} {unit}</text>')
    clock, per = ("s", 1.0) if span >= 1 else ("ms", 1e-3) if span >= 1e-3 else ("µs", 1e-6)
    timed = any(op.seconds > 0 for op in problem.ops)
    for tick in _ticks(span, 8):
        label = f"{tick / per:g} {clock}" if timed and problem.unit == "seconds" else f"{tick:g}"
        anchor = "end" if x(tick) > right - 20 else "middle"
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 20}" text-anchor="{anchor}">{label}</text>')
    floor = y(problem.resident_bytes)
    box = f'x="{_LEFT}" y="{floor:.1f}" width="{right - _LEFT}" height="{bottom - floor:.1f}"'
    parts.append(f'<rect class="resident" {box} fill="var(--resident)" opacity="0.55"/>')
    plain = _staircase(_columns(before, unscheduled.profile.tolist(), x), x(before[-1]), y)
    planned = _staircase(_columns(after, scheduled.profile.tolist(), x), x(after[-1]), y)
    parts.append(f'<path d="{planned}V{floor:.1f}H{_LEFT}Z" fill="var(--accent)" opacity="0.22"/>')
    parts.append(f'<path class="unscheduled" d="{plain}" fill="none" stroke="var(--plain)" stroke-width="1.8"/>')
    parts.append(f'<path class="scheduled" d="{planned}" fill="none" stroke="var(--accent)" stroke-width="1.8"/>')
    line = f'd="M{_LEFT} {y(budget):.1f}H{right}"'
    parts.append(f'<path class="budget" {line} stroke="var(--budget)" stroke-width="1.8" stroke-dasharray="7 5"/>')
    parts += _recompute_marks(problem, steps, after, x, bottom)
    return "".join([*parts, "</svg>"])


def _recompute_marks(problem: Problem, steps: Sequence[Step], times: Sequence[float], x: Callable[[float], float], bottom: int) -> list[str]:
    """A bar under the plot for the time of every recompute."""
    seen: set[int] = set()
    marks = []
    for k, step in enumerate(steps):
        if step.kind != "run":
            continue
        if step.index in seen:
            left, width = x(times[k]), max(1.5, x(times[k + 1]) - x(times[k]))
            box = f'x="{left:.1f}" y="{bottom + 1}" width="{width:.1f}" height="5"'
            name = escape(problem.ops[step.index].name)
            marks.append(f'<rect class="recompute" {box} fill="var(--mark)"><title>{name}</title></rect>')
        seen.add(step.index)
    return marks


def phase_spans(problem: Problem, steps: Sequence[Step], times: Sequence[float]) -> list[tuple[str, float, float]]:
    """(phase, start, end) in the unit of ``times``: forward up to the first backward op, update after the last op that is none."""
    phases = [problem.ops[s.index].phase if s.kind == "run" else "" for s in steps]
    count = len(phases)
    first = phases.index("backward") if "backward" in phases else count
    last = max((k + 1 for k, phase in enumerate(phases) if phase in ("forward", "backward")), default=0)
    first = min(first, last)
    spans = [("forward", times[0], times[first]), ("backward", times[first], times[last]), ("update", times[last], times[count])]
    return [(name, float(start), float(end)) for name, start, end in spans if end > start]


def _key(colour: str, text: str, kind: str = "") -> str:
    style = f"border-color: var(--{colour})" if kind else f"background: var(--{colour})"
    return f'<span><i class="key {kind}" style="{style}"></i>{escape(text)}</span>'


def profile_legend(manifest: Mapping[str, Any]) -> str:
    memory = manifest["memory"]
    rows = [
        _key("accent", "scheduled", "stroke"),
        _key("plain", "unscheduled", "stroke"),
        _key("budget", f"budget {format_bytes(memory['budget_bytes'])}", "stroke dashed"),
        _key("resident", f"resident {format_bytes(memory['resident_bytes'])}"),
        _key("mark", "recomputes"),
    ]
    return "".join(rows)


def profile_caption(manifest: Mapping[str, Any], plan: Plan, problem: Problem) -> str:
    memory = manifest["memory"]
    extra = memory["peak_predicted_bytes"] - plan.peak_bytes
    text = f"Live bytes by predicted time ({manifest['time']['costs']}). "
    if extra > 0:
        text += f"The predicted peak adds {format_bytes(extra)} for the runtime's placement of buffers in its arena. "
    if problem.optimizer_peak_bytes:
        text += f"The separate optimizer phase, after the step, needs {format_bytes(problem.optimizer_peak_bytes)}."
    return escape(text.strip())
