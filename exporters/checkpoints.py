"""torch.utils.checkpoint: the region is exported whole, its recomputation left to the scheduler, and which nodes it held is kept as a hint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as torch_checkpoint
from torch import fx

__all__ = ["CHECKPOINT", "mark_checkpoints", "whole_checkpoints"]

CHECKPOINT = "onnxremat.checkpoint"
"""metadata_props key of a node that the model itself would recompute: the number of its checkpointed region."""


@contextlib.contextmanager
def whole_checkpoints() -> Iterator[None]:
    """Within the block a checkpointed function is simply called, with the numbers of its regions noted by a trace that keeps annotations."""
    numbers = itertools.count()
    function = torch_checkpoint.CheckpointFunction
    apply, generator = function.__dict__.get("apply"), torch_checkpoint._checkpoint_without_reentrant_generator

    def region(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        with fx_traceback.annotate({CHECKPOINT: str(next(numbers))}):
            yield

    def call(run: Callable[..., Any], preserve_rng_state: bool, *operands: Any) -> Any:
        with fx_traceback.annotate({CHECKPOINT: str(next(numbers))}):
            return run(*operands)

    torch_checkpoint._checkpoint_without_reentrant_generator = region
    function.apply = call
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = generator
        if apply is None:
            del function.apply
        else:
            function.apply = apply


def mark_checkpoints(model: ir.Model) -> None:
    """Writes the number of its region into the metadata of every node that came of a checkpointed function."""
    for node in model.graph:
        origin = node.meta.get("node")
        number = (origin.meta.get("custom") or {}).get(CHECKPOINT) if isinstance(origin, fx.Node) else None
        if number is not None:
            node.metadata_props[CHECKPOINT] = number
