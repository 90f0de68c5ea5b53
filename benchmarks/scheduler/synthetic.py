"""Large problems of known shape: the step of a GPT of any depth, and random layered graphs, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from onnxremat.scheduler import Op, Problem, Tensor

__all__ = ["gpt_step", "layered"]

_FLOPS, _BANDWIDTH = 1e11, 2e10  # of the machine that the costs stand for


class _Tape:
    """Collects forward ops, then the backward ops that reversing them takes."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self._back: list[tuple[str, list[int], int, list[int], float, int]] = []

    def _op(self, name: str, reads: Sequence[int], size: int, flops: float, output: bool = False) -> int:
        traffic = size + sum(self.tensors[t].bytes for t in reads)
        self.tensors.append(Tensor(name, size, len(self.ops), output=output))
        phase = "backward" if name.startswith("d_") else "forward"
        self.ops.append(Op(name, flops / _FLOPS + traffic / _BANDWIDTH, tuple(dict.fromkeys(reads)), (len(self.tensors) - 1,), phase=phase))
        return len(self.tensors) - 1

    def op(self, name: str, reads: list[int], size: int, saved: str = "", flops: float = 0.0, weight: int = 0) -> int:
        """Run an op; ``saved`` says what its backward ops read beside the gradient: "x" its inputs, "y" its output; weight in bytes."""
        t = self._op(name, reads, size, flops)
        keep = [*(reads if "x" in saved else []), *([t] if "y" in saved else [])]
        self._back.append((name, reads, t, keep, flops, weight))
        return t

    def reverse(self, seed: int) -> None:
        """The backward pass from a tensor whose gradient is its own bytes."""
        gradient: dict[int, int] = {seed: self._op("d_loss", [seed], self.tensors[seed].bytes, 0.0)}
        for name, reads, t, keep, flops, weight in reversed(self._back):
            g = gradient[t]
            if weight:
                self._op(f"d_{name}_weight", [g, *keep], weight, flops, output=True)
            for k, u in enumerate(reads):
                new = self._op(f"d_{name}_{k}", [g, *keep], self.tensors[u].bytes, flops)
                if u in gradient:
                    new = self._op(f"d_{name}_{k}_sum", [new, gradient[u]], self.tensors[u].bytes, 0.0)
                gradient[u] = new
        self._op("d_embedding", [gradient[self._back[0][2]]], 4, 0.0, output=True)


def gpt_step(layers: int, tokens: int = 2048, length: int = 512, hidden: int = 512, heads: int = 8) -> Problem:
    """The training step of a GPT, about 50 ops a layer.

    Args:
        layers: number of blocks.
        tokens: tokens of a batch.
        length: tokens of a sequence.
        hidden: width; the inner width of the feed-forward part is four times this.
        heads: of attention.
    """
    tape = _Tape()
    state, scores = 4 * tokens * hidden, 4 * heads * tokens * length

    def matmul(name: str, x: int, inner: int, outer: int) -> int:
        return tape.op(name, [x], 4 * tokens * outer, "x", 2.0 * tokens * inner * outer, 4 * inner * outer)

    x = tape.op("embedding", [], state)
    for k in range(layers):
        n = tape.op(f"norm1_{k}", [x], state, "x", weight=8 * hidden)
        q, key, v = (matmul(f"{part}_{k}", n, hidden, hidden) for part in ("query", "key", "value"))
        q, key, v = (tape.op(f"{part}_heads_{k}", [y], state) for part, y in (("query", q), ("key", key), ("value", v)))
        s = tape.op(f"scores_{k}", [q, key], scores, "x", 2.0 * tokens * length * hidden)
        p = tape.op(f"softmax_{k}", [tape.op(f"masked_{k}", [s], scores)], scores, "y")
        a = tape.op(f"mix_{k}", [p, v], state, "x", 2.0 * tokens * length * hidden)
        a = matmul(f"project_{k}", tape.op(f"merge_{k}", [a], state), hidden, hidden)
        x = tape.op(f"add1_{k}", [x, a], state)
        n = tape.op(f"norm2_{k}", [x], state, "x", weight=8 * hidden)
        f = tape.op(f"gelu_{k}", [matmul(f"up_{k}", n, hidden, 4 * hidden)], 4 * state, "x", 10.0 * tokens * 4 * hidden)
        x = tape.op(f"add2_{k}", [x, matmul(f"down_{k}", f, 4 * hidden, hidden)], state)
    tape.reverse(tape.op("norm", [x], state, "x"))
    return Problem(f"gpt{layers}", tuple(tape.ops), tuple(tape.tensors), {"parameters": 0})


def layered(ops: int, seed: int = 0, width: int = 8, reach: int = 12) -> Problem:
    """A random graph in layers: every op reads one to four of the layers right before, now and then one from far back.

    Args:
        ops: number of ops.
        seed: source of chance.
        width: ops of a layer.
        reach: how many layers back an op reads in general.
    """
    rng = random.Random(seed)
    tensors: list[Tensor] = []
    made: list[Op] = []
    for i in range(ops):
        start = i - i % width
        near = range(max(0, start - reach * width), start)
        reads = {*rng.sample(near, min(len(near), rng.randrange(1, 5))), *([rng.randrange(start)] if start and rng.random() < 0.1 else [])}
        tensors.append(Tensor(f"t{i}", rng.randrange(1, 1000), i))
        made.append(Op(f"op{i}", float(rng.randrange(1, 100)), tuple(sorted(reads)), (i,)))
    return Problem(f"layered{ops}", tuple(made), tuple(tensors), {"parameters": 0})
