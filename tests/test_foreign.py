"""Problems from files: ONNX Runtime's own training graphs, with every shape checked against what the runtime really makes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxremat.artifact import save_model
from onnxremat.costs import analytic_costs
from onnxremat.errors import ArtifactError, OnnxRematError
from onnxremat.exporters import InputSpec, Loss, import_onnx
from onnxremat.foreign import kind_of_file, problem_from_file
from onnxremat.ops import MS
from onnxremat.optimizers import Optimizer, optimizer_model
from onnxremat.problem import scheduling_problem
from onnxremat.runtime.session import make_session
from onnxremat.scheduler import Problem, evaluate, solve
from onnxremat.training_graph import TrainingGraph, build_training_graph

# generate_artifacts imports torch and hooks its seeding: it gets a process of its own.
GENERATE = """
import sys, warnings, onnx, torch
from pathlib import Path
from torch import nn
from onnxruntime.training.artifacts import LossType, OptimType, generate_artifacts
warnings.filterwarnings("ignore")

class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.fc = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16, 10)
    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.bn(self.a(x))), 2)
        return self.fc(nn.functional.dropout(torch.relu(self.b(x)).mean((2, 3)), 0.1))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.qkv, self.o, self.f = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 50)
    def forward(self, ids):
        x = self.e(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.o(torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v)
        return self.f((x + nn.functional.gelu(x)).mean(1))

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.g = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pos, self.q, self.f = nn.Parameter(torch.randn(1, 64, 8)), nn.Linear(8, 8), nn.Linear(16, 10)
    def forward(self, x):
        y = nn.functional.max_pool2d(torch.sigmoid(self.g(nn.functional.leaky_relu(self.c(x)))), 2)
        y = y.flatten(2).transpose(1, 2) + self.pos
        y = torch.cat([self.q(y), torch.tanh(y)], -1)
        y = y[..., :8] * y[..., 8:]
        y = torch.cat([y, y.exp() / (1 + y * y).sqrt()], -1)
        return self.f(torch.where(y > 0, y, y * 0.5).mean(1))

mlp = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
models = {
    "mlp": (mlp, "x", torch.randn(4, 20)),
    "cnn": (Cnn(), "x", torch.randn(4, 3, 32, 32)),
    "attention": (Attention(), "x", torch.randint(0, 50, (4, 12))),
    "mixed": (Mixed(), "x", torch.randn(4, 3, 16, 16)),
}
for name, (model, feed, x) in models.items():
    folder = Path(sys.argv[1]) / name
    folder.mkdir()
    torch.onnx.export(model.train(), (x,), str(folder / "forward.onnx"), input_names=[feed], output_names=["y"], opset_version=17,
                      training=torch.onnx.TrainingMode.TRAINING, dynamic_axes={feed: {0: "batch"}}, do_constant_folding=False, dynamo=False)
    forward = onnx.load(folder / "forward.onnx")
    held = {i.name for i in forward.graph.initializer}
    trained = [n for n, _ in model.named_parameters()]
    generate_artifacts(forward, requires_grad=[n for n in trained if n in held], frozen_params=[n for n in held if "running" in n],
                       loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory=folder)
"""

INPUTS = {
    "mlp": ["x=8x20", "labels=8:int64:10"],
    "cnn": ["x=8x3x32x32", "labels=8:int64:10"],
    "attention": ["x=8x12:int64:50", "labels=8:int64:10"],
    "mixed": ["x=8x3x16x16", "labels=8:int64:10"],
}


def specs(name: str) -> list[InputSpec]:
    return [InputSpec.parse(text) for text in INPUTS[name]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training artifacts that ONNX Runtime made."""
    folder = tmp_path_factory.mktemp("ort")
    done = subprocess.run([sys.executable, "-c", GENERATE, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def tiny() -> onnx.ModelProto:
    """A forward graph with an open batch."""
    return helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["h"], name="product"), helper.make_node("ReduceSum", ["h"], ["loss"], keepdims=0)],
            "tiny",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])],
            [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
            [onnx.numpy_helper.from_array(np.full((3, 5), 0.5, np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(MS, 1)],
        ir_version=8,
    )


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_bytes_of_every_tensor_are_what_the_runtime_makes(made: Path, name: str) -> None:
    path = made / name / "training_model.onnx"
    problem = problem_from_file(path, specs(name))
    model = onnx.load(path)
    declared = {v.name for v in model.graph.output}
    wanted = [t.name for t in problem.tensors if t.producer >= 0]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in wanted if n not in declared)
    session = make_session(model.SerializeToString())
    rng = np.random.default_rng(0)
    sizes = {spec.name: spec.sample(rng) for spec in specs(name)}
    for entry in session.get_inputs():
        if entry.name not in sizes:
            sizes[entry.name] = np.ones(entry.shape, np.bool_ if entry.type == "tensor(bool)" else np.float32)
    found = dict(zip(wanted, session.run(wanted, sizes), strict=True))
    assert len(wanted) > 15
    assert {n: a.nbytes for n, a in found.items()} == {t.name: t.bytes for t in problem.tensors if t.producer >= 0}


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_resident_classes_add_up(made: Path, name: str) -> None:
    path = made / name / "training_model.onnx"
    resident = problem_from_file(path, specs(name)).resident
    forward = onnx.load(made / name / "forward.onnx")
    floats = {i.name: 4 * int(np.prod(i.dims)) for i in forward.graph.initializer if i.data_type == TensorProto.FLOAT and i.dims}
    graph = onnx.load(path).graph
    trained = sum(size for n, size in floats.items() if f"{n}_grad.accumulation.buffer" in {i.name for i in graph.input})
    assert trained > 0
    assert resident["parameters"] == resident["gradients"] == trained
    assert resident["optimizer_state"] == 2 * trained  # AdamW, from the optimizer model beside it
    assert resident["batch"] == sum(s.nbytes for s in specs(name)) + 1  # and lazy_reset_grad
    assert resident["model_state"] == (2 * 8 * 4 if name == "cnn" else 0)
    constants = [onnx.numpy_helper.to_array(i).nbytes for i in graph.initializer]
    assert resident["constants"] == sum(constants)


def test_phases_and_pins_of_a_graph_that_has_none(made: Path) -> None:
    problem = problem_from_file(made / "cnn" / "training_model.onnx", specs("cnn"))
    phases = {op.name: op.phase for op in problem.ops}
    pins = {op.op_type: op.pinned for op in problem.ops}
    assert all(phases[op.name] == "update" for op in problem.ops if op.op_type == "InPlaceAccumulatorV2")
    assert all(phases[op.name] == "backward" for op in problem.ops if op.op_type.endswith("Grad"))
    assert all(phases[op.name] == "forward" for op in problem.ops if op.op_type in ("Conv", "MaxPool", "SoftmaxCrossEntropyLoss"))
    assert pins["Dropout"] == "random"
    assert pins["Conv"] == pins["ConvGrad"] == ""
    # It writes over the running statistics: run twice, it would count the batch twice.
    norm = next(op for op in problem.ops if op.op_type == "BatchNormInternal")
    assert norm.pinned == "stateful"
    assert [problem.tensors[t].name for t in norm.writes] == ["bn.running_mean", "bn.running_var"]


def test_a_graph_of_the_runtime_can_be_planned(made: Path) -> None:
    problem = problem_from_file(made / "cnn" / "training_model.onnx", specs("cnn"))
    peak = evaluate(problem, range(len(problem.ops))).peak_bytes
    plan = solve(problem, int(0.85 * peak), strategy="auto", time_limit=5, seed=0)
    assert plan.peak_bytes <= 0.85 * peak
    assert plan.seconds >= plan.seconds_unscheduled > 0


def test_one_input_pins_a_symbol_everywhere(made: Path) -> None:
    path = made / "mlp" / "training_model.onnx"
    only_x = problem_from_file(path, specs("mlp")[:1])
    assert only_x.to_json() == problem_from_file(path, specs("mlp")).to_json()
    larger = problem_from_file(path, [InputSpec.parse("x=16x20")])
    assert larger.resident["batch"] == 2 * (only_x.resident["batch"] - 1) + 1


def test_threads_count_in_the_workspace(made: Path) -> None:
    path = made / "cnn" / "training_model.onnx"
    workspaces = [max(op.workspace_bytes for op in problem_from_file(path, specs("cnn"), threads).ops) for threads in (1, 4)]
    assert workspaces[1] > workspaces[0] > 0


def test_weights_inside_the_file_are_parameters(tiny: onnx.ModelProto, tmp_path: Path) -> None:
    problem = problem_from_file(saved(tiny, tmp_path), [InputSpec.parse("x=7x3")])
    assert problem.resident["parameters"] == 60
    assert problem.resident["batch"] == 84
    assert [(t.name, t.bytes) for t in problem.tensors if t.producer >= 0] == [("h", 140), ("loss", 4)]
    assert [op.phase for op in problem.ops] == ["forward", "forward"]


def test_gradient_args_are_followed_as_numbers(tmp_path: Path) -> None:
    """Shape -> BroadcastGradientArgs -> ReduceSumTraining -> Reshape, as the runtime's builder writes it for an open batch."""
    nodes = [
        helper.make_node("Shape", ["a"], ["sa"]),
        helper.make_node("Shape", ["b"], ["sb"]),
        helper.make_node("BroadcastGradientArgs", ["sa", "sb"], ["ra", "rb"], domain=MS),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("ReduceSumTraining", ["c", "rb"], ["reduced"], domain=MS, keepdims=1, noop_with_empty_axes=1),
        helper.make_node("Reshape", ["reduced", "sb"], ["back"]),
        helper.make_node("ReduceSumTraining", ["c", "ra"], ["same"], domain=MS, keepdims=1, noop_with_empty_axes=1),
    ]
    graph = helper.make_graph(
        nodes,
        "gradient args",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n", 4, 5]), helper.make_tensor_value_info("b", TensorProto.FLOAT, [4, 1])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("back", "same")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(MS, 1)], ir_version=8)
    problem = problem_from_file(saved(model, tmp_path), [InputSpec.parse("a=3x4x5")])
    sizes = {t.name: t.bytes for t in problem.tensors}
    assert (sizes["reduced"], sizes["back"], sizes["same"]) == (16, 16, 240)
    assert (sizes["ra"], sizes["rb"]) == (0, 16)


def test_gradients_without_a_rule_look_like_what_they_are_of(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("AveragePool", ["y"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("AveragePoolGrad", ["p"], ["y_grad_1"], kernel_shape=[2, 2], strides=[2, 2]),
    ]
    ends = [helper.make_tensor_value_info("y_grad_1", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "pool", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])], ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    problem = problem_from_file(saved(model, tmp_path), [InputSpec.parse("x=2x3x8x8")])
    sizes = {t.name: t.bytes for t in problem.tensors}
    assert sizes["y_grad_1"] == sizes["y"] == 4 * sizes["p"] == 1536


def own_training_graph(folder: Path, optimizer: Optimizer) -> TrainingGraph:
    """A training graph of this package's making, with running statistics and a frozen parameter ahead of the trained ones."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "conv"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["b", "", ""], training_mode=1),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "fc", "bias"], ["y"]),
    ]
    held = [weight("conv", 4, 2, 3, 3), weight("scale", 4), weight("shift", 4), weight("mean", 4)]
    held += [weight("fc", 144, 10), weight("bias", 10)]
    held.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "var"))
    feeds = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 2, 6, 6])]
    graph = helper.make_graph(nodes, "net", feeds, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 10])], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "forward.onnx")
    forward = import_onnx(folder / "forward.onnx", (), (), Loss("cross_entropy"), trainable=["scale", "shift", "fc", "bias"])
    return build_training_graph(forward, optimizer)


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer("sgd"), Optimizer("sgd", momentum=0.9), Optimizer("sgd", weight_decay=0.1)])
def test_our_own_training_graph_is_the_problem_it_was_planned_as(tmp_path: Path, optimizer: Optimizer) -> None:
    training = own_training_graph(tmp_path, optimizer)
    save_model(training.model, tmp_path / "training_model.onnx")
    if not optimizer.in_graph:
        onnx.save(optimizer_model(optimizer, training.trainable), tmp_path / "optimizer_model.onnx")
    expected = scheduling_problem(training.graph, analytic_costs(training.graph), training.resident())
    found = problem_from_file(tmp_path / "training_model.onnx")
    assert found.ops == expected.ops
    assert found.tensors == expected.tensors
    classes = dict(expected.resident)
    control = found.resident["batch"] - classes["batch"]  # lazy_reset_grad, learning_rate
    assert 0 < control <= 5
    assert found.resident == classes | {"batch": classes["batch"] + control}
    assert set(training.frozen) == {"conv"}


def test_problem_files_and_plain_instances(made: Path, tmp_path: Path) -> None:
    problem = problem_from_file(made / "mlp" / "training_model.onnx", specs("mlp"))
    problem.save(tmp_path / "problem.json")
    assert problem_from_file(tmp_path / "problem.json").to_json() == problem.to_json()
    plain = {"name": "chain", "ops": [{"cost": 1, "bytes": 8, "inputs": []}, {"cost": 2, "bytes": 8, "inputs": [0]}]}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    loaded = problem_from_file(tmp_path / "plain.json")
    assert (len(loaded.ops), loaded.ops[1].seconds) == (2, 2)


def test_kinds(made: Path, tiny: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(tiny, tmp_path / "no_suffix")
    (tmp_path / "a.json").write_text(" {}")
    (tmp_path / "bare").write_text('{"name": "x"}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "manifest.json").write_text("{}")
    assert kind_of_file(made / "mlp" / "training_model.onnx") == "onnx"
    assert kind_of_file(tmp_path / "no_suffix") == "onnx"
    assert kind_of_file(tmp_path / "a.json") == kind_of_file(tmp_path / "bare") == "problem"
    assert kind_of_file(tmp_path / "folder") == "artifact"


def test_a_folder_is_checked_as_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match="this onnxremat reads"):
        problem_from_file(tmp_path)


def refusal(path: Path, *inputs: str) -> str:
    with pytest.raises(OnnxRematError) as caught:
        problem_from_file(path, [InputSpec.parse(text) for text in inputs])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_refusals_of_files(made: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "text.onnx").write_text("hello, this is no model")
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    whole = (made / "mlp" / "training_model.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    assert "there is no file" in refusal(tmp_path / "missing.onnx")
    assert "neither a problem (JSON) nor an ONNX model" in refusal(tmp_path / "text.txt")
    assert "is not an ONNX model" in refusal(tmp_path / "text.onnx")
    assert "is not an ONNX model" in refusal(tmp_path / "empty.onnx")
    assert "is not an ONNX model" in refusal(tmp_path / "cut.onnx")
    assert "not a JSON file" in refusal(tmp_path / "broken.json")
    assert "not a problem" in refusal(tmp_path / "other.json")
    assert "no artifact" in refusal(tmp_path / "folder")


def test_refusals_of_inputs(made: Path, tmp_path: Path) -> None:
    path = made / "mlp" / "training_model.onnx"
    assert "'x' has the open shape [batch, 20]: pin it with --input x=8x20" in refusal(path)
    assert "has no input 'y'" in refusal(path, "y=8x20")
    assert "has the shape [batch, 20] in the graph" in refusal(path, "x=8x21")
    assert "has the shape [batch, 20] in the graph" in refusal(path, "x=8")
    assert "has dtype float32 in the graph, not int64" in refusal(path, "x=8x20:int64")
    assert "dimension 'batch' is 8 and 9 at once" in refusal(path, "x=8x20", "labels=9:int64")
    shutil.copy(path, tmp_path / "training_model.onnx")
    problem_from_file(path, specs("mlp")).save(tmp_path / "problem.json")
    assert "leave it out" in refusal(tmp_path / "problem.json", "x=8x20")
    (tmp_path / "optimizer_model.onnx").write_bytes(b"no model")
    assert "optimizer_model.onnx is not an ONNX model" in refusal(tmp_path / "training_model.onnx", "x=8x20")


def test_shapes_that_stay_unknown_are_named(tiny: onnx.ModelProto, tmp_path: Path) -> None:
    tiny.graph.node.append(helper.make_node("NonZero", ["h"], ["where"], name="finder"))
    tiny.graph.output.append(helper.make_tensor_value_info("where", TensorProto.INT64, None))
    message = refusal(saved(tiny, tmp_path), "x=7x3")
    assert "'where', made by NonZero 'finder', stays unknown" in message
    assert "--input" in message


def test_operators_without_a_rule_are_named(tiny: onnx.ModelProto, tmp_path: Path) -> None:
    tiny.graph.node.append(helper.make_node("Mystery", ["h"], ["clue"], name="riddle", domain=MS))
    tiny.graph.output.append(helper.make_tensor_value_info("clue", TensorProto.FLOAT, None))
    assert "'clue', made by Mystery 'riddle', stays unknown" in refusal(saved(tiny, tmp_path), "x=7x3")


def test_planning_needs_no_weights_but_the_numbers_that_shapes_are_made_of(tiny: onnx.ModelProto, tmp_path: Path) -> None:
    def planned_without(model: onnx.ModelProto) -> str:
        onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
        (tmp_path / "weights.bin").unlink()
        return refusal(tmp_path / "model.onnx", "x=7x3")

    onnx.save(tiny, tmp_path / "light.onnx", save_as_external_data=True, location="light.bin", size_threshold=0)
    whole = problem_from_file(tmp_path / "light.onnx", [InputSpec.parse("x=7x3")])
    (tmp_path / "light.bin").unlink()
    assert problem_from_file(tmp_path / "light.onnx", [InputSpec.parse("x=7x3")]).to_json() == whole.to_json()
    tiny.graph.initializer.append(onnx.numpy_helper.from_array(np.array([5, 7], np.int64), "turned"))
    tiny.graph.node.append(helper.make_node("Reshape", ["h", "turned"], ["t"]))
    tiny.graph.output.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, None))
    assert "weights.bin" in planned_without(tiny)


def test_control_flow_is_refused(tiny: onnx.ModelProto, tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)]
    branch = helper.make_graph([helper.make_node("Identity", ["h"], ["b"])], "branch", [], ends)
    tiny.graph.initializer.append(helper.make_tensor("flag", TensorProto.BOOL, [], [True]))
    tiny.graph.node.append(helper.make_node("If", ["flag"], ["picked"], name="fork", then_branch=branch, else_branch=branch))
    tiny.graph.output.append(helper.make_tensor_value_info("picked", TensorProto.FLOAT, [7, 5]))
    assert "If 'fork' has a subgraph" in refusal(saved(tiny, tmp_path), "x=7x3")


def test_nodes_out_of_order_are_refused(tiny: onnx.ModelProto, tmp_path: Path) -> None:
    nodes = list(tiny.graph.node)[::-1]
    del tiny.graph.node[:]
    tiny.graph.node.extend(nodes)
    assert "reads a value before it is made" in refusal(saved(tiny, tmp_path), "x=7x3")


def test_a_plan_problem_round_trip_is_deterministic(made: Path) -> None:
    path = made / "attention" / "training_model.onnx"
    first, second = (problem_from_file(path, specs("attention")).to_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert Problem.from_json(first).to_json() == first
