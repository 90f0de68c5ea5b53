"""What comes out of the scheduler: a sequence of steps with its predicted peak and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import PlanError

__all__ = ["Plan", "Step", "StepKind"]

StepKind = Literal["run", "swap_out", "swap_in"]
_KINDS: tuple[StepKind, ...] = ("run", "swap_out", "swap_in")


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the run of an op (``index`` is an op) or the transfer of a tensor with a storage of its own (``index`` is a tensor).

    ``swap_out`` copies it to the host, ``swap_in`` makes a new instance of it from there; see :func:`evaluate`.
    """

    kind: StepKind
    index: int


@dataclass(frozen=True)
class Plan:
    """A schedule of one training step.

    Attributes:
        problem_name: name of the problem it was made for.
        strategy: name of the strategy that made it.
        budget_bytes: the budget it keeps.
        steps: what is done, in order.
        peak_bytes: largest memory of any step, or the optimizer's peak where that is larger.
        seconds: time of the steps.
        seconds_unscheduled: time of the base order.
        seconds_lower_bound: a proven bound: no plan for this budget, in any order, takes less.
        peak_unscheduled_bytes: peak of the base order.
        solve_seconds: wall time that planning took.
    """

    problem_name: str
    strategy: str
    budget_bytes: int
    steps: tuple[Step, ...]
    peak_bytes: int
    seconds: float
    seconds_unscheduled: float
    seconds_lower_bound: float
    peak_unscheduled_bytes: int
    solve_seconds: float

    @property
    def sequence(self) -> tuple[int, ...]:
        """Op indices in the order they run; an index that comes again is a recompute."""
        return tuple(step.index for step in self.steps if step.kind == "run")

    @property
    def recomputed_ops(self) -> int:
        """Number of runs beyond the first of each op."""
        sequence = self.sequence
        return len(sequence) - len(set(sequence))

    @property
    def swapped_tensors(self) -> int:
        """Number of distinct tensors that are swapped out at some time."""
        return len({step.index for step in self.steps if step.kind == "swap_out"})

    @property
    def gap(self) -> float:
        """How far the plan may be from the best one, relative: seconds / lower bound - 1."""
        if self.seconds <= self.seconds_lower_bound:
            return 0.0
        return self.seconds / self.seconds_lower_bound - 1 if self.seconds_lower_bound > 0 else float("inf")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data: the fields above; ``steps`` is a list of ``[kind, index]``."""
        return {
            "format": "onnxremat-plan",
            "version": 1,
            "problem_name": self.problem_name,
            "strategy": self.strategy,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "seconds_unscheduled": self.seconds_unscheduled,
            "seconds_lower_bound": self.seconds_lower_bound,
            "peak_unscheduled_bytes": self.peak_unscheduled_bytes,
            "solve_seconds": self.solve_seconds,
            "steps": [[step.kind, step.index] for step in self.steps],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that JSON data describe; raises PlanError where they describe none."""
        if not isinstance(data, Mapping) or data.get("format") != "onnxremat-plan" or data.get("version") != 1:
            raise PlanError("not a plan: expected format 'onnxremat-plan', version 1")
        try:
            steps = []
            for kind, index in data["steps"]:
                if kind not in _KINDS:
                    raise PlanError(f"plan: step kind must be one of {', '.join(_KINDS)}, not {kind!r}")
                steps.append(Step(kind, int(index)))
            return cls(
                problem_name=str(data["problem_name"]),
                strategy=str(data["strategy"]),
                budget_bytes=int(data["budget_bytes"]),
                steps=tuple(steps),
                peak_bytes=int(data["peak_bytes"]),
                seconds=float(data["seconds"]),
                seconds_unscheduled=float(data["seconds_unscheduled"]),
                seconds_lower_bound=float(data["seconds_lower_bound"]),
                peak_unscheduled_bytes=int(data["peak_unscheduled_bytes"]),
                solve_seconds=float(data["solve_seconds"]),
            )
        except KeyError as error:
            raise PlanError(f"plan: the key {error.args[0]!r} is missing") from error
        except (TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"plan: a field does not have its type: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, whole or not at all."""
        from .files import write_json

        write_json(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises PlanError where it is missing or no plan."""
        from .files import read_json

        return cls.from_json(read_json(path, PlanError))

    def save_sequence(self, path: str | Path) -> None:
        """Write the op indices in the order they run, a plain JSON list; raises PlanError where the plan swaps."""
        from .files import write_json

        if any(step.kind != "run" for step in self.steps):
            raise PlanError(f"plan for {self.problem_name!r} swaps tensors, which a list of op indices cannot say; save the plan itself")
        write_json(list(self.sequence), path)
