"""Models over image patches: ViT (Dosovitskiy et al. 2021, arXiv:2010.11929) and MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MLPMixer", "VisionTransformer", "mlp_mixer", "vit_b16"]


class _Mlp(nn.Sequential):  # type: ignore[misc]
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout))


class _EncoderBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.mlp = nn.Dropout(dropout), _Mlp(width, hidden, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], dropout_p=self.attention_dropout if self.training else 0.0)
        x = x + self.dropout(self.projection(y.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):  # type: ignore[misc]
    """A class token and patch embeddings through pre-norm encoder blocks.

    Args:
        image: side of the image.
        patch: side of a patch.
        layers: encoder blocks.
        width: embedding width.
        heads: attention heads.
        num_classes: classes.
        dropout: of embeddings, attention weights and residual branches.
    """

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        num_classes: int = 1000,
        dropout: float = 0.1,
    ) -> None:
        """Builds and initialises the network."""
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_EncoderBlock(width, heads, 4 * width, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, image, image) -> logits (N, num_classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1)
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.dropout(tokens + self.positions)))[:, 0])
        return logits


class _MixerBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, tokens: int, width: int, token_hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = _Mlp(tokens, token_hidden, dropout), _Mlp(width, 4 * width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MLPMixer(nn.Module):  # type: ignore[misc]
    """Perceptrons over patches and over channels in turn; arguments as of :class:`VisionTransformer`."""

    def __init__(self, image: int = 224, patch: int = 16, layers: int = 12, width: int = 768, num_classes: int = 1000, dropout: float = 0.1) -> None:
        """Builds the network with torch's initialisation."""
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        tokens = (image // patch) ** 2
        self.blocks = nn.Sequential(*(_MixerBlock(tokens, width, width // 2, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, image, image) -> logits (N, num_classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        logits: torch.Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def vit_b16(
    image: int = 224, patch: int = 16, layers: int = 12, width: int = 768, heads: int = 12, num_classes: int = 1000, dropout: float = 0.1
) -> VisionTransformer:
    """ViT-B/16: 86.6 million parameters."""
    return VisionTransformer(image, patch, layers, width, heads, num_classes, dropout)


def mlp_mixer(image: int = 224, patch: int = 16, layers: int = 12, width: int = 768, num_classes: int = 1000, dropout: float = 0.1) -> MLPMixer:
    """Mixer-B/16: 59.9 million parameters."""
    return MLPMixer(image, patch, layers, width, num_classes, dropout)
