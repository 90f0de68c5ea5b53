"""Exports of torch modules, kept between compilations: the budget of the next one does not change them.

An entry is found by the content of the module (structure, attributes, weights), of what it is fed, and by the versions of all installed
packages.  The source files outside of installed packages that were loaded when it was made are noted in it with their hashes, and must be the
same still.  Weights are not stored: the module has them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from .cache import entry_lock, hash_file
from .exporters import ExportError, ForwardGraph, Loss, export_torch
from .exporters.sources import Feeds

__all__ = ["cached_export", "module_digest"]

_SOURCES, _INITIALIZERS = "onnxremat.sources", "onnxremat.initializers"


def cached_export(module: Any, feeds: Feeds, seed: int, spec: str) -> ForwardGraph:
    """What ``export_torch`` gives for a module that a source built, made anew only where that is not known.

    Args:
        module: in the mode in which it is to be exported.
        feeds: its inputs, labels and loss.
        seed: of example inputs.
        spec: the source.

    Raises:
        ExportError: as ``export_torch``.
    """
    key = _key(module, feeds, seed, spec)
    with entry_lock("exports", key) as kept, tempfile.TemporaryDirectory() as folder:
        path = (kept or Path(folder)) / f"{key}.onnx"
        known = _read(path, module)
        if known is not None:
            return known
        forward = export_torch(module, feeds.inputs, feeds.labels, feeds.loss, seed, spec)
        _write(forward, path, module)
        # Read back, since a file has numbers in the precision of ONNX: the answer does not depend on who made it.
        return _read(path, module) or forward


def _read(path: Path, module: Any) -> ForwardGraph | None:
    if not path.is_file():
        return None
    try:
        forward = ForwardGraph.load(path)
        properties = forward.model.metadata_props
        sources, names = json.loads(properties.pop(_SOURCES)), json.loads(properties.pop(_INITIALIZERS))
        if any(not Path(file).is_file() or hash_file(Path(file)) != digest for file, digest in sources.items()):
            return None
        weights = _weights(module)
        graph = forward.model.graph
        values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
        for name in names:
            value = values[name]
            if graph.initializers.pop(name, None) is None:
                graph.inputs.remove(value)
                value.const_value = ir.Tensor(weights[name].copy(), name=name)
            graph.register_initializer(value)  # in the order of the export
    except (ExportError, KeyError, ValueError, OSError):
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    return forward


def _write(forward: ForwardGraph, path: Path, module: Any) -> None:
    """Write an entry; the graph is as before afterwards. A cache that can't be written is no error."""
    graph, properties = forward.model.graph, forward.model.metadata_props
    weights = _weights(module)
    taken = []
    for name, value in list(graph.initializers.items()):
        array = value.const_value
        if name in weights and array is not None and np.array_equal(array.numpy(), weights[name]) and array.numpy().dtype == weights[name].dtype:
            taken.append((value, array))
    before = list(graph.initializers.items())
    try:
        for value, _ in taken:
            del graph.initializers[str(value.name)]
            value.const_value = None
            graph.inputs.append(value)
        properties[_SOURCES] = json.dumps(_loaded_sources())
        properties[_INITIALIZERS] = json.dumps([name for name, _ in before])
        with suppress(ExportError):
            forward.save(path)
    finally:
        properties.pop(_SOURCES, None)
        properties.pop(_INITIALIZERS, None)
        for value, array in taken:
            graph.inputs.remove(value)
            value.const_value = array
        graph.initializers.clear()
        graph.initializers.update(before)


def _weights(module: Any) -> dict[str, Any]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items() if hasattr(tensor, "detach")}


def _key(module: Any, feeds: Feeds, seed: int, spec: str) -> str:
    loss = None if feeds.loss is None else repr(Loss.of(feeds.loss))
    versions = sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions()})
    parts = [spec, seed, [str(s) for s in feeds.inputs], [str(s) for s in feeds.labels], loss, versions, sys.version, module_digest(module)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def module_digest(module: Any) -> str:
    """A hash of what a module is besides its code: its submodules with their classes, modes and attributes, and its weights."""
    digest = hashlib.sha256()
    for name, sub in module.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(sub).items() if key not in ("_parameters", "_buffers", "_modules")}
        digest.update(f"{name} {type(sub).__module__}.{type(sub).__qualname__} {_text(own, ())}\n".encode())
    first: dict[int, str] = {}
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            shared = first.setdefault(id(tensor), name)
            digest.update(f"{name} {shared} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}\n".encode())
            if shared == name:
                digest.update(_bytes(tensor.detach().cpu().numpy()))
    return digest.hexdigest()


def _bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _text(value: Any, within: tuple[int, ...]) -> str:
    """Attributes as text: what decides what a forward pass does, without addresses, which differ from run to run."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if id(value) in within:
        return "..."
    inner = (*within, id(value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(k, inner)}:{_text(v, inner)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(v, inner) for v in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(_text(v, inner) for v in value)) + "}"
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(_bytes(value)).hexdigest()}"
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "named_modules") or not hasattr(value, "__dict__"):
        return kind if hasattr(value, "named_modules") or " at 0x" in repr(value) else f"{kind} {value!r}"
    return f"{kind}{_text(vars(value), inner)}"


def _loaded_sources() -> dict[str, str]:
    """The loaded Python files that belong to no installed package, and all of our own, with their hashes."""
    installed = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py"):
            continue
        path = os.path.realpath(file)
        if name.partition(".")[0] == "onnxremat" or not path.startswith(installed):
            with suppress(OSError):
                found[path] = hash_file(Path(path))
    return found
