"""SOURCE as users write it -> module or graph: ``package.module:factory``, ``zoo:NAME`` or ``file.onnx``.

The first two may have arguments of the factory, as Python literals: ``package.module:factory(width=32, depth=3)``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import ExportError
from .forward_graph import ForwardGraph, InputSpec
from .losses import Loss
from .onnx_import import import_onnx

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Feeds", "build_module", "load_source", "source_feeds"]


def load_source(
    source: str,
    inputs: Sequence[InputSpec] = (),
    labels: Sequence[InputSpec] = (),
    loss: Loss | str | None = None,
    seed: int = 0,
    train_mode: bool = False,
) -> ForwardGraph:
    """A forward graph from a source.

    Args:
        source: ``package.module:factory`` (imported with the current directory on the path), ``zoo:NAME``, or a path ending in .onnx.
        inputs: batch inputs; empty takes the zoo entry's, or the file's own where they are static.
        labels: labels; empty takes the zoo entry's when inputs are its too, else they are derived from the loss.
        loss: a loss; None takes the zoo entry's, else the model's own scalar output where there is one.
        seed: seeds torch before the factory is called.
        train_mode: of a .onnx file: turn inference BatchNormalization and Dropout into their training forms.

    Raises:
        ExportError: when the source cannot be found, built or exported.
    """
    if source.endswith(".onnx"):
        return import_onnx(source, inputs, labels, loss, seed=seed, train_mode=train_mode)
    if train_mode:
        raise ExportError(source, "a torch module is exported in the mode it is in", "call train() on it; --train-mode is for .onnx files")
    feeds = source_feeds(source, inputs, labels, loss)
    from .torch_export import export_torch

    return export_torch(build_module(source, seed), feeds.inputs, feeds.labels, feeds.loss, seed, source)


@dataclass(frozen=True)
class Feeds:
    """What a model is trained on: specs of its inputs and labels, and the loss."""

    inputs: tuple[InputSpec, ...]
    labels: tuple[InputSpec, ...]
    loss: Loss | str | None


def source_feeds(source: str, inputs: Sequence[InputSpec] = (), labels: Sequence[InputSpec] = (), loss: Loss | str | None = None) -> Feeds:
    """What is given, and of a zoo's model what its entry says where nothing is; for sources that have a torch module.

    Raises:
        ExportError: when there are no inputs, or no such model in the zoo.
    """
    if source.startswith("zoo:"):
        entry = _zoo_entry(source)
        if not inputs:
            inputs = [InputSpec.parse(text) for text in entry.inputs]
            labels = labels or [InputSpec.parse(text) for text in entry.labels]
        loss = entry.loss if loss is None else loss
    if not inputs:
        raise ExportError(source, "no inputs given", "name at least one, such as x=8x3x224x224")
    return Feeds(tuple(inputs), tuple(labels), loss)


def build_module(source_spec: str, seed: int = 0) -> nn.Module:
    """Builds the torch module of a source; the same spec and seed give the same module.

    Raises:
        ExportError: when the module or factory is missing, fails, or returns something else than an nn.Module.
    """
    if source_spec.endswith(".onnx"):
        raise ExportError(source_spec, "an .onnx file has no torch module", "compare with the file itself")
    spec, positional, named = _call(source_spec)
    if spec.startswith("zoo:"):
        entry = _zoo_entry(spec)
        spec, named = entry.factory, {**entry.arguments, **named}
    factory = _factory(spec)
    try:
        import torch
        from torch import nn
    except ImportError as error:
        raise ExportError(spec, f"building it needs torch ({error})", "install torch") from error
    # Not torch.manual_seed: onnxruntime-training hooks it to seed itself, and with seed 0 its first two dropouts draw the same mask.
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    try:
        with _current_directory_on_path():
            module = factory(*positional, **named)
    except Exception as error:  # the user's code may raise anything
        raise ExportError(spec, f"the factory failed: {type(error).__name__}: {error}", "call it in Python to see the traceback") from error
    if not isinstance(module, nn.Module):
        raise ExportError(spec, f"the factory returned {type(module).__name__}, not an nn.Module", "return the model")
    return module


def _zoo_entry(source: str) -> Any:
    # By name, as a user's factory is: this folder imports nothing of the rest of the package.
    zoo = importlib.import_module(f"{(__package__ or '').rpartition('.')[0]}.models.zoo")
    try:
        return zoo.zoo_entry(_call(source)[0].removeprefix("zoo:"))
    except KeyError:
        raise ExportError(source, "the zoo has no such model", f"it has {', '.join(sorted(zoo.load_zoo()))}") from None


def _call(source: str) -> tuple[str, list[Any], dict[str, Any]]:
    """``package.module:factory(8, width=32)`` -> ``package.module:factory``, [8], {"width": 32}.

    Raises:
        ExportError: when what stands in the parentheses is not literals.
    """
    spec, parenthesis, rest = source.partition("(")
    if not parenthesis:
        return source, [], {}
    try:
        call = ast.parse(f"f({rest.strip()}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not one call")
        named = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg is not None}
        if len(named) < len(call.keywords):
            raise ValueError("** is no literal")
        return spec.strip(), [ast.literal_eval(a) for a in call.args], named
    except (SyntaxError, ValueError) as error:
        way_out = "write Python literals, such as package.module:factory(width=32, depth=3)"
        raise ExportError(f"source {source!r}", "the factory's arguments are not understood", way_out) from error


def _factory(spec: str) -> Any:
    module_name, colon, name = spec.partition(":")
    if not colon or not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ExportError(f"source {spec!r}", "not understood", _way_out(module_name))
    with _current_directory_on_path():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or module_name
            own = module_name == missing or module_name.startswith(f"{missing}.")
            way_out = "run from the folder that holds it, or install it" if own else f"install {missing}"
            raise ExportError(spec, f"no module named {missing}", way_out) from error
        except Exception as error:  # the user's module may raise anything
            raise ExportError(spec, f"importing {module_name} failed: {type(error).__name__}: {error}", "import it in Python") from error
    factory: Any = module
    for part in name.split("."):
        factory = getattr(factory, part, None)
        if factory is None:
            raise ExportError(spec, f"module {module_name} has no {name}", "check the name of the factory")
    if not callable(factory):
        raise ExportError(spec, f"{name} is {type(factory).__name__}, not callable", "name a function or a class that builds the model")
    return factory


def _way_out(name: str) -> str:
    """What to write instead of a source whose module has this name."""
    if name.endswith(".py") or "/" in name:
        folder, _, file = name.removesuffix(".py").rpartition("/")
        where = "" if folder in ("", ".") else f" in the folder {folder}"
        return f"write {file}:factory{where}, with the name of the function that builds the model"
    return "give package.module:factory, zoo:NAME or a path ending in .onnx"


@contextlib.contextmanager
def _current_directory_on_path() -> Iterator[None]:
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
