"""Constraint programming over retention intervals: Bartan, Li, Teague, Lott and Dilkina, ICML 2023, "Moccasin: Efficient Tensor
Rematerialization for Neural Networks", section 2, solved with OR-Tools' CP-SAT.

An op runs at most twice, each time followed by a retention interval of each of its storages.  Starts lie on the staged grid of
the paper: stage t ends with the first run of op t, and may run earlier ops again, in the base order, before it.  Memory is one
cumulative constraint; workspace is an interval of its run alone.  In-place takeovers are not used, so that a budget which needs one is
missed; the plan's peak, found by the simulator, knows them.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

from ..errors import StrategyError
from ..reduce import Reduced
from .registry import Context, register

__all__ = ["MAX_OPS", "moccasin"]

MAX_OPS = 1200
# Bytes are rounded up to so many units of the budget where they are not small anyway.
_UNITS = 10**6
_SECONDS_SCALE = 10**7


@register("moccasin")
def moccasin(context: Context) -> None:
    """Offer the base order, then what CP-SAT finds in the time left; raises StrategyError where OR-Tools is missing or the graph too large."""
    reduced = context.reduced
    try:
        cp_model: Any = importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise StrategyError(
            "moccasin: the package ortools is not installed; install the extra with pip install 'onnxremat[moccasin]', or use auto"
        ) from error
    if reduced.count > MAX_OPS:
        raise StrategyError(f"moccasin: {reduced.count} ops are too many for the constraint program (at most {MAX_OPS}); use auto")
    context.offer(range(reduced.count))
    if context.left <= 0 or not reduced.count or context.budget < reduced.resident:
        return
    program = _Program(reduced, context.budget - reduced.resident, cp_model)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, context.left)
    # The search is then a function of the seed and of the time limit's share that was used, whatever the number of cores.
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = context.seed % 2**31
    solver.parameters.num_workers = 8
    if solver.solve(program.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        context.offer(program.sequence(solver.value))


class _Program:
    """The constraint program; ``runs`` is, per op, a list of (start variable, literal) of its copies."""

    def __init__(self, reduced: Reduced, room: int, cp_model: Any) -> None:
        self.r = r = reduced
        self.model = model = cp_model.CpModel()
        n = r.count
        self.horizon = n * (n + 1) // 2
        divisor = math.gcd(room, *r.size, *r.workspace) or 1
        unit = divisor if room // divisor <= _UNITS else max(1, room // _UNITS)
        self.runs: list[list[tuple[Any, Any]]] = []
        rounded = [-(-x // unit) for x in r.size]
        scratch = [-(-x // unit) for x in r.workspace]
        for o in range(n):
            copies = [(model.new_constant(self.moment(o, o)), model.new_constant(1))]
            last = min([n - 1, *r.killers_again[o]])
            if r.rerun[o] and last > o and any(r.readers[s] for s in r.outs[o]):
                grid = cp_model.Domain.from_values([self.moment(t, o) for t in range(o + 1, last + 1)])
                copies.append((model.new_int_var_from_domain(grid, f"start{o}"), model.new_bool_var(f"runs{o}")))
            self.runs.append(copies)
        self.ends = [[model.new_int_var(0, self.horizon, f"end{s}") for _ in self.runs[p]] for s, p in enumerate(r.producer)]
        intervals, demands = [], []
        for s, p in enumerate(r.producer):
            for k, (start, literal) in enumerate(self.runs[p]):
                if not rounded[s]:
                    continue
                end = self.ends[s][k]
                length = model.new_int_var(1, self.horizon + 1, f"length{s}")
                intervals.append(model.new_optional_interval_var(start, length, end + 1, literal, f"held{s}"))
                demands.append(rounded[s])
            if r.held[s]:
                self._held_by_the_last(s)
        for o in range(n):
            for k, (start, literal) in enumerate(self.runs[o]):
                if scratch[o]:
                    intervals.append(model.new_optional_fixed_size_interval_var(start, 1, literal, f"scratch{o}"))
                    demands.append(scratch[o])
                for s in r.reads[o] if k == 0 else r.again[o]:
                    self._serve(s, start, literal)
        model.add_cumulative(intervals, demands, room // unit)
        scale = _SECONDS_SCALE / (sum(r.cost) or 1.0)
        model.minimize(sum(round(r.cost[o] * scale) * literal for o in range(n) for _, literal in self.runs[o][1:]))
        for copies in self.runs:
            for _, literal in copies[1:]:
                model.add_hint(literal, 0)

    @staticmethod
    def moment(stage: int, o: int) -> int:
        """The place of op o in a stage on the grid."""
        return stage * (stage + 1) // 2 + o

    def _held_by_the_last(self, s: int) -> None:
        """An output of the step is held to the end by its last run."""
        p = self.r.producer[s]
        again = [literal for _, literal in self.runs[p][1:]]
        self.model.add(self.ends[s][0] == self.horizon).only_enforce_if([literal.negated() for literal in again])
        for literal in again:
            self.model.add(self.ends[s][1] == self.horizon).only_enforce_if(literal)

    def _serve(self, s: int, start: Any, literal: Any) -> None:
        """A read at ``start`` lies in one retention interval of s."""
        model, p = self.model, self.r.producer[s]
        served = []
        for k, (made, there) in enumerate(self.runs[p]):
            by = literal if len(self.runs[p]) == 1 else model.new_bool_var(f"serves{s}")
            served.append(by)
            model.add_implication(by, there)
            model.add(made + 1 <= start).only_enforce_if(by)
            model.add(start <= self.ends[s][k]).only_enforce_if(by)
        if len(served) > 1:
            # Enough that one serves where the op runs; a second would only hold more.
            model.add_bool_or([*served, literal.negated()])

    def sequence(self, value: Any) -> list[int]:
        """The reduced ops of a solution, in the order they run."""
        starts = [(value(start), o) for o, copies in enumerate(self.runs) for start, literal in copies if value(literal)]
        return [o for _, o in sorted(starts)]
