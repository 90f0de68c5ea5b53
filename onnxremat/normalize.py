"""Rewrites of a forward graph before it is differentiated: the same function in operators with fast kernels and lean gradients.

Everything that ONNX Runtime would rewrite by itself is done here, since nothing may be rewritten after planning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from .graph import Expr, GraphBuilder, static_shape
from .ops import MS
from .rewrites import expand, replace

Rewrite = Callable[[GraphBuilder, ir.Node], "Expr | list[Expr | None] | None"]


def normalize(graph: ir.Graph) -> None:
    """Rewrite a typed forward graph in place.

    Operators that are trained through as compositions are written out first (``onnxremat.rewrites``), then functions that the runtime
    would inline; the tanh form of GELU becomes one node, transposes and constant factors of matrix operands move into the product.
    """
    expand(graph)
    for op_type, rewrite in _REWRITES:
        for node in [n for n in graph if n.op_type == op_type]:
            if node.graph is not None:
                replace(graph, node, rewrite)
    remove_dead(graph, list(graph.outputs))


def remove_dead(graph: ir.Graph, keep: list[ir.Value], keep_initializers: bool = False) -> None:
    """Remove nodes, and initializers unless told otherwise, that nothing in ``keep`` depends on."""
    needed = {id(v) for v in keep}
    for node in reversed(list(graph)):
        if any(id(v) in needed for v in node.outputs):
            needed |= {id(v) for v in node.inputs if v is not None}
        else:
            graph.remove(node, safe=True)
    for name, value in [] if keep_initializers else list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def merge_casts(graph: ir.Graph) -> None:
    """Let a Cast of a Cast read what the first one read, where the first loses nothing.

    The runtime does so in every session as soon as all readers of a Cast are Casts, which may be so for a clone and not for the original;
    the clone would be gone, and the plan with it.
    """
    for node in [n for n in graph if n.op_type == "Cast" and not n.domain]:
        while (source := _source_before(node)) is not None:
            node.replace_input_with(0, source)


def _source_before(node: ir.Node) -> ir.Value | None:
    """What the Cast that a Cast reads has read, where that one loses nothing; None otherwise."""
    (value,) = node.inputs
    inner = value.producer() if value is not None else None
    if value is None or inner is None or inner.op_type != "Cast" or inner.domain:
        return None
    source = inner.inputs[0]
    lossless = source is not None and source.dtype and value.dtype and np.can_cast(source.dtype.numpy(), value.dtype.numpy(), "safe")
    return source if lossless else None


def broadcast_expands(graph: ir.Graph) -> None:
    """Let elementwise arithmetic broadcast what an Expand has spread, where its other operand has the whole shape: a copy less."""
    for node in [n for n in graph if n.op_type == "Expand" and not n.domain]:
        source, spread = node.inputs[0], node.outputs[0]
        for user, index in [(use.node, use.idx) for use in spread.uses()]:
            other = user.inputs[1 - index] if user.op_type in _ARITHMETIC and not user.domain else None
            if other is not None and other is not spread and static_shape(other) == static_shape(user.outputs[0]):
                user.replace_input_with(index, source)


_ARITHMETIC = ("Add", "Sub", "Mul", "Div")


def _scalar(value: ir.Value | None) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().reshape(()))


def _batch_norm(op: GraphBuilder, node: ir.Node) -> list[Expr | None] | None:
    """Training BatchNormalization as a pure function of the batch, with the running statistics updated beside it.

    ONNX Runtime's kernel writes the new running statistics over the old ones it was fed, so that a second run (a recompute) would count the
    batch twice and a later reader of the old value would see the new one.  Here it is fed scratch with momentum 0, which
    makes its outputs the statistics of the batch, and ``running <- momentum * running + (1 - momentum) * batch`` is arithmetic with a
    version of its own.
    """
    if "training_mode" not in node.attributes or not node.attributes["training_mode"].as_int():
        return None
    x, scale, bias, mean, var = (op.wrap(v) for v in node.inputs if v is not None)
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    momentum = node.attributes["momentum"].as_float() if "momentum" in node.attributes else 0.9
    size = np.asarray(scale.shape, np.int64)
    # The kernel writes into them, so no two may be one buffer: equal nodes are merged by the optimizations of a default session.
    serial = 2 * sum(other.op_type == "BatchNormInternal" for other in op.graph)
    values = [ir.tensor(np.asarray([serial + i], x.dtype.numpy())) for i in (1, 2)]
    scratch = [op.node("ConstantOfShape", size, value=value, outputs=[op.fresh("bn_scratch")])[0] for value in values]
    names = [op.fresh(hint) for hint in ("bn_y", "bn_mean", "bn_var", "bn_saved_mean", "bn_saved_inv_std")]
    y, batch_mean, batch_var, _, _ = op.node(
        "BatchNormInternal",
        x,
        scale,
        bias,
        *scratch,
        domain=MS,
        outputs=names,
        like=[x, *[scale] * 4],
        epsilon=epsilon,
        momentum=0.0,
        training_mode=1,
    )

    def follow(index: int, running: Expr, batch: Expr) -> Expr | None:
        new = node.outputs[index] if index < len(node.outputs) else None
        if new is None or not (new.uses() or new.is_graph_output()):
            return None
        # torch's variance is the unbiased one: what is fed, and what comes of it, is scaled by constants.
        source, fed = next(_factors(running.value, "Mul"), (running.value, 1.0))
        reader = next(iter(new.uses())).node if _only_read_once(new) else None
        scaled = next((c for v, c in _factors(reader.outputs[0], "Mul") if v is new), None) if reader is not None else None
        if reader is None or scaled is None:
            return running * momentum + batch * (1.0 - momentum)
        following, op.before = op.before, reader
        result = op.wrap(source) * (momentum * fed * scaled) + batch * ((1.0 - momentum) * scaled)
        op.before = following
        (old,) = reader.outputs
        old.replace_all_uses_with(result.value, replace_graph_outputs=True)
        old.name, result.value.name = f"{old.name}_replaced", old.name
        op.graph.remove(reader, safe=True)
        return None

    return [y, follow(1, mean, batch_mean), follow(2, var, batch_var)]


def _hard_swish(op: GraphBuilder, node: ir.Node) -> Expr:
    assert node.inputs[0] is not None
    x = op.wrap(node.inputs[0])
    return x * op("HardSigmoid", x, alpha=1 / 6, beta=0.5)


def _cast_like(op: GraphBuilder, node: ir.Node) -> Expr:
    assert node.inputs[0] is not None and node.inputs[1] is not None and node.inputs[1].dtype is not None
    x, dtype = op.wrap(node.inputs[0]), node.inputs[1].dtype
    # A value of its own even where nothing changes: it takes over this node's name, and the input keeps the one that its role goes by.
    return op("Identity", x) if x.dtype == dtype else x.cast(dtype)


def _factors(value: ir.Value | None, op_type: str) -> Iterator[tuple[ir.Value, float]]:
    """The ways to read a value as ``operand (op) constant``."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == op_type and not node.domain:
        for operand, other in (node.inputs, node.inputs[::-1]):
            constant = _scalar(other)
            if operand is not None and constant is not None:
                yield operand, constant


def _gelu_tanh(op: GraphBuilder, node: ir.Node) -> Expr | None:
    """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``, read backwards from its tanh, becomes Gelu(approximate="tanh")."""
    x = _cubic_argument(node.inputs[0])
    (tanh,) = node.outputs
    uses = [use.node for use in tanh.uses()]
    if x is None or len(uses) != 1 or tanh.is_graph_output() or not any(c == 1.0 for _, c in _factors(uses[0].outputs[0], "Add")):
        return None
    (shifted,) = uses[0].outputs
    product = next((use.node for use in shifted.uses()), None)
    if product is None or product.op_type != "Mul" or len(shifted.uses()) != 1:
        return None
    other = product.inputs[0] if product.inputs[1] is shifted else product.inputs[1]
    if not any(operand is x and abs(c - 0.5) < 1e-6 for operand, c in _factors(other, "Mul")):
        return None
    before = op.before
    op.before = product
    gelu = op("Gelu", x, approximate="tanh")
    op.before = before
    (result,) = product.outputs
    name = result.name
    result.replace_all_uses_with(gelu.value, replace_graph_outputs=True)
    result.name, gelu.value.name = f"{name}_replaced", name
    return None


def _cubic_argument(value: ir.Value | None) -> ir.Value | None:
    """x where the value is ``sqrt(2/pi) (x + 0.044715 x^3)``."""
    for inner, scale in _factors(value, "Mul"):
        add = inner.producer()
        if abs(scale - math.sqrt(2 / math.pi)) > 1e-4 or add is None or add.op_type != "Add":
            continue
        for x, cubic in (add.inputs, add.inputs[::-1]):
            for power, coefficient in _factors(cubic, "Mul"):
                node = power.producer()
                if (
                    abs(coefficient - 0.044715) < 1e-6
                    and node is not None
                    and node.op_type == "Pow"
                    and node.inputs[0] is x
                    and _scalar(node.inputs[1]) == 3
                ):
                    return x
    return None


def _fold_transpose(op: GraphBuilder, node: ir.Node) -> Expr | None:
    """``A @ transpose(B)`` over the last two axes becomes one FusedMatMul; a Transpose that others read too stays for them."""
    a, b = node.inputs
    assert a is not None and b is not None
    if len(static_shape(a)) < 2 or len(static_shape(b)) < 2:
        return None
    left, trans_a = _untransposed(a)
    right, trans_b = _untransposed(b)
    if len(static_shape(b)) == 2 and trans_a and len(static_shape(a)) > 2:
        left, trans_a = a, False  # keeps the product one large one instead of a batch
    if not (trans_a or trans_b):
        return None
    from .autodiff.rules_linalg import matmul

    return matmul(op.wrap(left), op.wrap(right), trans_a, trans_b)


def _fold_scale(op: GraphBuilder, node: ir.Node) -> Expr | None:
    """``c (A @ B)`` and ``(c A) @ B`` for a constant c become one FusedMatMul, where nothing else reads what c scales."""
    from .autodiff.rules_linalg import matmul

    if node.op_type == "MatMul" or node.domain:
        product = node
        operands, factor = _unscaled(node)
    else:
        found = [(v.producer(), c) for v, c in _scaled(node.outputs[0]) if _is_product(v) and _only_read_once(v)]
        if not found or found[0][0] is None:
            return None
        product, factor = found[0][0], found[0][1]
        operands = list(product.inputs)
    a, b = (op.wrap(v) for v in operands if v is not None)
    if factor == 1.0 or min(a.rank, b.rank) < 2:
        return None
    attributes = product.attributes
    trans_a, trans_b = (bool(attributes.get_int(name, 0)) for name in ("transA", "transB"))
    return matmul(a, b, trans_a, trans_b, attributes.get_float("alpha", 1.0) * factor)


def _unscaled(product: ir.Node) -> tuple[list[ir.Value | None], float]:
    """The operands of a product without constants that scale them, and these constants multiplied."""
    operands, factor = list(product.inputs), 1.0
    for i, value in enumerate(operands):
        found = next(_scaled(value), None) if value is not None and _only_read_once(value) else None
        if found is not None:
            operands[i], factor = found[0], factor * found[1]
    return operands, factor


def _scaled(value: ir.Value | None) -> Iterator[tuple[ir.Value, float]]:
    """The ways to read a value as an operand of its own shape times a constant."""
    for operand, constant in _factors(value, "Mul"):
        if value is not None and static_shape(operand) == static_shape(value):
            yield operand, constant
    node = value.producer() if value is not None else None
    divisor = _scalar(node.inputs[1]) if node is not None and node.op_type == "Div" and not node.domain else None
    if node is not None and value is not None and divisor and node.inputs[0] is not None and static_shape(node.inputs[0]) == static_shape(value):
        yield node.inputs[0], 1.0 / divisor


def _only_read_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _is_product(value: ir.Value) -> bool:
    node = value.producer()
    if node is None or (node.domain, node.op_type) not in (("", "MatMul"), (MS, "FusedMatMul")):
        return False
    return not any(name in node.attributes and node.attributes[name].value for name in ("transBatchA", "transBatchB"))


def _untransposed(value: ir.Value) -> tuple[ir.Value, bool]:
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        rank = len(static_shape(value))
        perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]
        if perm == [*range(rank - 2), rank - 1, rank - 2]:
            return node.inputs[0], True
    return value, False


_REWRITES: list[tuple[str, Rewrite]] = [
    ("CastLike", _cast_like),
    ("BatchNormalization", _batch_norm),
    ("HardSwish", _hard_swish),
    ("Tanh", _gelu_tanh),
    ("MatMul", _fold_transpose),
    ("MatMul", _fold_scale),
    ("FusedMatMul", _fold_scale),
    ("Mul", _fold_scale),
    ("Div", _fold_scale),
]


def constant_bytes(graph: ir.Graph) -> int:
    """Bytes of the constants that the graph itself carries."""
    return sum(v.const_value.nbytes for v in graph.initializers.values() if v.const_value is not None)
