"""Rows of LSTM, GRU and RNN, against the equations of the ONNX specification written in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F

from tests.autodiff.support import Row, const, given, normal

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS: dict[str, Callable[[torch.Tensor, float, float], torch.Tensor]] = {
    "Sigmoid": lambda x, a, b: torch.sigmoid(x),
    "Tanh": lambda x, a, b: torch.tanh(x),
    "Relu": lambda x, a, b: torch.relu(x),
    "Softsign": lambda x, a, b: F.softsign(x),
    "Softplus": lambda x, a, b: F.softplus(x),
    "LeakyRelu": lambda x, a, b: F.leaky_relu(x, a),
    "ThresholdedRelu": lambda x, a, b: torch.where(x > a, x, 0.0),
    "Elu": lambda x, a, b: F.elu(x, a),
    "Affine": lambda x, a, b: a * x + b,
    "ScaledTanh": lambda x, a, b: a * torch.tanh(b * x),
    "HardSigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def reference(kind: str, slots: Sequence[int], attributes: dict[str, Any], parameters: Sequence[tuple[float, float]]) -> Any:
    """The operator on the operands at ``slots``; one pass over each sequence by itself, as the specification has it."""

    def run(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(slots, operands, strict=True))
        x = given[0].transpose(0, 1) if attributes.get("layout") else given[0]
        direction = attributes.get("direction", "forward")
        backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
        steps, batch, _ = x.shape
        hidden = given[2].shape[2]
        names = attributes.get("activations", DEFAULTS[kind] * len(backwards))
        each = len(DEFAULTS[kind])
        pairs = list(parameters) or [(0.0, 0.0)] * len(names)
        ys, lasts, cells = [], [], []
        for d, back in enumerate(backwards):
            acts = [
                lambda v, f=FUNCTIONS[n], p=p: f(v, *p)
                for n, p in zip(names[d * each : (d + 1) * each], pairs[d * each : (d + 1) * each], strict=True)
            ]
            y = [[torch.zeros(hidden, dtype=x.dtype)] * batch for _ in range(steps)]
            hs, cs = [], []
            for b in range(batch):
                length = int(given[4][b]) if 4 in given else steps

                def initial(slot: int, b: int = b, d: int = d) -> torch.Tensor:
                    if slot not in given:
                        return torch.zeros(hidden, dtype=x.dtype)
                    return given[slot][b, d] if attributes.get("layout") else given[slot][d, b]

                h, c = initial(5), initial(6)
                for t in reversed(range(length)) if back else range(length):
                    h, c = step(kind, {i: v[d] for i, v in given.items() if i in (1, 2, 3, 7)}, x[t, b], h, c, acts, attributes)
                    y[t][b] = h
                hs.append(h)
                cs.append(c)
            ys.append(torch.stack([torch.stack(row) for row in y]))
            lasts.append(torch.stack(hs))
            cells.append(torch.stack(cs))
        y_all, last, cell = torch.stack(ys, 1), torch.stack(lasts), torch.stack(cells)
        if attributes.get("layout"):
            y_all, last, cell = y_all.permute(2, 0, 1, 3), last.transpose(0, 1), cell.transpose(0, 1)
        return (y_all, last, cell) if kind == "LSTM" else (y_all, last)

    return run


def step(
    kind: str,
    weights: dict[int, torch.Tensor],
    x: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    acts: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    attributes: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    n, count = h.shape[0], GATES[kind]
    zero = torch.zeros(2 * count * n, dtype=x.dtype)
    bias = weights.get(3, zero)
    of_x = [weights[1][i * n : (i + 1) * n] @ x + bias[i * n : (i + 1) * n] for i in range(count)]
    matrices = [weights[2][i * n : (i + 1) * n] for i in range(count)]
    biases = [bias[(count + i) * n : (count + i + 1) * n] for i in range(count)]
    limit = attributes.get("clip")

    def clip(v: torch.Tensor) -> torch.Tensor:
        return v if limit is None else torch.clamp(v, -limit, limit)

    if kind == "RNN":
        return acts[0](clip(of_x[0] + matrices[0] @ h + biases[0])), c
    if kind == "GRU":
        z, r = (acts[0](clip(of_x[i] + matrices[i] @ h + biases[i])) for i in (0, 1))
        inner = r * (matrices[2] @ h + biases[2]) if attributes.get("linear_before_reset") else matrices[2] @ (r * h) + biases[2]
        return (1 - z) * acts[1](clip(of_x[2] + inner)) + z * h, c
    p = weights.get(7, torch.zeros(3 * n, dtype=x.dtype))
    pre = [of_x[i] + matrices[i] @ h + biases[i] for i in range(4)]
    i = acts[0](clip(pre[0] + p[:n] * c))
    f = 1 - i if attributes.get("input_forget") else acts[0](clip(pre[2] + p[2 * n :] * c))
    c = f * c + i * acts[1](clip(pre[3]))
    o = acts[0](clip(pre[1] + p[n : 2 * n] * c))
    return o * acts[2](c), c


def _row(
    kind: str,
    note: str = "",
    sizes: tuple[int, int, int, int] = (3, 2, 3, 2),
    slots: Sequence[int] = (0, 1, 2, 3),
    lengths: Any = None,
    parameters: Sequence[tuple[float, float]] = (),
    outputs: Sequence[int] | None = None,
    no_difference: str = "",
    **attributes: Any,
) -> Row:
    steps, batch, features, hidden = sizes
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    layout = attributes.get("layout", 0)
    gates = GATES[kind]
    state = normal(batch, directions, hidden) if layout else normal(directions, batch, hidden)
    operands: dict[int, Any] = {
        0: normal(batch, steps, features) if layout else normal(steps, batch, features),
        1: normal(directions, gates * hidden, features),
        2: normal(directions, gates * hidden, hidden),
        3: normal(directions, 2 * gates * hidden),
        4: lengths,
        5: state,
        6: state,
        7: normal(directions, 3 * hidden),
    }
    slots = sorted({*slots, *([4] if lengths is not None else [])})
    used = tuple(outputs) if outputs is not None else ((0, 1, 2) if kind == "LSTM" else (0, 1))
    whole = reference(kind, slots, attributes, parameters)

    def build(op: Any, values: Sequence[Any]) -> Any:
        values = list(values)
        if len(values) > 4 and values[4] is not None:
            constant = values[4].value.const_value
            values[4] = op.const(constant.numpy().astype(np.int32)) if constant is not None else values[4].cast(ir.DataType.INT32)
        made = op.node(kind, *values, outputs=3 if kind == "LSTM" else 2, hidden_size=hidden, **attributes)
        return [made[i] for i in used]

    return Row(
        kind,
        [operands[i] if i in slots else None for i in range(max(slots) + 1)],
        lambda *v: tuple(whole(*v)[i] for i in used),
        note=note,
        build=build,
        normalized=True,
        no_difference=no_difference,
        float32_differences="the float64 kernel refuses to run",
        step=2e-2,
        tolerance=1e-2,
    )


BATCH_FIRST = "the runtime's kernel knows no layout=1"
ROWS = [
    _row("LSTM"),
    _row("LSTM", "no bias", slots=(0, 1, 2)),
    _row("LSTM", "initial states", slots=(0, 1, 2, 3, 5, 6)),
    _row("LSTM", "reverse", direction="reverse"),
    _row("LSTM", "bidirectional", slots=(0, 1, 2, 3, 5, 6), direction="bidirectional"),
    _row("LSTM", "peepholes", slots=(0, 1, 2, 3, 7)),
    _row("LSTM", "peepholes bidirectional states", slots=(0, 1, 2, 3, 5, 6, 7), direction="bidirectional"),
    _row("LSTM", "input forget", input_forget=1),
    _row("LSTM", "clip", clip=0.3),
    _row("LSTM", "lengths", lengths=given([3, 1]), slots=(0, 1, 2, 3, 5, 6)),
    _row("LSTM", "constant lengths", lengths=const([2, 3])),
    _row("LSTM", "full lengths", lengths=const([3, 3])),
    _row("LSTM", "lengths reverse", lengths=given([1, 3]), slots=(0, 1, 2, 3, 5, 6), direction="reverse"),
    _row("LSTM", "lengths bidirectional", lengths=given([2, 3]), slots=(0, 1, 2, 3, 5, 6), direction="bidirectional"),
    _row("LSTM", "one step", sizes=(1, 2, 3, 2)),
    _row("LSTM", "last alone", outputs=(1,)),
    _row("LSTM", "cell alone", outputs=(2,)),
    _row("LSTM", "sequence alone", outputs=(0,)),
    _row("LSTM", "batch first", slots=(0, 1, 2, 3, 5, 6), layout=1, direction="bidirectional", no_difference=BATCH_FIRST),
    _row("LSTM", "activations", activations=["HardSigmoid", "Softsign", "Tanh"], parameters=[(0.2, 0.5), (0, 0), (0, 0)]),
    _row(
        "LSTM",
        "activation parameters",
        activations=["HardSigmoid", "ScaledTanh", "Elu"],
        activation_alpha=[0.3, 1.5, 0.7],
        activation_beta=[0.4, 0.8],
        parameters=[(0.3, 0.4), (1.5, 0.8), (0.7, 0)],
    ),
    _row("GRU"),
    _row("GRU", "no bias", slots=(0, 1, 2)),
    _row("GRU", "linear before reset", linear_before_reset=1),
    _row("GRU", "linear before reset no bias", slots=(0, 1, 2), linear_before_reset=1),
    _row("GRU", "initial state bidirectional", slots=(0, 1, 2, 3, 5), direction="bidirectional", linear_before_reset=1),
    _row("GRU", "reverse lengths", slots=(0, 1, 2, 3, 5), lengths=given([1, 3]), direction="reverse"),
    _row("GRU", "lengths", lengths=given([3, 2]), linear_before_reset=1),
    _row("GRU", "clip", clip=0.6),
    _row("GRU", "activations", activations=["Sigmoid", "Softplus"]),
    _row("GRU", "batch first", slots=(0, 1, 2, 3, 5), layout=1, no_difference=BATCH_FIRST),
    _row("RNN"),
    _row("RNN", "no bias state", slots=(0, 1, 2, 5)),
    _row("RNN", "bidirectional lengths", slots=(0, 1, 2, 3, 5), lengths=given([2, 3]), direction="bidirectional"),
    _row("RNN", "leaky relu", activations=["LeakyRelu"], activation_alpha=[0.2], parameters=[(0.2, 0)]),
    _row("RNN", "affine", activations=["Affine"], activation_alpha=[0.5], activation_beta=[0.1], parameters=[(0.5, 0.1)]),
    _row("RNN", "clip reverse", clip=0.5, direction="reverse"),
]
