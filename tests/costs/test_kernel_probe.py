"""The memory facts of the op table and the workspace formulas, measured again on the runtime's kernels.

Every buffer is mapped by itself, so that what the process grows by while a graph runs is what its kernels allocate, to a fraction of a MiB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onnxremat.costs import analytic_costs
from onnxremat.costs.analytic import Machine, flops
from onnxremat.costs.measured import probe_kernels, single_node_model
from onnxremat.costs.workspace import known_workspace
from onnxremat.nchwc import NCHWC
from onnxremat.ops import MS, traits
from onnxremat.runtime import worker

MIB = 2**20
#: What stacks and tables add.
NOISE = MIB // 2
ROWS, COLUMNS = 1024, 1024
SIZE = 4 * ROWS * COLUMNS

#: Operator -> further inputs, attributes.
UNARY: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "Tanh", "Softplus", "Softsign")},
    **{name: {} for name in ("ThresholdedRelu", "Softmax", "LogSoftmax", "Clip")},
    "Cast": {"attributes": {"to": TensorProto.INT32}},
    "ScatterElements": {
        "inputs": {"indices": np.zeros((1, COLUMNS), np.int64), "updates": np.zeros((1, COLUMNS), np.float32)},
        "attributes": {"axis": 0},
    },
}
VIEWS: dict[str, dict[str, Any]] = {
    "Reshape": {"inputs": {"shape": np.asarray([COLUMNS, ROWS], np.int64)}},
    "Flatten": {},
    "Squeeze": {"inputs": {"axes": np.asarray([0], np.int64)}, "shape": (1, ROWS, COLUMNS)},
    "Unsqueeze": {"inputs": {"axes": np.asarray([0], np.int64)}},
    "Identity": {},
}
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Sum")
FRESH: dict[str, dict[str, Any]] = {name: {} for name in ("Neg", "Exp", "Abs", "Sqrt", "Erf", "Log")}


def growth_job(models: list[str]) -> list[int]:
    """In a worker: bytes that the process grows by while each model runs, above its inputs."""
    from onnxremat.runtime import memory
    from onnxremat.runtime.session import BoundSession, Options, make_session, sample_arrays

    memory.map_large_buffers()
    found = []
    for text in models:
        session = make_session(bytes.fromhex(text), Options(threads=1, arena=False))
        bound = BoundSession(session)
        bound.bind(sample_arrays(session, np.random.default_rng(0)))
        bound.run_discarding()
        memory.trim()
        memory.reset_peak()
        before = memory.resident_bytes()
        bound.run_discarding()
        found.append(memory.peak_resident_bytes() - before)
    return found


def _chain(op_type: str, row: dict[str, Any], operands: int = 1) -> onnx.ModelProto:
    """Neg makes a buffer, the operator reads it last, ReduceMean ends the chain: one buffer where it is shared, two where it is not."""
    shape = row.get("shape", (ROWS, COLUMNS))
    extra = row.get("inputs", {})
    nodes = [helper.make_node("Neg", ["x"], ["a"])]
    inputs = ["a", *(["x"] if operands == 2 else []), *extra]
    nodes.append(helper.make_node(op_type, inputs, ["b"], **row.get("attributes", {})))
    nodes.append(helper.make_node("Shape" if op_type == "Cast" else "ReduceMean", ["b"], ["y"]))
    kind = TensorProto.INT64 if op_type == "Cast" else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in extra.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture(scope="module")
def growth() -> dict[str, int]:
    """Operator -> buffers held at once, in bytes."""
    models = {name: _chain(name, row) for name, row in (UNARY | VIEWS | FRESH).items()}
    models |= {name: _chain(name, {}, operands=2) for name in BINARY}
    measured = worker.call("tests.costs.test_kernel_probe:growth_job", models=[m.SerializeToString().hex() for m in models.values()])
    return dict(zip(models, measured, strict=True))


@pytest.mark.parametrize("op_type", [*UNARY, *VIEWS])
def test_the_output_takes_the_inputs_buffer(op_type: str, growth: dict[str, int]) -> None:
    row = traits(op_type)
    assert row.view if op_type in VIEWS else row.inplace == ((0, 0),)
    # A softmax reads its rows by blocks of its own; half a buffer is far from a second one.
    assert SIZE - NOISE <= growth[op_type] <= SIZE + NOISE, f"{op_type} held {growth[op_type] / SIZE:.2f} buffers"


@pytest.mark.parametrize("op_type", [*BINARY, *FRESH])
def test_the_output_is_a_buffer_of_its_own(op_type: str, growth: dict[str, int]) -> None:
    row = traits(op_type)
    assert not row.inplace and not row.view
    assert 2 * SIZE - NOISE <= growth[op_type] <= 2 * SIZE + NOISE, f"{op_type} held {growth[op_type] / SIZE:.2f} buffers"


def test_every_row_of_the_table_that_shares_is_measured() -> None:
    from onnxremat.ops import _TABLE

    sharing = {name for (domain, name), row in _TABLE.items() if not domain and (row.inplace or row.view)}
    assert sharing == set(UNARY) | set(VIEWS)


# Scratch.


def _value(name: str, shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _node(op_type: str, inputs: list[ir.Value], outputs: list[tuple[int, ...]], domain: str = "", **attributes: Any) -> ir.Node:
    made = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=len(outputs))
    for number, (value, shape) in enumerate(zip(made.outputs, outputs, strict=True)):
        value.name, value.shape, value.type = f"y{number}", ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
    made.name = op_type
    return made


def _conv(n: int, c: int, m: int, size: int, kernel: int, stride: int = 1, group: int = 1) -> ir.Node:
    pad, out = kernel // 2, (size + 2 * (kernel // 2) - kernel) // stride + 1
    attributes = {"pads": [pad] * 4, "strides": [stride] * 2, "kernel_shape": [kernel] * 2, "group": group}
    return _node("Conv", [_value("x", (n, c, size, size)), _value("w", (m, c // group, kernel, kernel))], [(n, m, out, out)], **attributes)


def _weight_gradient_conv(n: int, c: int, m: int, size: int, kernel: int, groups: int = 1) -> ir.Node:
    """The gradient of a convolution's weights as a convolution over rows, columns and channels."""
    inputs = [_value("x", (1, n, size, size, c)), _value("w", (groups * m, n // groups, size, size, 1))]
    attributes = {"pads": [kernel // 2, kernel // 2, 0] * 2, "strides": [1] * 3, "kernel_shape": [size, size, 1], "group": groups}
    return _node("Conv", inputs, [(1, groups * m, kernel, kernel, c)], **attributes)


def _blocked_conv(n: int, c: int, m: int, size: int, kernel: int) -> ir.Node:
    plain = _conv(n, c, m, size, kernel)
    inputs = [v for v in plain.inputs if v is not None]
    return _node("Conv", inputs, [(n, m, size, size)], NCHWC, **{a.name: a.value for a in plain.attributes.values()})


def _conv_grad(n: int, c: int, m: int, size: int, kernel: int) -> ir.Node:
    inputs = [_value("dy", (n, m, size, size)), _value("x", (n, c, size, size)), _value("w", (m, c, kernel, kernel))]
    attributes = {"pads": [kernel // 2] * 4, "strides": [1, 1], "kernel_shape": [kernel] * 2, "group": 1, "dilations": [1, 1]}
    return _node("ConvGrad", inputs, [(n, c, size, size), (m, c, kernel, kernel)], MS, **attributes)


def _conv_transpose(n: int, c: int, m: int, size: int) -> ir.Node:
    inputs = [_value("x", (n, c, size, size)), _value("w", (c, m, 2, 2))]
    return _node("ConvTranspose", inputs, [(n, m, 2 * size, 2 * size)], strides=[2, 2], kernel_shape=[2, 2])


def _where(rows: int) -> ir.Node:
    inputs = [_value("c", (rows, 512), ir.DataType.BOOL), _value("a", (rows, 512)), _value("b", (rows, 512))]
    return _node("Where", inputs, [(rows, 512)])


#: Node, and the least scratch that makes the case worth measuring (0: none is expected).
SCRATCH = {
    "conv wide": (_conv(2, 256, 512, 20, 3), 3 * MIB),
    "conv strided": (_conv(2, 256, 512, 40, 3, stride=2), 3 * MIB),
    "conv narrow": (_conv(2, 32, 32, 64, 3), 0),
    "conv pointwise": (_conv(2, 64, 64, 64, 1), 0),
    "conv depthwise": (_conv(2, 64, 64, 64, 3, group=64), 0),
    "conv over channels": (_weight_gradient_conv(4, 64, 64, 64, 3), 0),
    "conv over few channels": (_weight_gradient_conv(2, 2, 64, 128, 3), MIB),
    "conv over channels, images as groups": (_weight_gradient_conv(4, 16, 64, 64, 3, groups=4), 0),
    "conv over few channels, images as groups": (_weight_gradient_conv(4, 2, 64, 128, 3, groups=4), MIB // 4),
    "conv blocked": (_blocked_conv(2, 256, 512, 20, 3), 0),
    "conv grad": (_conv_grad(2, 32, 32, 64, 3), 4 * MIB),
    "conv grad 5x5": (_conv_grad(2, 16, 24, 64, 5), 6 * MIB),
    "conv transpose": (_conv_transpose(2, 128, 64, 64), 4 * MIB),
    "where": (_where(2048), 8 * MIB),
}


@pytest.fixture(scope="module")
def scratch() -> dict[str, int]:
    nodes = [node for node, _ in SCRATCH.values()]
    return dict(zip(SCRATCH, probe_kernels(nodes, {"": 20, MS: 1, NCHWC: 1}, threads=1), strict=True))


@pytest.mark.parametrize("case", list(SCRATCH))
def test_workspace_formula(case: str, scratch: dict[str, int]) -> None:
    node, least = SCRATCH[case]
    predicted = known_workspace(node, threads=1)
    assert predicted is not None and predicted >= least
    assert abs(scratch[case] - predicted) <= NOISE, f"{case}: measured {scratch[case] / MIB:.2f} MiB, predicted {predicted / MIB:.2f}"


def test_no_formula_for_what_is_probed() -> None:
    assert known_workspace(_node("Tanh", [_value("x", (3, 3))], [(3, 3)])) is None


def test_a_probe_is_a_model_of_one_node() -> None:
    model = single_node_model(SCRATCH["conv grad"][0], {"": 20, MS: 1})
    assert [n.op_type for n in model.graph.node] == ["ConvGrad"] and len(model.graph.input) == 3 and len(model.graph.output) == 2


# Time by model.


def test_flops_of_dense_operators() -> None:
    assert flops(_conv(2, 8, 16, 10, 3)) == 2 * (2 * 16 * 10 * 10) * (8 * 3 * 3)
    assert flops(_conv(2, 8, 16, 10, 3, group=4)) == 2 * (2 * 16 * 10 * 10) * (2 * 3 * 3)
    assert flops(_conv_grad(2, 8, 16, 10, 3)) == 2 * 2 * (2 * 16 * 10 * 10) * (8 * 3 * 3)
    assert flops(_conv_transpose(2, 8, 16, 10)) == 2 * (2 * 8 * 10 * 10) * (16 * 2 * 2)
    assert flops(_node("Gemm", [_value("a", (7, 5)), _value("b", (5, 3))], [(7, 3)])) == 2 * 7 * 5 * 3
    assert flops(_node("Gemm", [_value("a", (5, 7)), _value("b", (5, 3))], [(7, 3)], transA=1)) == 2 * 7 * 5 * 3
    assert flops(_node("MatMul", [_value("a", (4, 7, 5)), _value("b", (4, 5, 3))], [(4, 7, 3)])) == 2 * 4 * 7 * 5 * 3
    assert flops(_node("Tanh", [_value("x", (3, 3))], [(3, 3)])) == 0


def test_analytic_costs_are_a_roofline() -> None:
    machine = Machine(flops=1e9, bandwidth=1e9, overhead=1e-6)
    x = _value("x", (64, 64))
    dense = _node("MatMul", [x, _value("w", (64, 64))], [(64, 64)])
    light = _node("Tanh", [dense.outputs[0]], [(64, 64)])
    light.outputs[0].name = "t"
    view = _node("Flatten", [light.outputs[0]], [(64, 64)])
    view.outputs[0].name = "v"
    graph = ir.Graph([x, dense.inputs[1]], [view.outputs[0]], nodes=[dense, light, view], opset_imports={"": 20})  # type: ignore[list-item]
    costs = analytic_costs(graph, machine)
    assert costs.seconds["MatMul"] == pytest.approx(1e-6 + 2 * 64**3 / 1e9)
    assert costs.seconds["Tanh"] == pytest.approx(1e-6 + 2 * 64 * 64 * 4 / 1e9)
    assert costs.seconds["Flatten"] == 0
    assert costs.origin.startswith("analytic")


def test_scratch_of_as_many_threads_as_are_asked_for() -> None:
    conv = _conv(2, 32, 32, 64, 3)
    graph = ir.Graph([v for v in conv.inputs if v is not None], list(conv.outputs), nodes=[conv], opset_imports={"": 20})
    one, three = (analytic_costs(graph, threads=n).workspace_bytes["Conv"] for n in (1, 3))
    assert three == 3 * one > 0
