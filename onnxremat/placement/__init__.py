"""A schedule's buffers in the runtime's arena: where they end up, and how to make them need less."""

from .compaction import MOVES, compact
from .fixed import place_fixed
from .offsets import Offsets, OverlappingBuffers, assign_offsets, check_offsets, live_bytes, step_buffers
from .simulate import (
    GRANULE,
    UNLIMITED,
    ArenaExhausted,
    BestFitArena,
    Buffer,
    Placement,
    bookkeeping_bytes,
    buffer_lifetimes,
    capacity_within,
    place,
    rounded,
)

__all__ = [
    "GRANULE",
    "MOVES",
    "UNLIMITED",
    "ArenaExhausted",
    "BestFitArena",
    "Buffer",
    "Offsets",
    "OverlappingBuffers",
    "Placement",
    "assign_offsets",
    "bookkeeping_bytes",
    "buffer_lifetimes",
    "capacity_within",
    "check_offsets",
    "compact",
    "live_bytes",
    "place",
    "place_fixed",
    "rounded",
    "step_buffers",
]
