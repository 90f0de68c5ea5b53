"""InputSpec, and a ForwardGraph on disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onnxremat.exporters import ExportError, ForwardGraph, InputSpec, export_torch
from onnxremat.exporters import forward_graph as home
from tests.exporters.support import run_onnx, sample_all, x

SPECS = st.builds(
    InputSpec,
    st.from_regex(r"[a-zA-Z_][\w.]{0,8}", fullmatch=True),
    st.lists(st.integers(1, 5), max_size=4).map(tuple),
    st.sampled_from(["float32", "float64", "int64", "int32", "bool"]),
)


@given(SPECS)
def test_text_round_trip(spec: InputSpec) -> None:
    assert InputSpec.parse(str(spec)) == spec


@given(SPECS, st.integers(1, 9))
def test_samples_fit_the_spec(spec: InputSpec, high: int) -> None:
    if spec.is_integer:
        spec = InputSpec(spec.name, spec.shape, spec.dtype, high)
        assert InputSpec.parse(str(spec)) == spec
    array = spec.sample(np.random.default_rng(0))
    assert array.shape == spec.shape and array.dtype == spec.dtype and array.nbytes == spec.nbytes
    if spec.is_integer:
        assert (array >= 0).all() and (array < high).all()


def make() -> ForwardGraph:
    return export_torch(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5)), [x(2, 3, 6, 6)], (), "cross_entropy")


def assert_same(graph: ForwardGraph, again: ForwardGraph) -> None:
    assert again.roles() == graph.roles()
    feeds = sample_all(graph)
    ir.external_data.load_to_model(again.model)  # the runtime is given bytes here, not a path
    left, right = run_onnx(graph, feeds), run_onnx(again, feeds)
    assert left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_save_and_load(tmp_path: Path) -> None:
    graph = make()
    path = tmp_path / "forward.onnx"
    graph.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["forward.onnx"]
    assert_same(graph, ForwardGraph.load(path))
    proto = onnx.load(path)
    assert proto.ir_version == 10 and [(o.domain, o.version) for o in proto.opset_import] == [("", 20)]
    onnx.checker.check_model(proto, full_check=True)


def test_large_graphs_have_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "EXTERNAL_BYTES", 100)
    graph = make()
    graph.save(tmp_path / "forward.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["forward.onnx", "forward.onnx.data"]
    assert_same(graph, ForwardGraph.load(tmp_path / "forward.onnx"))
    # Over itself: what was there stays readable until the new files are complete.
    ForwardGraph.load(tmp_path / "forward.onnx").save(tmp_path / "forward.onnx")
    assert_same(graph, ForwardGraph.load(tmp_path / "forward.onnx"))


def test_a_full_disk_leaves_nothing_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "forward.onnx"
    path.write_bytes(b"old")

    def full(model: ir.Model, target: Path, **options: object) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(home.ir, "save", full)
    with pytest.raises(ExportError, match="No space left on device"):
        make().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["forward.onnx"] and path.read_bytes() == b"old"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="No such file or directory"):
        make().save(tmp_path / "none" / "forward.onnx")


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/null, which root could replace."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExportError, match="is there already and no plain file"):
        make().save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no such file"):
        ForwardGraph.load(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(ExportError, match="not an ONNX model"):
        ForwardGraph.load(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ExportError, match="not an ONNX model"):
        ForwardGraph.load(tmp_path / "empty.onnx")
    ir.save(
        ir.from_onnx_text('<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { y = Relu(x) }'),
        tmp_path / "plain.onnx",
    )
    with pytest.raises(ExportError, match="no onnxremat roles"):
        ForwardGraph.load(tmp_path / "plain.onnx")
