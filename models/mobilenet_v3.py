"""MobileNetV3 (Howard et al. 2019, arXiv:1905.02244, tables 1 and 2)."""

from __future__ import annotations

import torch
from torch import nn

from .layers import SqueezeExcitation, scaled_channels

__all__ = ["MobileNetV3", "mobilenet_v3_large", "mobilenet_v3_small"]

# (kernel, expanded channels, output channels, squeeze-and-excitation, hard swish, stride)
_LARGE = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)
_SMALL = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int, groups: int, activation: type[nn.Module] | None) -> list[nn.Module]:
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01),
    ]
    return layers if activation is None else [*layers, activation()]


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, kernel: int, expanded: int, outputs: int, squeeze: bool, swish: bool, stride: int) -> None:
        super().__init__()
        activation = nn.Hardswish if swish else nn.ReLU
        layers = _conv_bn(inputs, expanded, 1, 1, 1, activation) if expanded != inputs else []
        layers += _conv_bn(expanded, expanded, kernel, stride, expanded, activation)
        if squeeze:
            layers.append(SqueezeExcitation(expanded, scaled_channels(expanded / 4), nn.ReLU, nn.Hardsigmoid))
        self.layers = nn.Sequential(*layers, *_conv_bn(expanded, outputs, 1, 1, 1, None))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return x + y if self.residual else y


class MobileNetV3(nn.Module):  # type: ignore[misc]
    """Stem, inverted residual blocks with squeeze-and-excitation, and a head that widens after pooling.

    Args:
        large: the large or the small variant.
        num_classes: classes.
        multiplier: width multiplier.
        dropout: probability before the classifier.
    """

    def __init__(self, large: bool = True, num_classes: int = 1000, multiplier: float = 1.0, dropout: float = 0.2) -> None:
        """Builds and initialises the network."""
        super().__init__()
        width = scaled_channels(16 * multiplier)
        layers = _conv_bn(3, width, 3, 2, 1, nn.Hardswish)
        for kernel, expanded, outputs, squeeze, swish, stride in _LARGE if large else _SMALL:
            wide, out = scaled_channels(expanded * multiplier), scaled_channels(outputs * multiplier)
            layers.append(_Block(width, kernel, wide, out, squeeze, swish, stride))
            width = out
        self.features = nn.Sequential(*layers, *_conv_bn(width, 6 * width, 1, 1, 1, nn.Hardswish))
        hidden = scaled_channels((1280 if large else 1024) * multiplier)
        self.classifier = nn.Sequential(nn.Linear(6 * width, hidden), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(hidden, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes)."""
        logits: torch.Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def mobilenet_v3_large(num_classes: int = 1000, multiplier: float = 1.0, dropout: float = 0.2) -> MobileNetV3:
    """MobileNetV3 large: 5.5 million parameters."""
    return MobileNetV3(True, num_classes, multiplier, dropout)


def mobilenet_v3_small(num_classes: int = 1000, multiplier: float = 1.0, dropout: float = 0.2) -> MobileNetV3:
    """MobileNetV3 small: 2.5 million parameters."""
    return MobileNetV3(False, num_classes, multiplier, dropout)
