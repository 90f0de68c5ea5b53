"""Where a schedule's buffers end up in ONNX Runtime's arena, known before the run.

The CPU provider's arena is a best-fit allocator with coalescing (BFC, as TensorFlow's).  Given the order of the nodes, every allocation and
release is known, so the placement can be simulated; kernel scratch is modelled as one block beside the outputs, but for kernels that
take it before them (``Traits.scratch_first``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..emit import SMALL_BYTES
from ..errors import OnnxRematError
from ..ops import traits
from ..scheduler import Problem

#: Allocations are rounded up to this many bytes (BFCArena::kMinAllocationSize).
GRANULE = 256
#: The arena keeps one 8-byte handle for each granule of its region, all written when the region is made.
_HANDLE = 8
#: A capacity that nothing exhausts.
UNLIMITED = 1 << 62


class ArenaExhausted(OnnxRematError):
    """The simulated arena has no free block that is large enough."""


def rounded(size: int) -> int:
    """Bytes that the arena takes for a request."""
    return max(1, -(-size // GRANULE)) * GRANULE


def bookkeeping_bytes(capacity: int) -> int:
    """Bytes that an arena of this capacity takes for its own tables."""
    return capacity // GRANULE * _HANDLE


def capacity_within(room: int) -> int:
    """The largest capacity that takes, tables included, at most ``room`` bytes."""
    return max(0, room * GRANULE // (GRANULE + _HANDLE) // GRANULE * GRANULE)


class BestFitArena:
    """One region of ``capacity`` bytes, served best-fit, lowest address first among equals; neighbours coalesce when freed.

    With ``overflow``, what does not fit goes into an endless region behind it, apart from it: by how much ``high_water`` exceeds the capacity
    says how far the requests are from fitting.
    """

    def __init__(self, capacity: int, overflow: bool = False) -> None:
        self.capacity = capacity
        self.high_water = 0
        self._free: list[tuple[int, int]] = []  # (size, offset), sorted
        self._starts: dict[int, int] = {}  # offset -> size of free blocks
        self._ends: dict[int, int] = {}  # end -> offset of free blocks
        self._used: dict[int, int] = {}
        self._insert(0, capacity)
        if overflow and capacity < UNLIMITED:
            # A granule apart, so that the two never coalesce.
            self._insert(capacity + GRANULE, UNLIMITED)

    def allocate(self, size: int) -> int:
        """Offset of a new block; raises ArenaExhausted where no free block is large enough."""
        size = rounded(size)
        at = bisect_left(self._free, (size, -1))
        if at == len(self._free):
            raise ArenaExhausted(f"no free block of {size} bytes in an arena of {self.capacity}")
        room, offset = self._free.pop(at)
        del self._starts[offset], self._ends[offset + room]
        if room > size:
            self._insert(offset + size, room - size)
        self._used[offset] = size
        self.high_water = max(self.high_water, offset + size)
        return offset

    def release(self, offset: int) -> None:
        """Return a block."""
        size = self._used.pop(offset)
        following = self._starts.get(offset + size)
        if following is not None:
            self._remove(offset + size, following)
            size += following
        before = self._ends.get(offset)
        if before is not None:
            length = offset - before
            self._remove(before, length)
            offset, size = before, size + length
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._free, (size, offset))
        self._starts[offset] = size
        self._ends[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, offset))]
        del self._starts[offset], self._ends[offset + size]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a schedule's buffers end up.

    Attributes:
        arena_bytes: the arena up to its highest used address: what becomes resident.
        live_bytes: the most bytes in use at one time.
        pen_bytes: size of the pen for small buffers.
        block_bytes: the block beside the arena, in which tensors have offsets of their own (``onnxremat.placement.fixed``); 0 for none.
        offsets: where these are in the block, by tensor (of the problem in which swaps are ops) and number of the run that makes it.
    """

    arena_bytes: int
    live_bytes: int
    pen_bytes: int
    block_bytes: int = 0
    offsets: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def fragmentation(self) -> float:
        """How much more arena and block take than the buffers alive: 0.03 is 3 % more."""
        return (self.arena_bytes + self.block_bytes) / self.live_bytes - 1 if self.live_bytes else 0.0


def place(problem: Problem, sequence: Sequence[int], capacity: int, overflow: bool = False) -> Placement:
    """Simulate the arena of ``capacity`` bytes over a sequence of runs; see :func:`place_buffers`."""
    return place_buffers(buffer_lifetimes(problem, sequence), scratch_of(problem, sequence), capacity, overflow)


class Scratch(NamedTuple):
    """Scratch memory of a run: one block of ``bytes`` beside the outputs, or as many equal ones before them as ``early`` says."""

    bytes: int
    early: int = 0


def scratch_of(problem: Problem, sequence: Sequence[int]) -> list[Scratch]:
    """The scratch memory of each run."""
    return [Scratch(op.workspace_bytes, traits(op.op_type).scratch_first) for op in (problem.ops[number] for number in sequence)]


def place_buffers(buffers: Sequence[Buffer], scratch: Sequence[Scratch], capacity: int, overflow: bool = False) -> Placement:
    """Simulate the arena of ``capacity`` bytes over steps that need so much scratch memory each.

    Small buffers get a pen of their own: at the start of the step a block of ``pen_bytes`` is allocated, then a one-granule fence that
    stays, then the
    block is freed.  Being the smallest hole, it is where best-fit puts them, and they no longer split the holes that large buffers leave
    (``onnxremat.emit`` adds the two nodes).

    Raises:
        ArenaExhausted: the schedule does not fit; with ``overflow`` its arena is more than ``capacity`` instead (see BestFitArena).
    """
    arena = BestFitArena(capacity, overflow)
    born: list[list[int]] = [[] for _ in scratch]
    dies: list[list[int]] = [[] for _ in scratch]
    for number, buffer in enumerate(buffers):
        born[buffer.first].append(number)
        if buffer.last < len(scratch):
            dies[buffer.last].append(number)
    pen_bytes = _pen_bytes(buffers, len(scratch))
    pen = arena.allocate(pen_bytes)
    arena.allocate(GRANULE)
    arena.release(pen)
    offsets: dict[int, int] = {}
    live = GRANULE
    peak = live + pen_bytes
    for step, (workspace, early) in enumerate(scratch):
        blocks = [arena.allocate(workspace // early) for _ in range(early)] if workspace else []
        for number in born[step]:
            offsets[number] = arena.allocate(buffers[number].bytes)
            live += rounded(buffers[number].bytes)
        if workspace and not early:
            blocks.append(arena.allocate(workspace))
        for block in blocks:
            arena.release(block)
        peak = max(peak, live + (rounded(workspace) if workspace else 0))
        for number in dies[step]:
            arena.release(offsets[number])
            live -= rounded(buffers[number].bytes)
    return Placement(arena.high_water, peak, pen_bytes)


def _pen_bytes(buffers: Sequence[Buffer], steps: int) -> int:
    """The most bytes that small buffers take at one time, and a tenth more since they fragment too."""
    change = [0] * (steps + 2)
    for buffer in buffers:
        if buffer.bytes <= SMALL_BYTES:
            change[buffer.first] += rounded(buffer.bytes)
            change[min(buffer.last, steps) + 1] -= rounded(buffer.bytes)
    live = peak = 0
    for delta in change:
        live += delta
        peak = max(peak, live)
    return rounded(peak + peak // 10)


@dataclass(slots=True)
class Buffer:
    """A buffer of a schedule: allocated at step ``first``, released after step ``last`` (beyond the end: held).

    ``values`` are the tensors that are made in it, one after another: index, and which run of its producer makes it, counted from 0.
    """

    first: int
    last: int
    bytes: int
    values: tuple[tuple[int, int], ...] = ()


def buffer_lifetimes(problem: Problem, sequence: Sequence[int]) -> list[Buffer]:
    """The buffers that the runtime allocates for a sequence of runs, in order of allocation.

    A buffer that nobody reads is left out, freed at once or held to the end as ``onnxremat.emit`` has it.  Views share their base's
    buffer; where an in-place operator is the last reader of its input, the output takes the buffer over.
    """
    tensors = problem.tensors
    held: dict[int, int] = {}  # tensor -> instance that serves its reads
    first: list[int] = []
    last: list[int] = []
    size: list[int] = []
    made: list[tuple[int, int]] = []
    outputs: set[int] = set()
    read: set[int] = set()
    absent: set[int] = set()
    pairs: list[tuple[int, int, int]] = []
    runs: dict[int, int] = {}
    for step, op in enumerate(sequence):
        spec = problem.ops[op]
        reads = (problem.index.again_reads if op in runs else problem.index.first_reads)[op]
        run = runs[op] = runs.get(op, -1) + 1
        for tensor in reads:
            if tensor in held:
                last[held[tensor]] = step
                read.add(held[tensor])
        sources = {target: held[source] for source, target in spec.inplace if source in held and source in reads}
        optional = traits(spec.op_type).optional_outputs
        for position, tensor in enumerate(spec.outputs):
            base = tensors[tensor].alias_of
            if base >= 0:
                if base in held:
                    held[tensor] = held[base]
            else:
                held[tensor] = len(first)
                first.append(step)
                last.append(step)
                size.append(tensors[tensor].bytes)
                made.append((tensor, run))
                if position in optional:
                    absent.add(held[tensor])
                if tensor in sources:
                    pairs.append((step, sources[tensor], held[tensor]))
            if tensors[tensor].output and tensor in held:
                outputs.add(held[tensor])
    end = len(sequence)
    absent -= read | outputs
    stays = {i for i in range(len(first)) if i in outputs or (i not in read and size[i] <= SMALL_BYTES)}
    buffers = [Buffer(first[i], end if i in stays else last[i], size[i], (made[i],)) for i in range(len(first))]
    merged: set[int] = set()
    for step, source, target in reversed(pairs):
        dying = last[source] == step and source not in outputs and first[source] < step and target not in outputs
        if dying and size[source] == size[target] and target not in merged:
            buffers[source].last = buffers[target].last
            buffers[source].values += buffers[target].values
            merged.add(target)
    return [buffer for number, buffer in enumerate(buffers) if number not in merged and number not in absent]
