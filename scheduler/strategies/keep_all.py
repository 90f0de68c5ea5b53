"""Run everything once, in the base order: what a framework does without rematerialization, and the reference for all others."""

from __future__ import annotations

from .registry import Context, register


@register("keep_all")
def keep_all(context: Context) -> None:
    """Offer the base order."""
    context.offer_ops(list(range(len(context.problem.ops))))
    context.offer(range(context.reduced.count))
