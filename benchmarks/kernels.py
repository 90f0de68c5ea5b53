"""Which convolution kernel is the fastest: the plain or the blocked one, and three ways to the gradient of the input.

    python -m benchmarks.kernels [--rounds 7] [--threads 2]

Medians in milliseconds, torch beside them.  The thresholds of ``onnxremat.nchwc`` and
of the gradient rule of Conv were read off this table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from benchmarks.common import machine, session_of, table, timing_options
from onnxremat.autodiff.rules_conv import adjoint_weights
from onnxremat.graph import Expr, GraphBuilder
from onnxremat.nchwc import block_convolutions
from onnxremat.ops import MS

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Conv:
    """A square convolution with half padding: batch, channels in and out, map, window, stride, group."""

    batch: int
    inputs: int
    outputs: int
    size: int
    window: int = 3
    stride: int = 1
    group: int = 1

    @property
    def x(self) -> tuple[int, ...]:
        return (self.batch, self.inputs, self.size, self.size)

    @property
    def w(self) -> tuple[int, ...]:
        return (self.outputs, self.inputs // self.group, self.window, self.window)

    @property
    def y(self) -> tuple[int, ...]:
        return (self.batch, self.outputs, *[(self.size + 2 * (self.window // 2) - self.window) // self.stride + 1] * 2)

    @property
    def geometry(self) -> dict[str, Any]:
        pads, strides = [self.window // 2] * 4, [self.stride] * 2
        return {"kernel_shape": [self.window] * 2, "strides": strides, "pads": pads, "dilations": [1, 1], "group": self.group}


CONVS = [
    *[Conv(16, 64, 64, 56), Conv(16, 128, 128, 28), Conv(16, 256, 256, 14), Conv(16, 512, 512, 7)],
    *[Conv(16, 64, 128, 56, 3, 2), Conv(16, 256, 512, 14, 3, 2), Conv(16, 3, 64, 224, 7, 2)],
    *[Conv(4, 64, 64, 128), Conv(4, 256, 256, 32), Conv(4, 1024, 1024, 8)],
    *[Conv(4, 128, 64, 128), Conv(4, 256, 128, 64), Conv(4, 512, 256, 32), Conv(4, 1024, 512, 16), Conv(16, 128, 32, 28)],
    *[Conv(16, 256, 64, 56, 1), Conv(16, 512, 2048, 7, 1)],
    *[Conv(16, 128, 128, 56, 3, 1, 128), Conv(16, 96, 96, 112, 3, 2, 96)],
]


def compiled(build: Callable[[Callable[[str, tuple[int, ...]], Expr]], Expr], blocked: bool, threads: int) -> Callable[[], None]:
    """A session over what ``build`` makes of graph inputs, as something to call."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, MS: 1}, name="kernel")
    op = GraphBuilder(graph)

    def operand(name: str, shape: tuple[int, ...]) -> Expr:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        graph.inputs.append(value)
        return op.wrap(value)

    graph.outputs.append(build(operand).value)
    if blocked:
        block_convolutions(op)
    rng = np.random.default_rng(0)
    arrays = {v.name: rng.standard_normal(v.shape.numpy()).astype(np.float32) for v in graph.inputs if v.name and v.shape}
    return session_of(graph, arrays, threads).run_discarding


def variants(conv: Conv, threads: int) -> dict[str, Callable[[], None]]:
    """The kernels of one convolution, by column."""
    geometry = conv.geometry
    reach = (conv.y[2] - 1) * conv.stride + conv.window - 2 * (conv.window // 2)

    def forward(operand: Any) -> Expr:
        x, w = operand("x", conv.x), operand("w", conv.w)
        return x.op("Conv", x, w, **geometry)  # type: ignore[no-any-return]

    def transposed(operand: Any) -> Expr:
        g, w = operand("g", conv.y), operand("w", conv.w)
        return g.op("ConvTranspose", g, w, **geometry, output_padding=[conv.size - reach] * 2)  # type: ignore[no-any-return]

    def flipped(operand: Any) -> Expr:
        g, w = operand("g", conv.y), operand("w", conv.w)
        pads = [conv.window - 1 - p for p in geometry["pads"]]
        return g.op("Conv", g, adjoint_weights(w, conv.group), **geometry | {"pads": pads})  # type: ignore[no-any-return]

    def weight(operand: Any) -> Expr:
        g, x, w = operand("g", conv.y), operand("x", conv.x), operand("w", conv.w)
        made: Expr = g.op.node("ConvGrad", g, x, w, domain=MS, outputs=["", "dw"], like=[None, w], **geometry)[1]
        return made

    found = {"Conv": compiled(forward, False, threads), "blocked": compiled(forward, True, threads)}
    found["dX transposed"] = compiled(transposed, False, threads)
    if conv.stride == 1:
        found |= {"dX flipped": compiled(flipped, False, threads), "dX flipped, blocked": compiled(flipped, True, threads)}

    found["dW"] = compiled(weight, False, threads)
    return found | torch_variants(conv, threads)


def torch_variants(conv: Conv, threads: int) -> dict[str, Callable[[], None]]:
    import torch

    torch.set_num_threads(threads)
    x, w, g = (torch.randn(shape, requires_grad=True) for shape in (conv.x, conv.w, conv.y))
    y = torch.nn.functional.conv2d(x, w, None, conv.stride, conv.window // 2, groups=conv.group)

    def forward() -> None:
        with torch.no_grad():
            torch.nn.functional.conv2d(x, w, None, conv.stride, conv.window // 2, groups=conv.group)

    def gradient(of: Any) -> Callable[[], None]:
        return lambda: torch.autograd.grad(y, of, g, retain_graph=True) and None

    return {"torch": forward, "torch dX": gradient(x), "torch dW": gradient(w)}


def measure(kernel: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each call but the first, once the threads of the kernel before have ceased to spin."""
    time.sleep(0.1)
    kernel()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        kernel()
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    options = timing_options(__doc__)
    print(machine())
    columns = ["Conv", "blocked", "torch", "dX transposed", "dX flipped", "dX flipped, blocked", "torch dX", "dW", "torch dW"]
    rows = []
    for conv in CONVS:
        seconds = {name: measure(kernel, options.rounds) for name, kernel in variants(conv, options.threads).items()}
        shape = f"{conv.batch}x{conv.inputs}x{conv.size}, {conv.outputs} of {conv.window}x{conv.window}/{conv.stride}"
        shape += f", group {conv.group}" if conv.group > 1 else ""
        rows.append([shape, *[f"{statistics.median(seconds[c]) * 1e3:.1f}" if c in seconds else "-" for c in columns]])
    print(table(["convolution", *columns], rows))


if __name__ == "__main__":
    main()
