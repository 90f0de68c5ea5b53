"""The operator pair that swaps to a file: what comes back, who may share it, and what happens when the disk does not do its part."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxremat import spill
from onnxremat.doctor import examine
from onnxremat.errors import SpillFailed, SpillUnavailable
from onnxremat.runtime.session import BoundSession, Options, make_session
from onnxremat.spill import library
from tests.factories import in_new_process

MIB = 2**20
# A process in which files may not grow beyond 3 MiB, and the signal for that has its default effect.
LIMITED = """
import resource, signal
import numpy as np
from onnxremat import spill
from onnxremat.errors import SpillFailed
from onnxremat.runtime.session import BoundSession, Options, make_session
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
def session(size):
    bound = BoundSession(make_session(spill.probe_model((size,)), Options(arena=False)))
    bound.bind({"x": np.ones(size, np.float32)})
    return bound
small, large = session(2**19), session(2**20)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, 3 * 2**20))
"""


def swapping(model: bytes, folder: Path | None = None) -> BoundSession:
    return BoundSession(make_session(model, Options(threads=1, arena=False, spill_dir=folder)))


@pytest.mark.parametrize(
    "dtype", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.UINT8, TensorProto.BOOL]
)
def test_what_comes_back_is_what_was_written(dtype: int, tmp_path: Path) -> None:
    numpy_type = helper.tensor_dtype_to_np_dtype(dtype)
    session = swapping(spill.probe_model((3, 7, 5), dtype, reads=3), tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(3):
        sent = (rng.standard_normal((3, 7, 5)) * 50).astype(numpy_type)
        session.bind({"x": sent})
        for got in session.run():
            assert got.dtype == numpy_type
            assert got.tobytes() == sent.tobytes()


def test_nothing_is_left_in_the_folder_even_while_it_runs(tmp_path: Path) -> None:
    session = swapping(spill.probe_model((MIB,)), tmp_path)
    session.bind({"x": np.ones(MIB, np.float32)})
    session.run()
    assert list(tmp_path.iterdir()) == []
    (opened,) = [link for link in (os.path.realpath(f) for f in Path("/proc/self/fd").iterdir()) if str(tmp_path) in link]
    assert opened.endswith("(deleted)")


def test_sessions_and_threads_do_not_meet(tmp_path: Path) -> None:
    sessions = [make_session(spill.probe_model((4096,), reads=2), Options(threads=1, arena=False, spill_dir=tmp_path)) for _ in range(2)]
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(150):
            sent = np.full(4096, 1000 * number + step, np.float32)
            for got in sessions[number % 2].run(None, {"x": sent}):
                if not np.array_equal(got, sent):
                    wrong.append(f"thread {number} step {step}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_space_is_used_again(tmp_path: Path) -> None:
    """Ten steps need no more of the disk than one, also where steps fail between writing and reading."""
    nodes = [
        helper.make_node("SpillOut", ["x"], ["token"], domain=spill.DOMAIN, reads=1),
        helper.make_node("Gather", ["x", "at"], ["picked"]),
        helper.make_node("SpillIn", ["token", "like"], ["y"], domain=spill.DOMAIN, shape=[MIB // 4]),
        helper.make_node("Add", ["y", "picked"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "fails",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [MIB // 4]), helper.make_tensor_value_info("at", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [MIB // 4])],
        [helper.make_tensor("like", TensorProto.FLOAT, [0], [])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(spill.DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = make_session(model, Options(arena=False, spill_dir=tmp_path))
    sent = np.arange(MIB // 4, dtype=np.float32)
    for at in [0, 10**9] * 10 + [3]:
        if at > MIB:
            with pytest.raises(Exception, match="out of data bounds"):
                session.run(None, {"x": sent, "at": np.asarray([at])})
        else:
            assert np.array_equal(session.run(None, {"x": sent, "at": np.asarray([at])})[0], sent + at)
    (descriptor,) = [int(f.name) for f in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(f)]
    assert os.fstat(descriptor).st_size == MIB


def test_a_limit_on_files_ends_the_step_with_an_error_and_not_the_process() -> None:
    code = (
        LIMITED
        + """
for _ in range(3):
    try:
        large.run()
        raise SystemExit("a step went through that could not be written")
    except SpillFailed as error:
        text = str(error)
assert np.array_equal(small.run()[0], np.ones(2**19, np.float32))
print(text)
"""
    )
    done = in_new_process(code).stdout
    assert "reserving 4194304 bytes in" in done
    assert "File too large" in done
    assert "choose another folder with --spill-dir" in done


def test_a_full_disk_ends_the_step(tmp_path: Path) -> None:
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if not mount or not umount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        assert spill.lies_in_memory(tmp_path)
        small, large = (swapping(spill.probe_model((size,)), tmp_path) for size in (MIB // 2, MIB))
        small.bind({"x": np.ones(MIB // 2, np.float32)})
        large.bind({"x": np.ones(MIB, np.float32)})
        for _ in range(2):
            with pytest.raises(SpillFailed, match=r"reserving 4194304 bytes in .* failed: No space left on device"):
                large.run()
            assert small.run()[0].sum() == MIB // 2
        del small, large
    finally:
        subprocess.run([umount, "-l", str(tmp_path)], check=True)


def test_a_folder_that_is_not_there_is_told_before_training() -> None:
    with pytest.raises(SpillFailed, match=r"making a file in /nowhere failed: No such file or directory; .*--spill-dir"):
        swapping(spill.probe_model((4,)), Path("/nowhere"))


def test_the_folder_comes_from_option_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spill.DIRECTORY_VARIABLE, "/from/environment")
    assert spill.spill_directory(tmp_path) == tmp_path
    assert spill.spill_directory() == Path("/from/environment")
    with pytest.raises(SpillFailed, match="in /from/environment"):
        swapping(spill.probe_model((4,)))


def test_a_token_is_good_for_its_reads_only(tmp_path: Path) -> None:
    model = onnx.load_from_string(spill.probe_model((4,), reads=2))
    model.graph.node[0].attribute[0].i = 1
    session = swapping(model.SerializeToString(), tmp_path)
    session.bind({"x": np.ones(4, np.float32)})
    with pytest.raises(SpillFailed, match="reads a copy that is gone"):
        session.run()


def test_the_library_is_built_on_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "EXTENSION_SUFFIXES", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library_path.cache_clear()
    try:
        assert library.library_path().parent == tmp_path / "onnxremat" / "spill"
        session = swapping(spill.probe_model((4,)), tmp_path)
        session.bind({"x": np.ones(4, np.float32)})
        assert session.run()[0].tolist() == [1.0] * 4
    finally:
        library.library_path.cache_clear()


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "EXTENSION_SUFFIXES", [])
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.library_path.cache_clear()
    try:
        with pytest.raises(SpillUnavailable, match=r"there is no C compiler: install a C compiler .* or plan without swap \(--swap none\)"):
            library.library_path()
        (finding,) = [f for f in examine() if f.check == "swap to disk"]
        assert finding.status == "warning"
        assert "no C compiler" in finding.fix
    finally:
        library.library_path.cache_clear()


def test_bandwidth_is_measured_with_real_files(tmp_path: Path) -> None:
    found = spill.measured_bandwidth(tmp_path, chunk=2**20, chunks=4)
    assert 1e5 < found.out < 1e12
    assert 1e5 < found.into < 1e12
    assert list(tmp_path.iterdir()) == []
