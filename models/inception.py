"""Inception v1, GoogLeNet (Szegedy et al. 2015, arXiv:1409.4842, table 1), with batch normalization and its two auxiliary heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GoogLeNet", "inception_v1"]

# (1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection) of blocks 3a, 3b | 4a-4e | 5a, 5b
_BLOCKS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class _Inception(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int) -> None:
        super().__init__()
        self.branch1 = _conv(inputs, one, 1)
        self.branch3 = nn.Sequential(_conv(inputs, reduce3, 1), _conv(reduce3, three, 3))
        self.branch5 = nn.Sequential(_conv(inputs, reduce5, 1), _conv(reduce5, five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, pool, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), self.pooled(x)], 1)


class _Auxiliary(nn.Module):  # type: ignore[misc]
    def __init__(self, inputs: int, channels: int, hidden: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.conv, self.hidden = _conv(inputs, channels, 1), nn.Linear(16 * channels, hidden)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(F.adaptive_avg_pool2d(x, 4))
        logits: torch.Tensor = self.out(self.dropout(torch.relu(self.hidden(torch.flatten(y, 1)))))
        return logits


class GoogLeNet(nn.Module):  # type: ignore[misc]
    """Nine inception blocks; in training its loss is that of the classifier plus 0.3 times that of each auxiliary head.

    Args:
        num_classes: classes.
        scale: channels of every layer are divided by it.
        dropout: probability before the classifier; the auxiliary heads use 0.7, as the paper.
    """

    def __init__(self, num_classes: int = 1000, scale: int = 1, dropout: float = 0.4) -> None:
        """Builds the network with torch's initialisation."""
        super().__init__()
        self.stem = nn.Sequential(
            *(_conv(3, 64 // scale, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(64 // scale, 64 // scale, 1)),
            *(_conv(64 // scale, 192 // scale, 3), nn.MaxPool2d(3, 2, ceil_mode=True)),
        )
        channels = 192 // scale
        stages = []
        self.auxiliary = nn.ModuleList()
        for s, blocks in enumerate(_BLOCKS):
            stage = nn.ModuleList()
            for i, block in enumerate(blocks):
                widths = [max(1, c // scale) for c in block]
                stage.append(_Inception(channels, *widths))
                channels = widths[0] + widths[2] + widths[4] + widths[5]
                if s == 1 and i in (0, 3):
                    self.auxiliary.append(_Auxiliary(channels, 128 // scale, 1024 // scale, num_classes, 0.7))
            stages.append(stage)
        self.stages = nn.ModuleList(stages)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.dropout, self.classifier = nn.Dropout(dropout), nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """(N, 3, H, W), (N,) -> the loss and the logits (N, num_classes)."""
        x = self.stem(x)
        heads: list[torch.Tensor] = []
        for s, stage in enumerate(self.stages):
            x = self.pool(x) if s else x
            for i, block in enumerate(stage):
                x = block(x)
                if self.training and s == 1 and i in (0, 3):
                    heads.append(self.auxiliary[len(heads)](x))
        logits: torch.Tensor = self.classifier(self.dropout(x.mean((2, 3))))
        loss = F.cross_entropy(logits, labels)
        for head in heads:
            loss = loss + 0.3 * F.cross_entropy(head, labels)
        return {"loss": loss, "logits": logits}


def inception_v1(num_classes: int = 1000, scale: int = 1, dropout: float = 0.4) -> GoogLeNet:
    """GoogLeNet: 13 million parameters with its auxiliary heads."""
    return GoogLeNet(num_classes, scale, dropout)
