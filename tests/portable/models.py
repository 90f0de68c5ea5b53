"""Small models, one for each kind of kernel that stock ONNX Runtime lacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def mlp_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def wide_mlp() -> nn.Module:
    """A weight of more elements than an optimizer model is given at a time."""
    return nn.Sequential(nn.Linear(12, 300), nn.ReLU(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))


def tall() -> nn.Module:
    """Nothing but tensors of one size: 128 MiB each in a batch of 2^20."""
    return nn.Sequential(nn.Linear(4, 32), *(nn.Tanh() for _ in range(16)), nn.Linear(32, 4))


class _CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.Conv2d(8, 12, 1)
        self.grouped = nn.Conv2d(12, 12, 3, groups=3, dilation=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        y = F.max_pool2d(F.relu(self.norm2(self.conv2(y))), 3, stride=1, padding=1)  # windows that overlap
        y = F.gelu(self.pointwise(self.depthwise(y)))
        return self.head(self.grouped(y).mean((2, 3)))


def cnn() -> nn.Module:
    """Convolutions plain, strided, depthwise, grouped, dilated; batch normalization; both kinds of max pooling."""
    return _CNN()


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge, self.last = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        wide = F.interpolate(second[:, :4], scale_factor=2, mode="bilinear")
        return self.last(F.relu(self.merge(torch.cat([first, self.up(second), wide], 1))))


def unet() -> nn.Module:
    """Transposed convolution, concatenation, slices, resizing."""
    return _UNet()


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.RMSNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return (x @ self.tokens.weight.T).transpose(1, 2)


def transformer() -> nn.Module:
    """Embeddings (one tied), layer and RMS normalization, attention with dropout, GELU."""
    return _Transformer()


class _LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm() -> nn.Module:
    return _LSTM()
