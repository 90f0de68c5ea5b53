"""VGG-16 and VGG-19 (Simonyan and Zisserman 2015, arXiv:1409.1556, configurations D and E)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["VGG", "vgg16", "vgg19"]

# (multiple of the width, convolutions) of each stage
_VGG16 = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
_VGG19 = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))


class VGG(nn.Module):  # type: ignore[misc]
    """3x3 convolutions in five pooled stages, then three fully connected layers.

    Args:
        stages: (multiple of the width, convolutions) of each stage.
        num_classes: classes.
        width: channels of the first stage.
        hidden: width of the fully connected layers.
        pooled: side of the feature map that they see (7 in the paper).
        batch_norm: a BatchNorm after each convolution.
        dropout: probability between the fully connected layers.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, int]] = _VGG16,
        num_classes: int = 1000,
        width: int = 64,
        hidden: int = 4096,
        pooled: int = 7,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        """Builds and initialises the network."""
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for multiple, count in stages:
            for _ in range(count):
                layers.append(nn.Conv2d(inputs, width * multiple, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width * multiple))
                layers.append(nn.ReLU())
                inputs = width * multiple
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(inputs * pooled * pooled, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes); H and W multiples of 32 * pooled."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
        return logits


def vgg16(num_classes: int = 1000, width: int = 64, hidden: int = 4096, pooled: int = 7, batch_norm: bool = False, dropout: float = 0.5) -> VGG:
    """VGG-16: 138 million parameters as in the paper."""
    return VGG(_VGG16, num_classes, width, hidden, pooled, batch_norm, dropout)


def vgg19(num_classes: int = 1000, width: int = 64, hidden: int = 4096, pooled: int = 7, batch_norm: bool = False, dropout: float = 0.5) -> VGG:
    """VGG-19: 144 million parameters."""
    return VGG(_VGG19, num_classes, width, hidden, pooled, batch_norm, dropout)
