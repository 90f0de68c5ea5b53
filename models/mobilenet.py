"""MobileNet V1 (Howard et al. 2017, arXiv:1704.04861, table 1) and V2 (Sandler et al. 2018, arXiv:1801.04381, table 2)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MobileNetV1", "MobileNetV2", "mobilenet_v1", "mobilenet_v2"]

# V1: (output channels, stride) of each depthwise-separable block
_V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *(((512, 1),) * 5), (1024, 2), (1024, 1))
# V2: (expansion, output channels, repeats, stride)
_V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _scaled(channels: int, multiplier: float) -> int:
    """Channels times the width multiplier, to the nearest multiple of 8, never more than a tenth below."""
    target = channels * multiplier
    rounded = max(8, int(target + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * target else rounded


def _conv_bn(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] | None = nn.ReLU6
) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    if activation is not None:
        layers.append(activation())
    return nn.Sequential(*layers)


def _initialise(module: nn.Module) -> None:
    for sub in module.modules():
        if isinstance(sub, nn.Conv2d):
            nn.init.kaiming_normal_(sub.weight, mode="fan_out")


class MobileNetV1(nn.Module):  # type: ignore[misc]
    """A stem and thirteen depthwise-separable blocks.

    Args:
        num_classes: classes.
        multiplier: width multiplier.
    """

    def __init__(self, num_classes: int = 1000, multiplier: float = 1.0) -> None:
        """Builds and initialises the network."""
        super().__init__()
        width = _scaled(32, multiplier)
        layers = [_conv_bn(3, width, 3, 2, activation=nn.ReLU)]
        for channels, stride in _V1:
            outputs = _scaled(channels, multiplier)
            layers.append(_conv_bn(width, width, 3, stride, groups=width, activation=nn.ReLU))
            layers.append(_conv_bn(width, outputs, 1, activation=nn.ReLU))
            width = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, num_classes)
        _initialise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return logits


class InvertedResidual(nn.Module):  # type: ignore[misc]
    """Expand by 1x1, filter depthwise, project by 1x1; a shortcut where shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        """``expansion`` 1 leaves the first convolution out."""
        super().__init__()
        hidden = inputs * expansion
        layers = [] if expansion == 1 else [_conv_bn(inputs, hidden, 1)]
        layers += [_conv_bn(hidden, hidden, 3, stride, groups=hidden), _conv_bn(hidden, outputs, 1, activation=None)]
        self.conv = nn.Sequential(*layers)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) -> (N, outputs, H/stride, W/stride)."""
        y: torch.Tensor = self.conv(x)
        return x + y if self.shortcut else y


class MobileNetV2(nn.Module):  # type: ignore[misc]
    """A stem, seventeen inverted residuals, a 1x1 head, dropout, classifier.

    Args:
        num_classes: classes.
        multiplier: width multiplier.
        dropout: probability before the classifier.
    """

    def __init__(self, num_classes: int = 1000, multiplier: float = 1.0, dropout: float = 0.2) -> None:
        """Builds and initialises the network."""
        super().__init__()
        width, last = _scaled(32, multiplier), _scaled(1280, max(1.0, multiplier))
        layers: list[nn.Module] = [_conv_bn(3, width, 3, 2)]
        for expansion, channels, repeats, stride in _V2:
            outputs = _scaled(channels, multiplier)
            for i in range(repeats):
                layers.append(InvertedResidual(width, outputs, stride if i == 0 else 1, expansion))
                width = outputs
        layers.append(_conv_bn(width, last, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))
        _initialise(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.classifier(self.features(x).mean(dim=(2, 3)))
        return logits


def mobilenet_v1(num_classes: int = 1000, multiplier: float = 1.0) -> MobileNetV1:
    """MobileNet V1: 4.2 million parameters at multiplier 1."""
    return MobileNetV1(num_classes, multiplier)


def mobilenet_v2(num_classes: int = 1000, multiplier: float = 1.0, dropout: float = 0.2) -> MobileNetV2:
    """MobileNet V2: 3.5 million parameters at multiplier 1."""
    return MobileNetV2(num_classes, multiplier, dropout)
