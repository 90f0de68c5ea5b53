"""Checkmate's approximation: Jain et al., MLSys 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
section 5: the linear relaxation of the stage program at (1 - epsilon) of the budget, and two-phase rounding.

Phase one holds what the relaxation holds by more than a threshold; phase two runs the least that makes every stage valid.  The paper's
threshold is 1/2; it is swept here, as in the paper's evaluation, and so is epsilon.  What must never run again is always held.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import StrategyError
from .checkmate_ilp import StageProgram
from .machine import last_asked
from .registry import Context, register

__all__ = ["MAX_OPS", "checkmate_lp", "round_held"]

MAX_OPS = 400
_EPSILONS = (0.1, 0.0, 0.2, 0.05, 0.3)
_THRESHOLDS = tuple(k / 20 for k in range(1, 20))


@register("checkmate_lp")
def checkmate_lp(context: Context) -> None:
    """Offer the base order and the rounded relaxations; raises StrategyError on a large problem."""
    reduced = context.reduced
    if reduced.count > MAX_OPS:
        raise StrategyError(f"checkmate_lp: {reduced.count} ops are too many for the relaxation (at most {MAX_OPS}); use auto")
    context.offer(range(reduced.count))
    free = [o >= 0 for o in last_asked(reduced, reduced.count)]
    for epsilon in _EPSILONS:
        if context.left <= 0 or not reduced.count:
            return
        held = StageProgram(reduced, context.budget - reduced.resident).relaxed(context.left, epsilon)
        if held is None:
            continue
        levels = sorted({*_THRESHOLDS, *np.unique(np.round(held[(held > 0) & (held < 1)], 3)).tolist()[:100]})
        for threshold in levels:
            context.offer(round_held(context, held > threshold, free))
            if context.left <= 0:
                return


def round_held(context: Context, held: npt.NDArray[np.bool_], free: list[bool]) -> list[int]:
    """Phase two: the least runs that make every stage valid.

    Args:
        context: for the problem.
        held: bool, shape (ops + 1, storages): what is to be held when a stage begins.
        free: per storage, whether it may be dropped and made again.

    Returns:
        Reduced ops in the order they run.
    """
    r = context.reduced
    out: list[int] = []
    here: set[int] = set()
    for t in range(r.count):
        runs = {t}
        # What is wanted at the end of the stage and is not there, and all inputs, the last first.
        runs |= {r.producer[s] for s in np.flatnonzero(held[t + 1]).tolist() if s not in here and r.producer[s] < t and free[s]}
        for o in range(t, -1, -1):
            if o in runs:
                runs |= {r.producer[s] for s in (r.reads[o] if o == t else r.again[o]) if s not in here}
        out += sorted(runs)
        made = here.union(*(r.outs[o] for o in runs))
        here = {s for s in made if held[t + 1, s] or not free[s]}
    return out
