"""Which form the gradient of a convolution's weights takes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxremat.exporters import InputSpec, export_torch
from onnxremat.targets import ORT_TRAINING_CUDA, Target
from onnxremat.training_graph import build_training_graph


def joint_graph(conv: torch.nn.Module, channels: int, size: int, **options: Any) -> ir.Graph:
    forward = export_torch(conv, [InputSpec.parse(f"x=2x{channels}x{size}x{size}")], loss="mse")
    return build_training_graph(forward, **options).graph


def kernels(graph: ir.Graph) -> int:
    return sum(node.op_type == "ConvGrad" for node in graph)


@pytest.mark.parametrize("channels", [(8, 72), (32, 4)])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2}, {"padding": 3}], ids=str)
def test_windows_are_unfolded_on_all_threads(channels: tuple[int, int], options: dict[str, int]) -> None:
    """By a convolution whose third dimension are the channels: 9 results for each, no fewer than there are filters."""
    graph = joint_graph(torch.nn.Conv2d(*channels, 3, **options), channels[0], 29)  # type: ignore[arg-type]
    assert kernels(graph) == 0
    (made,) = [n for n in graph if n.op_type == "Conv" and n.outputs[0].shape is not None and len(n.outputs[0].shape) == 5]
    images, gradient, result = (list(v.shape or []) for v in (*made.inputs, made.outputs[0]) if v is not None)
    assert images[:2] == [1, 2] and images[-1] == channels[0]
    assert gradient[:2] == [channels[1], 2] and gradient[-1] == 1
    assert result == [1, channels[1], 3, 3, channels[0]]


@pytest.mark.parametrize(
    "conv, channels, size",
    [
        (torch.nn.Conv2d(3, 16, 3), 3, 32),  # few channels
        (torch.nn.Conv2d(16, 16, 1), 16, 32),  # nothing to unfold
        (torch.nn.Conv2d(16, 16, 3, groups=16), 16, 32),
        (torch.nn.Conv2d(16, 16, 3), 16, 8),  # 2 x 6 x 6 positions
        (torch.nn.Conv2d(8, 73, 3), 8, 32),  # 72 results: the whole batch would be unfolded at once
    ],
    ids=str,
)
def test_the_kernel_stays_where_it_is_faster_or_leaner(conv: torch.nn.Module, channels: int, size: int) -> None:
    assert kernels(joint_graph(conv, channels, size)) == 1


def test_cuda_keeps_its_kernel() -> None:
    target: Target = ORT_TRAINING_CUDA
    assert kernels(joint_graph(torch.nn.Conv2d(8, 8, 3), 8, 32, target=target)) == 1
