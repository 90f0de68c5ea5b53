"""What the benchmarks share: cases, and a table as text."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


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
