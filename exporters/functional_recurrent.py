"""Recurrent layers whose options ONNX has no form for, in layers and operations that it has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.modules.rnn import _VF

from .errors import ExportError

__all__ = ["RECURRENT", "visible_dropouts"]

Layer = Callable[..., Any]
_KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def packed(*arguments: Any) -> None:
    """``pack_padded_sequence``, which cannot be: always raises ExportError."""
    raise ExportError("packed sequence", "its shapes depend on the lengths", "give padded sequences, and mask the loss by the lengths")


def _stacked(kind: str, projections: bool) -> Layer:
    """``_VF.<kind>``: dropout between the layers and, with ``projections``, those of an LSTM become visible operations."""
    original: Layer = getattr(_VF, kind)

    def layers(
        input: torch.Tensor,
        states: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: Any = None,
    ) -> tuple[torch.Tensor, ...]:
        if batch_first is None:
            packed(input)
        held = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        projected = projections and len(held) == 2 and held[0].shape[-1] != held[1].shape[-1]
        if not projected and not (dropout and train and num_layers > 1):
            found: tuple[torch.Tensor, ...] = original(input, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)
            return found
        directions = 2 if bidirectional else 1
        each = len(weights) // num_layers
        x, ends = input, []
        for layer in range(num_layers):
            own = tuple(s[layer * directions : (layer + 1) * directions] for s in held)
            part = weights[layer * each : (layer + 1) * each]
            if projected:
                x, *last = _projected(x, own, part, has_biases, directions, batch_first)
            else:
                start = own if len(held) == 2 else own[0]
                x, *last = original(x, start, part, has_biases, 1, 0.0, train, bidirectional, batch_first)
            ends.append(last)
            if dropout and train and layer < num_layers - 1:
                x = F.dropout(x, dropout, True)
        return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    return layers


def _projected(
    x: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], has_biases: bool, directions: int, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """One layer of an LSTM whose hidden state is projected (Sak et al. 2014), step by step.

    Shapes: x (T, N, F), or (N, T, F) with ``batch_first``; hidden (D, N, P), cell (D, N, H); weights of a direction (4H, F), (4H, P),
    two biases (4H,) where there are any, and (P, H).
    """
    x = x.transpose(0, 1) if batch_first else x
    each = len(weights) // directions
    outputs, hiddens, cells = [], [], []
    for d in range(directions):
        into, back, *biases, projection = weights[d * each : (d + 1) * each]
        gates_of_inputs = F.linear(x, into, biases[0] + biases[1] if has_biases else None)
        hidden, cell = (s[d] for s in states)
        steps = []
        for t in reversed(range(x.shape[0])) if d else range(x.shape[0]):
            i, f, g, o = (gates_of_inputs[t] + F.linear(hidden, back)).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = F.linear(o.sigmoid() * cell.tanh(), projection)
            steps.append(hidden)
        outputs.append(torch.stack(steps[::-1] if d else steps))
        hiddens.append(hidden)
        cells.append(cell)
    y = torch.cat(outputs, -1)
    return y.transpose(0, 1) if batch_first else y, torch.stack(hiddens), torch.stack(cells)


#: (module, name of a function of it, what takes its place)
RECURRENT = (*((_VF, kind, _stacked(kind, True)) for kind in _KINDS), (_VF, "_pack_padded_sequence", packed))


@contextlib.contextmanager
def visible_dropouts() -> Iterator[None]:
    """Within the block recurrent layers call ``F.dropout`` between them, and are torch's own otherwise."""
    with contextlib.ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(patch.object(_VF, kind, _stacked(kind, False)))
        yield
