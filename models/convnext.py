"""ConvNeXt (Liu et al. 2022, arXiv:2201.03545)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .layers import StochasticDepth

__all__ = ["ConvNeXt", "convnext_tiny"]


class _ChannelNorm(nn.LayerNorm):  # type: ignore[misc]
    """LayerNorm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, channels: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.layers = nn.Sequential(nn.LayerNorm(channels, eps=1e-6), nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))
        self.drop = StochasticDepth(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(self.depthwise(x).permute(0, 2, 3, 1)) * self.scale
        return x + self.drop(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):  # type: ignore[misc]
    """Patch stem, four stages of depthwise 7x7 blocks with a LayerNorm and a 2x2 convolution between them.

    Args:
        depths: blocks per stage.
        widths: channels per stage.
        num_classes: classes.
        stochastic_depth: probability of dropping the last residual branch; it grows linearly from 0.
    """

    def __init__(self, depths: Sequence[int], widths: Sequence[int], num_classes: int = 1000, stochastic_depth: float = 0.1) -> None:
        """Builds and initialises the network."""
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), _ChannelNorm(widths[0], eps=1e-6)]
        done = 0
        for stage, depth in enumerate(depths):
            if stage:
                layers += [_ChannelNorm(widths[stage - 1], eps=1e-6), nn.Conv2d(widths[stage - 1], widths[stage], 2, 2)]
            for _ in range(depth):
                layers.append(_Block(widths[stage], stochastic_depth * done / max(1, sum(depths) - 1)))
                done += 1
        self.features = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes); H and W multiples of 32."""
        logits: torch.Tensor = self.head(self.norm(self.features(x).mean((2, 3))))
        return logits


def convnext_tiny(
    num_classes: int = 1000,
    depths: Sequence[int] = (3, 3, 9, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    stochastic_depth: float = 0.1,
) -> ConvNeXt:
    """ConvNeXt-T: 28.6 million parameters."""
    return ConvNeXt(depths, widths, num_classes, stochastic_depth)
