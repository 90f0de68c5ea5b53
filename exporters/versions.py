"""Versions of the libraries that shaped a graph."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["library_versions"]


def library_versions() -> dict[str, str]:
    """Installed version of each library that takes part in an export, by distribution name."""
    found = {}
    for name in ("torch", "onnx", "onnx-ir", "onnxscript", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
