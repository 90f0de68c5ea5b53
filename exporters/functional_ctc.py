"""``F.ctc_loss`` in plain operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .errors import ExportError

__all__ = ["ctc_loss"]

#: In the place of the logarithm of 0: far below every sum of logarithms, and finite, so that no difference of two is NaN.
_NOTHING = -1e30


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``F.ctc_loss`` by the forward recursion of Graves et al. (2006, section 4.1), one step for each time, in logarithms.

    Shapes: log_probs (T, N, C), targets (N, S), lengths (N,); or (T, C), (S,), scalars.  As for torch, log_probs must be logarithms of
    probabilities: the gradients are equal behind a log_softmax.

    Raises:
        ExportError: for targets of all samples joined into one vector.
    """
    single = log_probs.ndim == 2
    if single:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    if targets.ndim != 2:
        raise ExportError("ctc_loss", "targets joined into one vector have no static shape for each sample", "pad them to (N, S)")
    steps, batch, _ = log_probs.shape
    inputs, lengths = (torch.as_tensor(n).reshape(-1).to(torch.int64) for n in (input_lengths, target_lengths))
    labels = F.pad(targets.to(torch.int64).unsqueeze(-1), (1, 0), value=blank).reshape(batch, -1)
    labels = F.pad(labels, (0, 1), value=blank)  # blank, t1, blank, t2, ..., blank
    emitted = log_probs.gather(2, labels.expand(steps, -1, -1))
    skips = F.pad((labels[:, 2:] != labels[:, :-2]) & (labels[:, 2:] != blank), (2, 0), value=False)
    nothing = torch.full_like(emitted[0], _NOTHING)
    alpha = torch.cat([emitted[0, :, :2], nothing[:, 2:]], 1)
    for t in range(1, steps):
        shifted = F.pad(alpha, (1, 0), value=_NOTHING)[:, :-1]
        skipped = torch.where(skips, F.pad(alpha, (2, 0), value=_NOTHING)[:, :-2], nothing)
        following = torch.logsumexp(torch.stack([alpha, shifted, skipped]), 0) + emitted[t]
        alpha = torch.where((t < inputs).unsqueeze(1), following, alpha)
    ends = alpha.gather(1, torch.stack([2 * lengths, (2 * lengths - 1).clamp(min=0)], 1))
    ends = torch.where(torch.stack([lengths >= 0, lengths > 0], 1), ends, torch.full_like(ends, _NOTHING))
    losses = -torch.logsumexp(ends, 1)
    impossible = losses > -_NOTHING / 2
    losses = torch.where(impossible, torch.full_like(losses, 0.0 if zero_infinity else float("inf")), losses)
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses[0] if single else losses
    return (losses / lengths.clamp(min=1)).mean()
