"""DenseNet-121 (Huang et al. 2017, arXiv:1608.06993, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["DenseNet", "densenet121"]


class _DenseLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = self.conv2(F.relu(self.norm2(y)))
        return torch.cat([x, self.dropout(y)], 1)


class DenseNet(nn.Module):  # type: ignore[misc]
    """Stem, dense blocks with halving transitions between them, classifier.

    Args:
        depths: layers per block.
        growth: channels that each layer adds.
        num_classes: classes.
        dropout: probability behind each layer.
    """

    def __init__(self, depths: Sequence[int] = (6, 12, 24, 16), growth: int = 32, num_classes: int = 1000, dropout: float = 0.0) -> None:
        """Builds the network with torch's initialisation."""
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        for block, depth in enumerate(depths):
            if block:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(_DenseLayer(channels, growth, dropout))
                channels += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def densenet121(num_classes: int = 1000, growth: int = 32, depths: Sequence[int] = (6, 12, 24, 16), dropout: float = 0.0) -> DenseNet:
    """DenseNet-121: 8.0 million parameters."""
    return DenseNet(depths, growth, num_classes, dropout)
