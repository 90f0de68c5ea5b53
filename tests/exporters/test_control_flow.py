"""Control flow that is known beforehand is written out: the same function as the runtime's own loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxremat.autodiff import differentiate
from onnxremat.exporters import import_onnx
from onnxremat.exporters.errors import ExportError
from onnxremat.graph import GraphBuilder
from onnxremat.normalize import normalize

Array = npt.NDArray[Any]
HEAD = '<ir_version: 10, opset_import: ["" : 20]>\n'

LOOP = """
agraph (float[2,3] x) => (float[2,3] y, float[4,2,3] all)
<int64 trips = {4}, bool go = {1}, float[3] w = {0.5, -1.0, 2.0}>
{
  y, all = Loop (trips, go, x) <body = body (int64 i, bool c, float[2,3] h) => (bool c_out, float[2,3] h_out, float[2,3] seen) {
    c_out = Identity (c)
    k = CastLike (i, h)
    s = Mul (h, w)
    t = Tanh (s)
    h_out = Add (t, k)
    seen = Neg (h_out)
  }>
}
"""
SCAN = """
agraph (float[3,2,4] x) => (float[2,4] last, float[2,3,4] all)
<float[2,4] h0 = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8}, float[4,4] w = {1,0,0,2, 0,1,0,0, 3,0,1,0, 0,0,0,1}>
{
  last, all = Scan (h0, x) <num_scan_inputs = 1, scan_input_directions = [DIR], scan_output_axes = [1], scan_output_directions = [DIR],
   body = body (float[2,4] h, float[2,4] v) => (float[2,4] h_out, float[2,4] seen) {
    p = MatMul (h, w)
    q = Add (p, v)
    h_out = Sigmoid (q)
    seen = Identity (h_out)
  }>
}
"""
CHOICE = """
agraph (float[2,3] x) => (float[2,3] y)
<bool c = {FLAG}, float[3] w = {0.5, -1.0, 2.0}>
{
  y = If (c) <then_branch = yes () => (float[2,3] a) { a = Mul (x, w) }, else_branch = no () => (float[2,3] b) { b = Exp (x) }>
}
"""
NESTED = """
agraph (float[2,3] x) => (float[2,3] y)
<int64 trips = {2}, int64 inner = {3}, bool go = {1}, bool never = {0}, float[3] w = {0.5, -1.0, 2.0}>
{
  y = Loop (trips, go, x) <body = outer (int64 i, bool c, float[2,3] h) => (bool c_out, float[2,3] h_out) {
    c_out = Identity (c)
    g = Loop (inner, go, h) <body = middle (int64 j, bool d, float[2,3] m) => (bool d_out, float[2,3] m_out) {
      d_out = Identity (d)
      n = Mul (m, w)
      m_out = Add (n, h)
    }>
    h_out = If (never) <then_branch = yes () => (float[2,3] a) { a = Neg (g) }, else_branch = no () => (float[2,3] b) { b = Tanh (g) }>
  }>
}
"""
COUNTED = """
agraph (float[2,3] x) => (float[2,3] y)
<int64 place = {0}, bool go = {1}>
{
  shape = Shape (x)
  trips = Gather (shape, place)
  y = Loop (trips, go, x) <body = body (int64 i, bool c, float[2,3] h) => (bool c, float[2,3] h_out) { h_out = Sin (h) }>
}
"""
WHILE = """
agraph (float[2,3] x) => (float[2,3] y)
<int64 trips = {5}, bool go = {1}, float limit = {1.0}>
{
  y = Loop (trips, go, x) <body = body (int64 i, bool c, float[2,3] h) => (bool c_out, float[2,3] h_out) {
    h_out = Sin (h)
    total = ReduceSum <keepdims = 0> (h_out)
    c_out = Less (total, limit)
  }>
}
"""
CONDITION = """
agraph (float[2,3] x) => (float[2,3] y)
<float limit = {0.0}>
{
  total = ReduceSum <keepdims = 0> (x)
  c = Less (total, limit)
  y = If (c) <then_branch = yes () => (float[2,3] a) { a = Neg (x) }, else_branch = no () => (float[2,3] b) { b = Exp (x) }>
}
"""
PASSED_ON = """
agraph (float[2,3] x, float[2,3] z) => (float[2,3] y, float[2,3] u)
<int64 trips = {3}, bool go = {1}>
{
  y, u = Loop (trips, go, x, z) <body = body (int64 i, bool c, float[2,3] a, float[2,3] b) => (bool c, float[2,3] b, float[2,3] a_out)
   { a_out = Add (a, b) }>
}
"""


def written(text: str, path: Path) -> tuple[Path, onnx.ModelProto]:
    model = onnx.parser.parse_model(HEAD + text)
    onnx.checker.check_model(model, full_check=False)
    onnx.save(model, path / "m.onnx")
    return path / "m.onnx", model


def run(model: onnx.ModelProto) -> list[Array]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in sorted(session.get_inputs(), key=lambda i: i.name)}
    found: list[Array] = session.run(None, feeds)
    return found


CASES = {
    "loop": LOOP,
    "scan": SCAN.replace("DIR", "0"),
    "scan backwards": SCAN.replace("DIR", "1"),
    "if true": CHOICE.replace("FLAG", "1"),
    "if false": CHOICE.replace("FLAG", "0"),
    "nested": NESTED,
    "trip count from a shape": COUNTED,
    "state passed on": PASSED_ON,
    "no step": PASSED_ON.replace("trips = {3}", "trips = {0}"),
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_known_control_flow_is_written_out(text: str, tmp_path: Path) -> None:
    path, model = written(text, tmp_path)
    imported = import_onnx(path, trainable=[])
    assert not {"If", "Loop", "Scan"} & {node.op_type for node in imported.model.graph}
    for got, wanted in zip(run(ir.serde.serialize_model(imported.model)), run(model), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(WHILE, "its condition is computed in its body"), (CONDITION, "its condition depends on data")],
    ids=["while", "if"],
)
def test_unknown_control_flow_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    path, _ = written(text, tmp_path)
    with pytest.raises(ExportError, match=rf"(Loop|If) .*: {reason}; .*Where"):
        import_onnx(path, trainable=[])


def test_an_endless_loop_is_refused(tmp_path: Path) -> None:
    path, _ = written(LOOP.replace("float[4,2,3]", "float[n,2,3]").replace("trips = {4}", "trips = {1000000000}"), tmp_path)
    with pytest.raises(ExportError, match="nodes, more than"):
        import_onnx(path, trainable=[])


@pytest.mark.parametrize("text", [LOOP, SCAN.replace("DIR", "1")], ids=["loop", "scan"])
def test_gradients_flow_through_every_step(text: str, tmp_path: Path) -> None:
    """The weight's gradient against central differences of the runtime's own loop."""
    path, model = written(text, tmp_path)
    graph = import_onnx(path).model.graph
    normalize(graph)
    op = GraphBuilder(graph)
    weight = graph.initializers["w"]
    loss = None
    for value in list(graph.outputs):
        term = op("ReduceSum", op.wrap(value), keepdims=0)
        loss = term if loss is None else loss + term
    assert loss is not None
    gradient = differentiate(op, loss.value, [weight])["w"]
    graph.outputs[:] = [gradient.value]
    (found,) = run(ir.serde.serialize_model(ir.Model(graph, ir_version=10)))
    (held,) = [t for t in model.graph.initializer if t.name == "w"]
    base = onnx.numpy_helper.to_array(held).astype(np.float32)
    wanted = np.zeros(base.shape)
    for position in np.ndindex(*base.shape):
        sums = []
        for sign in (1, -1):
            moved = base.copy()
            moved[position] += sign * 0.01
            held.CopyFrom(onnx.numpy_helper.from_array(moved, "w"))
            sums.append(sum(float(y.sum(dtype=np.float64)) for y in run(model)))
        wanted[position] = (sums[0] - sums[1]) / 0.02
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-3)
