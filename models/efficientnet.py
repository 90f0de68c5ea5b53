"""EfficientNet-B0 (Tan and Le 2019, arXiv:1905.11946, table 1) with stochastic depth."""

from __future__ import annotations

import math

import torch
from torch import nn

from .layers import SqueezeExcitation, StochasticDepth, scaled_channels

__all__ = ["EfficientNet", "efficientnet_b0"]

# (expansion, output channels, repeats, kernel, stride)
_STAGES = (
    (1, 16, 1, 3, 1),
    (6, 24, 2, 3, 2),
    (6, 40, 2, 5, 2),
    (6, 80, 3, 3, 2),
    (6, 112, 3, 5, 1),
    (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
)


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, active: bool = True) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), *([nn.SiLU()] if active else [])]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, expansion: int, outputs: int, kernel: int, stride: int, drop: float) -> None:
        super().__init__()
        wide = inputs * expansion
        self.layers = nn.Sequential(
            *(_conv_bn(inputs, wide, 1) if expansion != 1 else []),
            *_conv_bn(wide, wide, kernel, stride, wide),
            SqueezeExcitation(wide, max(1, inputs // 4), nn.SiLU, nn.Sigmoid),
            *_conv_bn(wide, outputs, 1, active=False),
        )
        self.drop = StochasticDepth(drop) if stride == 1 and inputs == outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y if self.drop is None else x + self.drop(y)


class EfficientNet(nn.Module):  # type: ignore[misc]
    """Stem, seven stages of inverted residuals with squeeze-and-excitation, head.

    Args:
        num_classes: classes.
        width: width multiplier.
        depth: multiplier of the repeats.
        dropout: probability before the classifier.
        stochastic_depth: probability of dropping the last residual branch; it grows linearly from 0.
    """

    def __init__(self, num_classes: int = 1000, width: float = 1.0, depth: float = 1.0, dropout: float = 0.2, stochastic_depth: float = 0.2) -> None:
        """Builds and initialises the network."""
        super().__init__()
        channels = scaled_channels(32 * width)
        layers = _conv_bn(3, channels, 3, 2)
        repeats = [math.ceil(count * depth) for _, _, count, _, _ in _STAGES]
        done = 0
        for (expansion, outputs, _, kernel, stride), count in zip(_STAGES, repeats, strict=True):
            for i in range(count):
                out = scaled_channels(outputs * width)
                drop = stochastic_depth * done / sum(repeats)
                layers.append(_Block(channels, expansion, out, kernel, stride if i == 0 else 1, drop))
                channels, done = out, done + 1
        self.features = nn.Sequential(*layers, *_conv_bn(channels, 4 * channels, 1))
        self.dropout, self.classifier = nn.Dropout(dropout), nn.Linear(4 * channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.classifier(self.dropout(self.features(x).mean((2, 3))))
        return logits


def efficientnet_b0(
    num_classes: int = 1000, width: float = 1.0, depth: float = 1.0, dropout: float = 0.2, stochastic_depth: float = 0.2
) -> EfficientNet:
    """EfficientNet-B0: 5.3 million parameters."""
    return EfficientNet(num_classes, width, depth, dropout, stochastic_depth)
