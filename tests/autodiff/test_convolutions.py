"""Which form the gradient of a convolution's weights takes."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from onnxremat.costs.workspace import known_workspace
from onnxremat.exporters import InputSpec, export_torch
from onnxremat.training_graph import build_training_graph


def weight_gradient(conv: torch.nn.Module, channels: int, size: int) -> ir.Node:
    forward = export_torch(conv, [InputSpec.parse(f"x=2x{channels}x{size}x{size}")], loss="mse")
    graph = build_training_graph(forward).graph
    (node,) = [n for n in graph if n.op_type == "ConvGrad"]
    return node


@pytest.mark.parametrize("channels", [(32, 4), (4, 32)])
def test_the_narrower_side_is_unfolded(channels: tuple[int, int]) -> None:
    """The kernel unfolds one image, 9 taps of 4 channels: as much as scratch memory, whichever side is the narrow one."""
    node = weight_gradient(torch.nn.Conv2d(*channels, 3, padding=1), channels[0], 32)
    assert known_workspace(node) == 9 * 4 * 32 * 32 * 4


def test_a_small_map_keeps_the_plain_form() -> None:
    """Turning the gradient of many weights around costs more than a small map saves."""
    node = weight_gradient(torch.nn.Conv2d(64, 32, 3, padding=1), 64, 8)
    assert known_workspace(node) == 9 * 64 * 8 * 8 * 4


@pytest.mark.parametrize("options", [{"stride": 2}, {"groups": 4}, {"padding": 3}], ids=str)
def test_no_exchange_without_an_adjoint_convolution(options: dict[str, int]) -> None:
    node = weight_gradient(torch.nn.Conv2d(32, 4, 3, **options), 32, 32)  # type: ignore[arg-type]
    window = node.inputs[1]
    assert window is not None and window.shape is not None and window.shape[1] == 32
