"""Swap without recompute: the base order, and as few bytes moved as a greedy choice finds.

It needs a problem with a channel and works outside of the registry's protocol, whose sequences know runs only: see :mod:`..swap_search`.
"""

from __future__ import annotations

from ..errors import StrategyError
from .registry import Context, register


@register("swap_only", part=True)
def swap_only(context: Context) -> None:
    """Refuse a problem without a channel; :func:`~onnxremat.scheduler.solve` handles those with one itself."""
    raise StrategyError("swap_only: there is nowhere to swap to: plan with --swap disk, or another strategy")
