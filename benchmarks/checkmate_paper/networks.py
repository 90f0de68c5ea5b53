"""The networks and settings of Jain et al., MLSys 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization".

Settings as in the paper's artifact (github.com/parasj/checkmate, mlsys20_artifact.md and experiments/): images of 224x224 for classification and
416x608 for segmentation with 19 classes, float32, costs in FLOPs, 16 GB as 16e9 bytes, parameters and their gradients held throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

import benchmarks.common  # noqa: F401  (puts the checkout on the path)
from onnxremat.costs.analytic import flops
from onnxremat.exporters import InputSpec, Loss, load_source
from onnxremat.graph import static_shape
from onnxremat.ops import traits
from onnxremat.optimizers import Optimizer
from onnxremat.problem import Costs, scheduling_problem
from onnxremat.scheduler import Problem
from onnxremat.targets import ORT_TRAINING
from onnxremat.training_graph import build_training_graph

__all__ = ["CAPACITY", "NETWORKS", "Network", "ScaledProblem", "instance_problem", "own_problem"]

#: Bytes of the paper's GPU.
CAPACITY = 16_000_000_000
_CLASSES, _IMAGE, _SCENE = 19, (224, 224), (416, 608)
#: Batches that the graph is exported at; others lie on the line through them.  Large ones: the form of a gradient depends on what is larger, the
#: batch or the weights.
_EXPORTED = (16, 32)


@dataclass(frozen=True)
class Network:
    """A network of the paper.

    Attributes:
        name: as in the tables.
        factory: ``package.module:factory`` of our own model.
        image: height and width.
        dense: whether every pixel is labelled.
        batch: batch of the overhead curve.
        paper: largest batch at one extra forward pass by the paper's optimal schedules (its figure on maximum batch sizes).
        at_least: whether the paper's solver stopped before it was done.
        instance: stem of the published instance, or empty.
        parameters: of the network that the instance was extracted from, which does not hold them.
    """

    name: str
    factory: str
    image: tuple[int, int]
    dense: bool
    batch: int
    paper: int | None
    at_least: bool = False
    instance: str = ""
    parameters: int = 0


def segnet() -> object:
    """SegNet for the paper's classes."""
    from onnxremat.models.segmentation import segnet as build

    return build(_CLASSES)


def fcn8() -> object:
    """FCN-8s for the paper's classes."""
    from onnxremat.models.segmentation import fcn8 as build

    return build(_CLASSES)


def unet() -> object:
    """U-Net as published, for the paper's classes; the paper's has VGG16 for an encoder and half the resolution at its end."""
    from onnxremat.models.unet import unet as build

    return build(num_classes=_CLASSES)


_HERE = "benchmarks.checkmate_paper.networks"
NETWORKS = {
    network.name: network
    for network in (
        Network("VGG16", "onnxremat.models.vgg:vgg16", _IMAGE, False, 256, None, instance="vgg16_b256", parameters=138_357_544),
        Network("VGG19", "onnxremat.models.vgg:vgg19", _IMAGE, False, 256, 289),
        Network(
            *("MobileNet", "onnxremat.models.mobilenet:mobilenet_v1", _IMAGE, False, 512, 1105),
            instance="mobilenet_b512",
            parameters=4_253_864,
        ),
        Network("U-Net", f"{_HERE}:unet", _SCENE, True, 32, 61, instance="unet_b32", parameters=12_332_755),
        Network("FCN8", f"{_HERE}:fcn8", _SCENE, True, 32, 60, True, instance="fcn8_b32", parameters=134_456_985),
        Network("SegNet", f"{_HERE}:segnet", _SCENE, True, 32, 62, True),
        Network(
            *("ResNet-50", "onnxremat.models.resnet:resnet50", _IMAGE, False, 256, 193, True),
            instance="resnet50_b256",
            parameters=25_636_712,
        ),
    )
}


def node_flops(graph: ir.Graph) -> Costs:
    """FLOPs for seconds: of convolutions and products their multiply-adds twice, of any other node one for each element that it writes."""
    found = {}
    for node in graph:
        written = sum(int(np.prod(static_shape(v), dtype=np.int64)) for v in node.outputs if v.name)
        found[str(node.name)] = 0.0 if traits(node.op_type, node.domain).view else float(flops(node) or written)
    return Costs(found, {}, "FLOPs")


def _exported(network: Network, batch: int) -> Problem:
    height, width = network.image
    labels = (InputSpec.parse(f"labels={batch}x{height}x{width}:int64:{_CLASSES}"),) if network.dense else ()
    inputs = (InputSpec.parse(f"x={batch}x3x{height}x{width}"),)
    forward = replace(load_source(network.factory, inputs, labels, Loss.parse("cross_entropy"), 0, False), state={})
    # As in the paper's graphs there are no running statistics (whose factors n / (n - 1) may be equal at one batch and not at another), and a
    # gradient is one kernel (what stands for it on a target depends on the batch).
    training = build_training_graph(forward, Optimizer("sgd"), "nchw", replace(ORT_TRAINING, lowerings={}))
    problem = scheduling_problem(training.graph, node_flops(training.graph), training.resident(), network.name)
    return replace(problem, unit="FLOPs")


@dataclass(frozen=True)
class ScaledProblem:
    """A problem at any batch: bytes and costs lie on the line through those at two batches.

    Attributes:
        problems: the same graph at two batches.
        batches: the two batches; the same where everything is proportional to the batch, apart from ``fixed``.
        fixed: bytes held throughout that do not depend on the batch and are not part of the problems.
    """

    problems: tuple[Problem, Problem]
    batches: tuple[int, int]
    fixed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError where the two are not the same graph."""
        first, second = self.problems
        alike = [[(op.inputs, op.outputs, op.op_type, op.pinned, op.inplace) for op in p.ops] for p in (first, second)]
        if alike[0] != alike[1] or [t.alias_of for t in first.tensors] != [t.alias_of for t in second.tensors]:
            raise ValueError(f"{first.name}: the graph at batch {self.batches[1]} is another one than at batch {self.batches[0]}")

    def at(self, batch: int) -> Problem:
        """The problem at a batch."""
        first, second = self.problems
        low, high = self.batches

        def line(a: float, b: float) -> float:
            return a * batch / low if low == high else a + (b - a) * (batch - low) / (high - low)

        def size(a: int, b: int) -> int:
            return a * batch // low if low == high else a + (b - a) * (batch - low) // (high - low)

        ops = [
            replace(p, seconds=line(p.seconds, q.seconds), workspace_bytes=size(p.workspace_bytes, q.workspace_bytes))
            for p, q in zip(first.ops, second.ops, strict=True)
        ]
        tensors = [replace(p, bytes=size(p.bytes, q.bytes)) for p, q in zip(first.tensors, second.tensors, strict=True)]
        resident = {name: size(value, second.resident[name]) for name, value in first.resident.items()} | {"fixed": self.fixed}
        return replace(first, ops=tuple(ops), tensors=tuple(tensors), resident=resident)


def own_problem(network: Network, folder: Path) -> ScaledProblem:
    """Our own graph of a network, kept in a folder between runs."""
    problems = []
    for batch in _EXPORTED:
        path = folder / f"{network.name}.{batch}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _exported(network, batch).save(path)
        problems.append(Problem.load(path))
    return ScaledProblem((problems[0], problems[1]), (_EXPORTED[0], _EXPORTED[1]))


def instance_problem(network: Network, instances: Path) -> ScaledProblem:
    """The published instance of a network, with its parameters and their gradients added."""
    problem = Problem.load(instances / f"{network.instance}.json")
    return ScaledProblem((problem, problem), (network.batch, network.batch), 2 * 4 * network.parameters)


def forward_cost(problem: Problem) -> float:
    """Cost of the forward pass."""
    return sum(op.seconds for op in problem.ops if op.phase == "forward")


def selected(names: Sequence[str]) -> list[Network]:
    """Networks by name, all where none is named; raises SystemExit for an unknown one."""
    for name in names:
        if name not in NETWORKS:
            raise SystemExit(f"no network {name!r}; there are {', '.join(NETWORKS)}")
    return [NETWORKS[name] for name in names or NETWORKS]
