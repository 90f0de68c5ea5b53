"""Boolean masks in models: what is selected and reduced, or written back, against torch, with masks of nothing, of all, and NaN beside them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxremat.exporters import ExportError, InputSpec, export_torch
from onnxremat.optimizers import Optimizer
from onnxremat.training_graph import GRADIENT_BUFFER, build_training_graph
from tests.exporters.support import op_counts
from tests.models.training import TOLERANCE, _arrays, _session, compare_training

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scores (4, 6), a mask (4, 6) and classes (4,), of which the negative ones do not count."""

#: Rows with and without an element, classes with and without holes.
SOME = np.array([[1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 0]], bool)
CLASSES = np.array([2, -100, 5, 0])


class Masked(nn.Module):
    """The sum of a scalar of each function's result, each of a linear layer of its own."""

    def __init__(self, *functions: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.functions, self.layers = functions, nn.ModuleList(nn.Linear(6, 6) for _ in functions)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        results = [function(layer(x), mask, classes) for function, layer in zip(self.functions, self.layers, strict=True)]
        return torch.stack([scalar_of(y) for y in results]).sum()


def scalar_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.arange(1.0, y.numel() + 1).to(y.dtype).reshape(y.shape).cos() + y * y).sum() if y.ndim else y * 1.5


INPUTS = [InputSpec("x", (4, 6)), InputSpec("mask", (4, 6), "bool"), InputSpec("classes", (4,), "int64", 6)]


def batch(mask: np.ndarray, classes: np.ndarray = CLASSES) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    return {"x": x, "mask": mask, "classes": classes}


SOMETIMES = [batch(SOME), batch(np.ones((4, 6), bool), np.array([1, 1, 0, 5]))]


def values(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h, y = h.clone(), h.flip(0)
    h[m] = y[m]
    return h


def scalar(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[h > 0.2] = 0.5
    h[m & (h < 0)] *= 3
    return h


def added(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h, y = h.clone(), h.sin()
    h[m] += y[m] * 2
    h[~m] -= 1
    return h


def rows(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h, y = h.clone(), h.flip(1)
    h[c >= 0] = y[c >= 0] ** 2
    h[c < 0] = h[2].clone()
    return h


def columns(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h, y = h.clone(), h.flip(0)
    h[:, m[0]] = y[:, m[0]]
    return h


def read_before_written(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    before = h[m]
    h[m] = before * 2 + 1
    return h * before.sum()


def listed(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    h, y = h.clone(), h.sin()
    larger = h.detach()[:, 0] >= h.detach()[:, 0].sort().values[1]
    h[larger] = y[:3]
    return h


def mask_written(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    m = m.clone()
    first = h.detach()[m].sum()
    m[0] = False
    return first * h[m].sum()


def matrix(h: torch.Tensor) -> torch.Tensor:
    return h @ h.T


def constant_parts(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    g = matrix(h)
    g[torch.eye(4, dtype=torch.bool)] = 0.0
    upper = torch.ones(4, 4, dtype=torch.bool)
    upper[torch.ones(4, 4).tril() > 0] = False
    g[upper] = g.T[upper] * torch.arange(1.0, 7.0).to(h.dtype)
    return g


WRITES: dict[str, Function] = {
    "values": values,
    "scalar": scalar,
    "added": added,
    "rows": rows,
    "columns": columns,
    "read before written": read_before_written,
    "mask written": mask_written,
    "accumulated": lambda h, m, c: h.index_put((c >= 0,), h[2], accumulate=True),
    "masked_scatter": lambda h, m, c: torch.zeros_like(h).masked_scatter(m, h[m] * 2),
}
REDUCTIONS: dict[str, Function] = {
    "sum": lambda h, m, c: h[m].sum(),
    "mean": lambda h, m, c: h[m].mean(),
    "masked_select": lambda h, m, c: torch.masked_select(h, m).mean() + h.masked_select(m[:, :1]).sum(),
    "own mask": lambda h, m, c: h[h > 0].log().mean(),
    "by element": lambda h, m, c: ((h[m] * 2 - h.flip(0)[m]).exp() / 3).mean(),
    "of rows": lambda h, m, c: h[c >= 0].mean(0),
    "within rows": lambda h, m, c: h[c >= 0].softmax(-1)[:, 1:3].log().mean(1).sum(),
    "of leading axes": lambda h, m, c: h.reshape(2, 2, 6)[c.reshape(2, 2) >= 0].square().mean(),
    "laid out": lambda h, m, c: h[c >= 0].view(-1, 2, 3).transpose(1, 2).reshape(-1).square().mean(),
    "counted": lambda h, m, c: h[m].sum() / m.sum() + h[m].sum() / h[c >= 0].numel(),
    "maximum": lambda h, m, c: h[m].max() * h[c >= 0].amin(0).sum(),
    "variance": lambda h, m, c: h[m].var() + h[m].std(correction=0) + h[c >= 0].std(0).sum(),
    "again": lambda h, m, c: (lambda part: part[part < 0.5].mean())(h[m]),
    "written in place": lambda h, m, c: h[m].mul_(3).clamp_(max=1.0).mean(),
    "through a layer": lambda h, m, c: F.layer_norm(F.linear(h[c >= 0], h), (4,)).square().square().mean(),
    "looked up": lambda h, m, c: F.embedding(c[c >= 0], h.T).square().mean(),
    "without gradient": lambda h, m, c: (h * h.detach()[m].mean()).sum(),
    "accuracy": lambda h, m, c: h[c >= 0].square().mean() * (h[c >= 0].argmax(-1) == c[c >= 0]).to(h.dtype).mean().add(1),
    "side by side": lambda h, m, c: torch.cat([h[c >= 0], h.sin()[c >= 0]], 1).square().mean(),
    "mse": lambda h, m, c: F.mse_loss(h[m], h.sin()[m]) + F.mse_loss(h[m], h.cos()[m], reduction="sum"),
    "smooth l1": lambda h, m, c: F.smooth_l1_loss(h[m], torch.zeros_like(h)[m], reduction="none").mean(),
    "bce": lambda h, m, c: F.binary_cross_entropy_with_logits(h[m], torch.ones_like(h)[m]),
    "kl": lambda h, m, c: F.kl_div(h[c >= 0].log_softmax(-1), h.flip(1)[c >= 0].softmax(-1), reduction="batchmean"),
    "cross_entropy": lambda h, m, c: F.cross_entropy(h[c != -100], c[c != -100]),
    "cross_entropy of a sum": lambda h, m, c: F.cross_entropy(h[c >= 0], c[c >= 0], reduction="sum", ignore_index=0),
    "cross_entropy of each": lambda h, m, c: F.cross_entropy(h[c >= 0], c[c >= 0], reduction="none").square().mean(),
    "weighted cross_entropy": lambda h, m, c: F.cross_entropy(h[c >= 0], c[c >= 0], weight=torch.arange(1.0, 7.0).to(h.dtype)),
    "smoothed cross_entropy": lambda h, m, c: F.cross_entropy(h[c >= 0], c[c >= 0], label_smoothing=0.1),
    "nll": lambda h, m, c: F.nll_loss(h[c >= 0].log_softmax(-1), c[c >= 0]),
}


def assert_trains_as_torch(functions: dict[str, Function], batches: list[dict[str, np.ndarray]]) -> None:
    result = compare_training(Masked(*functions.values()), INPUTS, steps=len(batches), batches=batches)
    names = [name for name in functions for _ in ("weight", "bias")]
    parameters = [f"layers.{i}.{kind}" for i in range(len(functions)) for kind in ("weight", "bias")]
    wrong = {name: result.errors[p] for name, p in zip(names, parameters, strict=True) if result.errors.get(p, 0.0) > TOLERANCE}
    assert not wrong and result.worst[0] <= TOLERANCE, (wrong, result.worst)


def test_writes_under_masks_of_data() -> None:
    assert_trains_as_torch(WRITES, SOMETIMES)
    assert_trains_as_torch({"listed": listed}, SOMETIMES[:1])  # its three rows are for three places


def test_reductions_of_what_masks_of_data_select() -> None:
    assert_trains_as_torch(REDUCTIONS, SOMETIMES)


def self_loops_doubled(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """As graph networks treat edges: a constant mask selects, and another writes to what depends on the model."""
    ends = torch.tensor([[0, 1, 2, 2, 3], [1, 1, 0, 2, 2]])
    ends = torch.cat([ends[:, ends[1] != 0], torch.tensor([[0], [0]])], 1)
    weight = h[ends[0], 0] * h[ends[1], 1]
    weight[ends[0] == ends[1]] *= 2.0
    return torch.zeros(4).index_add(0, ends[1], weight.sin())


CONSTANT: dict[str, Function] = {
    "written to what another selected": self_loops_doubled,
    "off the diagonal": lambda h, m, c: matrix(h)[~torch.eye(4, dtype=torch.bool)].view(4, -1).softmax(1),
    "triangle": lambda h, m, c: matrix(h)[torch.ones(4, 4).triu(1) == 1],
    "written": constant_parts,
    "nonzero": lambda h, m, c: h[torch.ones(4).cumsum(0).fmod(2).nonzero().squeeze(1)],
    "where": lambda h, m, c: h[torch.where(torch.eye(4, 6, dtype=torch.bool))],
    "behind an axis": lambda h, m, c: h[:, torch.arange(6) > 3] @ h[:2, torch.arange(6) < 2],
    "empty": lambda h, m, c: h[torch.zeros(4, dtype=torch.bool)].sum() + h.sum(),
}


def test_constant_masks_become_indices() -> None:
    assert_trains_as_torch(CONSTANT, SOMETIMES[:1])


def test_equal_masks_are_one_until_something_is_written() -> None:
    def changed(h: torch.Tensor, m: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        x, y = h.detach().clone(), h.sin()
        first = F.mse_loss(y[x > 0], h[x > 0])
        x.mul_(-1)
        return first + F.mse_loss(y[x > 0], h[x > 0]) * 2

    assert_trains_as_torch({"changed": changed}, SOMETIMES[:1])


class Buffered(nn.Module):
    """A mask that nothing writes to, and one that each step replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("kept", torch.tensor([True, False, True, True]))
        self.register_buffer("seen", torch.tensor([True, False, True, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        loss = h[self.kept].reshape(3, 2, 3).softmax(2).square().sum() + h[self.seen.clone()].square().mean()
        self.seen.copy_(h[:, 0] > 0)
        return loss


def test_a_buffer_is_a_constant_mask_unless_it_is_written() -> None:
    result = compare_training(Buffered(), ["x=4x6"], steps=4)
    assert result.worst[0] <= TOLERANCE and "seen" in result.errors
    only = op_counts(export_torch(Masked(lambda h, m, c: h[torch.arange(4) > 1]), INPUTS))
    assert only["Gather"] + only["GatherND"] + only["Slice"] == 1 and not only["Where"] and not only["NonZero"]


def gradients(function: Function, feeds: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Loss and gradients of one step, here and in torch."""
    module = Masked(function)
    training = build_training_graph(export_torch(module, INPUTS), Optimizer("sgd"))
    session, arrays = _session(training, [], 0), _arrays(training)
    session.bind(arrays)
    for name in set(feeds) & set(arrays):
        arrays[name][...] = feeds[name]
    loss = dict(zip(session.outputs, session.run(), strict=True))[training.loss]
    wanted = module(*(torch.from_numpy(feeds[n]) for n in ("x", "mask", "classes")))
    wanted.backward()
    names = ["layers.0.weight", "layers.0.bias"]
    return [loss, *(arrays[n + GRADIENT_BUFFER] for n in names)], [wanted.detach().numpy(), *(module.get_parameter(n).grad.numpy() for n in names)]


#: One of each kind; a NaN that the model goes on with, or a quotient by a count of its own, is not among them.
EDGES = ["sum", "mean", "by element", "variance", "again", "through a layer", "mse", "bce", "cross_entropy", "weighted cross_entropy", "nll"]


@pytest.mark.parametrize("name", EDGES)
def test_selecting_nothing_gives_what_torch_gives(name: str) -> None:
    got, wanted = gradients(REDUCTIONS[name], batch(np.zeros((4, 6), bool), np.full(4, -100)))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


BESIDE: dict[str, Function] = {
    "nan": lambda h, m, c: (h + torch.where(m, 0.0, torch.nan))[m].square().mean(),
    "infinity": lambda h, m, c: (h + torch.where(m, 0.0, torch.inf))[m].exp().sum(),
    "logarithm of what is negative": lambda h, m, c: h[h > 0].log().sqrt().nan_to_num().sum() + h[h < 0].abs().sqrt().mean(),
    "rows": lambda h, m, c: F.cross_entropy((h + torch.where(c >= 0, 0.0, torch.nan)[:, None])[c >= 0], c[c >= 0]),
    "loss": lambda h, m, c: F.mse_loss((h + torch.where(m, 0.0, torch.nan))[m], h.flip(0)[m]),
    "written": lambda h, m, c: torch.where(m, 0.0, h).masked_scatter(m, (h + torch.where(m, 0.0, torch.nan))[m]).square().sum(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_selected_may_be_nan(name: str) -> None:
    got, wanted = gradients(BESIDE[name], batch(SOME))
    assert all(np.isfinite(array).all() for array in wanted) or name.startswith("logarithm")
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


REFUSALS: dict[str, tuple[Function, str]] = {
    "matrices": (lambda h, m, c: (h[c >= 0] @ h[c >= 0].T).sum(), "numpy_T.*depends on data; compute the mask once.*torch.where"),
    "sorted": (lambda h, m, c: h[m].sort().values.sum(), "sort.*depends on data"),
    "along the places": (lambda h, m, c: h[m].cumsum(0).sum(), "cumsum.*depends on data"),
    "softmax over the places": (lambda h, m, c: h[m].softmax(0).square().sum(), "softmax.*depends on data"),
    "two masks": (lambda h, m, c: F.mse_loss(h[m], h[~m]), "Eq"),
    "other mask": (lambda h, m, c: h.index_put((m,), h[~m]), "index_put.*another mask"),
    "drawn": (lambda h, m, c: F.dropout(h[m], 0.5).sum(), "dropout.*draws a number for each place"),
    "products": (lambda h, m, c: (h[c >= 0].mT @ h[c >= 0]).sum(), "mT.*depends on data"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_depends_on_the_size_is_named(name: str) -> None:
    function, message = REFUSALS[name]
    with pytest.raises(ExportError, match=message) as caught:
        export_torch(Masked(function), INPUTS)
    assert "test_masks.py:" in str(caught.value) and "\n" not in str(caught.value)
