"""onnxremat: fit the training of a neural network into the memory at hand.

The package is light to import: torch, onnx and ONNX Runtime are loaded when something needs them (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import compile, verify
    from .artifact import Artifact
    from .errors import BudgetInfeasible, OnnxRematError, VerificationFailed
    from .exporters import InputSpec, Loss
    from .optimizers import Optimizer
    from .runtime.cuda_trainer import CudaTrainer
    from .runtime.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "artifact",
    "BudgetInfeasible": "errors",
    "CudaTrainer": "runtime.cuda_trainer",
    "InputSpec": "exporters",
    "Loss": "exporters",
    "OnnxRematError": "errors",
    "Optimizer": "optimizers",
    "Trainer": "runtime.trainer",
    "VerificationFailed": "errors",
    "compile": "api",
    "verify": "api",
}

__all__ = [
    "Artifact",
    "BudgetInfeasible",
    "CudaTrainer",
    "InputSpec",
    "Loss",
    "OnnxRematError",
    "Optimizer",
    "Trainer",
    "VerificationFailed",
    "__version__",
    "compile",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxremat' has no attribute '{name}'")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
