"""Which form the gradient of a convolution's weights takes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxremat.exporters import InputSpec, export_torch
from onnxremat.targets import ORT_TRAINING_CUDA, Target
from onnxremat.training_graph import build_training_graph


def joint_graph(conv: torch.nn.Module, channels: int, size: int, batch: int = 2, **options: Any) -> ir.Graph:
    forward = export_torch(conv, [InputSpec.parse(f"x={batch}x{channels}x{size}x{size}")], loss="mse")
    return build_training_graph(forward, **options).graph


def kernels(graph: ir.Graph) -> int:
    return sum(node.op_type == "ConvGrad" for node in graph)


def over_channels(graph: ir.Graph) -> tuple[list[int], list[int], list[int]]:
    """Shapes of what the only convolution over rows, columns and channels reads and makes."""
    (made,) = [n for n in graph if n.op_type == "Conv" and n.outputs[0].shape is not None and len(n.outputs[0].shape) == 5]
    images, kernel, result = (list(v.shape or []) for v in (*made.inputs, made.outputs[0]) if v is not None)
    return images, kernel, result


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2}, {"padding": 3}], ids=str)
@pytest.mark.parametrize("channels, unfolded", [((8, 72), 8), ((32, 4), 32)])
def test_windows_are_unfolded_on_all_threads(channels: tuple[int, int], unfolded: int, options: dict[str, int]) -> None:
    """By a convolution whose third dimension are the channels: 9 results for each, no fewer than there are filters."""
    graph = joint_graph(torch.nn.Conv2d(*channels, 3, **options), channels[0], 29)  # type: ignore[arg-type]
    assert kernels(graph) == 0
    images, _, result = over_channels(graph)
    assert images[:2] == [1, 2] and images[-1] == unfolded
    assert result[2:] == [3, 3, unfolded]


def test_images_are_groups_where_a_filter_is_no_larger_than_a_map() -> None:
    """8 channels of 3 x 3 are 72 weights: no more than 9 x 9 positions, more than 8 x 8."""
    _, kernel, result = over_channels(joint_graph(torch.nn.Conv2d(8, 16, 3), 8, 11, batch=5))
    assert kernel == [5 * 16, 1, 9, 9, 1] and result == [1, 5 * 16, 3, 3, 8]
    _, kernel, result = over_channels(joint_graph(torch.nn.Conv2d(8, 16, 3), 8, 10, batch=5))
    assert kernel == [16, 5, 8, 8, 1] and result == [1, 16, 3, 3, 8]


def test_of_a_convolution_that_narrows_its_gradient_is_unfolded() -> None:
    images, kernel, result = over_channels(joint_graph(torch.nn.Conv2d(64, 16, 3, padding=1), 64, 12, batch=5))
    assert images == [1, 5, 12, 12, 16] and kernel == [5 * 64, 1, 12, 12, 1] and result == [1, 5 * 64, 3, 3, 16]
    images, *_ = over_channels(joint_graph(torch.nn.Conv2d(64, 16, 3, padding=1, stride=2), 64, 32, batch=5))
    assert images[-1] == 64


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
