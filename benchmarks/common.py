"""What the benchmarks share: cases, and a table as text."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxremat.runtime.session import BoundSession


@dataclass(frozen=True)
class Case:
    """A model of the benchmarks: a factory, its batch and its loss."""

    name: str
    source: str
    inputs: tuple[str, ...]
    loss: str


def resnet18() -> object:
    from onnxremat.models.resnet import resnet18 as build

    return build()


def unet() -> object:
    from onnxremat.models.unet import unet as build

    return build()


def gpt2_4() -> object:
    from onnxremat.models.transformer import gpt2

    return gpt2(layers=4, hidden=512, heads=8, vocab=16384, seq=256)


CASES = {
    case.name: case
    for case in (
        Case("resnet18", "benchmarks.common:resnet18", ("x=16x3x224x224",), "cross_entropy"),
        Case("unet", "benchmarks.common:unet", ("x=4x3x128x128",), "cross_entropy"),
        Case("gpt2-4", "benchmarks.common:gpt2_4", ("input_ids=8x256:int64:16384",), "cross_entropy:class_axis=-1"),
    )
}


def machine() -> str:
    """One line on the machine that the figures come from."""
    model = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def timing_options(description: str | None) -> argparse.Namespace:
    """What benchmarks of single kernels are asked: rounds and threads."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def session_of(graph: ir.Graph, arrays: Mapping[str, Any], threads: int) -> BoundSession:
    """A session of a graph over these inputs."""
    import onnx_ir as ir

    from onnxremat.runtime.session import BoundSession, Options, make_session

    model = ir.serde.serialize_model(ir.Model(graph, ir_version=10)).SerializeToString()
    bound = BoundSession(make_session(model, Options(threads=threads)))
    bound.bind(arrays)
    return bound


def difference(one: BoundSession, other: BoundSession) -> float:
    """Largest difference of their answers, relative to the largest number in them."""
    return max(float(abs(a - b).max() / abs(a).max()) for a, b in zip(one.run(), other.run(), strict=True))
