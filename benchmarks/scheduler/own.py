"""Training graphs of our own as problems: the whole step of well-known networks, with analytic costs, so that they are the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import Case
from onnxremat.exporters import InputSpec, Loss, load_source
from onnxremat.optimizers import Optimizer
from onnxremat.pipeline import Request, node_costs, training_problem
from onnxremat.scheduler import Problem
from onnxremat.training_graph import build_training_graph

__all__ = ["OWN", "own_problem"]


def gpt2_100() -> Any:
    """A GPT of 100 layers, about 5,000 ops, narrow so that its weights are few."""
    from onnxremat.models.transformer import gpt2

    return gpt2(layers=100, hidden=256, heads=4, vocab=4096, seq=512)


_TOKENS = "cross_entropy:class_axis=-1"
OWN = {
    case.name: case
    for case in (
        Case("gpt2-12", "onnxremat.models.transformer:gpt2", ("input_ids=4x512:int64:50257",), _TOKENS),
        Case("bert-base", "onnxremat.models.transformer:bert_mlm", ("input_ids=4x256:int64:30522",), _TOKENS),
        Case("vit-b16", "onnxremat.models.patches:vit_b16", ("x=8x3x224x224",), "cross_entropy"),
        Case("unet", "onnxremat.models.unet:unet", ("x=4x3x256x256",), "cross_entropy"),
        Case("resnet50", "onnxremat.models.resnet:resnet50", ("x=16x3x224x224",), "cross_entropy"),
        Case("gpt-100", "benchmarks.scheduler.own:gpt2_100", ("input_ids=4x512:int64:4096",), _TOKENS),
    )
}


def own_problem(case: Case, folder: Path | None = None) -> Problem:
    """The problem of a case, read from ``folder`` where an earlier run left it there, and left there otherwise."""
    path = None if folder is None else folder / f"{case.name}.json"
    if path is not None and path.exists():
        return Problem.load(path)
    forward = load_source(case.source, tuple(InputSpec.parse(text) for text in case.inputs), (), Loss.parse(case.loss), 0, False)
    training = build_training_graph(forward, Optimizer(), "nchw")
    request = Request(case.source, costs="analytic")
    problem = training_problem(training, node_costs(training, Path(), request, lambda _: None), case.name)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem.save(path)
    return problem
