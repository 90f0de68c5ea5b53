"""From a PyTorch module, or a forward .onnx file, to a forward graph with true training semantics.

This is the only place of the project that imports torch to export; importing the package itself loads neither torch nor onnx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ExportError
    from .forward_graph import ForwardGraph, InputSpec
    from .losses import Loss
    from .onnx_import import import_onnx
    from .sources import build_module, load_source
    from .torch_export import export_torch

__all__ = [
    "ExportError",
    "ForwardGraph",
    "InputSpec",
    "Loss",
    "build_module",
    "export_torch",
    "import_onnx",
    "load_source",
]

_HOMES = {
    "ExportError": ".errors",
    "ForwardGraph": ".forward_graph",
    "InputSpec": ".forward_graph",
    "Loss": ".losses",
    "build_module": ".sources",
    "export_torch": ".torch_export",
    "import_onnx": ".onnx_import",
    "load_source": ".sources",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
