"""Every model of the zoo: topology, and its forward graph against torch in training mode."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onnxremat.exporters import ForwardGraph, InputSpec, Loss, export_torch
from onnxremat.models.zoo import ManifestError, ZooEntry, load_zoo, read_manifest, zoo_entry
from tests.exporters.support import close, op_counts, same_as_torch

NAMES = tuple(load_zoo())
SLOW = {"resnet50", "resnet101", "mobilenet_v2", "resnet18_digits", "mobilenet_v3_large", "efficientnet_b0", "inception_v1", "t5", "bart", "whisper"}
#: Stochastic depth draws anew in each of the two; tests/models/test_families.py replays what was drawn.
DRAWN = [pytest.param("efficientnet_b0", marks=pytest.mark.slow)]
#: Where torch in float32 is about as far from torch in float64.
DEEP = {"resnet101": 1e-3}
MODELS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]


def factory(entry: ZooEntry) -> Any:
    module, _, name = entry.factory.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def quick(name: str) -> tuple[nn.Module, ForwardGraph]:
    entry = zoo_entry(name)
    torch.default_generator.manual_seed(0)
    module = factory(entry)(**entry.quick.arguments)
    inputs, labels = ([InputSpec.parse(text) for text in texts] for texts in (entry.quick.inputs, entry.quick.labels))
    return module, export_torch(module, inputs, labels, entry.loss)


@pytest.mark.parametrize("name", [m for m in MODELS if m not in DRAWN])
def test_forward_graph_equals_torch_in_training_mode(name: str) -> None:
    module, graph = quick(name)
    assert module.training
    got, _ = same_as_torch(graph, module, tolerance=DEEP.get(name, 1e-4))
    loss = Loss.parse(zoo_entry(name).loss)
    from tests.exporters.support import sample_all

    label = torch.from_numpy(sample_all(graph)[graph.labels[0].name])
    close(got["loss"], loss.torch(torch.from_numpy(got[graph.outputs[0]]), label))


@pytest.mark.parametrize("name", MODELS)
def test_roles_cover_the_module(name: str) -> None:
    module, graph = quick(name)
    parameters = [n for n, p in module.named_parameters() if p.requires_grad]
    assert [n for n in parameters if n not in graph.source["unused"]] == list(graph.trainable)
    statistics = [n for n, b in module.named_buffers() if n.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert set(statistics) == set(graph.state)
    own = [graph.loss] if graph.loss not in graph.outputs else []
    assert [v.name for v in graph.model.graph.outputs] == [*own, *graph.outputs, *graph.state.values()]


LEAN = {
    "resnet18": {"Conv": 20, "BatchNormalization": 20, "Relu": 17, "MaxPool": 1, "Gemm": 1, "Dropout": 1},
    "resnet50": {"Conv": 53, "BatchNormalization": 53, "Relu": 49, "Gemm": 1},
    "vgg16": {"Conv": 13, "Gemm": 3, "Dropout": 2, "MaxPool": 5},
    "mobilenet_v1": {"Conv": 27, "BatchNormalization": 27},
    "mobilenet_v2": {"Conv": 52, "BatchNormalization": 52, "Dropout": 1, "Clip": 35},
    "unet": {"ConvTranspose": 3, "Concat": 3},
    "gpt2": {"Gemm": 9, "Dropout": 7, "LayerNormalization": 5, "Softmax": 2, "Gather": 2, "Split": 2},
    "bert_mlm": {"Gemm": 14, "Dropout": 7, "LayerNormalization": 6, "Softmax": 2, "Gelu": 3},
    "bert_classifier": {"Dropout": 8, "Softmax": 2},
    "resnet18_digits": {"Conv": 20, "Dropout": 1},
}
NOISE = ("Constant", "Identity", "Cast", "CastLike", "Expand", "Shape", "Where", "IsNaN", "ConstantOfShape", "Range", "Slice", "Unsqueeze")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LEAN])
def test_graphs_are_lean(name: str) -> None:
    counts = op_counts(quick(name)[1])
    assert {op: counts[op] for op in LEAN[name]} == LEAN[name]
    assert not [op for op in NOISE if counts[op]]


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet18", 11.69),
        ("resnet50", 25.56),
        ("mobilenet_v1", 4.23),
        ("mobilenet_v2", 3.50),
        ("unet", 31.04),
        ("resnet101", 44.55),
        ("densenet121", 7.98),
        ("mobilenet_v3_large", 5.48),
        ("mobilenet_v3_small", 2.54),
        ("efficientnet_b0", 5.29),
        ("squeezenet", 1.24),
        ("convnext_tiny", 28.59),
        ("vit_b16", 86.57),
        ("mlp_mixer", 59.88),
    ],
)
def test_full_sizes_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        module = factory(zoo_entry(name))()
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "millions"), [("vgg16", 138.36), ("gpt2", 124.44), ("bert_mlm", 109.51)])
def test_large_full_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        module = factory(zoo_entry(name))()
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm"])
def test_eager_attention_gives_the_same_operators(name: str) -> None:
    entry = zoo_entry(name)
    module = factory(entry)(**entry.quick.arguments, attention="eager")
    graph = export_torch(module, [InputSpec.parse(t) for t in entry.quick.inputs], [InputSpec.parse(t) for t in entry.quick.labels], entry.loss)
    assert op_counts(graph) == op_counts(quick(name)[1])
    same_as_torch(graph, module)


def test_entries_are_well_formed() -> None:
    assert len(NAMES) == len(set(NAMES))
    for entry in load_zoo().values():
        for text in (*entry.inputs, *entry.labels, *entry.quick.inputs, *entry.quick.labels):
            assert str(InputSpec.parse(text)) == text
        assert Loss.parse(entry.loss).name in ("cross_entropy", "output") and entry.tags
        assert entry.batch == InputSpec.parse(entry.inputs[0]).shape[0]
    with pytest.raises(KeyError):
        zoo_entry("alexnet")


REQUIRED = (
    "vgg16 vgg19 resnet18 resnet50 resnet101 mobilenet_v1 mobilenet_v2 mobilenet_v3_large densenet121 efficientnet_b0 unet segnet fcn8 "
    "convnext_tiny vit_b16 mlp_mixer lstm_lm gpt2 bert_mlm llama t5 whisper"
)


@pytest.mark.parametrize("name", REQUIRED.split())
def test_the_zoo_has(name: str) -> None:
    entry = zoo_entry(name)
    assert entry.quick is not None and entry.source() == entry.factory
    assert entry.source(quick=True).startswith(f"{entry.factory}(") and entry.source(quick=True).endswith(")")


GOOD = """
- {name: mine, factory: "my.models:build", arguments: {width: 8}, batch: 4, inputs: ["x=Nx3xNx7", "scale=scalar"], labels: ["y=N:int64:3"],
   loss: cross_entropy, tags: [vision], limits: ["slow"], quick: {batch: 2, inputs: ["x=Nx3"], arguments: {deep: [1, 2]}}}
"""


def test_a_manifest_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    entry = read_manifest(tmp_path / "m.yaml")["mine"]
    assert entry.inputs == ("x=4x3x4x7", "scale=scalar") and entry.labels == ("y=4:int64:3",) and entry.limits == ("slow",)
    assert entry.source() == "my.models:build(width=8)" and entry.source(quick=True) == "my.models:build(deep=[1, 2])"
    assert entry.quick is not None and entry.quick.inputs == ("x=2x3",)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: mine", "nom: mine", "'nom', which is not one of"),
        ("name: mine", "name: ../mine", "names a folder"),
        ("loss: cross_entropy", "loss: 3", "loss must be text"),
        ("loss: cross_entropy", "loss:", "has no 'loss'"),
        ("my.models:build", "my.models", "not package.module:factory"),
        ("batch: 4, ", "", "no 'batch'"),
        ("batch: 4", "batch: many", "batch must be a number"),
        ("x=Nx3xNx7", "x=Nx3xA", "is not NAME=SHAPE"),
        ("{width: 8}", "{'a b': 8}", "arguments must be names"),
        ("batch: 2, ", "batches: 2, ", "quick has the key 'batches'"),
        ("[vision]", "vision", "tags must be a list"),
        ("]}}}", "]}}}}", "is not YAML"),
    ],
)
def test_bad_manifests(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    (tmp_path / "m.yaml").write_text(GOOD.replace(old, new))
    with pytest.raises(ManifestError, match=message) as caught:
        read_manifest(tmp_path / "m.yaml")
    assert "\n" not in str(caught.value) and "m.yaml" in str(caught.value)


def test_manifests_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        read_manifest(tmp_path / "none.yaml")
    (tmp_path / "m.yaml").write_text("name: x")
    with pytest.raises(ManifestError, match="expected a list"):
        read_manifest(tmp_path / "m.yaml")
    (tmp_path / "m.yaml").write_text(GOOD + GOOD)
    with pytest.raises(ManifestError, match="two models called mine"):
        read_manifest(tmp_path / "m.yaml")


def test_listing_needs_no_torch() -> None:
    code = "import sys; from onnxremat.models.zoo import load_zoo; load_zoo(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "False"
