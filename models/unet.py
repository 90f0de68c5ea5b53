"""U-Net (Ronneberger et al. 2015, arXiv:1505.04597, figure 1) with padded convolutions and BatchNorm."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["UNet", "unet"]


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):  # type: ignore[misc]
    """A contracting path of double convolutions and an expanding one, joined level by level.

    Args:
        channels: image channels.
        num_classes: classes per pixel.
        width: channels of the first level; each level below doubles them.
        depth: poolings; image sides must be multiples of ``2 ** depth``.
    """

    def __init__(self, channels: int = 3, num_classes: int = 2, width: int = 64, depth: int = 4) -> None:
        """Builds the network."""
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double_conv(i, o) for i, o in zip([channels, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_double_conv(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W) -> logits (N, num_classes, H, W)."""
        levels = []
        for i, block in enumerate(self.down):
            x = block(self.pool(x) if i else x)
            levels.append(x)
        levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([levels.pop(), up(x)], dim=1))
        logits: torch.Tensor = self.head(x)
        return logits


def unet(channels: int = 3, num_classes: int = 2, width: int = 64, depth: int = 4) -> UNet:
    """U-Net: 31 million parameters at width 64 and depth 4."""
    return UNet(channels, num_classes, width, depth)
