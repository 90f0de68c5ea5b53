"""The largest batch whose step fits a budget at a limited cost in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import BudgetInfeasible, UsageError
from ..exporters import InputSpec
from ..exporters.sources import source_feeds
from ..fit import needed, schedule_unscheduled
from ..pipeline import Request, search_of, source_problem
from ..schedule import schedule
from ..units import format_bytes

__all__ = ["MaxBatch", "Trial", "batch_axes", "largest_batch"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a batch came to.

    Attributes:
        batch: samples.
        fits: within the budget and the limit of overhead.
        peak_unscheduled_bytes: the budget that the unscheduled step needs.
        peak_bytes: of the plan; None where none was found.
        overhead: of the plan over the unscheduled step; None where none was found.
        minimum_budget_bytes: where no plan was found, the smallest budget for which one was.
    """

    batch: int
    fits: bool
    peak_unscheduled_bytes: int
    peak_bytes: int | None = None
    overhead: float | None = None
    minimum_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch found, and everything that was tried, in the order of the batches."""

    best: Trial
    trials: tuple[Trial, ...]


def batch_axes(specs: Sequence[InputSpec], named: Mapping[str, int]) -> dict[str, int]:
    """Which axis of each input or label is the batch.

    Args:
        specs: inputs and labels.
        named: those that the user says; then there are no others. Empty: the first axis of each, which must be of one size.

    Raises:
        UsageError: an axis is not there, or the sizes differ.
    """
    by_name = {s.name: s for s in specs}
    for name, axis in named.items():
        if name not in by_name:
            raise UsageError(f"--batch-dim {name}={axis}: there is no such input or label; there are {', '.join(by_name)}")
        if not 0 <= axis < len(by_name[name].shape):
            raise UsageError(f"--batch-dim {name}={axis}: {by_name[name]} has {len(by_name[name].shape)} axes, counted from 0")
    axes = dict(named) or {s.name: 0 for s in specs if s.shape}
    sizes = {name: by_name[name].shape[axis] for name, axis in axes.items()}
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "none"
        raise UsageError(f"the batch is not the same first axis of all inputs and labels ({told}): name it by --batch-dim NAME=AXIS for each")
    return axes


def largest_batch(
    request: Request,
    budget: int,
    overhead: float,
    named_axes: Mapping[str, int],
    most: int = 1 << 16,
    say: Callable[[str], None] = lambda message: None,
) -> MaxBatch:
    """Search for the largest batch: up from the one that is given, then by bisection.

    Args:
        request: the model at some batch.
        budget: bytes of a step.
        overhead: the step may take so many times the unscheduled step's time, such as 1.33.
        named_axes: axes of the batch, as for :func:`batch_axes`.
        most: no larger batch is tried.
        say: told of progress.

    Raises:
        BudgetInfeasible: not even a batch of one fits.
        UsageError: it is not clear what the batch is.
    """
    if not request.source.endswith(".onnx"):
        feeds = source_feeds(request.source, request.inputs, request.labels, request.loss)
        request = replace(request, inputs=feeds.inputs, labels=feeds.labels)
    if not request.inputs:
        raise UsageError(f"name the inputs of {request.source} by --input, so that their batch can be changed")
    axes = batch_axes([*request.inputs, *request.labels], named_axes)
    start = next(s.shape[axes[s.name]] for s in (*request.inputs, *request.labels) if s.name in axes)
    trials: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        if batch not in trials:
            trials[batch] = _try(replace(request, inputs=_at(request.inputs, axes, batch), labels=_at(request.labels, axes, batch)), batch)
            say(_told(trials[batch]))
        return trials[batch].fits

    def _try(changed: Request, batch: int) -> Trial:
        problem = source_problem(changed)
        full = needed(problem, schedule_unscheduled(problem))
        try:
            found = schedule(problem, budget, search_of(request))
        except BudgetInfeasible as error:
            return Trial(batch, False, full, minimum_budget_bytes=error.minimum_budget_bytes)
        over = found.plan.seconds / found.plan.seconds_unscheduled - 1 if found.plan.seconds_unscheduled else 0.0
        return Trial(batch, over <= overhead - 1 + 1e-9, full, found.peak_bytes, over)

    low, high = 0, min(start, most)
    while fits(high):
        low = high
        if low == most:
            break
        high = min(most, 2 * low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        single = trials[1]
        least = single.minimum_budget_bytes
        if least is None:
            raise BudgetInfeasible(
                f"a batch of one fits {format_bytes(budget)} only at {1 + (single.overhead or 0):.3g} times the time, and the limit is "
                f"{overhead:g}: raise --overhead or --budget",
                single.peak_unscheduled_bytes,
            )
        raise BudgetInfeasible(
            f"not even a batch of one fits {format_bytes(budget)}: the smallest budget found for it is {least}B ({format_bytes(least)})", least
        )
    return MaxBatch(trials[low], tuple(trials[batch] for batch in sorted(trials)))


def _at(specs: Sequence[InputSpec], axes: Mapping[str, int], batch: int) -> tuple[InputSpec, ...]:
    """The specs with another batch."""
    changed = []
    for spec in specs:
        if spec.name in axes:
            shape = list(spec.shape)
            shape[axes[spec.name]] = batch
            spec = replace(spec, shape=tuple(shape))
        changed.append(spec)
    return tuple(changed)


def _told(trial: Trial) -> str:
    if trial.overhead is None:
        return f"batch {trial.batch}: no plan found"
    verdict = "" if trial.fits else ", too slow"
    return f"batch {trial.batch}: {trial.overhead:+.1%}{verdict} (unscheduled {format_bytes(trial.peak_unscheduled_bytes)})"
