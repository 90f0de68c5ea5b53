"""How lean the joint graph of forward and backward is: nodes, and bytes kept alive for backward.

    python -m benchmarks.joint_graph [CASE ...]

The same forward graph is given to onnxremat, to ONNX Runtime's gradient builder and, where it is installed, to onnx-ad.  Kept for backward
are the storages that the forward part (what the loss depends on) makes and another node reads; a batch, weights and views take nothing.  Nodes are
those that loss and gradients depend on; the updates of running statistics, which the other two leave out, are counted apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
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


def figures(problem: Problem, loss: str) -> list[str]:
    """Nodes that loss and gradients depend on, other nodes, and MiB of the storages that the loss's ancestors make and other nodes read."""
    ops, tensors, root = problem.ops, problem.tensors, problem.index.root
    forward = _ancestors(problem, [t for t, tensor in enumerate(tensors) if tensor.name == loss])
    needed = _ancestors(problem, [t for t, tensor in enumerate(tensors) if tensor.output])
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


def ort_job(model: str, parameters: list[str], folder: str) -> None:
    """In a worker: the training graph of ONNX Runtime's gradient builder."""
    from onnxruntime.training import artifacts

    artifacts.generate_artifacts(onnx.load(model), requires_grad=parameters, artifact_directory=folder)


def ort(case: Case, folder: Path) -> tuple[Path, str]:
    parameters = save_forward(case, folder / "forward.onnx")
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
    options = parser.parse_args()
    print(machine())
    rows = []
    for name in options.cases:
        for builder, build in BUILDERS.items():
            if builder == "onnx-ad" and importlib.util.find_spec("onnx_ad") is None:
                rows.append([name, builder, "not installed", "", ""])
                continue
            with tempfile.TemporaryDirectory() as text:
                try:
                    path, loss = build(CASES[name], Path(text))
                    rows.append([name, builder, *figures(problem_from_file(path), loss)])
                except Exception as error:
                    rows.append([name, builder, "fails", "", " ".join(str(error).split())[:100]])
            print(table(["model", "by", "nodes", "state updates", "MiB kept"], rows[-1:]).splitlines()[-1], flush=True)
    print()
    print(table(["model", "by", "nodes", "state updates", "MiB kept"], rows))


if __name__ == "__main__":
    main()
