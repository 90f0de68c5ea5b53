"""The evaluation model: batch and parameters in, loss and the model's outputs out, every module in evaluation mode."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from .exporters import ForwardGraph
from .normalize import normalize, remove_dead
from .ops import MS
from .optimizers import IR_VERSION
from .targets import ORT_TRAINING, Target, lower
from .training_graph import TrainingGraph, hold_as_float, weights_become_inputs


def evaluation_form(forward: ForwardGraph) -> ForwardGraph:
    """A copy of a training-mode graph with batch normalization on its running statistics and dropout off.

    For foreign files, which have no module to ask; a torch module is exported again in evaluation mode instead.
    """
    model = ir.from_proto(ir.to_proto(forward.model))
    graph = model.graph
    by_name = {v.name: v for v in graph.outputs}
    state_outputs = {by_name[name] for name in forward.state.values()}
    graph.outputs[:] = [v for v in graph.outputs if v not in state_outputs]
    remove_dead(graph, list(graph.outputs), keep_initializers=True)
    for node in list(graph):
        if node.op_type == "BatchNormalization" and "training_mode" in node.attributes:
            del node.attributes["training_mode"]
            node.resize_outputs(1)
            for index in (3, 4):
                node.replace_input_with(index, _state_behind(node.inputs[index], forward.state))
        elif node.op_type == "Dropout":
            source = node.inputs[0]
            assert source is not None
            identity = ir.Node("", "Identity", [source], name=f"{node.name}_off")
            identity.outputs[0].shape, identity.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
            graph.insert_before(node, identity)
            name = node.outputs[0].name
            node.outputs[0].replace_all_uses_with(identity.outputs[0], replace_graph_outputs=True)
            graph.remove(node, safe=True)
            identity.outputs[0].name = name
    return ForwardGraph(
        model=model,
        inputs=forward.inputs,
        labels=forward.labels,
        trainable=forward.trainable,
        frozen=(*forward.frozen, *forward.state),
        outputs=forward.outputs,
        loss=forward.loss,
        source=forward.source,
    )


def _state_behind(value: ir.Value | None, state: Mapping[str, str]) -> ir.Value | None:
    """The running statistic that a batch normalization is fed, scaled as it may be for training (torch keeps the unbiased variance)."""
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type == "Mul":
        return next((v for v in producer.inputs if v is not None and v.name in state), value)
    return value


def eval_model(evaluation: ForwardGraph, training: TrainingGraph, target: Target = ORT_TRAINING) -> ir.Model:
    """The evaluation graph as a model whose weights are inputs, in the same relative order as in the training model.

    Outputs are the loss, then the model's outputs.
    """
    graph = evaluation.model.graph
    graph.opset_imports[MS] = 1
    evaluation.model.ir_version = IR_VERSION
    by_name = {v.name: v for v in graph.outputs}
    wanted = [evaluation.loss, *(name for name in evaluation.outputs if name != evaluation.loss)]
    graph.outputs[:] = [by_name[name] for name in wanted if name in by_name]
    normalize(graph)
    # Every tensor that the training model takes, in its order: onnxruntime.training.api feeds them all, needed here or not.
    held = {str(v.name): v for v in training.graph.inputs if v.name in training.weights or v.name in training.moments}
    weights_become_inputs(graph, list(held))
    inputs = {v.name: v for v in graph.inputs}
    for name in training.state:
        if name in inputs and inputs[name].dtype != ir.DataType.FLOAT:
            hold_as_float(graph, inputs[name])
    remove_dead(graph, list(graph.outputs))
    lower(graph, target)
    batch = [spec.name for spec in (*evaluation.inputs, *evaluation.labels)]
    graph.inputs[:] = [inputs[n] for n in batch] + [inputs.get(n) or ir.Value(name=n, shape=v.shape, type=v.type) for n, v in held.items()]
    return evaluation.model
