"""The strategies, one per module, behind one registry."""

from __future__ import annotations

from . import auto, checkmate_ilp, checkmate_lp, chen_greedy, chen_sqrt, griewank, keep_all, mincut_knapsack, moccasin, reorder, rotor, swap_only
from .registry import Context, Progress, Strategy, distinct_strategies, get_strategy, register, strategies

__all__ = [
    "Context",
    "Progress",
    "Strategy",
    "auto",
    "checkmate_ilp",
    "checkmate_lp",
    "chen_greedy",
    "chen_sqrt",
    "distinct_strategies",
    "get_strategy",
    "griewank",
    "keep_all",
    "mincut_knapsack",
    "moccasin",
    "register",
    "reorder",
    "rotor",
    "strategies",
    "swap_only",
]
