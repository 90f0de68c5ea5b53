"""LSTM, GRU and RNN, written out step by step.

The runtime's own training kernels know the forward direction without peepholes, clipping, sequence lengths or other activations only.  Here
the input's projection is one product for the whole sequence and each step is a handful of small nodes, so that the scheduler may
keep some of the states and recompute the rest: checkpointing through time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..autodiff.context import Context
from ..autodiff.rules_linalg import matmul
from ..graph import Expr
from .normalization import used
from .registry import rewrite

Activation = Callable[[Expr], Expr]

#: Defaults of (alpha, beta) of the activations that take parameters, and which of the two each takes.
_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "elu": (1.0, None),
    "affine": (1.0, 0.0),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
}
_FUNCTIONS: dict[str, Callable[[Expr, float, float], Expr]] = {
    "relu": lambda x, a, b: x.op("Relu", x),
    "tanh": lambda x, a, b: x.op("Tanh", x),
    "sigmoid": lambda x, a, b: x.op("Sigmoid", x),
    "softsign": lambda x, a, b: x.op("Softsign", x),
    "softplus": lambda x, a, b: x.op("Softplus", x),
    "leakyrelu": lambda x, a, b: x.op("LeakyRelu", x, alpha=a),
    "thresholdedrelu": lambda x, a, b: x.op("ThresholdedRelu", x, alpha=a),
    "elu": lambda x, a, b: x.op("Elu", x, alpha=a),
    "affine": lambda x, a, b: x * a + b,
    "scaledtanh": lambda x, a, b: x.op("Tanh", x * b) * a,
    "hardsigmoid": lambda x, a, b: x.op("HardSigmoid", x, alpha=a, beta=b),
}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@dataclass(frozen=True)
class _Cell:
    """One direction: what its steps share.

    Attributes:
        recurrent: R, (gates * hidden, hidden).
        recurrent_bias: (gates * hidden), or None where the input's projection has it, or there is none.
        peepholes: of the gates i, o, f, each (hidden), or None.
        activations: of the gates.
        clip: limits what enters an activation.
    """

    c: Context
    hidden: int
    recurrent: Expr
    recurrent_bias: Expr | None
    peepholes: Sequence[Expr] | None
    activations: Sequence[Activation]
    clip: Callable[[Expr], Expr]

    def split(self, value: Expr, *counts: int) -> list[Expr]:
        sizes = np.asarray([n * self.hidden for n in counts], np.int64)
        return self.c.op.node("Split", value, sizes, outputs=len(counts), axis=-1)

    def project(self, state: Expr, added: Expr) -> Expr:
        return self.c.op("Gemm", state, self.recurrent, added, transB=1)


def _rnn_step(cell: _Cell, x: Expr, h: Expr, _: Expr | None) -> tuple[Expr, None]:
    return cell.activations[0](cell.clip(cell.project(h, x))), None


def _gru_step(cell: _Cell, x: Expr, h: Expr, _: Expr | None) -> tuple[Expr, None]:
    """z, r = f(x + h R'); n = g(x + (r h) R'), or g(x + r (h R' + b)) with ``linear_before_reset``; h' = (1 - z) n + z h."""
    n = cell.hidden
    f, g = cell.activations
    if cell.recurrent_bias is not None:
        recurrent = matmul(h, cell.recurrent, trans_b=True)
        x_gates, x_new = cell.split(x, 2, 1)
        h_gates, h_new = cell.split(recurrent, 2, 1)
        z, r = cell.split(f(cell.clip(x_gates + h_gates)), 1, 1)
        new = g(cell.clip(x_new + r * (h_new + cell.recurrent_bias)))
    else:
        x_gates, x_new = cell.split(x, 2, 1)
        of_gates, of_new = (cell.recurrent.slice([a * n], [b * n], [0]) for a, b in ((0, 2), (2, 3)))
        z, r = cell.split(f(cell.clip(cell.c.op("Gemm", h, of_gates, x_gates, transB=1))), 1, 1)
        new = g(cell.clip(cell.c.op("Gemm", r * h, of_new, x_new, transB=1)))
    return new + z * (h - new), None


def _lstm_step(cell: _Cell, x: Expr, h: Expr, state: Expr | None) -> tuple[Expr, Expr]:
    """i, o, f = f(x + h R' + P c), o with the new c; c' = f c + i g(...); h' = o h(c')."""
    assert state is not None
    f, g, h_of = cell.activations
    coupled = int(cell.c.attr("input_forget", 0))
    gates = cell.project(h, x)
    if cell.peepholes is None:
        most, new = cell.split(gates, 3, 1)
        i, o, forget = cell.split(f(cell.clip(most)), 1, 1, 1)
    else:
        of_i, of_o, of_f = cell.peepholes
        i, o, forget, new = cell.split(gates, 1, 1, 1, 1)
        i = f(cell.clip(i + of_i * state))
        forget = f(cell.clip(forget + of_f * state))
    state = (1.0 - i if coupled else forget) * state + i * g(cell.clip(new))
    if cell.peepholes is not None:
        o = f(cell.clip(o + of_o * state))
    return o * h_of(state), state


_STEPS = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}


def _activations(c: Context, kind: str, directions: int) -> list[Activation]:
    """The functions of all directions; parameters are consumed in order by those that take any."""
    names = list(c.attr("activations", [])) or _DEFAULTS[kind] * directions
    alphas, betas = list(c.attr("activation_alpha", [])), list(c.attr("activation_beta", []))
    functions: list[Activation] = []
    for name in names:
        key = str(name).lower()
        if key not in _FUNCTIONS:
            raise c.refuse(f"its activation '{name}' is unknown; use one of {', '.join(sorted(_FUNCTIONS))}")
        alpha, beta = _PARAMETERS.get(key, (None, None))
        if alpha is not None and alphas:
            alpha = float(alphas.pop(0))
        if beta is not None and betas:
            beta = float(betas.pop(0))
        functions.append(lambda x, f=_FUNCTIONS[key], a=alpha or 0.0, b=beta or 0.0: f(x, a, b))  # type: ignore[misc]
    if len(functions) != len(_DEFAULTS[kind]) * directions:
        raise c.refuse(f"it names {len(functions)} activations where {len(_DEFAULTS[kind]) * directions} belong")
    return functions


@rewrite("LSTM GRU RNN")
def _recurrent(c: Context) -> Sequence[Expr | None]:
    kind = c.node.op_type
    direction = c.attr("direction", "forward")
    reversed_by_direction = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[str(direction)]
    activations = _activations(c, kind, len(reversed_by_direction))
    batch_first = int(c.attr("layout", 0))
    x = c.x0.transpose([1, 0, 2]) if batch_first else c.x0
    steps = x.shape[0]
    masks = _masks(c, steps)
    each = len(_DEFAULTS[kind])
    runs = [_direction(c, x, d, backwards, activations[d * each : (d + 1) * each], masks) for d, backwards in enumerate(reversed_by_direction)]

    def stack(values: Sequence[Expr], axis: int) -> Expr:
        wide = [v.reshape([*v.shape[:axis], 1, *v.shape[axis:]]) for v in values]
        return wide[0] if len(wide) == 1 else c.op("Concat", *wide, axis=axis)

    y = last = cell = None
    if used(c, 0):
        by_time = [stack([outputs[t] for outputs, _, _ in runs], 0) for t in range(steps)]
        y = stack(by_time, 0)
        y = y.transpose([2, 0, 1, 3]) if batch_first else y
    if used(c, 1):
        last = stack([h for _, h, _ in runs], 1 if batch_first else 0)
    if used(c, 2):
        cell = stack([state for _, _, state in runs if state is not None], 1 if batch_first else 0)
    return [y, last, cell]


def _masks(c: Context, steps: int) -> list[Expr | None]:
    """For each time the sequences that last beyond it, (batch, 1), boolean; None where all do."""
    if not c.has(4):
        return [None] * steps
    lengths = c.input(4)
    shortest = int(c.const(4).min(initial=steps)) if lengths.value.const_value is not None else 0
    column = lengths.reshape([lengths.shape[0], 1])
    return [None if t < shortest else c.op("Greater", column, t) for t in range(steps)]


def _direction(
    c: Context, x: Expr, d: int, backwards: bool, activations: Sequence[Activation], masks: Sequence[Expr | None]
) -> tuple[list[Expr], Expr, Expr | None]:
    """The output at each time, the last hidden and the last cell state of one direction."""
    kind, op = c.node.op_type, c.op
    steps, batch, features = x.shape
    hidden, gates = c.input(2).shape[-1], _GATES[kind]

    def of_direction(index: int) -> Expr:
        value = c.input(index)
        part = value if value.shape[0] == 1 else value.slice([d], [d + 1], [0])
        return part.reshape(part.shape[1:])

    def initial(index: int) -> Expr:
        if not c.has(index):
            return op.const(np.zeros((batch, hidden), x.dtype.numpy()))
        value = c.input(index)
        axis = 1 if int(c.attr("layout", 0)) else 0
        part = value if value.shape[axis] == 1 else value.slice([d], [d + 1], [axis])
        return part.reshape([batch, hidden])

    projected = matmul(x.reshape([steps * batch, features]), of_direction(1), trans_b=True)
    recurrent_bias: Expr | None = None
    if c.has(3):
        bias = of_direction(3)
        of_input, of_state = (bias.slice([i * gates * hidden], [(i + 1) * gates * hidden], [0]) for i in range(2))
        if kind == "GRU" and int(c.attr("linear_before_reset", 0)):
            # The candidate's recurrent bias is inside the reset; the gates' are not.
            recurrent_bias = of_state.slice([2 * hidden], [3 * hidden], [0])
            outside = op.const(np.repeat([1.0, 1.0, 0.0], hidden).astype(x.dtype.numpy()))
            of_state = of_state * outside
        projected = projected + (of_input + of_state)
    elif kind == "GRU" and int(c.attr("linear_before_reset", 0)):
        recurrent_bias = op.const(np.zeros(hidden, x.dtype.numpy()))
    slices = [projected] if steps == 1 else op.node("Split", projected, np.full(steps, batch, np.int64), outputs=steps, axis=0)
    peepholes: list[Expr] | None = None
    if kind == "LSTM" and c.has(7):
        peepholes = [of_direction(7).slice([i * hidden], [(i + 1) * hidden], [0]) for i in range(3)]
    limit = c.attr("clip")

    def clip(value: Expr) -> Expr:
        return value if not limit else op("Clip", value, -float(limit), float(limit))

    cell = _Cell(c, hidden, of_direction(2), recurrent_bias, peepholes, activations, clip)
    h = initial(5)
    state = initial(6) if kind == "LSTM" else None
    outputs: list[Expr | None] = [None] * steps
    for t in reversed(range(steps)) if backwards else range(steps):
        new_h, new_state = _STEPS[kind](cell, slices[t], h, state)
        mask = masks[t]
        outputs[t] = new_h
        if mask is not None:
            # Beyond its end a sequence keeps its state and puts out zeros.
            outputs[t] = new_h * mask.cast(x.dtype)
            new_h = op("Where", mask, new_h, h)
            new_state = op("Where", mask, new_state, state) if new_state is not None and state is not None else None
        h, state = new_h, new_state
    return [value for value in outputs if value is not None], h, state
