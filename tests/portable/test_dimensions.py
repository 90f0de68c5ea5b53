"""Named dimensions: no two buffers look alike, unless one takes over the other."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxremat.portable.dimensions import name_dimensions


def _value(name: str, shape: Sequence[int] = (4, 6)) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def _node(kind: str, inputs: list[ir.Value], output: str, shape: Sequence[int] = (4, 6)) -> ir.Value:
    node = ir.node(kind, inputs, name=output)
    made = node.outputs[0]
    made.name, made.shape, made.type = output, ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
    return made


def test_only_what_is_taken_over_shares_dimensions() -> None:
    x, zeros = _value("x"), ir.Value(name="zeros", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.INT64))
    a = _node("Mul", [x, x], "a")
    b = _node("Relu", [a], "b")  # a's last reader: in its place
    view = _node("Reshape", [b, zeros], "view")  # an edge
    c = _node("Tanh", [view], "c")  # not b's last reader
    flat = _node("Reshape", [b, zeros], "flat", (24,))
    d = _node("Mul", [c, b], "d")
    e = _node("Relu", [flat], "e", (24,))
    loss = _node("ReduceSum", [d, e], "loss", ())
    last = _node("Mul", [d, d], "last")
    nodes = [v.producer() for v in (a, b, view, c, flat, d, e, loss, last)]
    name_dimensions(ir.Graph([x, zeros], [last], nodes=[n for n in nodes if n is not None], opset_imports={"": 20}))
    assert list(x.shape or ()) == [4, 6] and list(last.shape or ()) == [4, 6] and loss.shape == ir.Shape([])
    assert a.shape == b.shape == view.shape
    assert flat.shape == e.shape  # b's last reader, through a view
    shapes = {str(v.shape) for v in (b, c, d, flat)}
    assert len(shapes) == 4
    assert all(not isinstance(d, int) for v in (a, c, d, flat) for d in v.shape or ())
