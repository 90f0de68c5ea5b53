"""Checkmate's mixed-integer program: Jain et al., MLSys 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", section 4, solved with HiGHS.

Exact for schedules whose first runs follow the base order and in which an op runs at most once per stage (a stage lies between the first
runs of two consecutive ops).  The program here works on storages, so that ops may have several outputs and views are free; it knows
workspace, pinned ops, versions and in-place pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import StrategyError
from ..reduce import Reduced
from .registry import Context, register

__all__ = ["MAX_OPS", "StageProgram", "checkmate_ilp"]

MAX_OPS = 160
# Feasibility tolerance of the solver, relative to the scaled budget; a schedule that is over by rounding is solved again below it.
_MARGIN = 2e-6


@register("checkmate_ilp")
def checkmate_ilp(context: Context) -> None:
    """Offer the optimum of the stage program, or its best solution when time runs out; raises StrategyError on a large problem."""
    reduced = context.reduced
    if reduced.count > MAX_OPS:
        raise StrategyError(f"checkmate_ilp: {reduced.count} ops are too many for the exact program (at most {MAX_OPS}); use auto")
    context.offer(range(reduced.count))
    if not reduced.count:
        return
    for margin in (0.0, _MARGIN, 20 * _MARGIN):
        if context.left <= 0:
            return
        sequence = StageProgram(reduced, context.budget - reduced.resident).solve(context.left, margin)
        if sequence is None or context.offer(sequence):
            return


class StageProgram:
    """The paper's program.

    Variables, all per stage t: R[t,o] op o runs; S[t,s] storage s is held when the stage begins; F[t,s,o] s is freed after o.
    """

    def __init__(self, reduced: Reduced, room: int) -> None:
        self.r = reduced
        self.room = room
        self.names: dict[tuple[str, int, int, int], int] = {}
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.whole: list[int] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.row_upper: list[float] = []

    def variable(self, key: tuple[str, int, int, int], low: float = 0.0, high: float = 1.0, whole: bool = True) -> int:
        self.names[key] = len(self.upper)
        self.lower.append(low)
        self.upper.append(high)
        self.whole.append(int(whole))
        return self.names[key]

    def row(self, terms: list[tuple[int, float]], high: float) -> None:
        """Add sum of coefficient * variable <= high."""
        k = len(self.row_upper)
        for column, value in terms:
            self.rows.append(k)
            self.columns.append(column)
            self.values.append(value)
        self.row_upper.append(high)

    def build(self, margin: float) -> None:
        r, n, m = self.r, self.r.count, len(self.r.size)
        names = self.names
        scale = 1.0 / max([1, *r.size, *r.workspace])
        # The op that touches a storage: its readers and its producer.
        touch = [sorted({*r.readers[s], r.producer[s]}) for s in range(m)]
        for t in range(n):
            for o in range(t + 1):
                allowed = o == t or (r.rerun[o] and all(w >= t for w in r.killers_again[o]))
                self.variable(("R", t, o, 0), 1.0 if o == t else 0.0, 1.0 if allowed else 0.0)
        for t in range(n + 1):
            for s in range(m):
                if r.producer[s] < t:
                    self.variable(("S", t, s, 0), 1.0 if t == n and r.held[s] else 0.0, 1.0)
        for t in range(n):
            for s in range(m):
                for o in touch[s]:
                    if o <= t:
                        self.variable(("F", t, s, o), whole=False)
        for t in range(n):
            for o in range(t + 1):
                run = names["R", t, o, 0]
                for u in r.reads[o] if o == t else r.again[o]:
                    held = names.get(("S", t, u, 0))
                    self.row([(run, 1.0), (names["R", t, r.producer[u], 0], -1.0)] + ([(held, -1.0)] if held is not None else []), 0.0)
            for s in range(m):
                if r.producer[s] > t:
                    continue
                kept = names["S", t + 1, s, 0]
                held = names.get(("S", t, s, 0))
                self.row([(kept, 1.0), (names["R", t, r.producer[s], 0], -1.0)] + ([(held, -1.0)] if held is not None else []), 0.0)
                users = [o for o in touch[s] if o <= t]
                for k, o in enumerate(users):
                    free = names["F", t, s, o]
                    self.row([(free, 1.0), (names["R", t, o, 0], -1.0)], 0.0)
                    self.row([(free, 1.0), (kept, 1.0)], 1.0)
                    for later in users[k + 1 :]:
                        # A recompute may read less than a first run; a run that does not read s does not hold it.
                        if s in (r.reads[later] if later == t else r.again[later]):
                            self.row([(free, 1.0), (names["R", t, later, 0], 1.0)], 1.0)
            self._memory(t, scale, margin)

    def _memory(self, t: int, scale: float, margin: float) -> None:
        r, names = self.r, self.names
        held: list[tuple[int, float]] = [
            (names["S", t, s, 0], r.size[s] * scale) for s in range(len(r.size)) if ("S", t, s, 0) in names and r.size[s]
        ]
        running = list(held)
        high = self.room * scale * (1 - margin)
        for o in range(t + 1):
            run = names["R", t, o, 0]
            running += [(run, r.size[s] * scale) for s in r.outs[o] if r.size[s]]
            reads = r.reads[o] if o == t else r.again[o]
            extra = [(run, r.workspace[o] * scale)] if r.workspace[o] else []
            extra += [(names["F", t, s, o], -r.size[s] * scale) for s in r.takeover[o] if s in reads]
            self.row(running + extra, high)
            running = running + [(names["F", t, s, o], -r.size[s] * scale) for s in (*reads, *r.outs[o]) if r.size[s]]

    def solve(self, seconds: float, margin: float) -> list[int] | None:
        """The reduced ops of the best schedule found, in order, or None."""
        self.build(margin)
        found = self._optimum(seconds, np.array(self.whole), "checkmate_ilp")
        if found is None:
            return None
        return [o for t in range(self.r.count) for o in range(t + 1) if found[self.names["R", t, o, 0]] > 0.5]

    def relaxed(self, seconds: float, margin: float) -> npt.NDArray[np.float64] | None:
        """How far the optimum of the linear relaxation, at (1 - margin) of the room, holds each storage when each stage begins.

        Returns:
            Array of shape (ops + 1, storages), from 0 to 1; None where the relaxation is infeasible or takes too long.
        """
        self.build(margin)
        found = self._optimum(seconds, np.zeros(len(self.whole)), "checkmate_lp")
        if found is None:
            return None
        held = np.zeros((self.r.count + 1, len(self.r.size)))
        for (kind, t, s, _), column in self.names.items():
            if kind == "S":
                held[t, s] = found[column]
        return held

    def _optimum(self, seconds: float, integrality: npt.NDArray[Any], strategy: str) -> npt.NDArray[np.float64] | None:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_matrix
        except ImportError as error:
            raise StrategyError(f"{strategy}: scipy is not installed; install it or use auto") from error
        total = sum(self.r.cost) or 1.0
        cost = np.zeros(len(self.upper))
        for (kind, _, o, _), column in self.names.items():
            if kind == "R":
                cost[column] = self.r.cost[o] / total
        matrix: Any = coo_matrix((self.values, (self.rows, self.columns)), shape=(len(self.row_upper), len(self.upper))).tocsr()
        found = milp(
            cost,
            integrality=integrality,
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self.row_upper)),
            options={"time_limit": max(seconds, 0.1), "mip_rel_gap": 1e-7},
        )
        x: npt.NDArray[np.float64] | None = found.x
        return x
