"""Square-root checkpointing: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.1.

Of n places to cut, every sqrt(n)-th is a checkpoint.  What lies between two is dropped, and made again as a whole before its backward
pass.  The last segment, whose backward pass comes at once, is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .registry import Context
from .stages import Action, Chain, Division, Stages, register_divided

__all__ = ["chen_sqrt", "segments"]


def segments(chain: Chain, cuts: Sequence[int]) -> list[int]:
    """The reduced ops of Chen's schedule with these checkpoints: positions of the forward pass, ascending."""
    stages = Stages(chain, cuts)
    last = stages.count - 1
    actions: list[Action] = []
    for i in range(last):
        actions += [("forward", i), ("hold", i + 1)]
    actions += [("last", last), ("back", last)]
    for i in range(last - 1, -1, -1):
        actions += [("release", i + 1), ("last", i), ("back", i)]
    return stages.replay(actions)


@register_divided("chen_sqrt")
def chen_sqrt(context: Context, chain: Chain, division: Division) -> None:
    """Offer sqrt(n) segments of equal length."""
    places = chain.positions(division)
    count = math.ceil(math.sqrt(len(places) + 1))
    chosen = sorted({round(k * (len(places) + 1) / count) - 1 for k in range(1, count)})
    context.offer(segments(chain, [places[k] for k in chosen if 0 <= k < len(places)]))
