"""The demonstration: a ResNet-18 for scikit-learn's digits, enlarged to 3x64x64."""

from __future__ import annotations

from .resnet import ResNet, resnet18

__all__ = ["resnet18_digits"]


def resnet18_digits() -> ResNet:
    """ResNet-18 with BatchNorm and dropout, for images (N, 3, 64, 64) of 10 classes."""
    return resnet18(num_classes=10, dropout=0.1)
