"""Which tensors to swap: a search around the search for sequences.

Once it is fixed which tensors go out, swap is a matter of two more ops each (:mod:`.swap`), and what looks for sequences of runs decides
about recompute and order beside them.  What to fix is searched here: nothing, which is recompute alone; what frees the excess with the
fewest bytes moved, which is swap alone; and sets in the order of what making a tensor again costs compared with moving it.  A quick walk
judges each set, the best one is changed tensor by tensor, and the best few are annealed.  Before that, the recomputes of the best plan
without swap are exchanged for swaps one by one.  The best of all by the simulator is the answer,
so both together never cost more than the better of the two alone.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .bounds import seconds_floor
from .errors import PlanError
from .evaluate import Evaluation, evaluate
from .greedy import walk
from .plan import Step
from .problem import Problem
from .reduce import reduce_problem
from .strategies.auto import WEIGHTS, lower_peak, search
from .strategies.registry import Context
from .swap import HIDDEN, Lowered, family, lower, swappable, with_swaps
from .timeline import hide_copies

__all__ = ["STRATEGIES", "Candidate", "SwapSearch", "candidates"]

#: The strategies that swap where the problem has a channel; ``swap_only`` does nothing else.
STRATEGIES = ("auto", "swap_only")
# Tensors smaller than this share of the largest one are not worth a transfer.
_SMALL = 1 / 256
# What copies that are moved to hide behind ops leave of the room, so that buffers can still be placed.
_LEFT = 0.03
# Sets that are annealed, and the shares of the time that exchanging recomputes and judging sets may take.
_ANNEALED, _EXCHANGING, _JUDGING = 2, 0.3, 0.4
# Sizes of the sets that are tried, as shares of all candidates.
_GRID = (1.0, 0.5, 0.75, 0.25, 0.12, 0.06, 0.37, 0.62, 0.87)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor that may be worth swapping.

    Attributes:
        tensor: its index.
        late: the ops after its longest absence.
        out: the op after which it may go, in the base order.
        back: the op before which it must be there again.
        bytes: its size.
        seconds: both transfers, as far as a search counts them.
        price: seconds of the op that makes it, infinity where that can't run again.
    """

    tensor: int
    late: frozenset[int]
    out: int
    back: int
    bytes: int
    seconds: float
    price: float

    @property
    def away(self) -> slice:
        """The ops of the base order during which it is not there."""
        return slice(self.out + 1, self.back)


def candidates(problem: Problem) -> list[Candidate]:
    """The tensors that may be swapped and are large enough, each with its longest absence in the base order."""
    channel = problem.transfer
    found = []
    for x, readers in swappable(problem).items() if channel is not None else ():
        assert channel is not None
        tensor = problem.tensors[x]
        gaps = [(b - a, -a, a, b) for a, b in itertools.pairwise(sorted({tensor.producer, *readers})) if b - a > 1]
        if not gaps or tensor.bytes > channel.host_bytes:
            continue
        _, _, a, b = max(gaps)
        late = frozenset(o for o in readers if o >= b)
        if any(problem.index.must_run[o] for o in late):
            seconds = tensor.bytes / channel.bytes_per_second_out + tensor.bytes / channel.bytes_per_second_in
            seconds *= HIDDEN if channel.overlap else 1.0
            op = problem.ops[tensor.producer]
            found.append(Candidate(x, late, a, b, tensor.bytes, seconds, float("inf") if op.pinned else op.seconds))
    least = max((c.bytes for c in found), default=0) * _SMALL
    return [c for c in found if c.bytes >= least]


@dataclass
class SwapSearch:
    """A search for the best plan of a problem with a channel.

    Attributes:
        problem: the checked problem.
        budget: bytes, resident ones included.
        deadline: ``time.monotonic()`` at which to stop.
        seed: source of chance.
        tell: called with the seconds of every new best plan.
        best: the best steps within the budget so far.
        best_seconds: their time.
        lowest: the steps of the lowest peak so far.
        lowest_peak: that peak, in bytes.
    """

    problem: Problem
    budget: int
    deadline: float
    seed: int
    tell: Callable[[float], None] = lambda seconds: None
    best: list[Step] | None = None
    best_seconds: float = float("inf")
    lowest: list[Step] = field(default_factory=list)
    lowest_peak: int = 1 << 62
    _judged: dict[frozenset[int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.problem.transfer is not None
        self.host_bytes, self.overlap = self.problem.transfer.host_bytes, self.problem.transfer.overlap
        self.profile = evaluate(self.problem, range(len(self.problem.ops))).profile
        self._may_swap = swappable(self.problem)
        # Only what is away while there is too much is of use.
        self.candidates = [c for c in candidates(self.problem) if (self.profile[c.away] > self.budget).any()]
        self.of = {c.tensor: c for c in self.candidates}

    @property
    def left(self) -> float:
        """Wall seconds left."""
        return self.deadline - time.monotonic()

    def offer(self, steps: Sequence[Step]) -> Evaluation | None:
        """Judge steps by the simulator and keep the best; None where they are no plan, or none that could be placed."""
        try:
            found = evaluate(self.problem, steps)
        except PlanError:
            return None
        if lower(self.problem, steps) is None:
            return None
        if found.peak_bytes <= self.budget and self.overlap and any(step.kind != "run" for step in steps):
            found, steps = self.hidden(found, steps)
        if found.peak_bytes < self.lowest_peak:
            self.lowest, self.lowest_peak = list(steps), found.peak_bytes
        if found.peak_bytes <= self.budget and found.seconds < self.best_seconds:
            self.best, self.best_seconds = list(steps), found.seconds
            self.tell(found.seconds)
        return found

    def hidden(self, found: Evaluation, steps: Sequence[Step]) -> tuple[Evaluation, Sequence[Step]]:
        """The steps with their copies hidden behind ops, where that is faster and still a plan."""
        room = self.budget - self.problem.resident_bytes
        moved = hide_copies(self.problem, steps, found.profile.tolist(), self.budget - int(_LEFT * room))
        with contextlib.suppress(PlanError):
            other = evaluate(self.problem, moved)
            if other.seconds < found.seconds and other.peak_bytes <= self.budget and lower(self.problem, moved) is not None:
                return other, moved
        return found, steps

    def swap_alone(self) -> list[Candidate]:
        """Offer the base order with few bytes moved: what frees most of the excess for its bytes goes first. Returns what goes."""
        profile = self.profile.copy()
        room = self.host_bytes
        left, chosen = list(self.candidates), list[Candidate]()
        while (profile > self.budget).any() and left:
            excess = np.maximum(profile - self.budget, 0)
            gains = [float(np.minimum(excess[c.away], c.bytes).sum()) / c.bytes for c in left]
            best = max(range(len(left)), key=lambda k: (gains[k], -left[k].bytes))
            if gains[best] <= 0:
                break
            c = left.pop(best)
            if c.bytes <= room:
                room -= c.bytes
                chosen.append(c)
                profile[c.away] -= c.bytes
        for c in sorted(chosen, key=lambda c: -c.bytes):
            # What later choices made needless stays.
            if (profile[c.away] + c.bytes <= self.budget).all():
                profile[c.away] += c.bytes
                chosen.remove(c)
        form = self.form(chosen)
        self.offer(form.plan_steps(form.sequence))
        return chosen

    def form(self, chosen: Iterable[Candidate]) -> Lowered:
        """The problem with these tensors swapped."""
        return with_swaps(self.problem, {c.tensor: c.late for c in sorted(chosen, key=lambda c: c.tensor)})

    def affordable(self, chosen: Iterable[Candidate]) -> frozenset[int]:
        """As many of them, first ones first, as the host holds all at once."""
        room, kept = self.host_bytes, []
        for c in chosen:
            if c.bytes <= room:
                kept.append(c.tensor)
                room -= c.bytes
        return frozenset(kept)

    def judge(self, swapped: frozenset[int], until: float) -> float:
        """Seconds of the best walk with these tensors swapped; infinity where none is within the budget."""
        if swapped not in self._judged:
            form = self.form(self.of[x] for x in swapped)
            reduced = reduce_problem(form.problem)
            sequences = [walk(reduced, self.budget, w, until) for w in WEIGHTS if time.monotonic() < until]
            plans = [form.plan_steps(form.sequence), *(form.plan_steps(reduced.expand(s)) for s in sequences if s is not None)]
            found = [f.seconds for f in map(self.offer, plans) if f is not None and f.peak_bytes <= self.budget]
            self._judged[swapped] = min(found, default=float("inf"))
        return self._judged[swapped]

    def run(self) -> None:
        """Offer swap alone, and recompute and swap together."""
        alone = self.affordable(self.swap_alone())
        if not self.candidates:
            return
        self.exchange(time.monotonic() + _EXCHANGING * self.left)
        until = time.monotonic() + _JUDGING * self.left
        ranked = sorted(self.candidates, key=lambda c: (-c.price / c.seconds, -c.bytes, c.tensor))
        self.judge(alone, until)
        for share in _GRID:
            if time.monotonic() < until:
                self.judge(self.affordable(ranked[: max(1, round(share * len(ranked)))]), until)
        self.change(ranked, until)
        order = sorted(self._judged, key=lambda s: (self._judged[s], len(s)))[:_ANNEALED]
        for k, swapped in enumerate(order):
            if self.left > 0 and self._judged[swapped] < float("inf"):
                self.anneal(swapped, time.monotonic() + self.left / (len(order) - k))

    def exchange(self, until: float) -> None:
        """In the best plan so far, let tensors that are made again come back from the host instead, one after another, dearest first."""
        improved = self.best is not None
        while improved and self.best is not None and time.monotonic() < until:
            improved, steps = False, self.best
            for r in self._remade(steps):
                if time.monotonic() > until:
                    return
                least = self.best_seconds
                self.offer(self._swapped_instead(steps, r))
                if self.best_seconds < least * (1 - 1e-9):
                    improved = True
                    break

    def _remade(self, steps: Sequence[Step]) -> list[int]:
        """The recomputes of a sequence that make one tensor which may be swapped: those that cost most for its bytes first."""
        own, ops, tensors = self.problem.index.own, self.problem.ops, self.problem.tensors
        ran: set[int] = set()
        found = []
        for k, step in enumerate(steps):
            if step.kind != "run":
                continue
            if step.index in ran and len(own[step.index]) == 1 and own[step.index][0] in self._may_swap:
                found.append(k)
            ran.add(step.index)
        return sorted(found, key=lambda k: -ops[steps[k].index].seconds / tensors[own[steps[k].index][0]].bytes)

    def _swapped_instead(self, steps: Sequence[Step], r: int) -> list[Step]:
        """The steps with a swap in place of the recompute at ``r``, and without the recomputes that served only that one."""
        index = self.problem.index
        (t,) = index.own[steps[r].index]
        users = {o for u in family(self.problem, t) for o in index.readers[u]} | {steps[r].index}
        last = max(k for k in range(r) if steps[k].kind == "run" and steps[k].index in users)
        changed = [*steps[: last + 1], Step("swap_out", t), *steps[last + 1 : r], Step("swap_in", t), *steps[r + 1 :]]
        while True:
            needless = _unread(self.problem, changed)
            if not needless:
                return changed
            changed = [step for k, step in enumerate(changed) if k not in needless]

    def change(self, ranked: Sequence[Candidate], until: float) -> None:
        """Let single tensors in or out of the best set, those near the border between what is and is not swapped first."""
        improved = True
        while improved and time.monotonic() < until:
            improved = False
            best = min(self._judged, key=lambda s: (self._judged[s], len(s)))
            border = sum(c.tensor in best for c in ranked)
            for k in sorted(range(len(ranked)), key=lambda k: abs(k - border)):
                if time.monotonic() > until:
                    return
                x = ranked[k].tensor
                trial = best ^ {x}
                if sum(self.of[t].bytes for t in trial) > self.host_bytes:
                    continue
                if self.judge(trial, until) < self._judged[best] * (1 - 1e-9):
                    best, improved = trial, True

    def anneal(self, swapped: frozenset[int], deadline: float) -> None:
        """Local search on the sequence with these tensors swapped."""
        form = self.form(self.of[x] for x in swapped)
        context = Context(form.problem, self.budget, deadline, self.seed)
        context.bound = seconds_floor(form.problem)
        starts = []
        for w in WEIGHTS:
            sequence = walk(context.reduced, self.budget, w, deadline)
            if sequence is not None and self.offer(form.plan_steps(context.reduced.expand(sequence))) is not None:
                context.offer(sequence)
                starts.append((sum(context.reduced.cost[o] for o in sequence), sequence))
        search(context, sorted(starts))
        for sequence in (context.best, context.lowest):
            if sequence is not None:
                self.offer(form.plan_steps(sequence))

    def lower_peak(self, enough: int) -> None:
        """Look for plans of ever lower peak, down to ``enough`` bytes, everything swapped that may be."""
        chosen = candidates(self.problem)
        kept = self.affordable(sorted(chosen, key=lambda c: -c.bytes))
        form = self.form(c for c in chosen if c.tensor in kept)
        context = Context(form.problem, enough, self.deadline, self.seed)
        context.offer_ops(list(form.sequence))
        lower_peak(context, enough)
        if context.lowest is not None:
            self.offer(form.plan_steps(context.lowest))


def _unread(problem: Problem, steps: Sequence[Step]) -> set[int]:
    """The recomputes of a sequence whose tensors nothing reads."""
    index = problem.index
    made: dict[int, int] = {}
    again: set[int] = set()
    read: set[int] = set()
    ran: set[int] = set()
    for k, step in enumerate(steps):
        if step.kind != "run":
            if step.kind == "swap_out":
                read.add(made.get(step.index, -1))
            else:
                made[step.index] = k
            continue
        o = step.index
        read.update(made.get(t, -1) for t in (index.again_reads if o in ran else index.first_reads)[o])
        if o in ran:
            again.add(k)
        ran.add(o)
        made |= dict.fromkeys(problem.ops[o].outputs, k)
    read.update(made[t] for t, tensor in enumerate(problem.tensors) if tensor.output and t in made)
    return again - read
