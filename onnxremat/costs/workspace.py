"""Scratch memory of the CPU kernels of ONNX Runtime 1.19.2 that is known exactly, by formula.

Each formula was read off a trace of the runtime's allocations; ``tests/costs`` measures them again.  Kernels that are not here are probed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ..graph import nbytes, static_shape
from ..nchwc import NCHWC
from ..ops import MS

#: MLAS's convolution gives each thread a block of 128 x 128 floats for its slice of the unfolded image.
_CONV_BLOCK = 4 * 128 * 128


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    assert value is not None
    return static_shape(value)


def _ints(node: ir.Node, name: str, default: int) -> list[int]:
    return list(node.attributes[name].as_ints()) if name in node.attributes else [default]


def _group(node: ir.Node) -> int:
    return node.attributes["group"].as_int() if "group" in node.attributes else 1


def _conv(node: ir.Node, threads: int) -> int:
    weight, positions = _shape(node.inputs[1]), int(np.prod(_shape(node.outputs[0])[2:]))
    pointwise = all(k == 1 for k in weight[2:]) and all(s == 1 for s in _ints(node, "strides", 1)) and not any(_ints(node, "pads", 0))
    depthwise = weight[1] == 1 and _group(node) == weight[0]
    if pointwise or depthwise:
        return 0
    if weight[0] // _group(node) > positions:
        return 4 * int(np.prod(weight[1:])) * positions
    return threads * _CONV_BLOCK


def _conv_grad(node: ir.Node, threads: int) -> int:
    # One image unfolded (im2col).
    weight, positions = _shape(node.inputs[2]), int(np.prod(_shape(node.inputs[0])[2:]))
    return 4 * positions * int(np.prod(weight[1:]))


def _conv_transpose(node: ir.Node, threads: int) -> int:
    weight, positions = _shape(node.inputs[1]), int(np.prod(_shape(node.inputs[0])[2:]))
    return 4 * int(np.prod(weight[1:])) * positions


_FORMULAS: dict[tuple[str, str], Callable[[ir.Node, int], int]] = {
    ("", "Conv"): _conv,
    (NCHWC, "Conv"): lambda node, threads: 0,
    (MS, "ConvGrad"): _conv_grad,
    ("", "ConvTranspose"): _conv_transpose,
    # Its scratch is not in the arena: see heap_bytes.
    ("", "ScatterElements"): lambda node, threads: 0,
    # The two branches are made separately, then merged.
    ("", "Where"): lambda node, threads: 2 * nbytes(node.outputs[0]),
}


#: What a convolution of cuDNN may take where it is not given all it wants (``cudnn_conv_use_max_workspace=0``).
_CUDNN_BYTES = 32 * 2**20


def gpu_workspace(graph: ir.Graph) -> dict[str, int]:
    """Node name -> scratch bytes on CUDA: the limit for convolutions and their gradients; others are not known, and not counted."""
    return {str(node.name): _CUDNN_BYTES for node in graph if node.op_type in ("Conv", "ConvTranspose", "ConvGrad", "ConvTransposeGrad")}


#: What the runtime keeps on the heap, until a run ends, of a node and the helpers that force its order: of ResNet-50 and BERT, with 4,900 nodes
#: and 16,000 helpers, about 4 MiB.  Fitted to these two.
_TOKEN_BYTES = 800


def heap_bytes(graph: ir.Graph, tokens: bool = False) -> int:
    """Scratch bytes that kernels take from the heap instead of the arena.

    ScatterElements copies its indices into a vector.  What the heap gave once it keeps, so this counts during the whole step.  A vector takes
    the place of the one before it, unless nodes are ordered by ``tokens``: then so many small objects are made in between that each gets its own.
    """
    vectors = [8 * int(np.prod(_shape(n.inputs[1]), dtype=np.int64)) for n in graph if n.op_type == "ScatterElements"]
    return sum(vectors) + _TOKEN_BYTES * len(graph) if tokens else max(vectors, default=0)


def known_workspace(node: ir.Node, threads: int = 0) -> int | None:
    """Scratch bytes of a node's kernel; None where there is no formula.

    Args:
        node: with static shapes.
        threads: intra-op threads; 0 is one for each core.
    """
    formula = _FORMULAS.get((node.domain, node.op_type))
    return None if formula is None else formula(node, threads or os.cpu_count() or 1)
