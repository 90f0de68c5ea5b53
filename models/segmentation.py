"""Segmentation on VGG's convolutions: SegNet (Badrinarayanan et al. 2017, arXiv:1511.00561) and FCN-8s (Long et al. 2015, arXiv:1411.4038)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["FCN8", "SegNet", "fcn8", "segnet"]

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # (multiple of the width, convolutions)


class SegNet(nn.Module):  # type: ignore[misc]
    """An encoder whose pooling indices place the decoder's values (max unpooling).

    Args:
        num_classes: classes.
        width: channels of the first stage.
    """

    def __init__(self, num_classes: int = 12, width: int = 64) -> None:
        """Builds the network with torch's initialisation."""
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        encoders, decoders, inputs = [], [], 3
        for s, (multiple, count) in enumerate(_STAGES):
            channels = width * multiple
            encoders.append(self._stage(inputs, channels, channels, count))
            back = width * _STAGES[s - 1][0] if s else width
            decoders.append(self._stage(channels, channels, back, count))
            inputs = channels
        self.encoders, self.decoders = nn.ModuleList(encoders), nn.ModuleList(decoders[::-1])
        self.classifier = nn.Conv2d(width, num_classes, 3, padding=1)

    @staticmethod
    def _stage(inputs: int, hidden: int, outputs: int, count: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i in range(count):
            out = outputs if i == count - 1 else hidden
            layers += [nn.Conv2d(inputs, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            inputs = out
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes, H, W); H and W multiples of 32."""
        indices = []
        for encoder in self.encoders:
            x, where = self.pool(encoder(x))
            indices.append(where)
        for decoder, where in zip(self.decoders, indices[::-1], strict=True):
            x = decoder(self.unpool(x, where))
        logits: torch.Tensor = self.classifier(x)
        return logits


class FCN8(nn.Module):  # type: ignore[misc]
    """VGG-16 with convolutional classifiers, upsampled by transposed convolutions and fused with the scores of two earlier pools.

    Args:
        num_classes: classes.
        width: channels of the first stage.
        hidden: width of the layers that were fully connected.
        dropout: probability behind them.
    """

    def __init__(self, num_classes: int = 21, width: int = 64, hidden: int = 4096, dropout: float = 0.5) -> None:
        """Builds the network with torch's initialisation."""
        super().__init__()
        stages, inputs = [], 3
        for multiple, count in _STAGES:
            layers: list[nn.Module] = []
            for _ in range(count):
                layers += [nn.Conv2d(inputs, width * multiple, 3, padding=1), nn.ReLU()]
                inputs = width * multiple
            stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Sequential(
            *(nn.Conv2d(inputs, hidden, 7, padding=3), nn.ReLU(), nn.Dropout2d(dropout)),
            *(nn.Conv2d(hidden, hidden, 1), nn.ReLU(), nn.Dropout2d(dropout), nn.Conv2d(hidden, num_classes, 1)),
        )
        self.score3, self.score4 = nn.Conv2d(4 * width, num_classes, 1), nn.Conv2d(8 * width, num_classes, 1)
        self.up5 = nn.ConvTranspose2d(num_classes, num_classes, 4, 2, 1, bias=False)
        self.up4 = nn.ConvTranspose2d(num_classes, num_classes, 4, 2, 1, bias=False)
        self.up3 = nn.ConvTranspose2d(num_classes, num_classes, 16, 8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> logits (N, num_classes, H, W); H and W multiples of 32."""
        pooled = []
        for stage in self.stages:
            x = stage(x)
            pooled.append(x)
        y = self.up5(self.head(x)) + self.score4(pooled[3])
        y = self.up4(y) + self.score3(pooled[2])
        logits: torch.Tensor = self.up3(y)
        return logits


def segnet(num_classes: int = 12, width: int = 64) -> SegNet:
    """SegNet: 29 million parameters."""
    return SegNet(num_classes, width)


def fcn8(num_classes: int = 21, width: int = 64, hidden: int = 4096, dropout: float = 0.5) -> FCN8:
    """FCN-8s: 134 million parameters."""
    return FCN8(num_classes, width, hidden, dropout)
