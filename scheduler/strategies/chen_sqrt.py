"""Square-root checkpointing: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1."""

from __future__ import annotations

import math

from ..segments import crossing, forward_end, segmented
from .registry import Context, register


@register("chen_sqrt")
def chen_sqrt(context: Context) -> None:
    """Offer sqrt(n) segments of equal length, on the linearised order and on its articulation points."""
    reduced = context.reduced
    end = forward_end(reduced)
    if end < 2:
        context.offer(range(reduced.count))
        return
    count = math.ceil(math.sqrt(end))
    linear = sorted({round(k * end / count) for k in range(1, count)} - {0})
    points = [p for p, width in enumerate(crossing(reduced, end)) if width == 1 and 0 < p < end]
    choices = [linear]
    if points:
        choices.append(sorted({min(points, key=lambda p: (abs(p - cut), p)) for cut in linear}))
    sequences = [sequence for cuts in choices if (sequence := segmented(reduced, cuts, end)) is not None]
    # One segment, the base order, where no other can be recomputed when it is needed.
    context.offer_all(sequences or [list(range(reduced.count))])
