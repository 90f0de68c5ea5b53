"""Stand-ins, while tracing, for functions of torch whose own form cannot be traced for fixed shapes, equal to them in value and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .equal_masks import EQUAL_MASKS
from .errors import ExportError
from .functional_ctc import ctc_loss
from .functional_recurrent import RECURRENT

__all__ = ["stand_ins"]

_adaptive_max_pools: dict[int, Callable[..., Any]] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
_cross_entropy, _apply, _data = F.cross_entropy, nn.Module._apply, torch.Tensor.data


def stand_ins() -> tuple[tuple[Any, str, Any], ...]:
    """(module, name of a function of it, what takes its place)."""
    return (
        (nn.modules.transformer, "_detect_is_causal_mask", is_causal_hint),
        (nn.Module, "_apply", apply_to_tensors),
        (torch.distributions.Distribution, "_validate_args", False),  # checks read values, and change none
        (torch.Tensor, "masked_fill_", masked_fill),
        (torch.Tensor, "fill_diagonal_", fill_diagonal),
        (torch.Tensor, "data", property(detached, overwrite)),
        (F, "cross_entropy", cross_entropy),
        (F, "gaussian_nll_loss", gaussian_nll_loss),
        (F, "ctc_loss", ctc_loss),
        (F, "embedding_bag", embedding_bag),
        (F, "adaptive_avg_pool3d", adaptive_avg_pool3d),
        *((F, f"adaptive_max_pool{rank}d", adaptive_max_pool(rank)) for rank in (1, 2, 3)),
        (torch, "fake_quantize_per_tensor_affine", fake_quantize),
        (torch, "fake_quantize_per_channel_affine", fake_quantize_channels),
        *RECURRENT,
        *EQUAL_MASKS,
    )


def is_causal_hint(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """nn.Transformer's guess whether a mask is the causal one: never, as the mask itself is applied, and a guess would read its values."""
    return bool(is_causal)


def apply_to_tensors(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``, by which ``to`` and ``float`` work: a module that is as asked for stays as it is, since no trace may replace it."""
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    return module if all(fn(tensor) is tensor for tensor in tensors) else _apply(module, fn, recurse)


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
    """``F.cross_entropy``; class probabilities as target and label smoothing, which the exporter loses, in plain operations."""
    if not target.is_floating_point() and not label_smoothing:
        return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)
    axis = 1 if input.ndim > 1 else 0
    if not target.is_floating_point():
        return _smoothed(input, target, weight, ignore_index, reduction, label_smoothing, axis)
    classes = input.shape[axis]
    weighted = F.log_softmax(input, axis) * (target * (1.0 - label_smoothing) + label_smoothing / classes)
    if weight is not None:
        weighted = weighted * weight.reshape([classes if a == axis else 1 for a in range(input.ndim)])
    losses = -weighted.sum(axis)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


def _smoothed(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, reduction: str, smoothing: float, axis: int
) -> torch.Tensor:
    """Cross-entropy with class indices, of which every class gets a share of ``smoothing``; a mean is over the weights of the targets."""
    classes = input.shape[axis]
    by_class = torch.ones(classes, dtype=input.dtype) if weight is None else weight
    kept = target != ignored
    even = -(F.log_softmax(input, axis) * by_class.reshape([classes if a == axis else 1 for a in range(input.ndim)])).sum(axis)
    even = torch.where(kept, even, torch.zeros_like(even))
    sharp = _cross_entropy(input, target, weight, ignore_index=ignored, reduction=reduction)
    if reduction != "none":
        even = even.sum()
    if reduction == "mean":
        weights = by_class[torch.where(kept, target, torch.zeros_like(target))]
        even = even / torch.where(kept, weights, torch.zeros_like(weights)).sum()
    return (1.0 - smoothing) * sharp + smoothing / classes * even


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """``Tensor.data`` of a traced tensor: detached, by an operation that a trace sees; it shares the storage as well."""
    return tensor.detach() if isinstance(tensor, FakeTensor) else _data.__get__(tensor)


def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``Tensor.data = value`` of a traced tensor, as a write into it."""
    if isinstance(tensor, FakeTensor):
        tensor.detach().copy_(value)
    else:
        _data.__set__(tensor, value)


def masked_fill(input: torch.Tensor, mask: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """``Tensor.masked_fill_`` as a copy: of a view's view torch's own form has strides that it cannot undo."""
    return input.copy_(input.masked_fill(mask, value))


def fill_diagonal(input: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """``Tensor.fill_diagonal_`` by a mask instead of strides: places of equal indices, of a matrix that wraps begun anew below a row left out."""
    axes = [torch.arange(size).reshape([-1 if a == axis else 1 for a in range(input.ndim)]) for axis, size in enumerate(input.shape)]
    first = axes[0] % (input.shape[1] + 1) if wrap else axes[0]
    mask = torch.ones(input.shape, dtype=torch.bool)
    for other in axes[1:]:
        mask = mask & (first == other)
    return masked_fill(input, mask, fill_value)


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
    """``F.embedding_bag``: indices (N, B), or (M,) with the offsets of N bags -> (N, E), as a look-up and a reduction.

    Raises:
        ExportError: for options that change gradients or weights unseen.
    """
    for option, given in {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq}.items():
        if given:
            raise ExportError("embedding_bag", f"{option} has no static form", "leave it out")
    rows = F.embedding(indices, weight, padding_idx)
    if offsets is not None:
        kept = None if padding_idx is None else indices != padding_idx % weight.shape[0]
        starts = offsets[:-1] if include_last_offset else offsets
        return _bags_of_any_size(rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(-1), starts, kept, mode)
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


def _bags_of_any_size(rows: torch.Tensor, starts: torch.Tensor, kept: torch.Tensor | None, mode: str) -> torch.Tensor:
    """Rows (M, E) reduced over bags (N,) by where each one starts -> (N, E); an empty bag gives zeros."""
    positions = torch.arange(rows.shape[0], device=rows.device)
    bag = (positions.unsqueeze(1) >= starts.unsqueeze(0)).sum(1) - 1
    present = rows.new_ones(rows.shape[0]) if kept is None else kept.to(rows.dtype)
    counts = rows.new_zeros(starts.shape[0]).index_add(0, bag, present).unsqueeze(-1)
    zeros = rows.new_zeros(starts.shape[0], rows.shape[1])
    if mode == "max":
        masked = rows if kept is None else rows.masked_fill(~kept.unsqueeze(-1), torch.finfo(rows.dtype).min)
        peaks = zeros.scatter_reduce(0, bag.unsqueeze(-1).expand_as(rows), masked, "amax", include_self=False)
        return torch.where(counts > 0, peaks, zeros)
    total = zeros.index_add(0, bag, rows if kept is None else rows.masked_fill(~kept.unsqueeze(-1), 0.0))
    return total if mode == "sum" else total / counts.clamp(min=1)


def adaptive_avg_pool3d(input: torch.Tensor, output_size: int | Sequence[int | None] | None) -> torch.Tensor:
    """``F.adaptive_avg_pool3d``, (..., D, H, W) -> (..., d, h, w): the mean over a box is the mean of means over its layers."""
    wanted = tuple(output_size) if isinstance(output_size, Sequence) else (output_size,) * 3
    lead, (depth, *_) = input.shape[:-3], input.shape[-3:]
    d, h, w = (size if given is None else given for given, size in zip(wanted, input.shape[-3:], strict=True))
    layers = F.adaptive_avg_pool2d(input.reshape(-1, *input.shape[-3:]), (h, w))
    columns = layers.reshape(-1, depth, h * w).transpose(1, 2)
    return F.adaptive_avg_pool1d(columns, d).transpose(1, 2).reshape(*lead, d, h, w)


def adaptive_max_pool(rank: int) -> Callable[..., Any]:
    """``F.adaptive_max_pool1d`` (2d, 3d), whose windows overlap where its sizes do not divide: the maximum of each, axis by axis.

    From the last axis to the first, so that of equal values in a window the first in memory gets the gradient, as in torch.
    """
    whole = _adaptive_max_pools[rank]

    def pool(input: torch.Tensor, output_size: int | Sequence[int | None], return_indices: bool = False) -> Any:
        wanted = tuple(output_size) if isinstance(output_size, Sequence) else (output_size,) * rank
        counts = [size if count is None else count for count, size in zip(wanted, input.shape[-rank:], strict=True)]
        if return_indices or not any(size % count for size, count in zip(input.shape[-rank:], counts, strict=True)):
            return whole(input, output_size, return_indices)
        for axis, count in zip(range(-1, -rank - 1, -1), reversed(counts), strict=True):
            size = input.shape[axis]
            ends = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
            input = torch.stack([input.narrow(axis, low, high - low).max(axis).values for low, high in ends], axis)
        return input

    return pool


def fake_quantize(input: torch.Tensor, scale: torch.Tensor | float, zero_point: torch.Tensor | float, quant_min: int, quant_max: int) -> torch.Tensor:
    """``torch.fake_quantize_per_tensor_affine``: the value of a quantization, with the straight-through gradient inside its range."""
    levels = torch.round(input * (1.0 / scale)) + zero_point
    inside = (levels >= quant_min) & (levels <= quant_max)
    value = ((levels.clamp(quant_min, quant_max) - zero_point) * scale).detach()
    through = torch.where(inside, input, torch.zeros_like(input))
    return value + (through - through.detach())


def fake_quantize_channels(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int
) -> torch.Tensor:
    """``torch.fake_quantize_per_channel_affine``; scale and zero_point (C,), C the length of ``axis``."""
    shape = [1] * input.ndim
    shape[axis] = -1
    return fake_quantize(input, scale.reshape(shape), zero_point.reshape(shape).to(input.dtype), quant_min, quant_max)
