"""float16 and bfloat16, in which ONNX Runtime's CPU provider moves data but does not compute."""

from __future__ import annotations

import onnx_ir as ir

from .errors import ExportError
from .places import place_of

__all__ = ["NARROW", "refuse_narrow_arithmetic"]

NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
#: Operators with a CPU kernel for both types in onnxruntime-training 1.19.2.  Of the others bfloat16 ones do not load; float16 ones are run in
#: float32 between casts that the runtime inserts, which no schedule would know of.
_MOVES = frozenset({"Cast", "Concat", "Constant", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})


def refuse_narrow_arithmetic(model: ir.Model) -> None:
    """Raises ExportError for the first operator that would compute in float16 or bfloat16."""
    for node in model.graph:
        if node.op_type in _MOVES:
            continue
        narrow = next((v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in NARROW), None)
        if narrow is not None:
            raise ExportError(
                f"{node.op_type} {node.name}{place_of(node)}",
                f"the runtime has no CPU kernel for it in {narrow.name.lower()}",
                "train in float32: leave out half(), bfloat16() and autocast",
            )
