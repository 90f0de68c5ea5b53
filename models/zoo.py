"""The list of models: ``zoo.yaml`` as dataclasses.  Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

__all__ = ["QuickSize", "ZooEntry", "load_zoo", "zoo_entry"]


@dataclass(frozen=True)
class QuickSize:
    """A small version for tests: a factory of its own with smaller arguments, and small inputs."""

    arguments: MappingProxyType[str, Any]
    inputs: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class ZooEntry:
    """One model.

    Attributes:
        name: as in ``zoo:NAME``.
        factory: ``package.module:factory``; called without arguments it builds the full size.
        inputs: texts of InputSpecs, such as ``x=8x3x224x224``.
        labels: texts of InputSpecs.
        loss: text of a loss.
        tags: words to select by.
        quick: the small version.
    """

    name: str
    factory: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    loss: str
    tags: tuple[str, ...]
    quick: QuickSize


@cache
def load_zoo() -> MappingProxyType[str, ZooEntry]:
    """All entries by name, in the order of the file."""
    rows = yaml.safe_load((Path(__file__).parent / "zoo.yaml").read_text(encoding="utf-8"))
    entries = {}
    for row in rows:
        quick = row["quick"]
        entries[row["name"]] = ZooEntry(
            row["name"],
            row["factory"],
            tuple(row["inputs"]),
            tuple(row["labels"]),
            row["loss"],
            tuple(row["tags"]),
            QuickSize(MappingProxyType(dict(quick.get("arguments", {}))), tuple(quick["inputs"]), tuple(quick["labels"])),
        )
    return MappingProxyType(entries)


def zoo_entry(name: str) -> ZooEntry:
    """One entry.

    Raises:
        KeyError: when there is none of that name.
    """
    return load_zoo()[name]
