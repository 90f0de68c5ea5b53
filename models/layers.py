"""Layers that several models of the zoo share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["SqueezeExcitation", "StochasticDepth", "scaled_channels"]


def scaled_channels(channels: float, divisor: int = 8) -> int:
    """The nearest multiple of ``divisor``, never more than a tenth below (Howard et al. 2019)."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class StochasticDepth(nn.Module):  # type: ignore[misc]
    """Drops a whole residual branch per sample in training (Huang et al. 2016, arXiv:1603.09382), the others scaled up.

    Args:
        p: probability of dropping.
    """

    def __init__(self, p: float) -> None:
        """Keeps ``p``."""
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, ...) -> (N, ...): one draw for each sample."""
        if not self.training or not self.p:
            return x
        return x * F.dropout(x.new_ones(x.shape[0], *(1,) * (x.ndim - 1)), self.p)


class SqueezeExcitation(nn.Module):  # type: ignore[misc]
    """Channel weights from the global average (Hu et al. 2018, arXiv:1709.01507).

    Args:
        channels: of the input.
        reduced: width of the bottleneck.
        activation: inside the bottleneck.
        gate: makes weights of its output.
    """

    def __init__(self, channels: int, reduced: int, activation: type[nn.Module], gate: type[nn.Module]) -> None:
        """Two 1x1 convolutions."""
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, reduced, 1), nn.Conv2d(reduced, channels, 1)
        self.activation, self.gate = activation(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        weights = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.expand(self.activation(self.reduce(weights))))
