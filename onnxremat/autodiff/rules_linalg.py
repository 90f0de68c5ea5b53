"""VJPs of matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..graph import Expr
from .context import Context
from .registry import joint_vjp


def matmul(a: Expr, b: Expr, trans_a: bool = False, trans_b: bool = False, alpha: float = 1.0) -> Expr:
    """``alpha * op(A) @ op(B)`` with the transposes done inside the product (com.microsoft.FusedMatMul), over NumPy's batch dimensions."""
    if not trans_a and not trans_b and alpha == 1.0:
        return a.op("MatMul", a, b)
    rows = a.shape[-1] if trans_a else a.shape[-2]
    columns = b.shape[-2] if trans_b else b.shape[-1]
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    return a.op.node(
        "FusedMatMul",
        a,
        b,
        domain="com.microsoft",
        transA=int(trans_a),
        transB=int(trans_b),
        alpha=float(alpha),
        like=[((*batch, rows, columns), a.dtype)],
    )[0]


def _broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    width = max(len(a), len(b))
    left, right = (1,) * (width - len(a)) + tuple(a), (1,) * (width - len(b)) + tuple(b)
    return tuple(max(x, y) for x, y in zip(left, right, strict=True))


def product_gradients(c: Context, trans_a: bool, trans_b: bool, alpha: float) -> Sequence[Expr | None]:
    """Gradients of ``Y = alpha * op(A) @ op(B)``: of op(A) it is G op(B)^T, of op(B) it is op(A)^T G."""
    g, a, b = c.g[0], c.x0, c.x1
    assert g is not None
    if a.rank == 1 or b.rank == 1:
        return _vector_gradients(c, g, trans_a, trans_b, alpha)
    if b.rank == 2 and a.rank > 2 and not trans_a:
        # One large product over all rows instead of a batch of small ones that would be summed.
        rows = g.reshape([math.prod(g.shape[:-1]), g.shape[-1]])
        flat = a.reshape([rows.shape[0], a.shape[-1]])
        da = matmul(rows, b, False, not trans_b, alpha).reshape(a.shape) if c.wants(0) else None
        if not c.wants(1):
            return [da]
        return [da, matmul(rows, flat, True, False, alpha) if trans_b else matmul(flat, rows, True, False, alpha)]
    return _pair_gradients(c, g, a, b, trans_a, trans_b, alpha)


def _vector_gradients(c: Context, g: Expr, trans_a: bool, trans_b: bool, alpha: float) -> Sequence[Expr | None]:
    """NumPy's rule for rank 1: a row on the left, a column on the right, never transposed, and the added axis dropped from the result."""
    a, b = c.x0, c.x1
    if trans_a and a.rank > 1:
        raise c.refuse("ONNX Runtime's kernel multiplies a transposed matrix by a vector wrongly; transpose the matrix before")
    trans_a, trans_b = False, trans_b and b.rank > 1
    wide_a = a.reshape([1, *a.shape]) if a.rank == 1 else a
    wide_b = b.reshape([*b.shape, 1]) if b.rank == 1 else b
    batch = list(_broadcast(wide_a.shape[:-2], wide_b.shape[:-2]))
    wide_g = g.reshape([*batch, wide_a.shape[-2], wide_b.shape[-2 if trans_b else -1]])
    da, db = _pair_gradients(c, wide_g, wide_a, wide_b, trans_a, trans_b, alpha)
    if da is not None and a.rank == 1:
        da = da.sum(range(da.rank - 2)).reshape(a.shape)
    if db is not None and b.rank == 1:
        db = db.sum(range(db.rank - 2)).reshape(b.shape)
    return [da, db]


def _pair_gradients(c: Context, g: Expr, a: Expr, b: Expr, trans_a: bool, trans_b: bool, alpha: float) -> list[Expr | None]:
    da = db = None
    if c.wants(0):
        da = matmul(b, g, trans_b, True, alpha) if trans_a else matmul(g, b, False, not trans_b, alpha)
    if c.wants(1):
        db = matmul(g, a, True, trans_a, alpha) if trans_b else matmul(a, g, not trans_a, False, alpha)
    return [da, db]


@joint_vjp("MatMul")
def _matmul(c: Context) -> Sequence[Expr | None]:
    return product_gradients(c, False, False, 1.0)


@joint_vjp("FusedMatMul", domain="com.microsoft")
def _fused_matmul(c: Context) -> Sequence[Expr | None]:
    if c.attr("transBatchA", 0) or c.attr("transBatchB", 0):
        raise c.refuse("FusedMatMul with transposed batch dimensions has no rule yet")
    return product_gradients(c, bool(c.attr("transA", 0)), bool(c.attr("transB", 0)), float(c.attr("alpha", 1.0)))


@joint_vjp("Gemm")
def _gemm(c: Context) -> Sequence[Expr | None]:
    g = c.g[0]
    assert g is not None
    beta = float(c.attr("beta", 1.0))
    grads = list(product_gradients(c, bool(c.attr("transA", 0)), bool(c.attr("transB", 0)), float(c.attr("alpha", 1.0))))
    grads += [None] * (2 - len(grads))
    bias = g if beta == 1.0 else g * beta
    return [*grads, bias if c.wants(2) else None]
