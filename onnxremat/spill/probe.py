"""Trying the operators out: a model of one pair of them, and what the folder lies on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from ..errors import SpillFailed
from .library import DOMAIN, spill_directory

_IN_MEMORY = ("tmpfs", "ramfs")


def probe_model(shape: tuple[int, ...], dtype: int = TensorProto.FLOAT, reads: int = 1) -> bytes:
    """A model that swaps its input ``x`` out once and in ``reads`` times, as ``y0``, ``y1`` ..."""
    nodes = [helper.make_node("SpillOut", ["x"], ["token"], name="out", domain=DOMAIN, reads=reads)]
    names = [f"y{k}" for k in range(reads)]
    nodes += [helper.make_node("SpillIn", ["token", "like"], [n], name=f"in_{n}", domain=DOMAIN, shape=list(shape)) for n in names]
    graph = helper.make_graph(
        nodes,
        "swap",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info(n, dtype, shape) for n in names],
        [helper.make_tensor("like", dtype, [0], [])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return bytes(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def probe(directory: Path | None = None) -> tuple[Path, bool]:
    """Swap a tensor out and in; returns the folder that was used, and whether that lies in memory.

    Raises:
        SpillUnavailable, SpillFailed: it can't be done, and why.
    """
    from ..runtime.session import BoundSession, Options, make_session

    where = spill_directory(directory)
    session = BoundSession(make_session(probe_model((1024,)), Options(arena=False, spill_dir=where)))
    sent = np.arange(1024, dtype=np.float32)
    session.bind({"x": sent})
    if not np.array_equal(session.run()[0], sent):
        raise SpillFailed(f"what came back from {where} is not what was written: choose another folder with --spill-dir")
    return where, lies_in_memory(where)


def lies_in_memory(directory: Path) -> bool:
    """Whether a folder lies on a file system that keeps its files in memory, as far as the system tells."""
    path = os.path.realpath(directory)
    kinds = {}
    try:
        with open("/proc/self/mounts", encoding="utf-8") as file:
            for line in file:
                _, point, kind = line.split()[:3]
                kinds[point] = kind
    except (OSError, ValueError):
        return False
    while path not in kinds and path != "/":
        path = os.path.dirname(path)
    return kinds.get(path) in _IN_MEMORY
