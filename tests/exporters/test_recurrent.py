"""Options of recurrent layers: loss and gradients against torch, many layers to a module."""

from __future__ import annotations

import torch
from torch import nn

from tests.models.training import TOLERANCE, compare_training


class Layers(nn.Module):
    """The sum of what several recurrent layers make of one sequence, outputs and last states."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for i, layer in enumerate(self.layers.values()):
            y, last = layer(x)
            for part in (y, *(last if isinstance(last, tuple) else (last,))):
                losses.append((part * (0.5 * part + i + 1)).mean())
        return torch.stack(losses).sum()


def test_every_option_trains_as_torch() -> None:
    module = Layers(
        lstm_two_ways=nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True),
        lstm_no_bias=nn.LSTM(4, 3, bias=False),
        lstm_dropout=nn.LSTM(4, 3, 3, dropout=0.3, bidirectional=True),
        lstm_projected=nn.LSTM(4, 5, 2, proj_size=3, bidirectional=True, batch_first=True, dropout=0.3),
        gru_two_ways=nn.GRU(4, 3, 2, bidirectional=True, batch_first=True),
        gru_dropout=nn.GRU(4, 3, 2, dropout=0.3, bias=False),
        rnn=nn.RNN(4, 3, 2, bidirectional=True),
        rnn_relu=nn.RNN(4, 3, 2, nonlinearity="relu", bias=False, batch_first=True, dropout=0.3),
    )
    result = compare_training(module, ["x=5x3x4"], steps=1)
    assert result.worst[0] <= TOLERANCE, result.worst
    assert {*result.errors, *result.excused} == {"loss", *(name for name, _ in module.named_parameters())}
