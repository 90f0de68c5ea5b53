"""Each training kernel of ONNX Runtime against what the target ``onnxruntime`` writes in its place: milliseconds, and how far apart.

    python -m benchmarks.lowerings [--rounds 7] [--threads 2]

``ort-training`` keeps a kernel unless the standard operators are faster; the last column says which of the two that is here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from benchmarks.common import difference, machine, session_of, table, timing_options
from benchmarks.kernels import Conv, measure
from onnxremat.graph import GraphBuilder
from onnxremat.ops import MS
from onnxremat.runtime.session import BoundSession
from onnxremat.targets import ONNXRUNTIME, lower

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Kernel:
    """One node: operator, shapes of its inputs, shape of each output (None: not asked for), attributes.

    Attributes:
        fill: input -> what it holds where random numbers will not do.
    """

    name: str
    kind: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...] | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = MS
    fill: Mapping[int, Array] = field(default_factory=dict)


def weight_gradient(conv: Conv) -> Kernel:
    name = f"ConvGrad dW {conv.batch}x{conv.inputs}x{conv.size}, {conv.outputs} of {conv.window}x{conv.window}/{conv.stride}"
    name += f", group {conv.group}" if conv.group > 1 else ""
    return Kernel(name, "ConvGrad", (conv.y, conv.x, conv.w), (None, conv.w), conv.geometry)


def batch_norm_gradient(shape: tuple[int, ...]) -> Kernel:
    vector = (shape[1],)
    inputs, outputs = (shape, shape, vector, vector, vector), (shape, vector, vector)
    deviation = {4: np.ones(vector, np.float32)}
    return Kernel(f"BatchNormalizationGrad {shape}", "BatchNormalizationGrad", inputs, outputs, {"epsilon": 1e-5}, fill=deviation)


def pooling_gradient(shape: tuple[int, int, int, int], window: int, stride: int) -> Kernel:
    """Every window's maximum at its first pixel, which no other window has where the stride is the window."""
    n, c, size, _ = shape
    out = (size - window) // stride + 1
    rows = np.arange(out) * stride
    at = np.arange(n * c).reshape(n, c, 1, 1) * size * size + rows.reshape(-1, 1) * size + rows
    pooled = (n, c, out, out)
    attributes = {"kernel_shape": [window] * 2, "strides": [stride] * 2}
    return Kernel(f"MaxPoolGrad {shape}, {window}x{window}/{stride}", "MaxPoolGrad", (pooled, pooled), (shape,), attributes, "", {1: at})


KERNELS = [
    weight_gradient(Conv(8, 64, 64, 56)),
    weight_gradient(Conv(8, 256, 256, 14)),
    weight_gradient(Conv(8, 64, 128, 56, 3, 2)),
    *map(weight_gradient, [Conv(8, 128, 128, 28), Conv(8, 512, 512, 7), Conv(4, 64, 64, 128), Conv(4, 1024, 1024, 8)]),
    *map(weight_gradient, [Conv(4, 128, 64, 128), Conv(4, 512, 256, 32), Conv(16, 128, 32, 28), Conv(8, 3, 64, 112)]),
    weight_gradient(Conv(8, 256, 64, 56, 1)),
    weight_gradient(Conv(8, 128, 128, 28, 3, 1, 128)),
    pooling_gradient((8, 64, 112, 112), 2, 2),
    pooling_gradient((8, 64, 113, 113), 3, 2),
    batch_norm_gradient((8, 64, 56, 56)),
    Kernel(
        "FusedMatMul, second transposed",
        "FusedMatMul",
        ((8, 8, 256, 64), (8, 8, 256, 64)),
        ((8, 8, 256, 256),),
        {"transB": 1, "alpha": 0.125},
    ),
]


def compiled(kernel: Kernel, lowered: bool, threads: int) -> BoundSession:
    """A session over the kernel, or over what is written in its place."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, MS: 1}, name="kernel")
    op, rng, arrays = GraphBuilder(graph), np.random.default_rng(0), {}
    for i, shape in enumerate(kernel.inputs):
        array = kernel.fill.get(i, rng.standard_normal(shape).astype(np.float32))
        kind = ir.DataType.from_numpy(array.dtype)
        graph.inputs.append(ir.Value(name=f"x{i}", shape=ir.Shape(shape), type=ir.TensorType(kind)))
        arrays[f"x{i}"] = np.ascontiguousarray(array)
    names = ["" if shape is None else f"y{i}" for i, shape in enumerate(kernel.outputs)]
    like = [None if shape is None else (shape, ir.DataType.FLOAT) for shape in kernel.outputs]
    made = op.node(kernel.kind, *graph.inputs, domain=kernel.domain, outputs=names, like=like, **kernel.attributes)
    graph.outputs.extend(v.value for v in made if v.value.name)
    if lowered:
        lower(graph, ONNXRUNTIME)
    return session_of(graph, arrays, threads)


def main() -> None:
    options = timing_options(__doc__)
    print(machine())
    rows = []
    for kernel in KERNELS:
        sides = [compiled(kernel, lowered, options.threads) for lowered in (False, True)]
        runs: list[Callable[[], None]] = [side.run_discarding for side in sides]
        seconds = [statistics.median(measure(run, options.rounds)) for run in runs]
        faster = "kernel" if seconds[0] <= seconds[1] else "standard"
        rows.append([kernel.name, *[f"{s * 1e3:.1f}" for s in seconds], f"{seconds[1] / seconds[0]:.2f}", f"{difference(*sides):.0e}", faster])
        print(table(["node", "kernel ms", "standard ms", "ratio", "apart", "faster"], rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(["node", "kernel ms", "standard ms", "ratio", "apart", "faster"], rows))


if __name__ == "__main__":
    main()
