"""Gradient kernels that ONNX Runtime's builder uses against the nodes that onnxremat's rules write instead: milliseconds and nodes.

    python -m benchmarks.gradients [--rounds 7] [--threads 2]

A rule is taken where its nodes are faster, or need less scratch memory, than the kernel: why the joint graph has more nodes
(``benchmarks/joint_graph.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.common import difference, machine, session_of, table, timing_options
from benchmarks.kernels import measure
from onnxremat.autodiff import differentiate
from onnxremat.graph import GraphBuilder, static_shape
from onnxremat.normalize import normalize, remove_dead
from onnxremat.ops import MS
from onnxremat.runtime.session import BoundSession
from onnxremat.targets import ORT_TRAINING, lower


@dataclass(frozen=True)
class Gradient:
    """An operator and the kernel of its gradient.

    Attributes:
        operator: its type.
        inputs: shapes of its inputs, all differentiated.
        kernel: the gradient's type.
        reads: what the kernel reads: "g", or an input or output of the operator as "x0" or "y1".
        writes: which inputs' gradients it gives, in order.
        attributes: of both.
        domain: of the operator.
    """

    operator: str
    inputs: tuple[tuple[int, ...], ...]
    kernel: str
    reads: tuple[str, ...]
    writes: tuple[int, ...] = (0,)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    outputs: int = 1
    kernel_attributes: Mapping[str, Any] | None = None


def conv(batch: int, inputs: int, outputs: int, size: int) -> Gradient:
    window = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4, "dilations": [1, 1], "group": 1}
    shapes = ((batch, inputs, size, size), (outputs, inputs, 3, 3), (outputs,))
    return Gradient("Conv", shapes, "ConvGrad", ("g", "x0", "x1"), (0, 1, 2), window)


ROWS, SCORES, HIDDEN = (8, 128, 256), (8, 8, 128, 128), (8, 128, 1024)
GRADIENTS = [
    Gradient("Relu", ((8, 64, 112, 112),), "ReluGrad", ("g", "y0")),
    Gradient("Softmax", (SCORES,), "SoftmaxGrad_13", ("g", "y0"), attributes={"axis": -1}),
    Gradient("Gelu", (HIDDEN,), "FastGeluGrad", ("g", "x0"), attributes={"approximate": "tanh"}, kernel_attributes={}),
    Gradient("Gelu", (HIDDEN,), "GeluGrad", ("g", "x0"), kernel_attributes={}),
    Gradient("LayerNormalization", (ROWS, ROWS[-1:], ROWS[-1:]), "LayerNormalizationGrad", ("g", "x0", "x1", "y1", "y2"), (0, 1, 2), outputs=3),
    conv(8, 64, 64, 112),
    conv(8, 512, 512, 14),
]


def compiled(gradient: Gradient, by_kernel: bool, threads: int) -> tuple[BoundSession, int]:
    """A session over operator and gradient, and its number of nodes."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, MS: 1}, name="gradient")
    op, rng, arrays = GraphBuilder(graph), np.random.default_rng(0), {}

    def feed(name: str, shape: tuple[int, ...]) -> ir.Value:
        graph.inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT)))
        arrays[name] = rng.standard_normal(shape).astype(np.float32)
        return graph.inputs[-1]

    xs = [feed(f"x{i}", shape) for i, shape in enumerate(gradient.inputs)]
    outputs = gradient.outputs if by_kernel else 1
    ys = [y.value for y in op.node(gradient.operator, *xs, domain=gradient.domain, outputs=outputs, **gradient.attributes)]
    g = feed("g", static_shape(ys[0]))
    if by_kernel:
        named = {"g": g} | {f"x{i}": x for i, x in enumerate(xs)} | {f"y{i}": y for i, y in enumerate(ys)}
        like = [op.wrap(xs[i]) for i in gradient.writes]
        attributes = gradient.attributes if gradient.kernel_attributes is None else gradient.kernel_attributes
        made = op.node(gradient.kernel, *[named[name] for name in gradient.reads], domain=MS, outputs=len(like), like=like, **attributes)
        graph.outputs.extend(v.value for v in made)
    else:
        loss = op("ReduceSum", op.wrap(ys[0]) * op.wrap(g), keepdims=0)
        graph.outputs.append(loss.value)
        normalize(graph)
        (end,) = graph.outputs
        found = differentiate(GraphBuilder(graph), end, [xs[i] for i in gradient.writes])
        graph.outputs[:] = [found[str(xs[i].name)].value for i in gradient.writes]
        remove_dead(graph, list(graph.outputs))
        lower(graph, ORT_TRAINING)
    return session_of(graph, arrays, threads), len(graph)


def main() -> None:
    options = timing_options(__doc__)
    print(machine())
    rows = []
    for gradient in GRADIENTS:
        (kernel, _), (rule, nodes) = (compiled(gradient, by_kernel, options.threads) for by_kernel in (True, False))
        apart = difference(kernel, rule)
        runs: list[Callable[[], None]] = [kernel.run_discarding, rule.run_discarding]
        times: list[list[float]] = [[], []]
        for _ in range(3):  # interleaved
            for run, seconds in zip(runs, times, strict=True):
                seconds += measure(run, options.rounds)
        milliseconds = [statistics.median(seconds) * 1e3 for seconds in times]
        ratio = milliseconds[1] / milliseconds[0]
        shape = "x".join(map(str, gradient.inputs[0]))
        rows.append([f"{gradient.kernel} {shape}", *[f"{m:.1f}" for m in milliseconds], f"{ratio:.2f}", str(nodes), f"{apart:.0e}"])
        print(table(["kernel", "kernel ms", "rule ms", "ratio", "nodes", "apart"], rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(["kernel", "kernel ms", "rule ms", "ratio", "nodes", "apart"], rows))


if __name__ == "__main__":
    main()
