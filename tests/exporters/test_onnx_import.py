"""Forward .onnx files of any origin."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from onnxremat.exporters import ExportError, InputSpec, export_torch, import_onnx
from onnxremat.training_graph import build_training_graph
from tests.exporters.support import close, op_counts, run_onnx, sample_all, x

BATCH_NORM = """<ir_version: 8, opset_import: ["": 15]>
g (float[N, 3, 8, 8] x) => (float[N, 4, 8, 8] y)
<float[4, 3, 3, 3] w, float[4] s, float[4] b, float[4] m, float[4] v>
{
  c = Conv<auto_pad = "SAME_UPPER">(x, w)
  y = BatchNormalization<training_mode = 1, momentum = 0.9>(c, s, b, m, v)
}"""


def write(path: Path, text: str, seed: int = 0) -> Path:
    """A textual graph; its typed initializers without values get random ones."""
    head, _, rest = text.partition("\n<float")
    names = {}
    if rest:
        declared, _, body = ("float" + rest).partition(">")
        text = head + body
        for item in declared.split(", float"):
            shape, _, name = item.removeprefix("float").strip("[").partition("] ")
            names[name.strip()] = tuple(int(d) for d in shape.split(","))
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(seed)
    for name, shape in names.items():
        array = np.abs(rng.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


def test_older_opset_dynamic_batch_auto_pad_and_state(tmp_path: Path) -> None:
    path = write(tmp_path / "bn.onnx", BATCH_NORM)
    graph = import_onnx(path, [InputSpec("x", (2, 3, 8, 8))])
    assert graph.trainable == ("w", "s", "b") and graph.state == {"m": "m.next", "v": "v.next"}
    assert graph.outputs == ("y",) and [v.name for v in graph.model.graph.outputs] == ["y", "m.next", "v.next"]
    conv = next(node for node in graph.model.graph if node.op_type == "Conv")
    assert list(conv.attributes["pads"].value) == [1, 1, 1, 1] and "auto_pad" not in conv.attributes
    assert graph.model.opset_imports == {"": 20} and graph.model.ir_version == 10
    feeds = sample_all(graph)
    got = run_onnx(graph, feeds)
    weights = {n: torch.from_numpy(v.const_value.numpy().copy()) for n, v in graph.model.graph.initializers.items() if n in "wsbmv"}
    y = torch.nn.functional.conv2d(torch.from_numpy(feeds["x"]), weights["w"], padding=1)
    close(got["y"], torch.nn.functional.batch_norm(y, None, None, weights["s"], weights["b"], True))
    close(got["m.next"], 0.9 * weights["m"] + 0.1 * y.mean((0, 2, 3)))


def test_a_loss_on_a_foreign_file(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[2, 4] x) => (float[2, 3] logits)\n<float[4, 3] w, float[3] b>\n'
        "{ h = MatMul(x, w) logits = Add(h, b) }"
    )
    graph = import_onnx(write(tmp_path / "m.onnx", text), (), (), "cross_entropy")
    assert graph.trainable == ("w", "b") and graph.loss == "loss" and graph.labels == (InputSpec("labels", (2,), "int64", 3),)
    feeds = sample_all(graph)
    got = run_onnx(graph, feeds)
    close(got["loss"], torch.nn.functional.cross_entropy(torch.from_numpy(got["logits"]), torch.from_numpy(feeds["labels"])))
    frozen = import_onnx(tmp_path / "m.onnx", (), (), "cross_entropy", trainable=["w"])
    assert frozen.trainable == ("w",) and frozen.frozen == ("b",)


def test_what_counts_as_a_weight(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[2, 4] x) => (float[2, 4] y)\n<float[4, 4] w, float[2, 4] table, float[1] one>\n'
        "{ t = Transpose<perm = [1, 0]>(w) h = MatMul(x, t) a = Add(h, table) y = Mul(a, one) }"
    )
    graph = import_onnx(write(tmp_path / "m.onnx", text))
    assert graph.trainable == ("w",) and graph.frozen == ("table",)
    assert op_counts(graph)["Transpose"] == 1  # never folded into the weight


def test_torch_script_style_file_equals_torch(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)).eval()
    torch.onnx.export(module, (torch.randn(2, 3, 6, 6),), tmp_path / "m.onnx", dynamo=True, verbose=False, external_data=False)
    graph = import_onnx(tmp_path / "m.onnx")
    feeds = sample_all(graph)
    (got,) = run_onnx(graph, feeds).values()
    close(got, module(torch.from_numpy(next(iter(feeds.values())))))
    assert len(graph.trainable) == 4


def test_own_file_with_a_loss_added_later(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    export_torch(module, [x(5, 4)]).save(tmp_path / "f.onnx")
    plain = import_onnx(tmp_path / "f.onnx")
    assert plain.loss is None and plain.state
    graph = import_onnx(tmp_path / "f.onnx", [x(5, 4)], (), "mse")
    assert graph.loss == "loss" and graph.state == plain.state
    assert set(run_onnx(graph, sample_all(graph))) == {"loss", "output", *graph.state.values()}
    with pytest.raises(ExportError, match="was exported with x=5x4"):
        import_onnx(tmp_path / "f.onnx", [x(6, 4)])


HEAD = '<ir_version: 8, opset_import: ["": 17, "my.ops": 1]> '
ONE = "g (float[N, 4] x) => (float[N, 4] y) "


@pytest.mark.parametrize(
    ("text", "specs", "message"),
    [
        (HEAD + ONE + "{ y = Relu(x) }", [], "dynamic; pin it"),
        (HEAD + ONE + "{ y = Relu(x) }", [InputSpec("z", (2, 4))], "no such input; it has x"),
        (HEAD + ONE + "{ y = Relu(x) }", [InputSpec("x", (2, 5))], "wants float32"),
        (HEAD + ONE + "{ y = Relu(x) }", [InputSpec("x", (2, 4), "int64")], "wants float32"),
        (HEAD + ONE + "{ y = Relu(x) }", [InputSpec("x", (2, 4, 1))], "wants float32"),
        (HEAD + ONE + "{ y = my.ops.Fancy(x) }", [InputSpec("x", (2, 4))], "Fancy.*domain my.ops"),
        (HEAD + ONE + "{ y = Fancy(x) }", [InputSpec("x", (2, 4))], "Fancy.*opset 17 has no such operator; export it with standard"),
        (HEAD + ONE + "{ c = Cast<to = 14>(x) y = Cast<to = 1>(c) }", [InputSpec("x", (2, 4))], "Cast .*complex tensors .*pairs of real"),
        (HEAD + "g (string[2] x) => (string[2] y) { y = Identity(x) }", [], "not a tensor that can be fed"),
        (HEAD + "g (float[4] x) => (int64[1, K] y) { y = NonZero(x) }", [], "not static"),
        ('<ir_version: 8, opset_import: ["": 99]> ' + ONE + "{ y = Relu(x) }", [InputSpec("x", (2, 4))], "opset 99 is newer"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, specs: list[InputSpec], message: str) -> None:
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=message) as caught:
        import_onnx(tmp_path / "m.onnx", specs)
    assert "\n" not in str(caught.value)


SEQUENCES = (
    HEAD
    + """net (float[N, 4] x) => (float[N, 2] y)
<float[4, 4] w, int64 last = {-1}> {
  h = MatMul(x, w)
  parts = SplitToSequence<axis = 1>(h, two)
  tail = SequenceAt(parts, last)
  count = SequenceLength(parts)
  factor = Cast<to = 1>(count)
  y = Mul(tail, factor)
}"""
)


def test_sequences_are_taken_apart(tmp_path: Path) -> None:
    text = SEQUENCES.replace("int64 last = {-1}", "int64 last = {-1}, int64 two = {2}")
    model = onnx.parser.parse_model(text.replace("float[4, 4] w, ", ""))
    weight = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx")
    graph = import_onnx(tmp_path / "m.onnx", [InputSpec("x", (3, 4))])
    feeds = sample_all(graph)
    close(run_onnx(graph, feeds)["y"], torch.from_numpy(2 * (feeds["x"] @ weight)[:, 2:]))
    training = build_training_graph(import_onnx(tmp_path / "m.onnx", [InputSpec("x", (3, 4))], (), "mse"))
    assert training.trainable == ("w",) and not any("Sequence" in node.op_type for node in training.graph)


def test_unknown_trainable(tmp_path: Path) -> None:
    path = write(tmp_path / "bn.onnx", BATCH_NORM)
    with pytest.raises(ExportError, match="no float initializer"):
        import_onnx(path, [InputSpec("x", (2, 3, 8, 8))], trainable=["nothing"])


def test_dropout_of_an_inference_file_is_absent(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2, 4] x) => (float[2, 4] y) { d = Dropout(x) y = Relu(d) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert op_counts(import_onnx(tmp_path / "m.onnx")) == {"Relu": 1}


def test_output_names_survive_the_removal_of_no_ops(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[2, 4] x) => (float[2, 4] a, float[2, 4] b, float[2, 4] c) '
        "{ r = Relu(x) a = Dropout(r) b = Identity(r) c = Identity(x) }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    graph = import_onnx(tmp_path / "m.onnx")
    assert graph.outputs == ("a", "b", "c")
    feeds = sample_all(graph)
    got = run_onnx(graph, feeds)
    relu = np.maximum(feeds["x"], 0)
    assert all(np.array_equal(got[name], wanted) for name, wanted in (("a", relu), ("b", relu), ("c", feeds["x"])))


@pytest.mark.parametrize("opset", [13, 20])
def test_external_data(tmp_path: Path, opset: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((300, 300)).astype(np.float32)  # beyond what the opset conversion is given to see
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g (float[2, 300] x) => (float[2, 300] y) {{ y = MatMul(x, w) }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    graph = import_onnx(tmp_path / "m.onnx")
    assert graph.trainable == ("w",)
    feeds = sample_all(graph)
    close(run_onnx(graph, feeds)["y"], feeds["x"] @ weight)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ExportError, match=r"m\.bin"):
        import_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize(("opset", "scales"), [(18, 2), (20, 2), (21, 4)])
def test_group_normalization_of_every_opset(tmp_path: Path, opset: int, scales: int) -> None:
    """One scale per group up to opset 20, one per channel from then on."""
    text = (
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[2, 4, 3, 3] x) => (float[2, 4, 3, 3] y)\n<float[{scales}] s, float[{scales}] b>\n'
        "{ y = GroupNormalization<num_groups = 2, epsilon = 0.001>(x, s, b) }"
    )
    graph = import_onnx(write(tmp_path / "m.onnx", text), loss="mse")
    assert graph.trainable == ("s", "b")
    feeds = sample_all(graph)
    scale, bias = (torch.tensor(graph.model.graph.initializers[n].const_value.numpy()).repeat_interleave(4 // scales) for n in "sb")
    wanted = nn.functional.group_norm(torch.from_numpy(feeds["x"]), 2, scale, bias, 0.001)
    close(run_onnx(graph, feeds)["y"], wanted)
    assert set(build_training_graph(graph).trainable) == {"s", "b"}


class Unscaled(nn.Module):
    """Normalizations without parameters, a buffer, a table of the forward's own: nothing of that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.group, self.batch = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
        self.out = nn.Linear(64, 8)
        self.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.batch(self.group(self.norm(self.conv(x / self.mean))))
        return self.out(h.flatten(1)) * torch.arange(1.0, 9.0)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "train-mode"])
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_what_both_exporters_of_torch_write(tmp_path: Path, dynamo: bool, train: bool) -> None:
    """A fresh model, whose equal tensors (biases, running means) the exporters merge."""
    module = Unscaled().eval()
    options: dict[str, Any] = {"verbose": False} if dynamo else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.randn(2, 3, 6, 6),), tmp_path / "m.onnx", dynamo=dynamo, input_names=["x"], **options)
    graph = import_onnx(tmp_path / "m.onnx", loss="mse", train_mode=train)
    assert len(graph.state) == (2 if train else 0)
    feeds = sample_all(graph)
    close(run_onnx(graph, feeds)[graph.outputs[0]], (module.train() if train else module)(torch.from_numpy(feeds["x"])))
    training = build_training_graph(graph)
    sizes = sorted(int(np.prod(training.weights[name].shape)) for name in training.trainable)
    frozen_mean = [] if dynamo else [3]  # only the dynamo exporter tells a buffer from a parameter
    assert sizes == sorted([4, 108, 4, 4, 4, 4, 8, 512, *frozen_mean])
