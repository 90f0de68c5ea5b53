"""Which node of a training graph overwrites which of its inputs.

Target ``ort-training`` has a kernel for it, ``InPlaceAccumulatorV2``.  With standard operators nothing overwrites its input: the new value is
an output of the graph, which the caller binds to the array of the input that it replaces.
"""

from __future__ import annotations

import json

import onnx_ir as ir

#: Metadata of a node whose first output replaces the graph input of this name.
WRITES = "onnxremat.writes"
#: Metadata of a model: a JSON object, output name -> name of the input that it replaces.
MODEL_WRITES = "onnxremat.writes"
OVERWRITER = "InPlaceAccumulatorV2"


def overwritten(graph: ir.Graph) -> dict[ir.Node, ir.Value]:
    """Node -> the graph input that it overwrites."""
    inputs = {v.name: v for v in graph.inputs}
    found: dict[ir.Node, ir.Value] = {}
    for node in graph:
        if node.op_type == OVERWRITER and node.inputs[0] is not None:
            found[node] = node.inputs[0]
        elif WRITES in node.metadata_props:
            found[node] = inputs[node.metadata_props[WRITES]]
    return found


def note_writes(model: ir.Model) -> None:
    """Write into a model's metadata which of its outputs replace which inputs; a model without such outputs gets none."""
    outputs = {v.name for v in model.graph.outputs}
    writers = [(n, v) for n, v in overwritten(model.graph).items() if WRITES in n.metadata_props]
    pairs = {str(n.outputs[0].name): str(v.name) for n, v in writers if n.outputs[0].name in outputs}
    if pairs:
        model.metadata_props[MODEL_WRITES] = json.dumps(pairs)


def writes_of(metadata: dict[str, str]) -> dict[str, str]:
    """Output -> input, from the metadata of a model as a session shows it."""
    pairs: dict[str, str] = json.loads(metadata.get(MODEL_WRITES, "{}"))
    return pairs
