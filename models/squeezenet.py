"""SqueezeNet 1.1 (Iandola et al. 2016, arXiv:1602.07360, and the authors' later revision with fewer operations)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SqueezeNet", "squeezenet"]


class _Fire(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(inputs, squeezed, 1), nn.ReLU())
        self.expand1, self.expand3 = nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.squeeze(x)
        return torch.relu(torch.cat([self.expand1(y), self.expand3(y)], 1))


class SqueezeNet(nn.Module):  # type: ignore[misc]
    """Fire modules between max poolings, classified by a convolution.

    Args:
        num_classes: classes.
        width: channels of the stem; the squeeze and expand layers scale with it.
        dropout: probability before the classifier.
    """

    def __init__(self, num_classes: int = 1000, width: int = 64, dropout: float = 0.5) -> None:
        """Builds the network with torch's initialisation."""
        super().__init__()

        def fire(inputs: int, size: int) -> _Fire:
            return _Fire(inputs * width, size * width // 4, size * width)

        self.features = nn.Sequential(
            *(nn.Conv2d(3, width, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(fire(1, 1), fire(2, 1), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(fire(2, 2), fire(4, 2), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(fire(4, 3), fire(6, 3), fire(6, 4), fire(8, 4)),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Conv2d(8 * width, num_classes, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.classifier(self.features(x)).mean((2, 3))
        return logits


def squeezenet(num_classes: int = 1000, width: int = 64, dropout: float = 0.5) -> SqueezeNet:
    """SqueezeNet 1.1: 1.24 million parameters."""
    return SqueezeNet(num_classes, width, dropout)
