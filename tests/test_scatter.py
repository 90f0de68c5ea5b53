"""Adding rows at repeated indices: exact, and the same in every run."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat.graph import GraphBuilder
from onnxremat.graph.scatter import add_nd, add_rows
from onnxremat.runtime.session import BoundSession, Options, make_session


def run(kind: str, data: np.ndarray, indices: np.ndarray, rows: np.ndarray, times: int) -> list[np.ndarray]:
    values = {
        name: ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        for name, array in (("data", data), ("indices", indices), ("rows", rows))
    }
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": 20}, name="scatter")
    op = GraphBuilder(graph)
    operation = add_rows if kind == "rows" else add_nd
    result = operation(*(op.wrap(v) for v in values.values()))
    graph.outputs.append(result.value)
    session = BoundSession(make_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), Options(threads=2)))
    session.bind({"data": data, "indices": indices, "rows": rows})
    return [np.array(session.run()[0]) for _ in range(times)]


def test_rows_at_repeated_indices_are_all_added() -> None:
    rng = np.random.default_rng(0)
    data, indices = np.zeros((500, 256), np.float32), rng.integers(-20, 20, (8, 128))
    rows = rng.integers(-5, 5, (8, 128, 256)).astype(np.float32)
    wanted = data.copy()
    np.add.at(wanted, indices.reshape(-1), rows.reshape(-1, 256))
    for found in run("rows", data, indices, rows, 10):
        np.testing.assert_array_equal(found, wanted)


def test_sums_are_the_same_in_every_run() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2048, 128)).astype(np.float32)
    first, *others = run("rows", np.zeros((64, 128), np.float32), rng.integers(0, 8, 2048), rows, 10)
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(("shape", "depth"), [((6, 5), 1), ((6, 5), 2), ((3, 4, 5), 2)])
def test_nd(shape: tuple[int, ...], depth: int) -> None:
    rng = np.random.default_rng(1)
    data = rng.standard_normal(shape).astype(np.float32)
    indices = np.stack([rng.integers(-n, n, 7) for n in shape[:depth]], -1)
    updates = rng.integers(-5, 5, (7, *shape[depth:])).astype(np.float32)
    wanted = data.copy()
    np.add.at(wanted, tuple(indices.T), updates)
    np.testing.assert_allclose(run("nd", data, indices, updates, 1)[0], wanted, rtol=1e-6)
