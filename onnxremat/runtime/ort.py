"""The one place that imports ONNX Runtime, and says what is wrong where it can't be used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any, cast

from ..errors import RuntimeUnavailable

TRAINING_PACKAGES = ("onnxruntime-training-cpu", "onnxruntime-training")
STOCK_PACKAGES = ("onnxruntime", "onnxruntime-gpu")
#: The version whose kernels, memory sharing and file formats onnxremat was measured against; frozen upstream.
TRAINING_VERSION = "1.19.2"
_INSTALL = f"pip install {TRAINING_PACKAGES[0]}=={TRAINING_VERSION}"


def installed_packages() -> dict[str, str]:
    """Distributions that own the import folder ``onnxruntime``: name -> version."""
    found = {}
    for name in (*TRAINING_PACKAGES, *STOCK_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def onnxruntime() -> ModuleType:
    """The module ``onnxruntime``, imported without torch.

    The training package imports torch for helpers that are not used here; a training process needs none, so that import is withheld.

    Raises:
        RuntimeUnavailable: it is missing, or two packages share its folder.
    """
    packages = installed_packages()
    if len(packages) > 1:
        names = " and ".join(packages)
        raise RuntimeUnavailable(f"{names} are installed into one folder and break each other: pip uninstall both, then {_INSTALL}")
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeUnavailable(f"onnxruntime is not installed: {_INSTALL}")
    absent = "torch" not in sys.modules
    if absent and "onnxruntime" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import onnxruntime as module
    except ImportError as error:
        raise RuntimeUnavailable(f"onnxruntime does not import ({error}): reinstall {TRAINING_PACKAGES[0]}=={TRAINING_VERSION}") from error
    finally:
        if absent and sys.modules.get("torch", ...) is None:
            del sys.modules["torch"]
    return cast(ModuleType, module)


def require_training_package() -> None:
    """Raise RuntimeUnavailable unless ONNX Runtime is a package with training operators."""
    onnxruntime()
    packages = installed_packages()
    if packages and not any(name in packages for name in TRAINING_PACKAGES):
        raise RuntimeUnavailable(
            f"{' and '.join(packages)} has no training operators: compile with --target onnxruntime, or pip uninstall -y "
            f"{' '.join(packages)}, then {_INSTALL}"
        )


def version() -> str:
    """Version of the runtime at hand."""
    return str(onnxruntime().__version__)


@cache
def bindings() -> Any:
    """The compiled bindings, which hold the checkpoint functions of the training API (their Python wrapper needs torch)."""
    require_training_package()
    from onnxruntime.capi import _pybind_state

    return _pybind_state
