"""The audit refuses sabotaged graphs, naming the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onnxremat.exporters import ExportError, ForwardGraph, export_torch
from onnxremat.exporters.audit import ProgramFacts, audit, program_facts
from onnxremat.exporters.trace import trace_module
from tests.exporters.support import x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.frozen = nn.BatchNorm2d(4).eval()
        self.drop = nn.Dropout(0.25)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.frozen(self.bn(self.conv(a))))
        return y * y.detach() + torch.rand_like(y)


@cache
def exported() -> tuple[ProgramFacts, ForwardGraph]:
    module = Model()
    facts = program_facts(trace_module(module, ["x"], [torch.zeros(2, 3, 4, 4)]))
    return facts, export_torch(module, [x(2, 3, 4, 4)])


@pytest.fixture
def case() -> tuple[ProgramFacts, ForwardGraph]:
    """The facts, and a graph of one's own to sabotage."""
    facts, graph = exported()
    model = ir.serde.deserialize_model(ir.serde.serialize_model(graph.model))
    return facts, dataclasses.replace(graph, model=model, state=dict(graph.state))


def first(graph: ForwardGraph, op_type: str, index: int = 0) -> ir.Node:
    return [node for node in graph.model.graph if node.op_type == op_type][index]


def bypass(graph: ForwardGraph, op_type: str) -> None:
    node = first(graph, op_type)
    ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0], replace_graph_outputs=True)
    graph.model.graph.remove(node, safe=True)


def constant(graph: ForwardGraph, array: np.ndarray) -> ir.Value:
    value = ir.Value(name="sabotage", const_value=ir.tensor(array, name="sabotage"))
    graph.model.graph.register_initializer(value)
    return value


def remove_parameter(graph: ForwardGraph) -> None:
    first(graph, "Conv").replace_input_with(2, constant(graph, np.zeros(4, np.float32)))
    del graph.model.graph.initializers["conv.bias"]


SABOTAGES: list[tuple[str, Callable[[ForwardGraph], object], str]] = [
    ("dropout removed", lambda g: bypass(g, "Dropout"), r"active dropout \(p=0.25\) in module drop.* lost"),
    ("dropout off", lambda g: first(g, "Dropout").replace_input_with(2, constant(g, np.array(False))), "in module drop .*lost"),
    ("dropout mode absent", lambda g: first(g, "Dropout").resize_inputs(2), "in module drop .*lost"),
    ("dropout ratio", lambda g: first(g, "Dropout").replace_input_with(1, constant(g, np.float32(0.5))), "in module drop"),
    (
        "dropout seeded",
        lambda g: first(g, "Dropout").attributes.__setitem__("seed", ir.AttrInt64("seed", 1)),
        "in module drop .*lost",
    ),
    (
        "training BN to inference",
        lambda g: first(g, "BatchNormalization").attributes.__setitem__("training_mode", ir.AttrInt64("training_mode", 0)),
        "in module bn",
    ),
    (
        "frozen BN to training",
        lambda g: first(g, "BatchNormalization", 1).attributes.__setitem__("training_mode", ir.AttrInt64("training_mode", 1)),
        "in module frozen",
    ),
    ("detach removed", lambda g: bypass(g, "Identity"), r"detach in module \(top level\).* lost"),
    ("stop-gradient forgotten", lambda g: setattr(g, "stop_gradient", frozenset()), "detach in module"),
    ("state forgotten", lambda g: g.state.pop("bn.running_var"), "bn.running_var"),
    ("parameter gone", remove_parameter, "parameter conv.bias"),
    ("parameter without a role", lambda g: setattr(g, "trainable", g.trainable[1:]), "parameter conv.weight"),
    ("state without an output", lambda g: g.model.graph.outputs.pop(), "state bn.num_batches_tracked"),
    (
        "auto_pad",
        lambda g: first(g, "Conv").attributes.__setitem__("auto_pad", ir.AttrString("auto_pad", "SAME_UPPER")),
        "auto_pad",
    ),
]


def test_a_faithful_graph_passes(case: tuple[ProgramFacts, ForwardGraph]) -> None:
    audit(*case)
    facts, _ = case
    kinds = sorted(effect.kind for effect in facts.effects)
    assert kinds == ["active dropout", "detach", "frozen BatchNorm", "random op", "training BatchNorm"]


@pytest.mark.parametrize(("sabotage", "message"), [(s, m) for _, s, m in SABOTAGES], ids=[name for name, _, _ in SABOTAGES])
def test_a_sabotaged_graph_is_refused(case: tuple[ProgramFacts, ForwardGraph], sabotage: Callable[[ForwardGraph], object], message: str) -> None:
    facts, graph = case
    sabotage(graph)
    with pytest.raises(ExportError, match=message) as caught:
        audit(facts, graph)
    assert "\n" not in str(caught.value)


def test_a_random_op_that_is_lost_is_refused(case: tuple[ProgramFacts, ForwardGraph]) -> None:
    facts, graph = case
    node = first(graph, "RandomUniformLike")
    ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
    graph.model.graph.remove(node, safe=True)
    with pytest.raises(ExportError, match="random op"):
        audit(facts, graph)


def test_the_message_names_the_line(case: tuple[ProgramFacts, ForwardGraph]) -> None:
    facts, graph = case
    bypass(graph, "Identity")
    with pytest.raises(ExportError, match=r"test_audit.py:\d+ \(return y \* y.detach\(\)"):
        audit(facts, graph)
