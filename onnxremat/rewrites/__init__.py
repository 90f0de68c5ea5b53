"""Operators that are trained through as compositions of others, one module a topic."""

from . import attention, einsum, elementwise, fourier, indexing, losses, microsoft, normalization, pooling, recurrent, sequences
from .registry import expand, replace

__all__ = [
    "attention",
    "einsum",
    "elementwise",
    "expand",
    "fourier",
    "indexing",
    "losses",
    "microsoft",
    "normalization",
    "pooling",
    "recurrent",
    "replace",
    "sequences",
]
