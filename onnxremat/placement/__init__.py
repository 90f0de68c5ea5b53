"""A schedule's buffers in the runtime's arena: where they end up, and how to make them need less."""

from .compaction import compact
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
    "UNLIMITED",
    "ArenaExhausted",
    "BestFitArena",
    "Buffer",
    "Placement",
    "bookkeeping_bytes",
    "buffer_lifetimes",
    "capacity_within",
    "compact",
    "place",
    "rounded",
]
