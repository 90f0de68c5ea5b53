"""report.html: what an artifact promises and why, on one page that needs no network and no script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import onnx

from .artifact import UNSCHEDULED, Artifact
from .files import write_text
from .optimizers import optimizer_groups
from .report_plot import profile_caption, profile_legend, profile_plot
from .scheduler import Evaluation, Plan, Problem, Step, evaluate
from .targets import SPILL_SUFFIX
from .units import format_bytes

#: Rows of a table; what is beyond is summed up in its last one.
_ROWS = 20
#: Colours of the memory classes, by number of the CSS variable.
_CLASSES = {
    "parameters": 0,
    "gradients": 1,
    "optimizer_state": 2,
    "model_state": 3,
    "batch": 4,
    "constants": 5,
    "runtime": 6,
    "activations": 7,
    "workspace": 8,
    "placement": 9,
}
_ENUMERATIONS = {
    "graph_optimization_level": "GraphOptimizationLevel",
    "execution_order": "ExecutionOrder",
    "execution_mode": "ExecutionMode",
}
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer that is alive at some step.

    Attributes:
        tensor: index of the tensor that owns it.
        op: index of the op that made it.
        recomputed: whether a recompute did.
        start: step from which it is held.
        last: last step at which it is.
    """

    tensor: int
    op: int
    recomputed: bool
    start: int
    last: int


def alive_at(problem: Problem, steps: Sequence[Step], step: int) -> list[Buffer]:
    """The buffers that a sequence holds at one of its steps, largest first; they add up to the simulator's profile.

    Args:
        problem: a checked problem.
        steps: a sequence that :func:`evaluate` accepts.
        step: index into it.
    """
    index, tensors = problem.index, problem.tensors
    bound: dict[int, int] = {}  # tensor -> its buffer's number
    rows: list[list[int]] = []  # tensor, op, recomputed, start, last
    takeovers: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    for k, move in enumerate(steps):
        if move.kind == "swap_out":
            rows[bound[move.index]][4] = k
            continue
        if move.kind == "swap_in":
            old, bound[move.index] = bound[move.index], len(rows)
            rows.append([*rows[old][:3], k, k])
            continue
        o = move.index
        again = o in seen
        seen.add(o)
        reads = (index.again_reads if again else index.first_reads)[o]
        for t in reads:
            if t in bound:
                rows[bound[t]][4] = k
        sources = [(bound[a], b) for a, b in problem.ops[o].inplace if a in reads and a in bound]
        for t in index.own[o]:
            bound[t] = len(rows)
            rows.append([t, o, again, k, k])
        for view, source in (index.again_views if again else index.first_views)[o]:
            if source in bound:
                bound[view] = bound[source]
        takeovers += [(k, i, bound[b]) for i, b in sources if b in index.own[o]]
    held = {bound[t] for t, tensor in enumerate(tensors) if tensor.output and t in bound}
    for i in held:
        rows[i][4] = len(steps) - 1
    taken: set[int] = set()
    for k, i, j in takeovers:
        same = tensors[rows[i][0]].bytes == tensors[rows[j][0]].bytes
        if rows[i][4] == k and i not in held and rows[i][3] < k and same and j not in taken:
            rows[i][4] = k - 1
            taken.add(j)
    alive = [Buffer(t, o, bool(again), start, last) for t, o, again, start, last in rows if start <= step <= last]
    return sorted(alive, key=lambda b: (-tensors[b.tensor].bytes, b.start, b.tensor))


def write_report(artifact: Artifact, path: Path) -> None:
    """Write the report of an artifact: one self-contained HTML file, whole or not at all.

    Args:
        artifact: an artifact folder; its path is not shown.
        path: the file to write.

    Raises:
        ProblemError, PlanError: the artifact's problem or plan can't be read.
        OSError: the file can't be written.
    """
    manifest, problem, plan = artifact.manifest, artifact.problem, artifact.plan
    base = tuple(Step("run", o) for o in range(len(problem.ops)))
    scheduled, unscheduled = evaluate(problem, plan.steps), evaluate(problem, base)
    source = manifest["source"]
    title = str(source.get("spec") or source.get("model") or problem.name)
    page = Template((files(__package__) / "templates" / "report.html").read_text(encoding="utf-8"))
    text = page.substitute(
        title=escape(title),
        subtitle=escape(f"One training step, scheduled for {format_bytes(plan.budget_bytes)} · target {manifest['target']}"),
        badge=_badge(manifest["verification"]),
        cards=_cards(manifest, plan),
        profile=profile_plot(problem, plan, base, scheduled, unscheduled),
        profile_legend=profile_legend(manifest),
        profile_caption=profile_caption(manifest, plan, problem),
        holdings=_holdings(manifest, problem, plan.steps, base, scheduled, unscheduled),
        recomputed=_recomputed(problem, plan, node_scopes(artifact.file(UNSCHEDULED))),
        alive=_alive(problem, plan.steps, scheduled.peak_step),
        verification=_verification(manifest),
        trainer_snippet=escape(trainer_snippet(artifact)),
        elsewhere=_elsewhere(artifact),
        source=_source(artifact),
    )
    write_text(path, text)


def _seconds(value: float) -> str:
    """Three digits in the unit that suits; no point without a digit behind it."""
    scale, unit = next((u for u in ((1.0, "s"), (1e-3, "ms")) if abs(value) >= u[0]), (1e-6, "µs"))
    if not value:
        return "0 s"
    return f"{value / scale:#.3g} {unit}" if abs(value) < 99.95 * scale else f"{value / scale:.0f} {unit}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}\u00a0%" if np.isfinite(value) else "unknown"


def _badge(verification: Mapping[str, Any] | None) -> str:
    if verification is None:
        return '<span class="badge">not verified</span>'
    return '<span class="badge good">verified</span>' if verification["passed"] else '<span class="badge bad">verification failed</span>'


def _cards(manifest: Mapping[str, Any], plan: Plan) -> str:
    memory, time, verification = manifest["memory"], manifest["time"], manifest["verification"]
    before, after = memory["peak_unscheduled_bytes"], memory["peak_predicted_bytes"]
    slow, fast = time["seconds_predicted"], time["seconds_unscheduled"]
    overhead = slow / fast - 1 if fast > 0 else float("nan")
    measured = verification["peak_measured_bytes"] if verification else None
    rows = [
        ("Budget", format_bytes(memory["budget_bytes"]), f"{_percent(memory['budget_bytes'] / before)} of the unscheduled peak"),
        ("Peak, predicted", format_bytes(after), f"unscheduled {format_bytes(before)}, {_percent(1 - after / before)} less"),
        ("Peak, measured", "not measured" if measured is None else format_bytes(measured), _measured_note(measured, after)),
        ("Step time, predicted", _seconds(slow), f"unscheduled {_seconds(fast)}"),
        ("Overhead", _percent(overhead), "time added by the schedule"),
        ("Proven lower bound", _seconds(plan.seconds_lower_bound), f"no plan is faster; gap {_percent(plan.gap)}"),
        ("Recomputed ops", str(plan.recomputed_ops), f"of {len(plan.sequence)} runs in a step"),
        ("Resident", format_bytes(memory["resident_bytes"]), "held during the whole step"),
    ]
    if plan.swapped_tensors:
        rows.append(("Swapped tensors", str(plan.swapped_tensors), "to the host and back"))
    card = '<div class="card"><div class="name">{}</div><b>{}</b><div class="note">{}</div></div>'
    return "".join(card.format(*map(escape, row)) for row in rows)


def _measured_note(measured: int | None, predicted: int) -> str:
    if measured is None:
        return "compile without --no-verify measures it"
    return f"{100 * (measured / predicted - 1):+.1f}\u00a0% against the prediction"


def node_scopes(model: Path) -> dict[str, str]:
    """Node name -> module path, as the exporter noted it or as the node's name tells; nodes without one are left out."""
    scopes: dict[str, str] = {}
    for node in onnx.load(str(model), load_external_data=False).graph.node:
        noted = next((p.value for p in node.metadata_props if p.key == _SCOPES), None)
        named = re.search(r"/(.+)/[^/]+$", node.name)
        if noted is not None:
            path = [str(part) for part in ast.literal_eval(noted)]
            scopes[node.name] = path[-2] if len(path) > 1 else ""
        elif named:
            scopes[node.name] = named.group(1).replace("/", ".")
    return {name: scope for name, scope in scopes.items() if scope}


# The tables.


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int], total: Sequence[str] | None = None) -> str:
    """An HTML table of plain text; columns in ``numbers`` are set right."""
    right = set(numbers)

    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        inner = "".join(f'<{tag} class="{"n" if i in right else "name"}">{escape(cell)}</{tag}>' for i, cell in enumerate(cells))
        return f"<tr{kind}>{inner}</tr>"

    body = "".join(line(row, "td") for row in rows) + (line(total, "td", ' class="total"') if total else "")
    return f'<div class="scroll"><table><thead>{line(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def _parts(problem: Problem, steps: Sequence[Step], run: Evaluation, peak: int) -> dict[str, int]:
    """Bytes at the largest step of the training phase, by class; ``placement`` is what the arena adds."""
    step = steps[run.peak_step]
    workspace = problem.ops[step.index].workspace_bytes if step.kind == "run" else 0
    live = int(run.profile[run.peak_step])
    parts = dict(problem.resident) | {"activations": live - problem.resident_bytes - workspace, "workspace": workspace}
    if peak > problem.optimizer_peak_bytes:
        parts["placement"] = max(0, peak - live)
    return parts


def _holdings(
    manifest: Mapping[str, Any],
    problem: Problem,
    steps: Sequence[Step],
    base: Sequence[Step],
    scheduled: Evaluation,
    unscheduled: Evaluation,
) -> str:
    memory = manifest["memory"]
    bars = {
        "scheduled": _parts(problem, steps, scheduled, memory["peak_predicted_bytes"]),
        "unscheduled": _parts(problem, base, unscheduled, memory["peak_unscheduled_bytes"]),
    }
    names = [*(n for n in _CLASSES if any(n in parts for parts in bars.values())), *(n for n in problem.resident if n not in _CLASSES)]
    widest = max(sum(parts.values()) for parts in bars.values())
    figure = []
    for bar, parts in bars.items():
        left, pieces = 0.0, []
        for name in names:
            width = 1000 * parts.get(name, 0) / widest
            tip = escape(f"{_spoken(name)}: {format_bytes(parts.get(name, 0))}")
            box = f'x="{left:.2f}" y="0" width="{width:.2f}" height="22"'
            pieces.append(f'<rect {box} fill="{_colour(name)}"><title>{tip}</title></rect>')
            left += width
        total = format_bytes(sum(parts.values()))
        figure.append(f"<figcaption>{bar}, {total}</figcaption>")
        figure.append('<svg class="bar" viewBox="0 0 1000 22" preserveAspectRatio="none" role="img" ')
        figure.append(f'aria-label="{bar}: {total} by class">{"".join(pieces)}</svg>')
    keep = [n for n in names if any(parts.get(n, 0) for parts in bars.values())]
    rows = "".join(
        f'<tr><td class="name"><i class="key" style="background: {_colour(n)}"></i>{escape(_spoken(n))}</td>'
        + "".join(f'<td class="n">{format_bytes(parts.get(n, 0))}</td>' for parts in bars.values())
        + "</tr>"
        for n in keep
    )
    sums = "".join(f'<td class="n">{format_bytes(sum(parts.values()))}</td>' for parts in bars.values())
    head = '<tr><th>Class</th><th class="n">Scheduled</th><th class="n">Unscheduled</th></tr>'
    table = f'<div class="scroll"><table><thead>{head}</thead><tbody>{rows}<tr class="total"><td>all</td>{sums}</tr></tbody></table></div>'
    return f"<figure>{''.join(figure)}</figure>{table}"


def _spoken(name: str) -> str:
    return {"placement": "arena placement and tables"}.get(name, name.replace("_", " "))


def _colour(name: str) -> str:
    return f"var(--c{_CLASSES[name]})" if name in _CLASSES else "var(--plain)"


def _recomputed(problem: Problem, plan: Plan, scopes: Mapping[str, str]) -> str:
    runs: dict[int, int] = {}
    for o in plan.sequence:
        runs[o] = runs.get(o, -1) + 1
    again = {o: count for o, count in runs.items() if count}
    if not again:
        return "<p>Nothing: the step fits the budget by its order alone.</p>"
    by_type = _grouped(problem, again, lambda o: problem.ops[o].op_type or "other", "Operator")
    by_scope = _grouped(problem, again, lambda o: scopes.get(problem.ops[o].name, "(no module)"), "Module")
    note = "Saved: the size of the outputs that are dropped and made again where they would have been kept."
    return f'<div class="two"><div>{by_type}</div><div>{by_scope}</div></div><p class="soft">{note}</p>'


def _grouped(problem: Problem, again: Mapping[int, int], label: Callable[[int], str], title: str) -> str:
    groups: dict[str, list[float]] = {}
    for o, count in again.items():
        row = groups.setdefault(label(o), [0, 0.0, 0])
        row[0] += count
        row[1] += count * problem.ops[o].seconds
        row[2] += sum(problem.tensors[t].bytes for t in problem.index.own[o])
    ordered = sorted(groups.items(), key=lambda item: (-item[1][2], item[0]))

    def cells(name: str, rows: Iterable[Sequence[float]]) -> tuple[str, str, str, str]:
        counts, seconds, sizes = zip(*rows, strict=True)
        return name, f"{sum(counts):.0f}", _seconds(sum(seconds)), format_bytes(sum(sizes))

    lines = [cells(name, [row]) for name, row in ordered[:_ROWS]]
    if len(ordered) > _ROWS:
        lines.append(cells(f"{len(ordered) - _ROWS} more", [row for _, row in ordered[_ROWS:]]))
    return _table((title, "Runs", "Time", "Saved"), lines, (1, 2, 3), cells("all", groups.values()))


def _alive(problem: Problem, steps: Sequence[Step], peak: int) -> str:
    op = problem.ops[steps[peak].index] if steps[peak].kind == "run" else None
    buffers = alive_at(problem, steps, peak)
    sizes = [problem.tensors[b.tensor].bytes for b in buffers]

    def row(buffer: Buffer) -> tuple[str, str, str, str]:
        tensor, maker = problem.tensors[buffer.tensor], problem.ops[buffer.op]
        how = f"{maker.name} (recomputed)" if buffer.recomputed else maker.name
        return tensor.name, f"{tensor.bytes / 2**20:.2f}", how, maker.phase

    lines = [row(b) for b in buffers[:_ROWS]]
    if len(buffers) > _ROWS:
        lines.append((f"{len(buffers) - _ROWS} more", f"{sum(sizes[_ROWS:]) / 2**20:.2f}", "", ""))
    where = f"while {op.name} runs" if op else "during a transfer"
    workspace = f", with {format_bytes(op.workspace_bytes)} of workspace" if op and op.workspace_bytes else ""
    intro = f"Step {peak + 1} of {len(steps)}, {where}{workspace}: {len(buffers)} buffers beside what is resident."
    total = ("all", f"{sum(sizes) / 2**20:.2f}", "", "")
    return f"<p>{escape(intro)}</p>" + _table(("Tensor", "MiB", "Made by", "Phase"), lines, (1,), total)


def _verification(manifest: Mapping[str, Any]) -> str:
    found = manifest["verification"]
    if found is None:
        return "<p>not verified: compiled with --no-verify; <code>onnxremat verify</code> checks it.</p>"
    yes = {True: "yes", False: "no"}
    error, measured = found["max_relative_error_torch"], found["peak_measured_bytes"]
    allowed = f", allowed {found['tolerance_torch']:.2g}" if "tolerance_torch" in found else ""
    rows = [
        ("Passed", yes[found["passed"]]),
        ("Bit-equal to the unscheduled step", f"{yes[found['bitwise_equal']]}, over {found['steps']} steps"),
        ("State equal", yes[found["state_equal"]]),
        ("Largest relative error against torch", "not compared" if error is None else f"{error:.2g}{allowed}"),
        ("Peak, measured", "not measured" if measured is None else f"{format_bytes(measured)} ({measured} bytes)"),
        ("Within the budget", "not measured" if found["within_budget"] is None else yes[found["within_budget"]]),
    ]
    if found["reason"]:
        rows.append(("Remarks", found["reason"]))
    return f"<dl>{_definitions(rows)}</dl>"


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)


# How to run it.


def _batch_lines(artifact: Artifact) -> list[str]:
    specs = [*artifact.inputs, *artifact.labels]
    return [f"    {spec.name!r}: np.zeros({spec.shape}, np.{np.dtype(spec.dtype).type.__name__})," for spec in specs]


def trainer_snippet(artifact: Artifact) -> str:
    """Python that trains from the artifact by :class:`onnxremat.Trainer`, to be run in its folder."""
    lines = ["import numpy as np", "import onnxremat", "", 'trainer = onnxremat.Trainer(".")', "batch = {  # your data"]
    lines += [*_batch_lines(artifact), "}", "loss = trainer.train_step(batch)", 'trainer.save("trained")']
    return "\n".join(lines)


def api_snippet(artifact: Artifact) -> str:
    """Python that trains by ``onnxruntime.training.api`` under the manifest's session options, to be run in the artifact's folder."""
    manifest = artifact.manifest
    separate = manifest["update"] == "separate"
    names = "CheckpointState, Module, Optimizer" if separate else "CheckpointState, Module"
    lines = ["import numpy as np", "import onnxruntime as ort", f"from onnxruntime.training.api import {names}", ""]
    lines.append("options = ort.SessionOptions()")
    for key, value in manifest["session_options"].items():
        if key == "config":
            lines += [f"options.add_session_config_entry({name!r}, {text!r})" for name, text in value.items()]
        else:
            kind = _ENUMERATIONS.get(key)
            lines.append(f"options.{key} = " + (f"ort.{kind}.{value}" if kind else repr(value)))
    lines += ["", 'state = CheckpointState.load_checkpoint("checkpoint")']
    lines.append('model = Module("training_model.onnx", state, "eval_model.onnx", session_options=options)')
    if separate:
        groups = list(optimizer_groups(artifact.optimizer, manifest["roles"]["trainable"]))
        # One for each weight decay; each file names the parameters that it updates.
        optimizers = dict(zip(["optimizer"] if len(groups) == 1 else ["decayed", "exempt"], groups, strict=True))
        for name, file in optimizers.items():
            lines.append(f'{name} = Optimizer("{file}", model)')
            lines.append(f"{name}.set_learning_rate({manifest['optimizer']['learning_rate']!r})")
    lines += ["model.train()", "batch = {  # your data", *_batch_lines(artifact)]
    if not separate:
        lines.append(f"    'learning_rate': np.array([{manifest['optimizer']['learning_rate']!r}], np.float32),")
    # The API hands back a tuple where a step has outputs beside loss and gradients: the flags of what it writes in place.
    lines += ["}", "outputs = model(*batch.values())", "loss = outputs[0] if isinstance(outputs, tuple) else outputs"]
    lines += [*(f"{name}.step()" for name in optimizers), "model.lazy_reset_grad()"] if separate else []
    lines.append('CheckpointState.save_checkpoint(state, "trained_checkpoint")')
    return "\n".join(lines)


def _elsewhere(artifact: Artifact) -> str:
    """HTML on training without onnxremat, as far as the artifact's target and update allow it."""
    manifest = artifact.manifest
    if artifact.target.tokens:
        return (
            "<p>With a session of any ONNX Runtime, in any language: feed the batch and the tensors of <code>checkpoint.safetensors</code>; every "
            "output that <code>manifest.json</code> lists under <code>writes</code> is the next value of an input. The project's "
            "<code>examples</code> do so in JavaScript and in C.</p>"
        )
    if manifest["target"].endswith(SPILL_SUFFIX):
        return '<p class="soft">It swaps tensors by operators of <code>onnxremat.spill</code>, so it trains with that package only.</p>'
    if (manifest.get("swap") or {}).get("kind") == "host" and manifest["plan"]["swapped_tensors"]:
        return (
            '<p class="soft">It swaps tensors between GPU and host: train it on CUDA with the node partition of <code>partition.json</code>, which '
            "puts the copies on streams of their own.</p>"
        )
    if manifest["update"] == "fused":
        return '<p class="soft">Its parameters are updated within the step, which ONNX Runtime\'s own training API has no part in.</p>'
    alone = manifest["memory"].get("peak_arena_alone_bytes", 0)
    more = f" An arena without fixed offsets takes {format_bytes(alone)}." if alone > manifest["memory"]["budget_bytes"] else ""
    return (
        "<p>With ONNX Runtime's own training API, which needs neither onnxremat nor the model's source:</p>\n"
        f'<pre><code class="api">{escape(api_snippet(artifact))}</code></pre>\n'
        '<p class="soft">Order and recomputes hold under the session options above; other options compute the same numbers but may need more '
        f"memory.{more}</p>"
    )


def _source(artifact: Artifact) -> str:
    manifest = artifact.manifest
    source, optimizer = manifest["source"], manifest["optimizer"]
    numbers = {name: value for name, value in optimizer.items() if isinstance(value, float | int) and value}
    used = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in numbers.items())
    used += f", no decay of {len(optimizer['no_decay'])} parameters" if optimizer.get("no_decay") else ""
    told = ("spec", "model", "path", "kind", "loss", "seed")
    counts = {name: len(manifest["roles"][name]) for name in ("trainable", "frozen", "state")}
    rows = [(name.capitalize(), str(source[name])) for name in told if source.get(name) is not None]
    rows += [
        ("Inputs", ", ".join(manifest["inputs"])),
        ("Labels", ", ".join(manifest["labels"]) or "none"),
        ("Optimizer", f"{optimizer['name']} ({used}), {manifest['update']}"),
        ("Strategy", f"{manifest['plan']['strategy']}, planned in {_seconds(manifest['time']['solve_seconds'])}"),
        ("Allocator", artifact.allocator),
        ("Costs", str(manifest["time"]["costs"])),
        ("Threads", str(manifest["threads"] or "the runtime's default")),
        ("Tensors", ", ".join(f"{count} {name}" for name, count in counts.items())),
        ("Versions", ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())),
    ]
    return _definitions(rows)
