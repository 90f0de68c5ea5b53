"""Stand-ins, while tracing, for functions of torch whose own form cannot be traced for fixed shapes, equal to them in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .errors import ExportError

__all__ = ["cross_entropy", "embedding_bag", "gaussian_nll_loss", "is_causal_hint"]

_cross_entropy = F.cross_entropy


def is_causal_hint(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """nn.Transformer's guess whether a mask is the causal one: never, as the mask itself is applied, and a guess would read its values."""
    return bool(is_causal)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy``; with class probabilities as target, which ONNX's loss does not take, in plain operations."""
    if not target.is_floating_point():
        return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    axis = 1 if input.ndim > 1 else 0
    classes = input.shape[axis]
    weighted = F.log_softmax(input, axis) * (target * (1.0 - label_smoothing) + label_smoothing / classes)
    if weight is not None:
        weighted = weighted * weight.reshape([classes if a == axis else 1 for a in range(input.ndim)])
    losses = -weighted.sum(axis)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.gaussian_nll_loss`` without its look at the values of ``var``, which must not be negative; the clamp of ``var`` passes gradients."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def embedding_bag(
    indices: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """``F.embedding_bag`` of bags of one size: indices (N, B) -> (N, E), as a look-up and a reduction.

    Raises:
        ExportError: for bags given by offsets, and for options that change gradients or weights unseen.
    """
    refusals: dict[str, Any] = {"offsets": offsets is not None, "max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq}
    for option, given in refusals.items():
        if given:
            way_out = "give bags of one size as a 2-D tensor, padded by padding_idx" if option == "offsets" else "leave it out"
            raise ExportError("embedding_bag", f"{option} has no static form", way_out)
    rows = F.embedding(indices, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.max(1)[0] if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
    kept = (indices != padding_idx % weight.shape[0]).unsqueeze(-1)
    counts = kept.to(rows.dtype).sum(1)
    if mode == "max":
        peaks = rows.masked_fill(~kept, torch.finfo(rows.dtype).min).max(1)[0]
        return torch.where(counts > 0, peaks, torch.zeros_like(peaks))
    total = rows.masked_fill(~kept, 0.0).sum(1)
    return total if mode == "sum" else total / counts.clamp(min=1)
