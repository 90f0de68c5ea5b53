"""How lean the joint graph of forward and backward is: nodes, and bytes kept alive for backward.

    python -m benchmarks.joint_graph [--operators] [CASE ...]

The same forward graph is given to onnxremat, to ONNX Runtime's gradient builder and, where it is installed, to onnx-ad.  Kept for backward
are the storages that the forward part (what the loss depends on) makes and another node reads; a batch, weights and views take nothing.  Nodes are
those that loss and gradients depend on; the updates of running statistics, which the other two leave out, are counted apart.
ONNX Runtime's builder fails where a LayerNormalization has one output, as torch exports it: it is given the statistics too.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from benchmarks.common import Case, machine, table
from onnxremat.exporters import ForwardGraph, InputSpec, Loss, load_source
from onnxremat.foreign import problem_from_file
from onnxremat.normalize import remove_dead
from onnxremat.runtime import worker
from onnxremat.scheduler import Problem
from onnxremat.training_graph import build_training_graph


def without_dropout(module: Any) -> Any:
    """onnx-ad refuses dropout in training form."""
    for part in module.modules():
        if type(part).__name__ == "Dropout":
            part.p = 0.0
    return module


def vgg16() -> Any:
    from onnxremat.models.vgg import vgg16 as build

    return without_dropout(build())


def resnet50() -> Any:
    from onnxremat.models.resnet import resnet50 as build

    return build()


def resnet50_eval() -> Any:
    """With batch normalization in evaluation form, which is all that onnx-ad differentiates."""
    return resnet50().eval()


def gpt2() -> Any:
    from onnxremat.models.transformer import gpt2 as build

    return build(layers=4, hidden=256, heads=8, vocab=4096, seq=128, dropout=0.0)


CASES = {
    case.name: case
    for case in (
        Case("vgg16", "benchmarks.joint_graph:vgg16", ("x=8x3x224x224",), "cross_entropy"),
        Case("resnet50", "benchmarks.joint_graph:resnet50", ("x=8x3x224x224",), "cross_entropy"),
        Case("resnet50 eval", "benchmarks.joint_graph:resnet50_eval", ("x=8x3x224x224",), "cross_entropy"),
        Case("gpt2", "benchmarks.joint_graph:gpt2", ("input_ids=8x128:int64:4096",), "cross_entropy:class_axis=-1"),
    )
}


def _ancestors(problem: Problem, tensors: Iterable[int]) -> set[int]:
    """The ops that these tensors depend on."""
    found: set[int] = set()
    pending = [problem.tensors[t].producer for t in tensors]
    while pending:
        op = pending.pop()
        if op >= 0 and op not in found:
            found.add(op)
            pending += [problem.tensors[t].producer for t in problem.ops[op].inputs]
    return found


def needed_ops(problem: Problem) -> set[int]:
    """The ops that loss and gradients depend on."""
    return _ancestors(problem, [t for t, tensor in enumerate(problem.tensors) if tensor.output])


def figures(problem: Problem, loss: str) -> list[str]:
    """Nodes that loss and gradients depend on, other nodes, and MiB of the storages that the loss's ancestors make and other nodes read."""
    ops, tensors, root = problem.ops, problem.tensors, problem.index.root
    forward = _ancestors(problem, [t for t, tensor in enumerate(tensors) if tensor.name == loss])
    needed = needed_ops(problem)
    backward = [op for number, op in enumerate(ops) if number not in forward]
    kept = {root[t] for op in backward for t in op.inputs if tensors[root[t]].producer in forward}
    return [str(len(needed)), str(len(ops) - len(needed)), f"{sum(tensors[t].bytes for t in kept) / 2**20:.1f}"]


def forward_graph(case: Case) -> ForwardGraph:
    inputs = tuple(InputSpec.parse(text) for text in case.inputs)
    return load_source(case.source, inputs, (), Loss.parse(case.loss), 0)


def save_forward(case: Case, path: Path) -> list[str]:
    """The forward graph with its loss alone; returns the trainable parameters."""
    forward = forward_graph(case)
    graph = forward.model.graph
    graph.outputs[:] = [v for v in graph.outputs if v.name == forward.loss]
    remove_dead(graph, list(graph.outputs))
    ir.save(forward.model, str(path))
    return [name for name in forward.trainable if name in graph.initializers]


def ours(case: Case, folder: Path) -> tuple[Path, str]:
    training = build_training_graph(forward_graph(case))
    ir.save(training.model, str(folder / "ours.onnx"))
    return folder / "ours.onnx", training.loss


def operators(path: Path, problem: Problem) -> Counter[str]:
    """How many nodes of each kind loss and gradients depend on."""
    kinds = {node.name: node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    return Counter(kinds[problem.ops[op].name] for op in needed_ops(problem))


def with_statistics(path: Path) -> None:
    """Give every LayerNormalization its outputs of mean and deviation."""
    model = onnx.load(path)
    for i, node in enumerate(n for n in model.graph.node if n.op_type == "LayerNormalization"):
        del node.output[1:]
        node.output.extend((f"layer_norm_mean_{i}", f"layer_norm_deviation_{i}"))
    onnx.save(onnx.shape_inference.infer_shapes(model), path)


def ort_job(model: str, parameters: list[str], folder: str) -> None:
    """In a worker: the training graph of ONNX Runtime's gradient builder."""
    from onnxruntime.training import artifacts

    artifacts.generate_artifacts(onnx.load(model), requires_grad=parameters, artifact_directory=folder)


def ort(case: Case, folder: Path) -> tuple[Path, str]:
    parameters = save_forward(case, folder / "forward.onnx")
    with_statistics(folder / "forward.onnx")
    worker.call("benchmarks.joint_graph:ort_job", model=str(folder / "forward.onnx"), parameters=parameters, folder=str(folder))
    return folder / "training_model.onnx", onnx.load(str(folder / "forward.onnx")).graph.output[0].name


def onnx_ad(case: Case, folder: Path) -> tuple[Path, str]:
    import onnx_ad as package

    parameters = save_forward(case, folder / "forward.onnx")
    model = onnx.load(str(folder / "forward.onnx"))
    loss = model.graph.output[0].name
    # It differentiates by inputs.
    weights = {w.name: w for w in model.graph.initializer if w.name in set(parameters)}
    for name, weight in weights.items():
        model.graph.initializer.remove(weight)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, weight.data_type, list(weight.dims)))
    joint = package.reverse(model, inputs=parameters, outputs=[loss], layout="onnx")
    for value in joint.graph.input:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                dimension.dim_value = 1  # one seed
    onnx.save(joint, str(folder / "joint.onnx"))
    return folder / "joint.onnx", loss


BUILDERS: dict[str, Callable[[Case, Path], tuple[Path, str]]] = {"onnxremat": ours, "ONNX Runtime": ort, "onnx-ad": onnx_ad}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--operators", action="store_true", help="also list the kinds of nodes of which onnxremat and another have unequal numbers")
    options = parser.parse_args()
    print(machine())
    rows = []
    for name in options.cases:
        kinds: dict[str, Counter[str]] = {}
        for builder, build in BUILDERS.items():
            if builder == "onnx-ad" and importlib.util.find_spec("onnx_ad") is None:
                rows.append([name, builder, "not installed", "", ""])
                continue
            with tempfile.TemporaryDirectory() as text:
                try:
                    path, loss = build(CASES[name], Path(text))
                    problem = problem_from_file(path)
                    kinds[builder] = operators(path, problem)
                    rows.append([name, builder, *figures(problem, loss)])
                except Exception as error:
                    rows.append([name, builder, "fails", "", " ".join(str(error).split())[:100]])
            print(table(["model", "by", "nodes", "state updates", "MiB kept"], rows[-1:]).splitlines()[-1], flush=True)
        if options.operators:
            names = sorted(set().union(*kinds.values()), key=lambda kind: (-max(k[kind] for k in kinds.values()), kind))
            unequal = [[kind, *(str(k[kind]) for k in kinds.values())] for kind in names if len({k[kind] for k in kinds.values()}) > 1]
            print("\n" + table(["operator", *kinds], unequal) + "\n", flush=True)
    print()
    print(table(["model", "by", "nodes", "state updates", "MiB kept"], rows))


if __name__ == "__main__":
    main()
