"""Custom autograd Functions that are what their forward's derivative is train; others are refused (test_bad_input)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.training import TOLERANCE, compare_training


class Tanh(torch.autograd.Function):
    """With a ctx, as older code has it, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        y = torch.tanh(factor * x)
        ctx.save_for_backward(y)
        ctx.factor = factor
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return grad * ctx.factor * (1 - y * y), None


class Product(torch.autograd.Function):
    """With setup_context, several inputs and outputs."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a * b, a + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, product: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return product * b + total, product * a + total


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product, total = Product.apply(self.first(x), self.second(x))
        return Tanh.apply(product, 0.5) + total


def test_they_train_as_torch() -> None:
    result = compare_training(Net(), ["x=2x4"], (), "mse", steps=1)
    assert result.worst[0] <= TOLERANCE
    assert torch.autograd.Function.apply.__self__ is torch.autograd.Function
