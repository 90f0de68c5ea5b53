"""Problems for the tests: chains with a backward pass, a transformer-like step, random graphs with every trait, random sequences."""

from __future__ import annotations

import random

from onnxremat.scheduler import Op, PlanError, Problem, Step, Tensor, Transfer, evaluate


def chain(n: int, seconds: float = 1.0, size: int = 10, resident: int = 0) -> Problem:
    """A chain of n forward ops and its n backward ops: the gradient of op i reads the next gradient and what op i read."""
    ops, tensors = [], []
    for i in range(n):
        tensors.append(Tensor(f"x{i}", size, i))
        ops.append(Op(f"f{i}", seconds, (i - 1,) if i else (), (i,)))
    for k in range(n):
        i, t = n - 1 - k, n + k
        reads = {t - 1, i} | ({i - 1} if i else set())
        tensors.append(Tensor(f"g{i}", size, t, output=k == n - 1))
        ops.append(Op(f"b{i}", seconds, tuple(sorted(reads)), (t,), phase="backward"))
    return Problem(f"chain{n}", tuple(ops), tuple(tensors), {"parameters": resident})


def transformer(layers: int, pinned: bool = True) -> Problem:
    """A step like that of a transformer: attention, a view, a pinned dropout mask, a two-output split, a normalization, residuals."""
    ops: list[Op] = []
    tensors: list[Tensor] = [Tensor("weights", 0, -1), Tensor("state", 0, -1)]
    forward: list[tuple[int, list[int]]] = []

    def op(name: str, seconds: float, inputs: list[int], sizes: list[int], **traits: object) -> list[int]:
        made = []
        for k, size in enumerate(sizes):
            alias = traits.get("alias", -1)
            tensors.append(Tensor(f"{name}:{k}", size, len(ops), alias_of=alias if isinstance(alias, int) else -1))
            made.append(len(tensors) - 1)
        inplace = ((inputs[0], made[0]),) if traits.get("inplace") else ()
        ops.append(
            Op(
                name,
                seconds,
                tuple(inputs),
                tuple(made),
                workspace_bytes=int(str(traits.get("workspace", 0))),
                phase=str(traits.get("phase", "forward")),
                pinned=str(traits.get("pinned", "")),
                inplace=inplace,
            )
        )
        return made

    (x,) = op("embed", 1.0, [0], [64])
    for k in range(layers):
        (norm,) = op(f"norm{k}", 0.4, [x, 0], [64])
        (qkv,) = op(f"qkv{k}", 6.0, [norm, 0], [192], workspace=32)
        (view,) = op(f"view{k}", 0.0, [qkv], [192], alias=qkv)
        q, kv = op(f"split{k}", 0.6, [view], [64, 128])
        (scores,) = op(f"scores{k}", 4.0, [q, kv], [256])
        (soft,) = op(f"softmax{k}", 1.0, [scores], [256], inplace=True)
        (mask,) = op(f"mask{k}", 0.5, [], [32], pinned="random" if pinned else "")
        (dropped,) = op(f"drop{k}", 0.8, [soft, mask], [256])
        (y,) = op(f"mix{k}", 5.0, [dropped, kv, 0], [64])
        (z,) = op(f"add{k}", 0.3, [y, x], [64], inplace=True)
        forward.append((z, [norm, view, q, kv, soft, mask, dropped, x]))
        x = z
    (grad,) = op("loss", 1.0, [x], [64], phase="backward")
    for k in range(layers - 1, -1, -1):
        norm, view, q, kv, soft, mask, dropped, below = forward[k][1]
        del view
        (gd,) = op(f"gdrop{k}", 5.0, [grad, kv, dropped], [256], phase="backward")
        (gs,) = op(f"gsoft{k}", 1.5, [gd, soft, mask], [256], phase="backward", inplace=True)
        (gq,) = op(f"gqkv{k}", 8.0, [gs, q, kv], [192], phase="backward", workspace=64)
        (gw,) = op(f"gw{k}", 6.0, [gq, norm], [0], phase="backward", pinned="output")
        (gn,) = op(f"gnorm{k}", 6.0, [gq, below], [64], phase="backward")
        (grad,) = op(f"gadd{k}", 0.3, [gn, grad, gw], [64], phase="backward", inplace=True)
    return Problem(f"transformer{layers}", tuple(ops), tuple(tensors), {"parameters": 100})


def random_problem(rng: random.Random, n: int, plain: bool = False) -> Problem:
    """A random graph of n ops; unless ``plain``, with views, in-place pairs, workspace, several outputs, pinned ops, writes and scratch."""
    tensors = [Tensor(f"p{k}", rng.randrange(5), -1) for k in range(2)]
    ops: list[Op] = []
    computed: list[int] = []
    replaced: set[int] = set()
    for i in range(n):
        recent = computed[-4:] if rng.random() < 0.7 else computed
        reads = rng.sample(recent, min(len(recent), rng.randrange(0, 3) if computed else 0))
        if not plain and rng.random() < 0.3:
            reads += [p for p in (0, 1) if p not in replaced][:1]
        view = not plain and bool(reads) and rng.random() < 0.25
        outputs, inplace = [], []
        for k in range(1 if plain or rng.random() < 0.7 else 2):
            alias = reads[0] if view else -1
            size = rng.choice((0, 1, 2, 3, 4, 4, 8))
            source = next((t for t in reads if tensors[t].producer >= 0), None)
            if not plain and alias < 0 and source is not None and rng.random() < 0.6:
                root = source
                while tensors[root].alias_of >= 0:
                    root = tensors[root].alias_of
                size = tensors[root].bytes
                inplace.append((source, len(tensors)))
            outputs.append(len(tensors))
            tensors.append(Tensor(f"t{i}_{k}", size, i, alias_of=alias, output=not plain and rng.random() < 0.1))
        writes: tuple[int, ...] = ()
        if not plain and not view and rng.random() < 0.1 and len(replaced) < 2:
            free = [p for p in (0, 1) if p not in replaced]
            writes = (free[0],)
            replaced.add(free[0])
        roots = [t for t in reads if tensors[t].producer < 0]
        ops.append(
            Op(
                f"op{i}",
                float(rng.randrange(0, 6)),
                tuple(reads),
                tuple(outputs),
                workspace_bytes=0 if plain or rng.random() < 0.7 else rng.randrange(4),
                phase="forward" if i < n // 2 else "backward",
                pinned="random" if not plain and rng.random() < 0.12 else ("stateful" if writes else ""),
                inplace=tuple(inplace),
                writes=writes,
                recompute_inputs=tuple(t for t in reads if t not in roots) if roots and not view and rng.random() < 0.5 else None,
            )
        )
        computed += outputs
        # A view of a version that is replaced later would be read too late; the generator leaves views of persistents out of play.
        computed = [t for t in computed if not _persistent_view(tensors, t)]
    transfer = None if plain else Transfer(4.0, 8.0, 12)
    return Problem(f"random{n}", tuple(ops), tuple(tensors), {"parameters": 3}, transfer=transfer)


def _persistent_view(tensors: list[Tensor], t: int) -> bool:
    root = t
    while tensors[root].alias_of >= 0:
        root = tensors[root].alias_of
    return root != t and tensors[root].producer < 0


def random_steps(problem: Problem, rng: random.Random, swaps: bool = False) -> list[Step]:
    """A random valid sequence: the base order with extra runs and transfers wherever the simulator lets them pass."""
    steps = [Step("run", i) for i in range(len(problem.ops))]
    for _ in range(3 * len(problem.ops)):
        k = rng.randrange(len(steps) + 1)
        if swaps and rng.random() < 0.5 and problem.tensors:
            t = rng.randrange(len(problem.tensors))
            later = rng.randrange(k, len(steps) + 1)
            trial = [*steps[:k], Step("swap_out", t), *steps[k:later], Step("swap_in", t), *steps[later:]]
        else:
            trial = [*steps[:k], Step("run", rng.randrange(len(problem.ops))), *steps[k:]]
        try:
            evaluate(problem, trial)
        except PlanError:
            continue
        steps = trial
    return steps


def brute_force(problem: Problem, budget: int, longest: int) -> float | None:
    """The least seconds of any sequence of at most ``longest`` runs, in any order, within the budget, by best-first enumeration.

    A state is what was run and which storages are bound where; memory is judged on the whole sequence, so this enumerates sequences.
    """
    best: float | None = None
    n = len(problem.ops)
    index = problem.index

    def extend(sequence: list[int], have: frozenset[int], seconds: float) -> None:
        nonlocal best
        missing = sum(problem.ops[o].seconds for o in range(n) if index.must_run[o] and o not in have)
        if best is not None and seconds + missing >= best:
            return
        if all(o in have for o in range(n) if index.required[o]):
            try:
                if evaluate(problem, sequence).peak_bytes <= budget:
                    best = seconds
                    return
            except PlanError:
                return
        if len(sequence) == longest:
            return
        for o in range(n):
            if sequence and sequence[-1] == o:
                continue
            reads = problem.ops[o].inputs
            if any(problem.tensors[t].producer not in have for t in reads if problem.tensors[t].producer >= 0):
                continue
            if o in have and problem.ops[o].pinned:
                continue
            extend([*sequence, o], have | {o}, seconds + problem.ops[o].seconds)

    extend([], frozenset(), 0.0)
    return best
