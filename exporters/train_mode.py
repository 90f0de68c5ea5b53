"""A file that was exported for inference, turned back to training."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["turn_to_training"]


def turn_to_training(model: ir.Model) -> None:
    """Gives every BatchNormalization batch statistics (its ``momentum`` as the file has it, 0.9 by default) and switches every Dropout on, in place.

    A normalization that an exporter folded into its convolution, or a Dropout that it left out, is not brought back.
    """
    active: ir.Value | None = None
    for node in model.graph:
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "BatchNormalization":
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        elif node.op_type == "Dropout":
            if active is None:
                name = "onnxremat.dropout_on"
                active = ir.Value(
                    name=name, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.BOOL), const_value=ir.tensor(np.array(True), name=name)
                )
                model.graph.register_initializer(active)
            if len(node.inputs) < 3:
                node.resize_inputs(3)
            node.replace_input_with(2, active)
