"""Scratch that a kernel takes from the heap is counted, and really taken."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxremat.costs.measured import probe_kernels
from onnxremat.costs.workspace import heap_bytes, known_workspace
from onnxremat.graph import GraphBuilder


def test_scatter_elements_copies_its_indices() -> None:
    shapes = {"data": ((4096, 256), ir.DataType.FLOAT), "indices": ((2048, 256), ir.DataType.INT64), "rows": ((2048, 256), ir.DataType.FLOAT)}
    values = [ir.Value(name=n, shape=ir.Shape(s), type=ir.TensorType(t)) for n, (s, t) in shapes.items()]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 20}, name="scatter")
    op = GraphBuilder(graph)
    op("ScatterElements", *values, axis=0, reduction="add")
    node = next(iter(graph))
    assert heap_bytes(graph) == 8 * 2048 * 256
    assert known_workspace(node) == 0
    (measured,) = probe_kernels([node], {"": 20})
    assert measured == pytest.approx(heap_bytes(graph), abs=2**19)


def test_a_graph_without_such_kernels_takes_none() -> None:
    value = ir.Value(name="x", shape=ir.Shape((8,)), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": 20}, name="plain")
    GraphBuilder(graph)("Add", value, np.float32(1))
    assert heap_bytes(graph) == 0


def test_vectors_add_up_where_helpers_order_the_nodes() -> None:
    """With tokens, a small object for each node and helper comes to lie where the vector before was."""
    data = ir.Value(name="data", shape=ir.Shape((64, 8)), type=ir.TensorType(ir.DataType.FLOAT))
    indices = ir.Value(name="indices", shape=ir.Shape((32, 8)), type=ir.TensorType(ir.DataType.INT64))
    rows = ir.Value(name="rows", shape=ir.Shape((32, 8)), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([data, indices, rows], [], nodes=[], opset_imports={"": 20}, name="scatters")
    op = GraphBuilder(graph)
    op("ScatterElements", op("ScatterElements", data, indices, rows, axis=0), indices, rows, axis=0)
    vector = 8 * 32 * 8
    assert heap_bytes(graph) == vector
    assert heap_bytes(graph, tokens=True) >= 2 * vector + 2 * 100
