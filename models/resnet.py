"""Residual networks (He et al. 2016, arXiv:1512.03385, table 1) and their standard initialisation (arXiv:1502.01852)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["BasicBlock", "Bottleneck", "ResNet", "resnet18", "resnet50", "resnet101"]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """Width is also the number of output channels."""
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) -> (N, width, H/stride, W/stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):  # type: ignore[misc]
    """1x1, 3x3 (with the stride), 1x1 convolutions beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """The output has four times ``width`` channels."""
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) -> (N, 4 width, H/stride, W/stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):  # type: ignore[misc]
    """Stem, four stages, global average pool, optional dropout, classifier.

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: blocks per stage.
        num_classes: classes.
        width: channels of the first stage; the others double it.
        dropout: probability before the classifier; 0 leaves the layer out.
        channels: image channels.
        small_inputs: a 3x3 stride-1 stem without pooling, for images below about 64x64.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        num_classes: int = 1000,
        width: int = 64,
        dropout: float = 0.0,
        channels: int = 3,
        small_inputs: bool = False,
    ) -> None:
        """Builds and initialises the network."""
        super().__init__()
        self.conv1 = _conv(channels, width, 3) if small_inputs else _conv(channels, width, 7, 2)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
        self.maxpool = nn.Identity() if small_inputs else nn.MaxPool2d(3, 2, 1)
        stages, inputs = [], width
        for stage, depth in enumerate(depths):
            blocks = []
            for i in range(depth):
                blocks.append(block(inputs, width << stage, 2 if stage and not i else 1))
                inputs = (width << stage) * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W) -> logits (N, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))
        return logits


def resnet18(num_classes: int = 1000, width: int = 64, dropout: float = 0.0, small_inputs: bool = False) -> ResNet:
    """ResNet-18: 11.7 million parameters at width 64 and 1000 classes."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, width, dropout, small_inputs=small_inputs)


def resnet50(num_classes: int = 1000, width: int = 64, dropout: float = 0.0, small_inputs: bool = False) -> ResNet:
    """ResNet-50: 25.6 million parameters at width 64 and 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, width, dropout, small_inputs=small_inputs)


def resnet101(num_classes: int = 1000, width: int = 64, dropout: float = 0.0, small_inputs: bool = False) -> ResNet:
    """ResNet-101: 44.5 million parameters at width 64 and 1000 classes."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, width, dropout, small_inputs=small_inputs)
