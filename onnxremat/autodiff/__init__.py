"""Reverse-mode differentiation of ONNX graphs: the edges of the forward graph, reversed."""

from . import (
    rules_activations,
    rules_conv,
    rules_elementwise,
    rules_grid_sample,
    rules_indexing,
    rules_linalg,
    rules_nn,
    rules_normalization,
    rules_other,
    rules_pooling,
    rules_reduction,
    rules_resample,
    rules_shape,
)
from .engine import differentiate
from .registry import NotDifferentiable, Refused, Vjp, joint_vjp, lookup, registered, vjp

__all__ = [
    "NotDifferentiable",
    "Refused",
    "Vjp",
    "differentiate",
    "joint_vjp",
    "lookup",
    "registered",
    "rules_activations",
    "rules_conv",
    "rules_elementwise",
    "rules_grid_sample",
    "rules_indexing",
    "rules_linalg",
    "rules_nn",
    "rules_normalization",
    "rules_other",
    "rules_pooling",
    "rules_reduction",
    "rules_resample",
    "rules_shape",
    "vjp",
]
