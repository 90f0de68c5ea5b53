"""The strategies, one per module, behind one registry."""

from __future__ import annotations

from . import auto, checkmate_ilp, chen_greedy, chen_sqrt, keep_all
from .registry import Context, Progress, Strategy, get_strategy, register, strategies

__all__ = [
    "Context",
    "Progress",
    "Strategy",
    "auto",
    "checkmate_ilp",
    "chen_greedy",
    "chen_sqrt",
    "get_strategy",
    "keep_all",
    "register",
    "strategies",
]
