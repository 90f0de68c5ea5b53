"""An LSTM language model (Zaremba et al. 2014, arXiv:1409.2329)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LSTMLanguageModel", "lstm_lm"]


class LSTMLanguageModel(nn.Module):  # type: ignore[misc]
    """Embedding, LSTM layers with dropout between them, and a decoder.

    Args:
        vocab: vocabulary size.
        hidden: width of the embedding and of each layer.
        layers: LSTM layers.
        dropout: probability before, between and behind them.
        tied: whether the decoder uses the embedding's weight.
    """

    def __init__(self, vocab: int = 10000, hidden: int = 650, layers: int = 2, dropout: float = 0.5, tied: bool = True) -> None:
        """Builds the network with torch's initialisation, the embedding's scaled down for the tied decoder."""
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers))
        self.decoder = nn.Linear(hidden, vocab)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (N, T) -> logits (N, T, vocab)."""
        x = self.dropout(self.embedding(input_ids))
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        logits: torch.Tensor = self.decoder(x)
        return logits


def lstm_lm(vocab: int = 10000, hidden: int = 650, layers: int = 2, dropout: float = 0.5, tied: bool = True) -> LSTMLanguageModel:
    """The medium model: 13.3 million parameters with a tied decoder."""
    return LSTMLanguageModel(vocab, hidden, layers, dropout, tied)
