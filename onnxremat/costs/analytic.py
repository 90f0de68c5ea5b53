"""Seconds from a roofline (FLOPs and bytes moved), workspace from the kernels' formulas: for a machine that is not this one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph import nbytes, static_shape
from ..ops import traits
from ..problem import Costs
from .workspace import known_workspace


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as a roofline: Williams, Waterman and Patterson, CACM 2009.

    Attributes:
        flops: floating-point operations per second that dense kernels reach.
        bandwidth: bytes per second to and from memory.
        overhead: seconds that every kernel takes at least.
    """

    flops: float = 1e11
    bandwidth: float = 2e10
    overhead: float = 3e-6


#: A GPU of a data centre in float32: 15 TFLOP/s and 900 GB/s on paper.
GPU = Machine(flops=1e13, bandwidth=7e11, overhead=5e-6)


def flops(node: ir.Node) -> int:
    """Multiply-adds counted twice, of convolutions and matrix products; 0 for operators that memory bounds."""
    kind = node.op_type
    if kind in ("Conv", "ConvTranspose"):
        image = node.outputs[0] if kind == "Conv" else node.inputs[0]
        weight = static_shape(_required(node.inputs[1]))
        assert image is not None
        positions = static_shape(image)
        return 2 * positions[0] * int(np.prod(positions[2:])) * int(np.prod(weight))
    if kind == "ConvGrad":
        gradient, weight = static_shape(_required(node.inputs[0])), static_shape(_required(node.inputs[2]))
        wanted = sum(bool(v.name) for v in node.outputs[:2])
        return 2 * wanted * gradient[0] * int(np.prod(gradient[2:])) * int(np.prod(weight))
    if kind in ("MatMul", "Gemm", "FusedMatMul"):
        left = static_shape(_required(node.inputs[0]))
        transposed = "transA" in node.attributes and node.attributes["transA"].as_int() != 0
        inner = left[-2] if transposed and len(left) > 1 else left[-1]
        return 2 * inner * int(np.prod(static_shape(node.outputs[0]), dtype=np.int64))
    return 0


def analytic_costs(graph: ir.Graph, machine: Machine = Machine(), threads: int = 0) -> Costs:
    """Costs of every node from shapes alone; each of ``threads`` (0: one for each core) has scratch of its own."""
    seconds: dict[str, float] = {}
    workspace: dict[str, int] = {}
    for node in graph:
        name = str(node.name)
        if traits(node.op_type, node.domain).view:
            seconds[name] = 0.0
            continue
        moved = sum(nbytes(v) for v in node.inputs if v is not None) + sum(nbytes(v) for v in node.outputs if v.name)
        seconds[name] = machine.overhead + max(flops(node) / machine.flops, moved / machine.bandwidth)
        workspace[name] = known_workspace(node, threads) or 0
    return Costs(seconds, workspace, origin=f"analytic: {machine.flops:.3g} FLOP/s, {machine.bandwidth:.3g} B/s")


def _required(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value
