"""The compiled inner loops of this package: shared libraries without a line of Python in them."""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["load_library"]


def load_library(name: str) -> ctypes.CDLL | None:
    """The library ``name`` beside this file, or None where the package was installed without it, or with one for another machine."""
    here = Path(__file__).parent
    path = next((path for suffix in EXTENSION_SUFFIXES if (path := here / f"{name}{suffix}").exists()), None)
    if path is None:
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
