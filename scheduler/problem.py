"""What is to be scheduled: the ops and tensors of one training step, as plain data.

Bytes are integers; seconds are floats (or the unit that :attr:`Problem.unit` names).  A problem knows neither onnx nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .index import Index, build_index

__all__ = ["Op", "Problem", "Tensor", "Transfer"]

PHASES = ("forward", "backward", "update")
# Sums of bytes are kept exactly in float64 by the solvers and in int64 by the evaluator.
MAX_BYTES = 2**52
# Sums of seconds stay finite.
MAX_SECONDS = 1e100


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the step.

    Attributes:
        name: its name in the training graph.
        bytes: size of its storage; the own bytes of a view are not counted.
        producer: index of the op that writes it, or -1 for a persistent tensor, which is there before the step (parameter,
            gradient buffer, state, batch) and counted in :attr:`Problem.resident` only.
        alias_of: index of the tensor whose storage this view shares (chains are allowed), or -1 for a storage of its own.
        output: held from its last run to the end of the step.
    """

    name: str
    bytes: int
    producer: int
    alias_of: int = -1
    output: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name: its name in the training graph.
        seconds: time of one run.
        inputs: tensors that it reads, data and control.
        outputs: tensors that it writes.
        workspace_bytes: scratch memory held only while it runs, on top of inputs and outputs.
        phase: ``forward``, ``backward`` or ``update``.
        pinned: why it must run exactly once (``random``, ``stateful``, ``output`` ...); empty where it may be recomputed.
        inplace: pairs (input, output): the output takes over the input's buffer when this run is the last read of the input's
            storage, the sizes are equal and the storage is neither persistent nor an output of the step.
        writes: persistent tensors whose value it replaces; no later run may read the old version.
        recompute_inputs: what a recompute reads when that differs from ``inputs``; None where it is the same.
        op_type: operator name, for reports.
    """

    name: str
    seconds: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int = 0
    phase: str = "forward"
    pinned: str = ""
    inplace: tuple[tuple[int, int], ...] = ()
    writes: tuple[int, ...] = ()
    recompute_inputs: tuple[int, ...] | None = None
    op_type: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The swap channel.

    Attributes:
        bytes_per_second_out: pace of copies to the host.
        bytes_per_second_in: pace of copies back.
        host_bytes: what the host lends.
        overlap: copies run beside the ops, one at a time in either direction (:mod:`.timeline`); otherwise ops wait for them.
    """

    bytes_per_second_out: float
    bytes_per_second_in: float
    host_bytes: int
    overlap: bool = False


@dataclass(frozen=True)
class Problem:
    """A training step to be scheduled.

    Attributes:
        name: a name for reports.
        ops: the ops in the base order, a valid order in which each runs once.
        tensors: the tensors; ops refer to them by index.
        resident: storage class (``parameters``, ``gradients``, ``optimizer_state``, ``model_state``, ``batch`` ...) to the bytes
            held during the whole step; persistent tensors are counted here and nowhere else.
        optimizer_peak_bytes: peak of a separate optimizer phase, resident bytes included; 0 where there is none.
        transfer: the swap channel, or None.
        unit: unit of ``Op.seconds``; ``seconds`` unless the problem is an instance with a unit of its own.
    """

    name: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    resident: Mapping[str, int]
    optimizer_peak_bytes: int = 0
    transfer: Transfer | None = None
    unit: str = "seconds"

    @property
    def resident_bytes(self) -> int:
        """Bytes held during the whole step."""
        return sum(self.resident.values())

    @cached_property
    def index(self) -> Index:
        """Derived lookups (readers, storages, required ops); built once, of a checked problem."""
        return build_index(self)

    def check(self) -> None:
        """Raise ProblemError, one line, unless the problem is well formed."""
        from .check import check_problem

        check_problem(self)

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON data; see :mod:`onnxremat.scheduler.files` for the format."""
        from .files import problem_to_json

        return problem_to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """The problem that JSON data describe, checked; raises ProblemError."""
        from .files import problem_from_json

        return problem_from_json(data)

    def save(self, path: str | Path) -> None:
        """Write the problem to a JSON file, whole or not at all."""
        from .files import write_json

        write_json(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        """Read a problem file, or a plain instance (single-output ops with ``cost``, ``bytes`` and ``inputs``).

        Raises:
            ProblemError: the file is missing, is not JSON, or does not hold a well-formed problem.
        """
        from .files import load_problem

        return load_problem(path)


def is_size(value: object) -> bool:
    """Whether a value is an integer from 0 to the largest byte count that sums stay exact for."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES


def is_duration(value: object) -> bool:
    """Whether a value is a number of seconds from 0 to the largest that sums stay finite for."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS
