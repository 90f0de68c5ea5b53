"""What the exporters hand on: a forward graph whose values have roles."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .errors import ExportError

__all__ = ["IR_VERSION", "OPSET", "PADDING_INDEX", "ForwardGraph", "InputSpec"]

IR_VERSION = 10
"""The newest IR that onnxruntime-training 1.19.2 reads."""
OPSET = 20
"""The opset of every forward graph."""
PADDING_INDEX = "onnxremat.padding_index"
"""metadata_props key of a Gather from an embedding: the row that gets no gradient."""
EXTERNAL_BYTES = 1_500_000_000
"""Initializers above this many bytes in all go to a file beside the model: protobuf ends at 2 GiB."""
_ROLES = "onnxremat.roles"
_DTYPES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One batch input or label: name, static shape, numpy dtype name and, for integers, the exclusive upper end of its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int | None = None

    def __post_init__(self) -> None:
        """Checks what no later stage could repair.

        Raises:
            ValueError: for an empty name, a dimension below one, an unknown dtype or a ``high`` that does not fit the dtype.
        """
        if not self.name or any(c in self.name for c in "=:, \t\n"):
            raise ValueError(f"input name {self.name!r}: must be non-empty and free of '=', ':', ',' and spaces")
        if any(d < 1 for d in self.shape):
            raise ValueError(f"input {self.name}: shape {self.shape} has a dimension below 1; shapes are static and non-empty")
        if self.dtype not in _DTYPES:
            raise ValueError(f"input {self.name}: dtype {self.dtype!r} is not one of {', '.join(_DTYPES)}")
        if self.high is not None and (not self.is_integer or self.high < 1):
            raise ValueError(f"input {self.name}: an upper end of {self.high} needs an integer dtype and a value of at least 1")

    @property
    def is_integer(self) -> bool:
        """Whether the dtype is an integer (bool is not)."""
        return np.issubdtype(np.dtype(self.dtype), np.integer)

    @property
    def nbytes(self) -> int:
        """Bytes of one array of this spec."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Reads ``NAME=SHAPE[:DTYPE[:HIGH]]``, such as ``ids=2x128:int64:30522``; ``NAME=scalar`` is a rank-0 input.

        Raises:
            ValueError: in one line, when the text has another form.
        """
        name, equals, rest = text.partition("=")
        parts = rest.split(":")
        if not equals or not rest or len(parts) > 3:
            raise ValueError(f"input {text!r}: expected NAME=SHAPE[:DTYPE[:HIGH]], such as x=8x3x224x224 or ids=2x128:int64:30522")
        try:
            shape = () if parts[0] == "scalar" else tuple(int(d) for d in parts[0].split("x"))
        except ValueError:
            raise ValueError(f"input {text!r}: shape {parts[0]!r} is not integers joined by 'x', such as 8x3x224x224") from None
        try:
            high = int(parts[2]) if len(parts) == 3 else None
        except ValueError:
            raise ValueError(f"input {text!r}: upper end {parts[2]!r} is not an integer") from None
        return cls(name, shape, parts[1] if len(parts) > 1 else "float32", high)

    def __str__(self) -> str:
        """The text that :meth:`parse` reads back."""
        text = f"{self.name}={'x'.join(map(str, self.shape)) or 'scalar'}"
        if self.dtype != "float32" or self.high is not None:
            text += f":{self.dtype}"
        return text if self.high is None else f"{text}:{self.high}"

    def sample(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Draws one array: standard normal floats, fair bools, integers from [0, high) (from [0, 2) without ``high``)."""
        dtype = np.dtype(self.dtype)
        if dtype == np.bool_:
            return np.asarray(rng.integers(0, 2, self.shape)).astype(np.bool_)
        if self.is_integer:
            return np.asarray(rng.integers(0, self.high or 2, self.shape)).astype(dtype)
        return np.asarray(rng.standard_normal(self.shape)).astype(dtype)


@dataclass
class ForwardGraph:
    """A forward pass with training semantics.

    Attributes:
        model: graph inputs are the batch inputs, then the labels; initializers are parameters, buffers, state and constants; graph
            outputs are the loss (if any), then the model's outputs, then the state outputs.  Opset 20, IR 10, static shapes throughout.
        inputs: the batch inputs, in the order of the graph inputs.
        labels: the labels, after the inputs.
        trainable: initializer names (torch's) in module order; a tied weight once, under its first name.
        frozen: parameters with ``requires_grad=False``, and buffers that no step changes.
        state: initializer name -> name of the graph output that holds its next value.
        outputs: names of the model's own outputs; with the model's own loss, that one is among them (and is graph output 0).
        loss: name of the scalar loss output.
        stop_gradient: names of values through which no gradient flows.
        tied: further torch name -> the canonical one.
        source: where the graph came from; JSON-able.
    """

    model: ir.Model
    inputs: tuple[InputSpec, ...] = ()
    labels: tuple[InputSpec, ...] = ()
    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    state: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    loss: str | None = None
    stop_gradient: frozenset[str] = frozenset()
    tied: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    def roles(self) -> dict[str, Any]:
        """Everything but the model, as JSON-able data."""
        return {
            "inputs": [dataclasses.asdict(spec) for spec in self.inputs],
            "labels": [dataclasses.asdict(spec) for spec in self.labels],
            "trainable": list(self.trainable),
            "frozen": list(self.frozen),
            "state": dict(self.state),
            "outputs": list(self.outputs),
            "loss": self.loss,
            "stop_gradient": sorted(self.stop_gradient),
            "tied": dict(self.tied),
            "source": self.source,
        }

    def freeze(self, patterns: Sequence[str]) -> None:
        """Moves parameters whose names match a shell-style pattern, such as ``backbone.*``, from trainable to frozen, in place.

        Raises:
            ExportError: when a pattern matches no trainable parameter.
        """
        for pattern in patterns:
            if not fnmatch.filter(self.trainable, pattern):
                known = ", ".join(self.trainable[:3])
                raise ExportError(f"freeze {pattern!r}", "no trainable parameter has such a name", f"they are called {known} ...")
        frozen = [name for name in self.trainable if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        self.trainable = tuple(name for name in self.trainable if name not in frozen)
        self.frozen = (*self.frozen, *frozen)

    def save(self, path: str | Path) -> None:
        """Writes the graph and its roles to one .onnx file, with ``<name>.data`` beside it above 1.5 GB of initializers.

        The files appear under their names only when they are complete.

        Raises:
            ExportError: when the file cannot be written (no such folder, no permission, disk full).
        """
        target = Path(path)
        if target.exists() and not target.is_file():
            raise ExportError(f"writing {target}", "it is there already and no plain file", "name another file")
        self.model.ir_version = IR_VERSION
        self.model.metadata_props[_ROLES] = json.dumps(self.roles(), sort_keys=True)
        size = sum(value.const_value.nbytes for value in self.model.graph.initializers.values() if value.const_value is not None)
        data = f"{target.name}.data" if size > EXTERNAL_BYTES else None
        scratch = ""
        try:
            # A sibling folder: os.replace must not cross a file system.
            scratch = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
            ir.save(self.model, Path(scratch) / target.name, external_data=data, size_threshold_bytes=1024)
            for name in filter(None, (data, target.name)):
                os.replace(Path(scratch) / name, target.parent / name)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ExportError(f"writing {target}", reason, "choose a writable folder with enough space") from error
        finally:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)

    @classmethod
    def load(cls, path: str | Path) -> ForwardGraph:
        """Reads what :meth:`save` wrote.

        Raises:
            ExportError: when the file is missing, is not ONNX, or carries no roles.
        """
        model = read_model(path)
        text = model.metadata_props.get(_ROLES)
        if text is None:
            raise ExportError(f"reading {path}", "it carries no onnxremat roles", "import it with import_onnx")
        roles = json.loads(text)
        return cls(
            model=model,
            inputs=_specs(roles["inputs"]),
            labels=_specs(roles["labels"]),
            trainable=tuple(roles["trainable"]),
            frozen=tuple(roles["frozen"]),
            state=dict(roles["state"]),
            outputs=tuple(roles["outputs"]),
            loss=roles["loss"],
            stop_gradient=frozenset(roles["stop_gradient"]),
            tied=dict(roles["tied"]),
            source=roles["source"],
        )


def has_roles(model: ir.Model) -> bool:
    """Whether a model was written by :meth:`ForwardGraph.save`."""
    return _ROLES in model.metadata_props


def read_model(path: str | Path) -> ir.Model:
    """Reads an .onnx file.

    Raises:
        ExportError: when the file is missing, unreadable, or not an ONNX model.
    """
    file = Path(path)
    if not file.is_file():
        raise ExportError(f"reading {file}", "no such file", "check the path")
    try:
        model = ir.load(file)
        ir.external_data.load_to_model(model)  # later passes look for it from wherever the process runs
    except OSError as error:
        missing = error.filename is not None and Path(error.filename) != file
        where = f"reading {Path(error.filename).name} of {file}" if missing else f"reading {file}"
        raise ExportError(where, error.strerror or str(error), "check the file and its permissions") from error
    except Exception as error:  # protobuf's DecodeError and its kin share no base class that is public
        raise ExportError(f"reading {file}", f"not an ONNX model ({error})", "give a file written by an ONNX exporter") from error
    if not model.graph.outputs:
        raise ExportError(f"reading {file}", "not an ONNX model, or one without outputs", "give a file written by an ONNX exporter")
    return model


def _specs(rows: Iterable[dict[str, Any]]) -> tuple[InputSpec, ...]:
    return tuple(InputSpec(row["name"], tuple(row["shape"]), row["dtype"], row["high"]) for row in rows)
