"""The audit: what trains in the torch program must train in the ONNX graph, or the export is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from .embedding import padding_row
from .errors import ExportError
from .forward_graph import PADDING_INDEX, ForwardGraph
from .known_values import written_arguments
from .noop import STOP_GRADIENT, constant_of
from .places import scope_of, user_line
from .trace import TracedModule

__all__ = ["Effect", "ProgramFacts", "audit", "graph_effects", "program_facts"]

BATCH_NORM = "training BatchNorm"
FROZEN_BATCH_NORM = "frozen BatchNorm"
DROPOUT = "active dropout"
RANDOM = "random op"
DETACH = "detach"
PADDING = "embedding with a padding row"
_RANDOM_NODES = frozenset({"RandomUniform", "RandomNormal", "RandomUniformLike", "RandomNormalLike", "Multinomial", "Bernoulli"})


@dataclass(frozen=True, order=True)
class Effect:
    """One thing that an exporter could lose: its kind, the path of its module, and a figure (the ratio of a dropout, the padding row)."""

    kind: str
    module: str
    figure: float = 0.0

    def __str__(self) -> str:
        """``active dropout (p=0.1) in module encoder.drop``."""
        ratio = f" (p={self.figure:g})" if self.kind == DROPOUT else ""
        return f"{self.kind}{ratio} in module {self.module or '(top level)'}"


@dataclass(frozen=True)
class ProgramFacts:
    """What a torch program does beyond computing its outputs.

    Attributes:
        effects: how often each effect occurs; for detach a lower bound (mutated temporaries hide some), without those on the way to
            state alone, where no gradient comes along.
        lines: where each effect stands in the user's code, for messages.
        parameters: parameters that the outputs depend on; one without elements has nothing to lose.
        state: buffers that the program writes to.
    """

    effects: Counter[Effect]
    lines: dict[Effect, str]
    parameters: frozenset[str]
    state: frozenset[str]


def program_facts(traced: TracedModule) -> ProgramFacts:
    """Reads the facts off an exported program in training IR, with no_grad regions inlined.

    Raises:
        ExportError: for an operation whose training effects have no ONNX counterpart.
    """
    program = traced.program
    signature = program.graph_signature
    buffers, parameters = signature.inputs_to_buffers, signature.inputs_to_parameters
    trainable = {name for name, target in parameters.items() if program.state_dict[target].requires_grad}
    live = _live(program.graph)
    returned = _read_by(program.graph, len(traced.output_names))
    differentiable: set[fx.Node] = set()
    effects: Counter[Effect] = Counter()
    lines: dict[Effect, str] = {}
    state: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in trainable:
            differentiable.add(node)
        if node.op != "call_function" or node not in live:
            continue
        reached = any(source in differentiable for source in node.all_input_nodes)
        is_detach = _base_name(node) in ("detach", "detach_", "detach_copy")
        shape_only = _base_name(node).endswith("_like") or _base_name(node).startswith("new_")
        if reached and not is_detach and not shape_only and _is_float(node):
            differentiable.add(node)
        state.update(buffers[source.name] for source in written_arguments(node) if source.name in buffers)
        try:
            effect = _effect(node, reached)
        except ExportError as error:
            raise error.at(user_line(node.meta.get("stack_trace") or "")) from None
        if effect is not None and (effect.kind != DETACH or node in returned):
            effects[effect] += 1
            lines.setdefault(effect, user_line(node.meta.get("stack_trace") or ""))
    named = {node.name for node in live}
    used = frozenset(target for name, target in parameters.items() if name in named and program.state_dict[target].numel())
    return ProgramFacts(effects, lines, used, frozenset(state))


def audit(facts: ProgramFacts, graph: ForwardGraph) -> None:
    """Compares a torch program's facts with the graph that came of it.

    Raises:
        ExportError: for the first difference, naming the module and what was lost or gained.
    """
    found = graph_effects(graph)
    for effect in sorted({*facts.effects, *found}):
        wanted, got = facts.effects[effect], found[effect]
        if got == wanted or (effect.kind == DETACH and got > wanted):
            continue
        verb = "lost" if got < wanted else "gained"
        raise ExportError(
            f"{effect}{facts.lines.get(effect, '')}",
            f"the export {verb} it: {wanted} in the torch program, {got} in the ONNX graph",
            "report the model that led here",
        )
    initializers = graph.model.graph.initializers
    names = {graph.tied.get(name, name) for name in facts.parameters}
    missing = sorted(name for name in names if name not in initializers)
    if missing:
        raise ExportError(f"parameter {missing[0]}", "the export lost it: the torch program reads it, the ONNX graph does not")
    unplaced = sorted(name for name in names if (name in graph.trainable) == (name in graph.frozen))
    if unplaced:
        raise ExportError(f"parameter {unplaced[0]}", "it is not exactly one of trainable and frozen", "report the model that led here")
    lost = sorted({graph.tied.get(name, name) for name in facts.state} - set(graph.state))
    if lost:
        raise ExportError(f"buffer {lost[0]}", "the export lost its update: the torch program writes it, the graph has no state output")
    outputs = {value.name for value in graph.model.graph.outputs}
    dangling = sorted(name for name, output in graph.state.items() if output not in outputs or name not in initializers)
    if dangling:
        raise ExportError(f"state {dangling[0]}", "it has no initializer, or no output with its next value", "report the model that led here")
    for node in graph.model.graph:
        if "auto_pad" in node.attributes:
            raise ExportError(f"{node.op_type} {node.name}", "auto_pad is left, which gradient kernels ignore", "give explicit pads")


def graph_effects(graph: ForwardGraph) -> Counter[Effect]:
    """The effects that are present in an ONNX graph; a Dropout without a constant true training_mode is none."""
    counts: Counter[Effect] = Counter()
    protected = frozenset(graph.trainable) | frozenset(graph.state)
    returned = _returned(graph)
    for node in graph.model.graph:
        module = scope_of(node)
        if node.op_type == "BatchNormalization":
            training = node.attributes.get_int("training_mode", 0)
            counts[Effect(BATCH_NORM if training else FROZEN_BATCH_NORM, module)] += 1
        elif node.op_type == "Dropout" and _is_active(node, protected):
            ratio = constant_of(node.inputs[1], protected) if len(node.inputs) > 1 else np.float32(0.5)
            counts[Effect(DROPOUT, module, _rounded(float(ratio if ratio is not None else -1)))] += 1
        elif PADDING_INDEX in node.metadata_props:
            counts[Effect(PADDING, module, float(node.metadata_props[PADDING_INDEX]))] += 1
        elif node.op_type in _RANDOM_NODES:
            counts[Effect(RANDOM, module)] += 1
        elif STOP_GRADIENT in node.metadata_props and node in returned and str(node.outputs[0].name) in graph.stop_gradient:
            counts[Effect(DETACH, module)] += 1
    return counts


def _returned(graph: ForwardGraph) -> set[ir.Node]:
    """The nodes that an output depends on which is not the next value of a state."""
    state = set(graph.state.values())
    pending = [value.producer() for value in graph.model.graph.outputs if value.name not in state]
    found: set[ir.Node] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
    return found


def _is_active(node: ir.Node, protected: frozenset[str]) -> bool:
    mode = constant_of(node.inputs[2], protected) if len(node.inputs) > 2 else None
    return mode is not None and bool(mode) and "seed" not in node.attributes


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output or a mutation depends on."""
    stack = [node for node in graph.nodes if node.op == "output" or written_arguments(node)]
    live: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def _read_by(graph: fx.Graph, outputs: int) -> set[fx.Node]:
    """Nodes that the first so many outputs depend on, by their arguments and by what writes to these."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            writers.setdefault(target, []).append(node)
    (end,) = (node for node in graph.nodes if node.op == "output")
    pending = [value for value in end.args[0][:outputs] if isinstance(value, fx.Node)]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [*node.all_input_nodes, *writers.get(node, [])]
    return found


def _base_name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target))


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    tensors = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(t, torch.Tensor) and t.dtype.is_floating_point for t in tensors)


def _argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an aten call by its schema name."""
    if name in node.kwargs:
        return node.kwargs[name]
    for i, spec in enumerate(node.target._schema.arguments):
        if spec.name == name:
            return node.args[i] if i < len(node.args) else spec.default_value
    return default


def _rounded(p: float) -> float:
    return float(np.float32(p))


def _dropout(node: fx.Node, module: str) -> Effect | None:
    p = _argument(node, "p")
    active = _argument(node, "train", True) is not False and p
    return Effect(DROPOUT, module, _rounded(p)) if active else None


def _alpha_dropout(node: fx.Node, module: str) -> Effect | None:
    if _dropout(node, module) is not None:
        raise ExportError(f"{_base_name(node)} {module}", "it has no live ONNX form", "use nn.Dropout, or call eval() on it")
    return None


def _attention(node: fx.Node, module: str) -> Effect | None:
    p = _argument(node, "dropout_p")
    return Effect(DROPOUT, module, _rounded(p)) if p else None


def _batch_norm(node: fx.Node, module: str) -> Effect | None:
    return Effect(BATCH_NORM if _argument(node, "training") else FROZEN_BATCH_NORM, module)


def _instance_norm(node: fx.Node, module: str) -> Effect | None:
    if _argument(node, "running_mean") is not None:
        raise ExportError(f"InstanceNorm {module}", "its running statistics have no ONNX form", "set track_running_stats=False")
    return None


def _recurrent(node: fx.Node, module: str) -> Effect | None:
    return None  # torch counts it as random for the dropout between its layers, which is written out before (functional_recurrent)


def _embedding(node: fx.Node, module: str) -> Effect | None:
    if _argument(node, "scale_grad_by_freq"):
        raise ExportError(f"Embedding {module}", "scale_grad_by_freq has no ONNX form", "set scale_grad_by_freq=False")
    row = padding_row(node)
    return None if row is None else Effect(PADDING, module, float(row))


def _renormalized(node: fx.Node, module: str) -> Effect | None:
    raise ExportError(f"Embedding {module}", "max_norm writes to its weight in forward", "set max_norm=None, or scale the rows between steps")


def _multilabel_margin(node: fx.Node, module: str) -> Effect | None:
    # Measured on torch 2.13: its own decomposition, which the exporter uses, gives another value than its kernel.
    raise ExportError(f"{_base_name(node)} {module}", "torch decomposes it wrongly", "use multilabel_soft_margin_loss, or write it out")


def _multinomial(node: fx.Node, module: str) -> Effect | None:
    if _argument(node, "num_samples") > 1 and not _argument(node, "replacement"):
        raise ExportError(f"multinomial {module}", "draws without replacement have no ONNX form", "take topk of log-probabilities plus Gumbel noise")
    return Effect(RANDOM, module)


def _rrelu(node: fx.Node, module: str) -> Effect | None:
    return Effect(RANDOM, module) if _argument(node, "training") else None


_EFFECTS: dict[str, Callable[[fx.Node, str], Effect | None]] = {
    "dropout": _dropout,
    "dropout_": _dropout,
    "native_dropout": _dropout,
    "feature_dropout": _dropout,
    "feature_dropout_": _dropout,
    "alpha_dropout": _alpha_dropout,
    "alpha_dropout_": _alpha_dropout,
    "feature_alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout_": _alpha_dropout,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "multinomial": _multinomial,
    "rrelu": _rrelu,
    "multilabel_margin_loss": _multilabel_margin,
    "embedding": _embedding,
    "embedding_renorm": _renormalized,
    "embedding_renorm_": _renormalized,
}


def _effect(node: fx.Node, reached: bool) -> Effect | None:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = str(stack[-1][0]) if stack else ""
    name = _base_name(node)
    if name in _EFFECTS:
        return _EFFECTS[name](node, module)
    if name in ("detach", "detach_", "detach_copy"):
        return Effect(DETACH, module) if reached and _is_float(node) else None
    tags = getattr(node.target, "tags", ())
    return Effect(RANDOM, module) if torch.Tag.nondeterministic_seeded in tags else None
