"""What torch users write: padding rows, checkpoints, in-place dropout, bags, masks, in the training step and against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from onnxremat.exporters import ExportError, InputSpec, export_torch
from onnxremat.exporters.checkpoints import CHECKPOINT
from tests.models.training import assert_trains_as_torch


class Bag(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(11, 6, **options), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.bag(x))


class Bags(nn.Module):
    """Bags of any size, by where each one starts; the second is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.sum = nn.EmbeddingBag(11, 6), nn.EmbeddingBag(11, 6, mode="sum", include_last_offset=True)
        self.max = nn.EmbeddingBag(11, 6, mode="max", padding_idx=3)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([0, 2, 2, 5])
        ends = torch.cat([starts, torch.tensor([8])])
        return self.mean(x, starts) + self.sum(x, ends, per_sample_weights=weights) + self.max(x, starts)


class Converted(nn.Module):
    """Modules that convert themselves to what they are, parameters without elements, and one that a constant mask leaves unread."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rest = nn.Linear(8, 5), nn.Linear(8, 0)
        self.mask = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.inner.to(x.dtype)(x), self.rest(x)], -1)
        return torch.where(torch.ones(5) == 0, self.mask, y)


def spectral_norm(module: nn.Module) -> nn.Module:
    """The older form, by a hook."""
    return nn.utils.spectral_norm(module)


def weight_norm(module: nn.Module) -> nn.Module:
    """The older form, whose computed weight is an attribute that ``deepcopy`` refuses."""
    return nn.utils.weight_norm(module)


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.activation = nn.Linear(8, 5), torch.jit.script(swish)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.out(x))


class Codes(nn.Module):
    """A codebook that follows the batch, written by way of ``data``, and a straight-through look-up in it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 3)
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.project(x)
        near = F.one_hot((z @ self.codes).argmax(1), 4).to(z.dtype)
        self.codes.data.mul_(0.9).addmm_(z.detach().T, near, alpha=0.1)
        self.scale.data = self.scale * 0.5
        found = near @ (self.codes.data * self.scale).T
        return z + (found - z).detach() + z * found


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        return self.out(x) * options["scale"]


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda weight: torch.tanh(x @ weight))(self.weight)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(8, 8), reentrant
        self.region = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.region, self.first(x), use_reentrant=self.reentrant)


class Probabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(x), target.softmax(-1), label_smoothing=0.1)


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.model(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]))


def swin() -> nn.Module:
    """``contiguous()`` between an attention and a view: the kernel's strides when traced are not those of its translation."""
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4}
    return Logits(SwinForImageClassification(SwinConfig(**sizes, num_labels=5, drop_path_rate=0.0)))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).logits


class Quantiles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.out(x)
        return y.median(1).values + y.kthvalue(2, -1, True).values.squeeze(1)


class GaussianLoss(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.mean, self.variance, self.loss = nn.Linear(8, 5), nn.Linear(8, 5), nn.GaussianNLLLoss(**options)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(self.mean(x), target, F.softplus(self.variance(x)))


class Masked(nn.Module):
    """A fully masked row gives zeros by a boolean mask, and the mean of all values by a finite additive one."""

    def __init__(self, additive: bool) -> None:
        super().__init__()
        self.project, self.additive = nn.Linear(8, 24), additive

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        keep = keep.unsqueeze(1).expand(-1, x.shape[1], -1) * torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.int64)) > 0
        mask = torch.where(keep, 0.0, torch.finfo(torch.float32).min) if self.additive else keep
        return F.scaled_dot_product_attention(q, k, v, mask.to(x.dtype) if self.additive else mask, dropout_p=0.1)


class Remembering(nn.Module):
    """It leaves on itself what it computes: a buffer, entries of a dictionary and a list, an auxiliary loss, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.tables, self.seen, self.calls = nn.Linear(8, 5), {}, [], 0
        self.register_buffer("bias", None, persistent=False)
        self.later = nn.Module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            self.register_buffer("bias", torch.arange(5.0), persistent=False)
        if 5 not in self.tables:
            self.tables[5] = torch.linspace(0, 1, 5)
        y = self.out(x) + self.bias * self.tables[5]
        self.calls += 1
        self.seen.append(y)
        self.last, self.later.auxiliary = y.detach(), y.square().mean()
        return y * self.later.auxiliary


IDS = "x=4x6:int64:11"
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], str | None]] = {
    "padding row": (lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)), [IDS], "mse"),
    "negative padding row": (lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=-1), nn.Linear(6, 3)), [IDS], "mse"),
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 3)), [IDS], "mse"),
    "bag mean": (Bag, [IDS], "mse"),
    "bag sum with padding": (lambda: Bag(mode="sum", padding_idx=0), [IDS], "mse"),
    "bag mean with padding": (lambda: Bag(padding_idx=0), [IDS], "mse"),
    "bag max with padding": (lambda: Bag(mode="max", padding_idx=0), [IDS], "mse"),
    "bags of any size": (Bags, ["x=8:int64:11", "weights=8"], "mse"),
    "conversions and idle parameters": (Converted, ["x=4x8"], "mse"),
    "older spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 5))), ["x=4x8"], "mse"),
    "older weight norm": (lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 5))), ["x=4x8"], "mse"),
    "scripted function": (Scripted, ["x=4x8"], "mse"),
    "buffers written as data": (Codes, ["x=4x8"], "mse"),
    "any keywords": (Keywords, ["x=4x8", "scale=4x5"], "mse"),
    "remembering": (Remembering, ["x=4x8"], "mse"),
    "vmap over a parameter": (Ensemble, ["x=4x8"], "mse"),
    "checkpoint": (lambda: Checkpointed(False), ["x=4x8"], "mse"),
    "reentrant checkpoint": (lambda: Checkpointed(True), ["x=4x8"], "mse"),
    "in-place dropout": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2, inplace=True), nn.ReLU(inplace=True)), ["x=4x8"], "mse"),
    "channel dropout": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3)), ["x=2x3x6x6"], "mse"),
    "class probabilities": (Probabilities, ["x=4x8", "target=4x5"], None),
    "nn.Transformer": (Translation, ["source=2x6x8", "target=2x5x8"], "mse"),
    "unfold and fold": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Unfold(2), nn.Fold((6, 6), 2)), ["x=2x3x8x8"], "mse"),
    "attention viewed": (swin, ["pixel_values=2x3x32x32"], "mse"),
    "median and k-th value": (Quantiles, ["x=4x8"], "mse"),
    "gaussian loss": (GaussianLoss, ["x=4x8", "target=4x5"], None),
    "gaussian loss, clamped and full": (lambda: GaussianLoss(full=True, eps=0.7), ["x=4x8", "target=4x5"], None),
    "masked rows": (lambda: Masked(False), ["x=3x4x8", "keep=3x4:int64:2"], "mse"),
    "masked rows by addition": (lambda: Masked(True), ["x=3x4x8", "keep=3x4:int64:2"], "mse"),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 5))), ["x=4x8"], "mse"),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 5))), ["x=4x8"], "mse"),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_torch(name: str) -> None:
    build, inputs, loss = MODELS[name]
    torch.default_generator.manual_seed(0)
    assert_trains_as_torch(build(), inputs, (), loss)


def test_a_module_is_left_as_it_was() -> None:
    module = Remembering()
    seen, tables = module.seen, module.tables
    before = {name: dict(vars(sub)) for name, sub in module.named_modules()}
    export_torch(module, [InputSpec("x", (4, 8))], (), "mse")
    assert {name: dict(vars(sub)) for name, sub in module.named_modules()} == before
    assert seen is module.seen and tables is module.tables and not seen and not tables and module.bias is None
    module(torch.zeros(4, 8)).sum().backward()
    assert type(module.bias) is torch.Tensor


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_are_kept_as_hints(reentrant: bool) -> None:
    graph = export_torch(Checkpointed(reentrant), [InputSpec("x", (4, 8))])
    marked = [node.op_type for node in graph.model.graph if CHECKPOINT in node.metadata_props]
    assert marked == ["Gemm", "Gelu", "Dropout"]


@pytest.mark.parametrize(
    ("options", "words"), [({"scale_grad_by_freq": True}, "scale_grad_by_freq"), ({"max_norm": 1.0}, "max_norm")], ids=["frequency", "norm"]
)
def test_embeddings_that_onnx_cannot_say(options: dict[str, object], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        export_torch(nn.Sequential(nn.Embedding(11, 6, **options)), [InputSpec("0", (4,), "int64", 11)])
