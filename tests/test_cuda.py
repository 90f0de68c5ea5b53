"""The CUDA path as far as a machine without a GPU can show it: what is asked of driver and runtime, what is refused, and which graph is emitted.

A driver written in C stands in for NVIDIA's, its device memory is the host's; copies between GPU and host become copies on the CPU.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from onnxremat import Artifact, Optimizer
from onnxremat.api import compile as compile_model
from onnxremat.artifact import PARTITION, TRAINING
from onnxremat.cli import main
from onnxremat.copies import cpu_copy
from onnxremat.costs.transfer import Swap, swap_channel
from onnxremat.errors import OnnxRematError, OutOfBudget, RuntimeUnavailable, UsageError
from onnxremat.runtime import cuda, session
from onnxremat.runtime.cuda import Cuda, Driver, Slab
from onnxremat.runtime.cuda_trainer import CudaTrainer
from onnxremat.runtime.placement import STREAM, Nodes, check_on_gpu, with_streams
from onnxremat.runtime.session import Options, execution_streams
from onnxremat.runtime.trainer import Trainer
from onnxremat.scheduler import evaluate
from onnxremat.targets import ORT_TRAINING, ORT_TRAINING_CUDA, target_named

from .factories import MLP_INPUT

MLP12: dict[str, Any] = {"inputs": ["x=8192x32"], "labels": ["labels=8192:int64:8"], "loss": "cross_entropy"}


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Twelve layers for CUDA, whatever can be away on the host."""
    return compile_model(
        "tests.factories:mlp12",
        tmp_path_factory.mktemp("cuda") / "artifact",
        **MLP12,
        optimizer=Optimizer("sgd"),
        budget="45%",
        costs="analytic",
        strategy="swap_only",
        provider="cuda",
        provider_options=["cudnn_conv_algo_search=HEURISTIC"],
        swap="host",
        swap_bandwidth="12GiB/s:10GiB/s",
        swap_bytes="1GiB",
        threads=1,
        time_limit=1,
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(Path(__file__).with_name("fake_cuda.c"))], check=True)
    return Driver(ctypes.CDLL(str(library)))


@pytest.fixture
def on_fake_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Sessions for CUDA run on the CPU provider, on memory of the stand-in."""
    for module in ("onnxremat.runtime.session", "onnxremat.runtime.cuda_trainer"):
        monkeypatch.setattr(f"{module}.require_cuda", lambda chosen: driver)
    monkeypatch.setattr(session.Options, "providers", property(lambda self: ["CPUExecutionProvider"]))
    monkeypatch.setattr(session, "PROVIDER", "CPUExecutionProvider")
    monkeypatch.setattr(cuda.DeviceArray.__init__, "__defaults__", (0, "cpu"))
    yield driver


def test_the_step_swaps_to_the_host_and_keeps_its_numbers(swapped: Artifact) -> None:
    """Verified in sessions with three streams on the CPU, whose copies are real ones."""
    manifest, plan = swapped.manifest, swapped.plan
    checked = manifest["verification"]
    assert checked["passed"]
    assert checked["bitwise_equal"]
    assert checked["max_relative_error_torch"] < 1e-4
    assert (checked["peak_measured_bytes"], "no GPU here" in checked["reason"]) == (None, True)
    assert (manifest["target"], manifest["provider"], swapped.target) == ("ort-training", "cuda", ORT_TRAINING_CUDA)
    assert manifest["provider_options"]["cudnn_conv_algo_search"] == "HEURISTIC"
    assert plan.swapped_tensors >= 5
    swap = manifest["swap"]
    assert swap["kind"] == "host"
    assert swap["host_bytes"] == evaluate(swapped.problem, plan.steps).host_bytes <= 2**30
    assert swapped.problem.transfer is not None
    assert swapped.problem.transfer.overlap
    # Copies hide behind ops: both ways they would take this much by themselves.
    bytes_moved = sum(swapped.problem.tensors[step.index].bytes for step in plan.steps if step.kind == "swap_out")
    turns = plan.seconds_unscheduled + bytes_moved * (1 / (12 * 2**30) + 1 / (10 * 2**30))
    assert plan.seconds_unscheduled <= plan.seconds < 0.9 * turns


def test_every_copy_waits_for_what_it_must(swapped: Artifact) -> None:
    nodes = list(onnx.load(str(swapped.file(TRAINING))).graph.node)
    place = {n.name: k for k, n in enumerate(nodes)}
    maker = {o: n for n in nodes for o in n.output}
    stream = {n.name: m.value for n in nodes for m in n.metadata_props if m.key == STREAM}
    out = [n for n in nodes if n.op_type == "MemcpyToHost"]
    back = [n for n in nodes if n.op_type == "MemcpyFromHost"]
    assert len(out) == len(back) == swapped.plan.swapped_tensors
    for copy in out:
        assert stream[copy.name] == "out"
        mark = nodes[place[copy.name] + 1]
        assert (mark.op_type, stream[mark.name]) == ("Neg", "out")
        # A wait among the ops reads both the tensor and the mark, behind all other readers that come before the copy back.
        (wait,) = [n for n in nodes if mark.output[0] in n.input]
        assert (wait.op_type, list(wait.input), wait.name in stream) == ("Group", [copy.input[0], mark.output[0]], False)
        (home,) = [n for n in back if copy.output[0] in n.input]
        assert place[copy.name] < place[wait.name] < place[home.name]
    for copy in back:
        before, wait = nodes[place[copy.name] - 2], nodes[place[copy.name] - 1]
        assert (stream[copy.name], stream[wait.name], before.name in stream) == ("in", "in", False)
        assert list(wait.input) == list(before.output)
        assert all(place[n.name] > place[copy.name] for n in nodes if copy.output[0] in n.input)
    assert all(maker[n.input[0]].op_type == "MemcpyToHost" for n in back)


def test_copies_have_streams_of_their_own(swapped: Artifact) -> None:
    model = cpu_copy(swapped.file(TRAINING))
    (alone,) = execution_streams(model)
    nodes = Nodes.of(model)
    partition = with_streams({"streams": [alone], "devices": ["0"]}, nodes.streams)
    assert [len(names) for names in partition["streams"]][1:] == [2 * swapped.plan.swapped_tensors] * 2
    assert sorted(name for names in partition["streams"] for name in names) == sorted(alone)
    written = json.loads(swapped.file(PARTITION).read_text(encoding="utf-8"))
    assert written["devices"] == ["1", "1", "1"]
    assert [sorted(names) for names in written["streams"]] == [sorted(names) for names in partition["streams"]]


def test_a_copy_out_after_a_copy_back_waits_for_it() -> None:
    """By hand: three ops of a chain, the first swapped and back before the last one's input goes out."""
    import dataclasses

    import onnx_ir as ir

    from onnxremat.emit import emit
    from onnxremat.problem import Costs, scheduling_problem
    from onnxremat.scheduler import Step, Transfer, plan_from_sequence
    from onnxremat.training_graph import PHASE

    x = ir.Value(name="x", shape=ir.Shape([4, 64]), type=ir.TensorType(ir.DataType.FLOAT))
    made: list[ir.Node] = []

    def node(kind: str, name: str, *inputs: ir.Value) -> ir.Value:
        found = ir.Node("", kind, list(inputs), num_outputs=1, name=name, metadata_props={PHASE: "forward"})
        found.outputs[0].name, found.outputs[0].shape, found.outputs[0].type = f"{name}:0", x.shape, x.type
        made.append(found)
        return found.outputs[0]

    a = node("Exp", "a", x)
    b = node("Sin", "b", a)
    c = node("Mul", "c", b, a)
    d = node("Cos", "d", c)
    e = node("Add", "e", node("Neg", "n", d), c)
    graph = ir.Graph([x], [e], nodes=made, opset_imports={"": 20}, name="hand")
    p = dataclasses.replace(scheduling_problem(graph, Costs({}), {}, inplace=False), transfer=Transfer(1e9, 1e9, 1 << 30, overlap=True))
    tensor = {t.name: k for k, t in enumerate(p.tensors)}
    ta, tc = tensor["a:0"], tensor["c:0"]
    steps = [Step("run", 0), Step("run", 1), Step("swap_out", ta), Step("swap_in", ta), Step("run", 2)]
    steps += [Step("run", 3), Step("swap_out", tc), Step("run", 4), Step("swap_in", tc), Step("run", 5)]
    plan = plan_from_sequence(p, steps, 1 << 30)
    emitted = emit(ir.Model(graph, ir_version=10), p, plan, target=ORT_TRAINING_CUDA)
    names = [str(n.name) for n in emitted.model.graph]
    # Behind c comes its copy out, and before that a wait, on the same stream, for the copy back of a.
    at = names.index("out:c:0")
    assert names[at - 1] == "wait:after:c:0"
    fence = list(emitted.model.graph)[at - 1]
    assert fence.metadata_props[STREAM] == "out"
    assert [v.name for v in fence.inputs if v is not None] == ["mark:back:a:0:value"]
    proto = ir.to_proto(emitted.model)
    value = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    from onnxremat.copies import cpu_twin

    bound = session.BoundSession(session.make_session(cpu_twin(proto).SerializeToString(), Options(arena=False)))
    bound.bind({"x": value})
    again = session.BoundSession(session.make_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), Options(arena=False)))
    again.bind({"x": value})
    assert np.array_equal(bound.run()[0], again.run()[0])


def test_the_provider_is_told_device_limit_and_options() -> None:
    chosen = Cuda.parse(["device_id=1", "cudnn_conv_algo_search=HEURISTIC"])
    (name, told), other = Options(cuda=chosen, gpu_bytes=2**30).providers
    assert (name, other) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert told["device_id"] == "1"
    assert told["gpu_mem_limit"] == str(2**30)
    assert told["arena_extend_strategy"] == "kSameAsRequested"
    assert (told["cudnn_conv_algo_search"], told["cudnn_conv_use_max_workspace"], told["do_copy_in_default_stream"]) == ("HEURISTIC", "0", "1")
    assert "gpu_mem_limit" not in Options(cuda=chosen).providers[0][1]
    assert Options().providers == ["CPUExecutionProvider"]


def test_the_arena_of_the_device_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    ort = SimpleNamespace(
        OrtMemoryInfo=lambda *a: a,
        OrtArenaCfg=lambda settings: settings,
        OrtAllocatorType=SimpleNamespace(ORT_ARENA_ALLOCATOR="arena"),
        OrtMemType=SimpleNamespace(DEFAULT="default"),
        create_and_register_allocator_v2=lambda *a: calls.append(a),
    )
    monkeypatch.setattr(cuda, "onnxruntime", lambda: ort)
    monkeypatch.setattr(cuda, "_registered", None)
    size = 5 * 2**30
    cuda.register_arena(size, Cuda(device=1))
    cuda.register_arena(size, Cuda(device=1))
    ((provider, info, options, settings),) = calls
    assert (provider, info) == ("CUDAExecutionProvider", ("Cuda", "arena", 1, "default"))
    assert (options["device_id"], options["gpu_mem_limit"]) == ("1", str(size))
    assert settings["max_mem"] == size
    assert settings["initial_chunk_size_bytes"] < 2**31
    with pytest.raises(OnnxRematError, match="start a new process"):
        cuda.register_arena(size // 2, Cuda(device=1))
    # From 2 GiB on one buffer asks for all of it; it is a model that loads.
    claimed: list[bytes] = []
    bound = SimpleNamespace(run=lambda: None)
    cuda.claim(2**20, lambda model: claimed.append(model) or bound)
    assert not claimed
    cuda.claim(size, lambda model: claimed.append(model) or bound)
    onnx.checker.check_model(onnx.load_from_string(claimed[0]))


def test_the_driver_is_asked_for_memory(driver: Driver) -> None:
    assert (driver.version(), driver.devices(), driver.name(1)) == ("11.8", 2, "Fake 1")
    before = driver.memory(0)
    arrays = {"a": np.arange(5, dtype=np.float32), "b": np.ones((3, 2), np.int64), "c": np.zeros(0, np.float32)}
    slab = Slab(driver, 0, arrays)
    assert slab.nbytes == 512
    assert driver.memory(0) == (before[0] - 512, before[1])
    meter = cuda.DeviceMeter(driver, 0)
    other = Slab(driver, 0, {"more": np.zeros(1000, np.float32)})
    meter.after_step()
    other.close()
    meter.after_step()
    assert meter.grown == 4096
    found = np.empty(5, np.float32)
    slab.read_into("a", found)
    assert found.tolist() == [0, 1, 2, 3, 4]
    slab.zero("a")
    slab.write("b", 7 * arrays["b"])
    slab.read_into("a", found)
    back = np.empty_like(arrays["b"])
    slab.read_into("b", back)
    assert (found.any(), back.tolist()) == (False, [[7, 7]] * 3)
    assert slab.arrays["a"].slice(2, 9).shape == (3,)
    assert slab.arrays["a"].slice(2, 9).address == slab.arrays["a"].address + 8
    slab.close()
    assert driver.memory(0) == before
    with pytest.raises(OutOfBudget, match="the GPU has no room"):
        driver.allocate(0, 1 << 40)
    with pytest.raises(RuntimeUnavailable, match=r"cuMemFree_v2: invalid value \(1\)"):
        driver.free(12345)


def test_bandwidth_is_measured_once(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONNXREMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda, "require_cuda", lambda chosen=None: driver)
    monkeypatch.setattr("onnxremat.costs.transfer.require_cuda", lambda chosen: driver)
    monkeypatch.setattr("onnxremat.costs.transfer.available", lambda: True)
    monkeypatch.setattr(cuda, "_MEASURED_BYTES", 2**20)
    channel = swap_channel(Swap.parse("host", cuda=Cuda()))
    assert channel is not None
    assert channel.overlap
    assert channel == swap_channel(Swap.parse("host", cuda=Cuda()))
    assert channel.bytes_per_second_out > 2**20


@pytest.mark.parametrize("optimizer", [Optimizer("adamw", clip_grad_norm=0.01), Optimizer("sgd", momentum=0.9)])
def test_a_gpu_trains_as_the_cpu_does(optimizer: Optimizer, on_fake_gpu: Driver, tmp_path: Path) -> None:
    """Two batches a step where gradients can be accumulated, clipping, a checkpoint in between, evaluation."""
    artifact = compile_model(
        "tests.factories:tiny_mlp", tmp_path / "a", inputs=[MLP_INPUT], loss="cross_entropy", optimizer=optimizer, costs="analytic", verify=False
    )
    rng = np.random.default_rng(0)
    batches = [{spec.name: spec.sample(rng) for spec in (*artifact.inputs, *artifact.labels)} for _ in range(4)]
    steps = [batches[:2], batches[2:]] if not optimizer.in_graph else [[b] for b in batches]
    here, there = Trainer(artifact, threads=1, capped=False, seed=1), CudaTrainer(artifact, threads=1, capped=False, seed=1)
    assert there.resident_bytes == 0
    for number, step in enumerate(steps):
        expected = here.train_step(*step)
        assert there.train_step(*step) == pytest.approx(expected, rel=1e-6)
        if number == 0:
            there.save(tmp_path / "saved")
            there.train_step(*step)
            there.restore(tmp_path / "saved")
    assert there.evaluate(batches[0])[0] == pytest.approx(here.evaluate(batches[0])[0], rel=1e-6)
    there.pull()
    for name, value in here.parameters.items():
        np.testing.assert_allclose(there.parameters[name], value, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(value, artifact.parameters()[name]) or name not in artifact.manifest["roles"]["trainable"]
    there.close()


def test_what_cuda_lacks_is_written_otherwise() -> None:
    assert target_named("ort-training") is ORT_TRAINING
    assert target_named("ort-training", "cuda") is ORT_TRAINING_CUDA
    assert "com.microsoft.nchwc" not in ORT_TRAINING_CUDA.domains
    with pytest.raises(UsageError, match="--target onnxruntime with --provider cuda is not there"):
        target_named("onnxruntime", "cuda")
    with pytest.raises(UsageError, match="choose cpu or cuda"):
        target_named("ort-training", "rocm")


def test_pools_have_no_gradient_kernel_there(tmp_path: Path) -> None:
    artifact = compile_model(
        "tests.factories:overlapping_pool", tmp_path / "a", inputs=["x=2x3x9x9"], loss="cross_entropy", costs="analytic", provider="cuda"
    )
    assert artifact.manifest["verification"]["passed"]
    kinds = {n.op_type for n in onnx.load(str(artifact.file(TRAINING))).graph.node}
    assert "MaxPool" in kinds
    assert "MaxPoolGrad" not in kinds


def test_nodes_left_to_the_cpu_are_refused() -> None:
    nodes = Nodes({"a": "Relu", "b": "Resize", "s": "Size"}, {})
    check_on_gpu({"streams": [["a", "b"], ["s"]], "devices": ["1", "0"]}, nodes)
    refusal = r"leaves nodes to the CPU \(1 Resize, 'b' first\), and the runtime added 2 copies .*--allow-cpu-nodes"
    with pytest.raises(RuntimeUnavailable, match=refusal):
        check_on_gpu({"streams": [["a", "Memcpy", "Memcpy_1"], ["b"]], "devices": ["1", "0"]}, nodes)


def test_a_session_that_fell_back_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "require_cuda", lambda chosen: driver)
    monkeypatch.setattr(session.Options, "providers", property(lambda self: ["CPUExecutionProvider"]))
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Relu(x) }')
    with pytest.raises(RuntimeUnavailable, match=r"CUDAExecutionProvider was asked for, but the session fell back to CPU.* LD_LIBRARY_PATH"):
        session.make_session(model.SerializeToString(), Options(cuda=Cuda()))


def test_cuda_is_refused_before_the_runtime_is_asked(
    swapped: Artifact, driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"onnxruntime-training-cpu has no CUDA provider: pip uninstall -y .*onnxruntime-training==1.19.2"):
        cuda.require_cuda()
    assert main(["run", str(swapped.path)]) == 1
    assert "has no CUDA provider" in capsys.readouterr().err
    assert main(["run", str(swapped.path), "--provider", "cpu"]) == 2
    assert "this artifact swaps from a GPU to its host" in capsys.readouterr().err
    assert main(["verify", str(swapped.path), "--steps", "1", "--provider", "cpu"]) == 0
    with pytest.raises(RuntimeUnavailable, match="has no CUDA provider"):  # to measure there must be a GPU
        compile_model("tests.factories:tiny_mlp", tmp_path / "out", inputs=[MLP_INPUT], loss="cross_entropy", provider="cuda")
    assert not (tmp_path / "out").exists()
    packaged = SimpleNamespace(get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(cuda, "onnxruntime", lambda: packaged)
    with pytest.raises(RuntimeUnavailable, match=r"there is no NVIDIA driver: libcuda.so.1 does not load"):
        cuda.require_cuda()
    monkeypatch.setattr(cuda, "find_driver", lambda: driver)
    assert cuda.require_cuda(Cuda(1)) is driver
    with pytest.raises(RuntimeUnavailable, match="there is no CUDA device 2: the driver has 2"):
        cuda.require_cuda(Cuda(2))


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text in ("fast", "=1", "a="):
        with pytest.raises(UsageError, match="takes KEY=VALUE"):
            Cuda.parse([text])
    with pytest.raises(UsageError, match="device_id=x: the number"):
        Cuda.parse(["device_id=x"])
    with pytest.raises(UsageError, match="the limit is the plan's"):
        Cuda.parse(["gpu_mem_limit=5"])
    with pytest.raises(UsageError, match="--swap disk is for the CPU"):
        Swap.parse("disk", cuda=Cuda())
    with pytest.raises(UsageError, match=r"there is no GPU here to measure: .* --swap-bandwidth 12GiB/s"):
        swap_channel(Swap.parse("host", cuda=Cuda()))
    with pytest.raises(UsageError, match="are CUDA's: give --provider cuda"):
        compile_model("tests.factories:tiny_mlp", tmp_path / "out", inputs=[MLP_INPUT], loss="cross_entropy", provider_options=["a=b"])
