"""What translations into ONNX operators ask of the symbolic values that onnxscript traces, and the constants they make."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset20 as op

__all__ = ["Value", "constant", "dims", "dtype_of", "ints"]

Value = Any  # onnxscript traces symbolic tensors through its operators


def dims(x: Value) -> tuple[int, ...]:
    """The static shape."""
    return tuple(int(d) for d in x.shape)


def dtype_of(x: Value) -> np.dtype[Any]:
    """The dtype, as numpy's."""
    return ir.DataType(x.dtype).numpy()


def constant(array: np.ndarray[Any, Any]) -> Value:
    """A constant with this content."""
    return op.Constant(value=ir.serde.serialize_tensor(ir.tensor(array)))


def ints(*values: int) -> Value:
    """A constant vector of int64."""
    return constant(np.array(values, np.int64))
