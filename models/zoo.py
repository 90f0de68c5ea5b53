"""The list of models: ``zoo.yaml``, or a manifest of one's own in the same form, as dataclasses.  Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

__all__ = ["ManifestError", "QuickSize", "ZooEntry", "load_zoo", "read_manifest", "zoo_entry"]

_REQUIRED = ("name", "factory", "inputs", "loss")
_KEYS = (*_REQUIRED, "arguments", "labels", "batch", "tags", "limits", "quick")
_QUICK_KEYS = ("arguments", "batch", "inputs", "labels")


class ManifestError(ValueError):
    """A manifest that can't be read; one line that names the file, the entry and the key."""


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
        factory: ``package.module:factory``; with its ``arguments`` it builds the full size.
        inputs: texts of InputSpecs, such as ``x=8x3x224x224``.
        labels: texts of InputSpecs.
        loss: text of a loss.
        tags: words to select by.
        quick: the small version; None where there is none.
        arguments: of the factory, by name.
        batch: the samples of a step; None where the inputs do not say.
        limits: what is known not to work, or not to be checked, one line each.
    """

    name: str
    factory: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    loss: str
    tags: tuple[str, ...]
    quick: QuickSize | None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    limits: tuple[str, ...] = ()

    def source(self, quick: bool = False) -> str:
        """The model as SOURCE: ``package.module:factory(width=8)``.

        Raises:
            ManifestError: the quick version is wanted, and there is none.
        """
        if quick and self.quick is None:
            raise ManifestError(f"{self.name} has no quick size: add 'quick' to its entry, or leave it out")
        arguments = self.quick.arguments if quick and self.quick else self.arguments
        return f"{self.factory}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})" if arguments else self.factory


@cache
def load_zoo() -> MappingProxyType[str, ZooEntry]:
    """All entries of our own zoo by name, in the order of the file."""
    return read_manifest(Path(__file__).parent / "zoo.yaml")


def zoo_entry(name: str) -> ZooEntry:
    """One entry of our own zoo.

    Raises:
        KeyError: when there is none of that name.
    """
    return load_zoo()[name]


def read_manifest(path: Path) -> MappingProxyType[str, ZooEntry]:
    """The entries of a manifest by name, in the order of the file.

    Raises:
        ManifestError: it is not there, or an entry is not well formed.
    """
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"manifest {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ManifestError(f"manifest {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(rows, list) or not rows:
        raise ManifestError(f"manifest {path}: expected a list of models, each with {', '.join(_REQUIRED)}")
    entries: dict[str, ZooEntry] = {}
    for number, row in enumerate(rows, 1):
        name = row.get("name") if isinstance(row, Mapping) else None
        try:
            entry = _entry(row)
        except (KeyError, TypeError, ValueError) as error:
            reason = error.args[0] if error.args else error
            raise ManifestError(f"manifest {path}, model {number}{f' ({name})' if name else ''}: {reason}") from error
        if entry.name in entries:
            raise ManifestError(f"manifest {path}, model {number}: there are two models called {entry.name}")
        entries[entry.name] = entry
    return MappingProxyType(entries)


def _entry(row: Any) -> ZooEntry:
    if not isinstance(row, Mapping):
        raise ValueError(f"expected keys and values, not {row!r}")
    _check_keys(row, _KEYS, _REQUIRED, "it")
    name = row["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"the name {name!r} must be of letters, digits, '.', '_' and '-', and start with one of the first two: it names a folder")
    for key in ("factory", "loss"):
        if not isinstance(row[key], str):
            raise ValueError(f"{key} must be text, not {row[key]!r}")
    if not re.fullmatch(r"[\w.]+:[\w.]+", row["factory"]):
        raise ValueError(f"the factory {row['factory']!r} is not package.module:factory; its arguments go to 'arguments'")
    quick = None
    if row.get("quick") is not None:
        small = row["quick"]
        if not isinstance(small, Mapping):
            raise ValueError(f"quick must have keys and values, not {small!r}")
        _check_keys(small, _QUICK_KEYS, ("inputs",), "quick")
        quick = QuickSize(_arguments(small), _specs(small, "inputs"), _specs(small, "labels"))
    return ZooEntry(
        name=name,
        factory=row["factory"],
        inputs=_specs(row, "inputs"),
        labels=_specs(row, "labels"),
        loss=row["loss"],
        tags=_texts(row, "tags"),
        quick=quick,
        arguments=_arguments(row),
        batch=row.get("batch"),
        limits=_texts(row, "limits"),
    )


def _check_keys(row: Mapping[str, Any], known: tuple[str, ...], required: tuple[str, ...], where: str) -> None:
    for key in row:
        if key not in known:
            raise ValueError(f"{where} has the key {key!r}, which is not one of {', '.join(known)}")
    for key in required:
        if row.get(key) in (None, [], ""):
            raise ValueError(f"{where} has no {key!r}")


def _texts(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key) or []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{key} must be a list of texts, not {value!r}")
    return tuple(value)


def _specs(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Specs with the batch put in: ``x=Nx3x224x224`` -> ``x=8x3x224x224``."""
    batch = row.get("batch")
    if batch is not None and (not isinstance(batch, int) or isinstance(batch, bool) or batch < 1):
        raise ValueError(f"batch must be a number of samples, not {batch!r}")
    found = []
    for text in _texts(row, key):
        if not re.fullmatch(r"[^=\s]+=(scalar|(N|\d+)(x(N|\d+))*)(:\w+){0,2}", text):
            raise ValueError(f"{key}: {text!r} is not NAME=SHAPE[:DTYPE[:HIGH]], such as x=Nx3x224x224 with N for the batch")
        name, _, rest = text.partition("=")
        shape, colon, kind = rest.partition(":")
        if "N" in shape and batch is None:
            raise ValueError(f"{key}: {text!r} has N, and there is no 'batch' that says how many that is")
        found.append(f"{name}={shape.replace('N', str(batch))}{colon}{kind}")
    return tuple(found)


def _arguments(row: Mapping[str, Any]) -> MappingProxyType[str, Any]:
    arguments = row.get("arguments") or {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in arguments):
        raise ValueError(f"arguments must be names and values, not {arguments!r}")
    return MappingProxyType(dict(arguments))
