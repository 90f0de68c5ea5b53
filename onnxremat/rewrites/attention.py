"""Attention and MultiHeadAttention of com.microsoft as products and a softmax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..autodiff.context import Context
from ..autodiff.rules_linalg import matmul
from ..graph import Expr
from ..ops import MS
from .microsoft import as_float_mask
from .normalization import used
from .registry import rewrite


def _heads(x: Expr, heads: int) -> Expr:
    """(batch, length, hidden) -> (batch, heads, length, head size)."""
    batch, length, hidden = x.shape
    return x.reshape([batch, length, heads, hidden // heads]).transpose([0, 2, 1, 3])


def _attend(c: Context, q: Expr, k: Expr, v: Expr, mask: Expr | None, bias: Expr | None) -> tuple[Expr, Expr]:
    """softmax(scale q k' + mask + bias) v, joined over the heads, and the softmax (Vaswani et al. 2017, section 3.2)."""
    batch, _, length, size = q.shape
    total = k.shape[2]
    scores = matmul(q, k, trans_b=True, alpha=float(c.attr("scale", 0.0)) or 1.0 / float(np.sqrt(size)))
    if bias is not None:
        scores = scores + bias
    filler = float(c.attr("mask_filter_value", -10000.0))
    if mask is not None:
        scores = scores + as_float_mask(mask, q.dtype, filler)
    if int(c.attr("unidirectional", 0)):
        later = np.triu(np.full((length, total), float(np.finfo(q.dtype.numpy()).min), q.dtype.numpy()), total - length + 1)
        scores = scores + later
    weights = c.op("Softmax", scores, axis=-1)
    joined = c.op("MatMul", weights, v).transpose([0, 2, 1, 3])
    return joined.reshape([batch, length, joined.shape[2] * joined.shape[3]]), weights


def _key_mask(c: Context, mask: Expr, batch: int, total: int) -> Expr:
    """A mask of keys as a boolean that broadcasts over (batch, heads, length, total)."""
    if mask.shape in ((batch,), (2 * batch,)):
        # Exclusive ends of the keys, and their starts where there are twice as many entries.
        places = np.arange(total, dtype=mask.dtype.numpy()).reshape(1, total)
        ends = mask.slice([0], [batch], [0]).reshape([batch, 1])
        inside = c.op("Greater", ends, places)
        if mask.shape == (2 * batch,):
            starts = mask.slice([batch], [2 * batch], [0]).reshape([batch, 1])
            inside = c.op("And", inside, c.op("LessOrEqual", starts, places))
        return inside.reshape([batch, 1, 1, total])
    nonzero = c.op("Greater", mask, 0)
    if mask.rank == 2 and mask.shape[1] == total:
        return nonzero.reshape([mask.shape[0], 1, 1, total])
    if mask.rank == 3 and mask.shape[2] == total:
        return nonzero.reshape([mask.shape[0], 1, *mask.shape[1:]])
    raise c.refuse(f"a mask of shape {mask.shape} has no rewrite; give one of shape (batch, keys)")


@rewrite("Attention", domain=MS)
def _attention(c: Context) -> Sequence[Expr | None]:
    """Self-attention with one weight matrix for queries, keys and values."""
    if c.has(4) or c.has(6) or int(c.attr("do_rotary", 0)) or used(c, 1):
        raise c.refuse("past states and rotary positions serve inference; export the model for training, without a cache")
    x, weight, heads = c.x0, c.x1, int(c.attr("num_heads"))
    batch, length, features = x.shape
    sizes = [int(n) for n in c.attr("qkv_hidden_sizes", [weight.shape[1] // 3] * 3)]
    projected = c.op("MatMul", x.reshape([batch * length, features]), weight)
    if c.has(2):
        projected = projected + c.input(2)
    parts = c.op.node("Split", projected, np.asarray(sizes, np.int64), outputs=3, axis=1)
    q, k, v = (_heads(part.reshape([batch, length, size]), heads) for part, size in zip(parts, sizes, strict=True))
    mask = _key_mask(c, c.input(3), batch, length) if c.has(3) else None
    return [_attend(c, q, k, v, mask, c.input(5) if c.has(5) else None)[0]]


@rewrite("MultiHeadAttention", domain=MS)
def _multi_head_attention(c: Context) -> Sequence[Expr | None]:
    """Attention of queries to keys and values that are projected already; packed and unpacked forms."""
    if any(c.has(i) for i in (6, 7, 8, 9)):
        raise c.refuse("past states serve inference; export the model for training, without a cache")
    heads = int(c.attr("num_heads"))
    query = c.x0
    batch, length = query.shape[:2]
    if query.rank == 5:  # (batch, length, heads, 3, size)
        q, k, v = (p.reshape([batch, length, heads * query.shape[4]]) for p in _unpack(c, query, 3))
    elif c.has(1) and c.x1.rank == 5:  # (batch, keys, heads, 2, size)
        q, packed = query, c.x1
        k, v = (p.reshape([batch, packed.shape[1], heads * packed.shape[4]]) for p in _unpack(c, packed, 2))
    elif c.has(1) and c.has(2):
        q, k, v = query, c.x1, c.input(2)
    else:
        raise c.refuse("its keys and values are missing; give them")
    split_already = k.rank == 4  # (batch, heads, keys, size): cross attention to a cache
    if c.has(3):
        width = v.shape[1] * v.shape[3] if split_already else v.shape[2]
        sizes = [q.shape[2], q.shape[2], width]
        of_q, of_k, of_v = c.op.node("Split", c.input(3), np.asarray(sizes, np.int64), outputs=3, axis=0)
        q = q + of_q
        if not split_already:
            k, v = k + of_k, v + of_v
    q = _heads(q, heads)
    if not split_already:
        k, v = _heads(k, heads), _heads(v, heads)
    mask = _key_mask(c, c.input(4), batch, k.shape[2]) if c.has(4) else None
    y, weights = _attend(c, q, k, v, mask, c.input(5) if c.has(5) else None)
    return [y, k, v, weights]


def _unpack(c: Context, packed: Expr, count: int) -> list[Expr]:
    return c.op.node("Split", packed, outputs=count, axis=3, num_outputs=count)
