"""Optimal persistent schedules of heterogeneous chains: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, 2019, "Optimal checkpointing
for heterogeneous chains: how to train deep neural networks with limited memory" (*rotor*).

Opt(s, t, m) is the least time to reverse the stages s to t in m bytes, the state before s being held outside of m.  Stage s either keeps all
that its backward block reads (F_all), or a later state s' becomes a checkpoint (F_ck), what lies between is passed without keeping
anything (F_none), the stages from s' on are reversed, and then those before it, from s again.

On the graph of a step, sizes and times of a stage are read off its ops, and bytes are in slots, rounded up; the model takes states to be
disjoint, so programs for budgets around the given one are decoded as well, and the simulator picks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..evaluate import evaluate
from .registry import Context
from .stages import Action, Chain, Division, Stages, register_divided

__all__ = ["Costs", "Rotor", "rotor", "stage_costs"]

_STAGES, _SLOTS = 72, 1000
# Memory for the program, relative to the base order's peak: the most, the least, and the step between; what is near, relative to the budget.
_TOP, _LOWEST, _STEP, _NEAR = 1.3, 0.02, 0.97, (0.7, 1.4)
_BISECTIONS = 4
_NONE, _ALL = -2, -1


@dataclass(frozen=True)
class Costs:
    """A chain of k stages in numbers; the state before stage i is that of cut i, bytes are whole slots or bytes.

    Attributes:
        forward: seconds to run stage i again for the state behind it.
        both: seconds to run it again for that state and for what its block reads.
        last: seconds to run it again for what its block reads only, all later blocks having run.
        state: shape (k, k): [s, i] bytes of the state before i that the state before s does not hold.
        saved: bytes of what the block of stage i reads and of the state behind it, beyond the state before it.
        forward_peak: bytes that running it needs, beyond the state before it, when only the state behind it is wanted.
        all_peak: the same when what its block reads is wanted too.
        last_peak: the same when only what its block reads is wanted.
        beside: bytes held beside the states before stages up to i while block i has not begun and all later ones have run.
        back_peak: bytes that block i needs beyond the state before its stage.
    """

    forward: list[float]
    both: list[float]
    last: list[float]
    state: list[list[int]]
    saved: list[int]
    forward_peak: list[int]
    all_peak: list[int]
    last_peak: list[int]
    beside: list[int]
    back_peak: list[int]


def _run_again(stages: Stages, i: int, targets: Iterable[int], beside: Iterable[int] = ()) -> tuple[float, int]:
    """Seconds to make targets from the state before stage i and what is there beside it, and the peak of bytes beyond these."""
    r, free = stages.chain.reduced, stages.chain.free
    have = {*stages.state[i], *beside}
    goal = [s for s in targets if s not in have]
    wanted: set[int] = set()
    stack = list(goal)
    while stack:
        p = r.producer[stack.pop()]
        if p not in wanted:
            wanted.add(p)
            stack += [s for s in r.again[p] if free[s] and s not in have]
    end = {s: p for p in sorted(wanted) for s in (*r.outs[p], *r.again[p]) if s not in have}
    end.update((s, r.count) for s in goal)
    live = peak = 0
    ending: dict[int, int] = {}
    for p in sorted(wanted):
        made = [s for s in r.outs[p] if s not in have]
        live += sum(r.size[s] for s in made)
        peak = max(peak, live + r.workspace[p])
        for s in made:
            ending[end[s]] = ending.get(end[s], 0) + r.size[s]
        live -= ending.get(p, 0)
    return sum(r.cost[p] for p in wanted), peak


def stage_costs(stages: Stages) -> Costs:
    """The numbers of a chain of stages."""
    chain, k = stages.chain, stages.count
    r = chain.reduced
    state = [set(x) for x in stages.state]
    goal_of = [(*stages.state[i + 1], *stages.saved[i]) for i in range(k)]
    forward = [_run_again(stages, i, stages.state[i + 1]) for i in range(k)]
    both = [_run_again(stages, i, goal_of[i]) for i in range(k)]
    # When a stage is the last one to reverse, the state behind it has just served the next block; what its own block reads of it stays.
    there = [[s for s in stages.state[i + 1] if s in stages.saved[i] and s not in state[i]] for i in range(k)]
    last = [_run_again(stages, i, stages.saved[i], there[i]) for i in range(k)]

    def size(storages: Iterable[int]) -> int:
        return sum(r.size[s] for s in storages)

    # What is no part of any state: storages that are never dropped, and those of the backward pass, in the base order.
    made, freed = np.zeros(r.count, dtype=np.int64), np.zeros(r.count, dtype=np.int64)
    for s, p in enumerate(r.producer):
        if not chain.free[s]:
            made[p] += r.size[s]
            if not r.held[s]:
                freed[max([p, *r.readers[s]])] += r.size[s]
    kept = np.cumsum(made - freed)
    fixed = kept + freed
    busy = fixed + np.array(r.workspace, dtype=np.int64)
    for o in range(chain.end, r.count):
        busy[o] -= size(s for s in r.takeover[o] if not chain.free[s] and r.readers[s][-1] == o and not r.held[s])
    beside, back_peak = [0] * k, [0] * k
    now = int(fixed[: chain.end].max(initial=0))
    for i in range(k - 1, -1, -1):
        block = stages.block[i]
        beside[i] = now + size(there[i])
        alone = [s for s in stages.saved[i] if s not in state[i]]
        back_peak[i] = max([now, *(int(busy[o]) + size(s for s in alone if chain.asked[s] >= o) for o in block)])
        if block:
            now = int(kept[block[-1]])
    return Costs(
        forward=[c for c, _ in forward],
        both=[c for c, _ in both],
        last=[c for c, _ in last],
        state=[[size(state[i] - state[s]) for i in range(k)] for s in range(k)],
        saved=[size(set(goal_of[i]) - state[i]) for i in range(k)],
        forward_peak=[p for _, p in forward],
        all_peak=[p for _, p in both],
        last_peak=[p for _, p in last],
        beside=beside,
        back_peak=back_peak,
    )


class Rotor:
    """The dynamic program.

    Attributes:
        seconds: [s][t] is a float64 array over m = 0 .. slots: seconds of recomputation.
        choice: [s][t] is an int32 array: -2 infeasible, -1 F_all, otherwise s'.
    """

    def __init__(self, costs: Costs, room: int, slots: int = _SLOTS) -> None:
        self.costs = costs
        self.unit = unit = max(1, -(-room // slots))
        top = room // unit
        c, k = costs, len(costs.forward)
        self.top = top
        empty: npt.NDArray[np.float64] = np.full(top + 1, np.inf)
        self.seconds = [[empty] * k for _ in range(k)]
        self.choice = [[np.full(top + 1, _NONE, dtype=np.int32)] * k for _ in range(k)]
        passed = np.concatenate([[0.0], np.cumsum(c.forward)])
        for length in range(1, k + 1):
            for s in range(k - length + 1):
                t = s + length - 1
                # The first sweep runs every stage once in any schedule; only what comes after it is paid for.
                again = t < k - 1
                best = np.full(top + 1, np.inf)
                choice = np.full(top + 1, _NONE, dtype=np.int32)
                beside = c.beside[t]
                need = max(beside + (c.last_peak if s == t else c.all_peak)[s], c.back_peak[s])
                start = self.cells(need)
                if start <= top:
                    if s == t:
                        best[start:] = c.last[s] if again else 0.0
                    else:
                        shift = self.cells(c.saved[s])
                        inner = self.seconds[s + 1][t]
                        best[shift:] = inner[: top + 1 - shift] + (c.both[s] if again else 0.0)
                        best[:start] = np.inf
                    choice[np.isfinite(best)] = _ALL
                peak = 0
                for cut in range(s + 1, t + 1):
                    peak = max(peak, beside + c.state[s][cut - 1] + c.forward_peak[cut - 1])
                    shift, start = self.cells(c.state[s][cut]), self.cells(peak)
                    if max(shift, start) > top:
                        if start > top:
                            break
                        continue
                    trial = np.full(top + 1, np.inf)
                    trial[shift:] = self.seconds[cut][t][: top + 1 - shift]
                    trial += self.seconds[s][cut - 1] + (passed[cut] - passed[s] if again else 0.0)
                    trial[:start] = np.inf
                    better = trial < best
                    best[better] = trial[better]
                    choice[better] = cut
                self.seconds[s][t], self.choice[s][t] = best, choice

    def cells(self, size: int) -> int:
        """Slots that hold so many bytes."""
        return -(-size // self.unit)

    def actions(self, room: int) -> list[Action] | None:
        """The actions of the optimal schedule in ``room`` bytes, or None where there is none."""
        k = len(self.costs.forward)
        m = min(self.top, room // self.unit)
        if m < 0 or not np.isfinite(self.seconds[0][k - 1][m]):
            return None
        actions: list[Action] = []
        stack: list[tuple[int, int, int] | Action] = [(0, k - 1, m)]
        while stack:
            entry = stack.pop()
            if len(entry) == 2:
                actions.append(entry)
                continue
            s, t, m = entry
            cut = int(self.choice[s][t][m])
            if cut == _ALL and s == t:
                actions += [("last", s), ("back", s)]
            elif cut == _ALL:
                actions += [("all", s), ("hold", s + 1)]
                after: Action = ("release", s + 1)
                back: Action = ("back", s)
                stack += [back, after, (s + 1, t, m - self.cells(self.costs.saved[s]))]
            else:
                actions += [("forward", i) for i in range(s, cut)]
                actions.append(("hold", cut))
                after = ("release", cut)
                stack += [(s, cut - 1, m), after, (cut, t, m - self.cells(self.costs.state[s][cut]))]
        return actions


@register_divided("rotor")
def rotor(context: Context, chain: Chain, division: Division) -> None:
    """Offer the program's optimum for budgets around the given one."""
    if context.left < 0:
        return
    resident = context.reduced.resident
    top = int(_TOP * (evaluate(context.problem, range(len(context.problem.ops))).peak_bytes - resident))
    stages = Stages(chain, chain.thinned(division, _STAGES))
    program = Rotor(stage_costs(stages), top)
    # The grid does not depend on the budget, so that the smallest peak that is met for one budget is met for that peak as a budget too.
    grid = [top * _STEP**j for j in range(math.ceil(math.log(1 / _LOWEST, 1 / _STEP)))]
    room = context.budget - resident
    near = sorted((m for m in grid if _NEAR[0] * room <= m <= _NEAR[1] * room), key=lambda m: abs(m - room))
    far = sorted(set(grid) - set(near), key=lambda m: (m > room, -m))
    seen: dict[tuple[Action, ...], bool] = {}

    def fits(m: float) -> bool:
        """Offer the optimum in m bytes; whether its true peak is within the budget."""
        actions = tuple(program.actions(int(m)) or ())
        if actions and actions not in seen:
            offers = [context.offer(stages.replay(actions, sticky)) for sticky in (True, False)]
            seen[actions] = any(offers)
        return seen.get(actions, False)

    enough = 0.0
    for part in (near, far):
        for m in part:
            if fits(m):
                enough = max(enough, m)
            if context.left < 0 or (part is far and enough):
                return
        if enough:
            break
    too_much = enough / _STEP
    for _ in range(_BISECTIONS if enough else 0):
        middle = (enough + too_much) / 2
        enough, too_much = (middle, too_much) if fits(middle) else (enough, middle)
        if context.left < 0:
            return
    fits(room)
