"""Building and editing ONNX graphs (on onnx_ir)."""

from .builder import Expr, GraphBuilder, nbytes, static_shape

__all__ = ["Expr", "GraphBuilder", "nbytes", "static_shape"]
