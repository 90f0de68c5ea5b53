"""A training step as a chain of stages, for the strategies that are stated on chains.

The forward pass is cut into stages.  The *state* of a cut is what the forward pass from there on reads of what was written before; on a
chain it is one tensor.  The backward pass is cut into blocks: block i starts where the backward pass first reads what only stage i or an
earlier one knows.  Cuts lie at articulation points, where the state is one tensor (Chen et al., 2016, "Training Deep Nets with
Sublinear Memory Cost"), or anywhere, the graph linearised (the baselines of Jain et al., MLSys 2020, "Checkmate"): there the state is
whatever crosses.  Storages that cannot be made again stay, and are part of no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..reduce import Reduced
from .machine import Machine, forward_end, last_asked
from .registry import Context, register

__all__ = ["Action", "Chain", "Division", "Stages", "register_divided"]

Division = Literal["ap", "linear"]
#: ``forward``: run a stage and keep the state behind it.  ``all``: keep what its block reads as well.  ``last``: make only that.
#: ``back``: run its block.  ``hold`` and ``release``: the state before it is a checkpoint, or no longer.
Kind = Literal["forward", "all", "last", "back", "hold", "release"]
Action = tuple[Kind, int]

# What crosses an articulation point beside its one storage is at most this part of it.
_SMALL = 16


@dataclass
class Chain:
    """What all divisions of a problem share.

    Attributes:
        reduced: the problem.
        end: number of ops of the forward pass.
        asked: per storage, the last op that may ask for it, or -1 where it must not be dropped.
    """

    reduced: Reduced
    end: int
    asked: list[int]

    @classmethod
    def of(cls, reduced: Reduced) -> Chain:
        """The chain of a problem."""
        end = forward_end(reduced)
        return cls(reduced, end, last_asked(reduced, end))

    @cached_property
    def free(self) -> list[bool]:
        """Per storage, whether it may be dropped and made again."""
        return [o >= 0 for o in self.asked]

    @cached_property
    def last_read(self) -> list[int]:
        """Per storage, the last op of the forward pass that reads it, or its own where none does."""
        return [max((o for o in r if o < self.end), default=p) for r, p in zip(self.reduced.readers, self.reduced.producer, strict=True)]

    @cached_property
    def crossing(self) -> npt.NDArray[np.int64]:
        """Per position of the forward pass, the bytes of all storages that cross it, and of the largest: int64 array of shape (2, end + 1)."""
        found = np.zeros((2, self.end + 1), dtype=np.int64)
        for s, p in enumerate(self.reduced.producer):
            if p < self.end:
                across = found[:, p + 1 : self.last_read[s] + 1]
                across[0] += self.reduced.size[s]
                np.maximum(across[1], self.reduced.size[s], out=across[1])
        return found

    @cached_property
    def articulation_points(self) -> list[int]:
        """Inner positions of the forward pass that one storage crosses; next to it, small ones such as a mask for all layers don't count."""
        total, largest = self.crossing
        return [p for p in range(1, self.end) if largest[p] and (total[p] - largest[p]) * _SMALL <= largest[p]]

    def positions(self, division: Division) -> list[int]:
        """Where a division may cut."""
        return self.articulation_points if division == "ap" else list(range(1, self.end))

    def thinned(self, division: Division, most: int) -> list[int]:
        """Cuts into at most ``most`` stages: of each run of neighbouring positions, about equal in bytes made, the one that least crosses."""
        places = self.positions(division)
        if len(places) < most:
            return places
        bytes_across = self.crossing[0]
        made = np.cumsum([sum(self.reduced.size[s] for s in self.reduced.outs[o]) + 1 for o in range(self.end)])
        group = [int(made[p - 1] * (most - 1) // (made[-1] + 1)) for p in places]
        chosen: dict[int, int] = {}
        for p, g in zip(places, group, strict=True):
            if g not in chosen or bytes_across[p] < bytes_across[chosen[g]]:
                chosen[g] = p
        return sorted(chosen.values())


class Stages:
    """A chain cut into stages.

    Attributes:
        chain: the problem.
        bounds: positions 0 = first, cuts, end of the forward pass; stage i is bounds[i] to bounds[i + 1].
        state: per cut, number of stages + 1 of them, the droppable storages that cross it.
        block: per stage, the ops of its backward block, ascending.
        saved: per stage, the droppable storages to be there when its block begins: those of this and of earlier stages that it reads,
            and those of this stage that a later block reads.
    """

    def __init__(self, chain: Chain, cuts: Sequence[int]) -> None:
        self.chain = chain
        r, end = chain.reduced, chain.end
        self.bounds = [0, *cuts, end]
        self.count = len(self.bounds) - 1
        stage = np.repeat(np.arange(self.count), np.diff(self.bounds)).tolist()
        self.state: list[tuple[int, ...]] = [()] * (self.count + 1)
        crossing: list[list[int]] = [[] for _ in self.state]
        for s, p in enumerate(r.producer):
            if p < end and chain.free[s]:
                for i in range(stage[p] + 1, stage[chain.last_read[s]] + 1):
                    crossing[i].append(s)
        self.state = [tuple(c) for c in crossing]
        self.block: list[list[int]] = [[] for _ in range(self.count)]
        saved: list[dict[int, None]] = [{} for _ in range(self.count)]
        self._blocks: dict[int, set[int]] = {}
        now = self.count - 1
        for q in range(end, r.count):
            reads = [s for s in r.reads[q] if chain.free[s]]
            now = min([now, *(stage[chain.last_read[s]] for s in reads)])
            self.block[now].append(q)
            for s in reads:
                # What is read later than the block of its own stage is made with that stage.
                made = max(now, stage[r.producer[s]])
                saved[made][s] = None
                self._blocks.setdefault(s, set()).update((now, made))
        self.saved = [tuple(s) for s in saved]

    def replay(self, actions: Iterable[Action], sticky: bool = True) -> list[int]:
        """The reduced ops of a list of actions.

        Args:
            actions: what to do; what they do not provide for is made on demand.
            sticky: keep what a block has read until the last block that reads it, rather than make it again.

        Returns:
            Reduced ops in the order they run.
        """
        chain = self.chain
        machine = Machine(chain.reduced, chain.asked)
        swept = 0
        keep: Counter[int] = Counter()
        lingering: list[int] = []
        for kind, i in actions:
            if kind == "hold":
                keep.update(self.state[i])
                continue
            if kind == "release":
                keep.subtract(self.state[i])
                continue
            if kind == "back":
                for o in self.block[i]:
                    machine.run(o)
                keep.subtract(self.saved[i])
                lingering = [s for s in machine.here if self._wanted_later(s, i, sticky)]
                targets: tuple[int, ...] = ()
            else:
                targets = (*(self.state[i + 1] if kind != "last" else ()), *(self.saved[i] if kind != "forward" else ()))
                if i == swept:
                    for o in range(self.bounds[i], self.bounds[i + 1]):
                        machine.run(o)
                    swept += 1
                else:
                    machine.demand(targets)
                if kind != "forward":
                    keep.update(self.saved[i])
            machine.drop([*(s for s, times in keep.items() if times > 0), *targets, *lingering])
        return machine.out

    def _wanted_later(self, s: int, i: int, sticky: bool) -> bool:
        """Whether to keep a storage that is here when block i has run."""
        blocks = self._blocks.get(s, set())
        return i - 1 in blocks or (sticky and max(blocks, default=-1) >= i > min(blocks))


def register_divided(name: str) -> Callable[[Callable[[Context, Chain, Division], None]], Callable[[Context], None]]:
    """Register a strategy for chains three times: at articulation points (NAME_ap), linearised (NAME_linear), and both (NAME).

    All offer the base order first.
    """

    def enter(strategy: Callable[[Context, Chain, Division], None]) -> Callable[[Context], None]:
        def divided(*divisions: Division) -> Callable[[Context], None]:
            def run(context: Context) -> None:
                context.offer(range(context.reduced.count))
                chain = Chain.of(context.reduced)
                for division in divisions:
                    if chain.positions(division):
                        strategy(context, chain, division)

            return run

        register(f"{name}_ap", part=True)(divided("ap"))
        register(f"{name}_linear", part=True)(divided("linear"))
        return register(name)(divided("ap", "linear"))

    return enter
