"""What a target's runtime can run, and how the training kernels that it lacks are written in standard operators.

Gradient rules are mathematics: they speak of kernels such as ``ConvGrad`` or ``MaxPoolGrad``.  Which of them an artifact may have is the
target's affair; the others are lowered after differentiation, and what has no lowering is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from .autodiff.context import Context, describe
from .errors import DifferentiationError, UsageError
from .graph import Expr, GraphBuilder
from .nchwc import NCHWC
from .ops import MS
from .portable.lowerings import LOWERINGS, unpooled
from .portable.weight_gradient import threaded_weight_gradient
from .portable.writes import lower_writes

#: What the name of an artifact's target ends in where its graph swaps tensors by operators of onnxremat's own.
SPILL_SUFFIX = "+spill"
#: From a node's context: a replacement for each output (None: not used), or None to leave the node as it is.
Lowering = Callable[[Context], "Sequence[Expr | None] | None"]


@dataclass(frozen=True)
class Target:
    """A runtime that artifacts are made for.

    Attributes:
        name: as in ``--target``.
        domains: of the operators that it has kernels for.
        standard: its operators of ai.onnx are those of the ONNX standard and no more.
        lowerings: (domain, operator) -> how it is written otherwise.
        in_place: it has a kernel that overwrites an input; without one, new values are outputs of the graph.
        tokens: the order of the nodes is forced by data edges (``onnxremat.portable.tokens``) instead of session options.
        training_package: it takes one of the onnxruntime-training packages.
        on_gpu: its nodes run on CUDA, and swaps go to the host.
        shares_measured: its kernels take over dead inputs as ``onnxremat.ops`` says; otherwise none is counted on to do so.
    """

    name: str
    domains: frozenset[str]
    standard: bool = False
    lowerings: Mapping[tuple[str, str], Lowering] = field(default_factory=dict)
    in_place: bool = True
    tokens: bool = False
    training_package: bool = True
    on_gpu: bool = False
    shares_measured: bool = True

    def has(self, node: ir.Node, opset: int) -> bool:
        """Whether the target has a kernel for this kind of node."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain not in self.domains:
            return False
        return not self.standard or onnx.defs.has(node.op_type, opset, domain)


ORT_TRAINING = Target(
    "ort-training",
    frozenset({"", MS, NCHWC}),
    lowerings={("", "MaxPoolGrad"): unpooled, (MS, "ConvGrad"): threaded_weight_gradient},
)
ONNXRUNTIME = Target("onnxruntime", frozenset({""}), standard=True, lowerings=LOWERINGS, in_place=False, tokens=True, training_package=False)
#: The same package on CUDA: no blocked convolutions and no MaxPoolGrad; training BatchNormalization is refused from opset 14 on, but the
#: BatchNormInternal that it is written as anyway has its kernel.  Read from the sources of 1.19, not run.
ORT_TRAINING_CUDA = Target(
    "ort-training",
    frozenset({"", MS}),
    lowerings={("", "MaxPoolGrad"): LOWERINGS["", "MaxPoolGrad"]},
    on_gpu=True,
    shares_measured=False,
)
PROVIDERS = ("cpu", "cuda")
TARGETS = {target.name: target for target in (ORT_TRAINING, ONNXRUNTIME)}


def target_named(name: str, provider: str = "cpu") -> Target:
    """The target of a name for a provider; raises UsageError where there is none."""
    if name not in TARGETS:
        raise UsageError(f"there is no target '{name}': choose {' or '.join(TARGETS)}")
    if provider not in PROVIDERS:
        raise UsageError(f"there is no provider '{provider}': choose {' or '.join(PROVIDERS)}")
    if provider == "cuda" and name != ORT_TRAINING_CUDA.name:
        raise UsageError(f"--target {name} with --provider cuda is not there: leave --target out, or --provider")
    return ORT_TRAINING_CUDA if provider == "cuda" else TARGETS[name]


def lower(graph: ir.Graph, target: Target) -> None:
    """Write the nodes that a target has no kernel for, or a slower one, in operators that it has, in place.

    Raises:
        DifferentiationError: a node has neither a kernel nor a lowering; names it.
    """
    op = GraphBuilder(graph)
    for node in list(graph):
        lowering = target.lowerings.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
        if lowering is not None:
            op.forget()  # an equal value from far away would have to be kept alive until here
            op.before, op.metadata = node, dict(node.metadata_props)
            made = lowering(Context(op, node, [], []))
            if made is not None:
                _replace(op, node, made)
    if not target.in_place:
        lower_writes(graph)
    opset = graph.opset_imports[""]
    for node in graph:
        if not target.has(node, opset):
            kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise DifferentiationError(
                f"the target {target.name} has no kernel for {kind}, which {describe(node)} needs, and it can't be written in standard "
                f"operators: compile with --target {ORT_TRAINING.name}"
            )
    for domain in [d for d in graph.opset_imports if d and d not in target.domains]:
        del graph.opset_imports[domain]


def _replace(op: GraphBuilder, node: ir.Node, made: Sequence[Expr | None]) -> None:
    taken: set[int] = {id(v) for v in node.inputs if v is not None}
    for old, new in zip(node.outputs, made, strict=False):
        if new is None or not old.name:
            continue
        if id(new.value) in taken or new.value.producer() is None:  # a value that was there before keeps its own name
            new = op.node("Identity", new, outputs=[op.fresh("identity")])[0]
        taken.add(id(new.value))
        name = old.name
        old.replace_all_uses_with(new.value, replace_graph_outputs=True)
        old.name, new.value.name = f"{name}_lowered", name
    op.graph.remove(node, safe=True)
