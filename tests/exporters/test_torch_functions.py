"""Functions of torch inside a model: loss and gradients against torch's autograd, many functions to a module, each with a parameter of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, RelaxedBernoulli, kl_divergence

from onnxremat.exporters import ExportError, InputSpec, export_torch
from tests.models.training import TOLERANCE, compare_training

Function = Callable[[torch.Tensor], torch.Tensor]

DRAWN = torch.Generator().manual_seed(0)
NORMAL = torch.randn(4, 24, generator=DRAWN)
INDEX = torch.randint(24, (4, 24), generator=DRAWN)
CLASSES = torch.randint(24, (4,), generator=DRAWN)
GRID = torch.randn(2, 2, 3, 3, 3, generator=DRAWN).tanh()
ROWS, COLUMNS = torch.tensor([0, 5, 0, 2]), torch.tensor([1, 2, 1, 4])
INTERVAL = torch.linspace(-1, 1, 5)
CAUSAL, PADDED = torch.ones(3, 3).triu(1).bool(), torch.tensor([[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 0]]).bool()


def image(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(2, 2, 4, 6)


def volume(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(2, 2, 2, 2, 6)


def signal(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(2, 4, 12)


def matrices(h: torch.Tensor) -> torch.Tensor:
    return h.reshape(4, 6, 4)


def blank(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: torch.zeros(shape, dtype=h.dtype)


ROOM, WIDE = blank(6, 24), blank(4, 24)


def unpooled(rank: int, shape: Function) -> Function:
    def function(h: torch.Tensor) -> torch.Tensor:
        pooled, places = getattr(F, f"max_pool{rank}d")(shape(h), 2, return_indices=True)
        return getattr(F, f"max_unpool{rank}d")(pooled, places, 2)

    return function


def written(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, 0:3] = 0.0
    h[:, ROWS] = h[:, 6:7] * 2
    return h


def diagonals_written(h: torch.Tensor) -> torch.Tensor:
    products = (matrices(h) @ matrices(h).mT).flip(1).mT
    products.diagonal(dim1=1, dim2=2).mul_(2)
    products.diagonal(1, 1, 2).copy_(h[:, :5])
    products[0].diagonal(-2).zero_()
    products[1].T[1:].copy_(h[0, :6])
    return products


def normal(h: torch.Tensor) -> torch.Tensor:
    return NORMAL.to(h.dtype)


SCATTERS = {
    "sum": lambda h: WIDE(h).scatter_reduce(1, INDEX[:, :6], h[:, :6], "sum"),
    "mean": lambda h: normal(h).scatter_reduce(1, INDEX, h, "mean"),
    "mean without self": lambda h: h.flip(0).scatter_reduce(1, INDEX, h, "mean", include_self=False),
    "amax": lambda h: h.flip(0).scatter_reduce(1, INDEX, h, "amax"),
    "amin without self": lambda h: h.flip(0).scatter_reduce(1, INDEX[:, :6], h[:, :6], "amin", include_self=False),
    "prod": lambda h: h.flip(0).scatter_reduce(1, INDEX[:, :4], h[:, :4], "prod"),
    "add of a part": lambda h: WIDE(h).scatter_add(1, INDEX[:2, :6], h[:2, :6]),
    "source of a part": lambda h: h.flip(1).scatter(1, torch.tensor([[3, 1], [0, 2]]), h[:2, :2]),
    "value": lambda h: h.scatter(1, torch.tensor([[3, 1], [0, 2]]), 1.5),
    "gather of a part": lambda h: h.gather(1, INDEX[:2, :6]),
    "index_add": lambda h: ROOM(h).index_add(0, ROWS, h, alpha=0.5),
    "index_copy": lambda h: ROOM(h).index_copy(0, torch.tensor([0, 5, 1, 2]), h),
    "index_fill": lambda h: h.index_fill(1, ROWS, 2.0),
    "index_put": lambda h: ROOM(h).index_put((ROWS, COLUMNS), h[:, 0], accumulate=True),
    "index_put of rows": lambda h: ROOM(h).index_put((ROWS,), h, accumulate=True),
    "masked_scatter": lambda h: WIDE(h).masked_scatter(h > 0, h.flip(1)),
    "masked_fill": lambda h: h.masked_fill(h > 0.3, 1.0),
    "setitem": written,
    "take_along_dim": lambda h: h.take_along_dim(INDEX[:, :2], 1),
    "two indices": lambda h: h.reshape(4, 4, 6)[torch.tensor([0, 1, 1]), :, torch.tensor([2, 2, 3])],
    "masked_fill_ of a view": lambda h: (h * 1).reshape(8, 12).T.masked_fill_(torch.ones(12, 8).tril().bool(), 2.0),
    "fill_diagonal": lambda h: (h.T @ h).fill_diagonal_(-1),
    "fill_diagonal of a view": lambda h: (h * 1).reshape(8, 12).T.fill_diagonal_(-1.0),
    "fill_diagonal that wraps": lambda h: (h * 1).reshape(24, 4).fill_diagonal_(2.0, wrap=True),
    "fill_diagonal of a cube": lambda h: (h[:3, :9] * 1).reshape(3, 3, 3).fill_diagonal_(2.0),
    "diagonals written": diagonals_written,
    "as_strided of a transposed view": lambda h: h.T.as_strided((5, 3), (1, 24)),
    "as_strided of a slice": lambda h: h[1:, 2:].as_strided((2, 3), (24, 1)),
    "as_strided from an offset": lambda h: h[1:].as_strided((3, 3), (2, 1), 40),
    "select_scatter": lambda h: h.select_scatter(h[:, 1], 1, 0).slice_scatter(h[:, :3] * 2, 1, 5, 8),
}
POOLS = {
    "avg_pool1d": lambda h: F.avg_pool1d(signal(h), 3, 2, 1),
    "avg_pool2d": lambda h: F.avg_pool2d(image(h), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool2d with divisor": lambda h: F.avg_pool2d(image(h), 2, padding=1, divisor_override=3),
    "avg_pool3d": lambda h: F.avg_pool3d(volume(h), 2, 1, 1),
    "adaptive_avg_pool2d": lambda h: F.adaptive_avg_pool2d(image(h), (3, 4)),
    "adaptive_avg_pool3d": lambda h: F.adaptive_avg_pool3d(volume(h), (None, 1, 4)),
    "adaptive_max_pool1d of overlapping windows": lambda h: F.adaptive_max_pool1d(signal(h), 5),
    "adaptive_max_pool2d of overlapping windows": lambda h: F.adaptive_max_pool2d(image(h).relu(), (3, None)),
    "adaptive_max_pool3d of overlapping windows": lambda h: F.adaptive_max_pool3d(volume(h), (1, 2, 4)),
    "max_pool1d beyond its input, dilated": lambda h: F.max_pool1d(signal(h)[..., :5], 2, 4, dilation=3, ceil_mode=True),
    "max_pool2d beyond its input": lambda h: F.max_pool2d(image(h)[..., :3, :5], 2, ceil_mode=True),
    "max_pool2d beyond its pads": lambda h: F.max_pool2d(image(h)[..., :3, :5], 2, 2, 1, ceil_mode=True),
    "max_pool3d beyond its input": lambda h: F.max_pool3d(volume(h)[..., :5], 2, ceil_mode=True),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(image(h), (2, 3)),
    "max_unpool1d": unpooled(1, signal),
    "max_unpool2d": unpooled(2, image),
    "max_unpool3d": unpooled(3, volume),
    "pixel_shuffle": lambda h: F.pixel_shuffle(h.reshape(1, 8, 2, 6), 2),
    "pixel_unshuffle": lambda h: F.pixel_unshuffle(image(h), 2),
    "unfold": lambda h: F.unfold(image(h), 2, padding=1),
    "fold": lambda h: F.fold(h.reshape(2, 8, 6), (3, 4), 2),
    "Tensor.unfold": lambda h: h.unfold(1, 5, 3),
    "grid_sample of a volume": lambda h: F.grid_sample(volume(h), GRID.to(h.dtype), align_corners=False),
    "grid_sample, bicubic": lambda h: F.grid_sample(volume(h)[:, :, 0], GRID[:, 0, ..., :2].to(h.dtype), mode="bicubic", align_corners=False),
    "grid_sample at": lambda h: F.grid_sample(volume(normal(h)), h.reshape(2, 2, 2, 4, 3).tanh(), align_corners=False),
    "interpolate": lambda h: F.interpolate(image(h)[:, :, :3, :5], scale_factor=1.5, mode="bilinear"),
    "interpolate nearest": lambda h: F.interpolate(image(h)[:, :, :3, :5], scale_factor=1.5),
}
SEQUENCES = {
    "cumprod": lambda h: h.cumprod(1),
    "cumprod over zeros": lambda h: (h * (INDEX > 4)).cumprod(0),
    "cummax": lambda h: h.cummax(1).values,
    "cummin": lambda h: h.cummin(0).values,
    "cumsum": lambda h: h.cumsum(1),
    "logcumsumexp": lambda h: h.logcumsumexp(1),
    "sort": lambda h: h.sort(1).values * torch.arange(24),
    "sort downwards": lambda h: h.sort(0, descending=True).values,
    "argsort": lambda h: h.gather(1, h.argsort(1)) * torch.arange(24),
    "topk": lambda h: h.topk(3, 1).values,
    "topk of the smallest": lambda h: h.topk(3, 0, largest=False).values,
    "kthvalue": lambda h: h.kthvalue(3, 1).values,
    "median": lambda h: h.median(1).values + h.median(),
    "quantile": lambda h: h.quantile(0.3, 1),
    "roll": lambda h: h.roll((5, -1), (1, 0)),
    "flip": lambda h: h.flip(1) * torch.arange(24),
    "diff": lambda h: h.diff(n=2, dim=1),
    "bucketize": lambda h: h * torch.bucketize(h.detach(), INTERVAL.to(h.dtype), right=True),
    "searchsorted": lambda h: h * torch.searchsorted(INTERVAL.to(h.dtype), h.detach()),
    "one_hot": lambda h: h @ F.one_hot(h.detach().argmax(1), 24).to(h.dtype).T,
    "repeat_interleave": lambda h: h.repeat_interleave(3, 1),
    "repeat_interleave by a tensor": lambda h: h[:, :4].repeat_interleave(torch.tensor([1, 2, 3, 1]), 1, output_size=7),
    "tril_indices": lambda h: h[:, :16].reshape(4, 4, 4)[:, torch.tril_indices(4, 4)[0], torch.tril_indices(4, 4)[1]],
}
NORMS = {
    "einsum with an ellipsis": lambda h: torch.einsum("...ij,...kj->...ik", matrices(h), matrices(h)),
    "einsum of a diagonal": lambda h: torch.einsum("bii->bi", h[:, :16].reshape(4, 4, 4)),
    "norm 1": lambda h: h.norm(1, dim=1),
    "norm 2": lambda h: h.norm(dim=1),
    "norm 3.5": lambda h: torch.linalg.vector_norm(h, 3.5),
    "norm inf": lambda h: h.norm(math.inf, dim=1),
    "norm -inf": lambda h: h.norm(-math.inf, dim=1),
    "normalize": lambda h: F.normalize(h, dim=1),
    "renorm": lambda h: h.renorm(2, 0, 1.0),
    "var": lambda h: h.var((0, 1), correction=2, keepdim=True),
    "std": lambda h: h.std(1),
    "var_mean": lambda h: sum(torch.var_mean(h, dim=1, correction=0)),
    "prod": lambda h: h[:, :5].prod(1),
    "logsumexp": lambda h: matrices(h).logsumexp((0, 2), keepdim=True),
    "logaddexp": lambda h: torch.logaddexp(h, h.flip(1)),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h.flip(1), dim=1),
    "pairwise_distance": lambda h: F.pairwise_distance(h, h.flip(1)),
    "cdist": lambda h: torch.cdist(matrices(h), matrices(h)[:, :3] + 1),
    "cdist to itself": lambda h: torch.cdist(matrices(h), matrices(h)),
    "cdist p=1": lambda h: torch.cdist(matrices(h), matrices(h)[:, :3] + 1, p=1.0),
    "cdist p=3": lambda h: torch.cdist(matrices(h), matrices(h)[:, :3] + 1, p=3.0),
    "cdist p=inf": lambda h: torch.cdist(matrices(h), matrices(h)[:, :3] + 1, p=math.inf),
    "pdist": lambda h: F.pdist(h) + F.pdist(h, 1.5),
}
ACTIVATIONS = {
    "softplus": lambda h: F.softplus(h * 20, beta=2.0, threshold=5),
    "hardtanh": lambda h: F.hardtanh(h, -0.3, 0.4),
    "relu6": lambda h: F.relu6(h * 5),
    "clamp by a float and an integer": lambda h: h.clamp(-0.3, 1) + h.clip(-1, 0.5),
    "celu": lambda h: F.celu(h, 0.7),
    "selu": F.selu,
    "mish": F.mish,
    "glu": lambda h: F.glu(h, 1),
    "logsigmoid": F.logsigmoid,
    "tanhshrink": F.tanhshrink,
    "softshrink": lambda h: F.softshrink(h, 0.2),
    "hardshrink": lambda h: F.hardshrink(h, 0.2),
    "threshold": lambda h: F.threshold(h, 0.1, 2.0),
    "fake_quantize": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 3, -8, 7),
    "fake_quantize by channel": lambda h: torch.fake_quantize_per_channel_affine(
        h, torch.linspace(0.1, 0.3, 24, dtype=torch.float32), torch.zeros(24, dtype=torch.int32), 1, -8, 7
    ),
    "straight through": lambda h: h + (h.round() - h).detach(),
    "reflection pad": lambda h: F.pad(image(h), (1, 2, 2, 1), mode="reflect"),
    "circular pad": lambda h: F.pad(image(h), (1, 2, 2, 1), mode="circular"),
}
LOSSES = {
    "triplet": lambda h: F.triplet_margin_loss(h, h.flip(0) + 1, normal(h), swap=True, p=1),
    "huber": lambda h: F.huber_loss(h, normal(h), delta=0.7),
    "smooth_l1": lambda h: F.smooth_l1_loss(h, normal(h), beta=0.5),
    "kl_div": lambda h: F.kl_div(h.log_softmax(1), normal(h).softmax(1), reduction="batchmean"),
    "kl_div of logarithms": lambda h: F.kl_div(h.log_softmax(1), normal(h).log_softmax(1), log_target=True),
    "nll": lambda h: F.nll_loss(h.log_softmax(1), CLASSES, weight=normal(h)[0].abs()),
    "nll of images": lambda h: F.nll_loss(h.reshape(4, 4, 2, 3).log_softmax(1), INDEX[:, :6].reshape(4, 2, 3) % 4, reduction="none"),
    "smoothed cross_entropy": lambda h: F.cross_entropy(h, CLASSES, label_smoothing=0.1),
    "bce with weights": lambda h: F.binary_cross_entropy_with_logits(h, normal(h).softmax(1), pos_weight=normal(h)[0].abs()),
    "bce": lambda h: F.binary_cross_entropy(h.sigmoid(), normal(h).softmax(1)),
    "poisson": lambda h: F.poisson_nll_loss(h, normal(h).exp(), full=True),
    "hinge embedding": lambda h: F.hinge_embedding_loss(h, normal(h).sign()),
    "margin ranking": lambda h: F.margin_ranking_loss(h, h.flip(1), normal(h).sign()),
    "cosine embedding": lambda h: F.cosine_embedding_loss(h, normal(h), torch.tensor([1, -1, 1, -1])),
    "multi margin": lambda h: F.multi_margin_loss(h, CLASSES),
    "smoothed cross_entropy with holes": lambda h: F.cross_entropy(
        matrices(h).transpose(1, 2), INDEX[:, :6] % 4, weight=normal(h)[0, :4].abs(), ignore_index=2, label_smoothing=0.1
    ),
    "ctc": lambda h: F.ctc_loss(matrices(h).log_softmax(-1), INDEX[:6, :2].repeat(2, 1)[:6] % 3 + 1, (4, 3, 4, 2, 4, 4), (2, 1, 2, 1, 0, 2)),
    "ctc without infinities": lambda h: F.ctc_loss(
        matrices(h).log_softmax(-1),
        torch.ones(6, 3, dtype=torch.int64),
        torch.full((6,), 4),
        torch.full((6,), 3),
        zero_infinity=True,
        reduction="sum",
    ),
}
SHIFTS = {  # of the shape of their argument, and no no-ops
    "later": lambda h: F.pad(signal(h), (1, -1)),
    "earlier": lambda h: F.pad(image(h), (0, 0, -1, 1)),
    "rolled": lambda h: h.roll((1, -2), (0, 1)),
    "flipped": lambda h: h.flip(1),
}
DRAWS = {
    "uniform": lambda h: h * torch.empty_like(h).uniform_(-1, 2),
    "normal": lambda h: h * torch.empty_like(h).normal_(1, 2) + torch.normal(h.detach(), 0.1),
    "row dropped by chance": lambda h: h * h.new_empty(4, 1).bernoulli_(0.7),
    "element by chance": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "gumbel": lambda h: F.gumbel_softmax(h, tau=0.7),
    "gumbel with hard choice": lambda h: F.gumbel_softmax(h, hard=True) * h,
    "exponential": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "distribution": lambda h: Normal(h, h.exp()).rsample() + kl_divergence(Normal(h, h.exp()), Normal(0.0, 1.0)),
    "relaxed": lambda h: RelaxedBernoulli(torch.tensor(0.5), logits=h).rsample(),
}
GROUPS: dict[str, Mapping[str, Function]] = {
    "shifts": SHIFTS,
    "draws": DRAWS,
    "scatters": SCATTERS,
    "pools": POOLS,
    "sequences": SEQUENCES,
    "norms": NORMS,
    "activations": ACTIVATIONS,
    "losses": LOSSES,
}


class Attention(nn.Module):
    """Masks of every kind, dropout on, weights returned."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.MultiheadAttention(8, 2, 0.1, batch_first=True)
        self.extended = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        self.other = nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=True)
        self.slope, self.channels = nn.PReLU(24), nn.Dropout1d(0.2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x, other = h.reshape(4, 3, 8), matrices(h)
        y, weights = self.plain(x, x, x, attn_mask=CAUSAL, key_padding_mask=PADDED)
        z, _ = self.plain(x, x, x, attn_mask=torch.arange(72.0).reshape(8, 3, 3).sin().to(h.dtype), need_weights=False)
        e, _ = self.extended(x, x, x, need_weights=False)
        o, _ = self.other(x, other, other, need_weights=False)
        encoded = self.layer(x, src_key_padding_mask=PADDED)
        return (y + z + e + o + encoded + weights.square().sum(-1, keepdim=True)).square() + self.slope(self.channels(x).reshape(4, 24)).reshape(
            4, 3, 8
        )


class Each(nn.Module):
    """The sum of a scalar of each function's result, each applied to the batch times a parameter under the function's name."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        super().__init__()
        self.functions = {name.replace(".", " "): function for name, function in functions.items()}
        self.weights = nn.ParameterDict({name: 1 + 0.3 * torch.randn(4, 24, generator=DRAWN) for name in self.functions})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for name, function in self.functions.items():
            y = function(x * self.weights[name])
            noise = torch.arange(y.numel()).mul(1.7).sin().reshape(y.shape).to(x.dtype)
            losses.append((0.5 * y * y + y * noise).mean())
        return torch.stack(losses).sum()


@pytest.mark.parametrize("group", GROUPS)
def test_gradients_equal_torch(group: str) -> None:
    result = compare_training(Each(GROUPS[group]), ["x=4x24"], steps=1)
    wrong = {name: error for name, error in result.errors.items() if error > TOLERANCE}
    assert not wrong
    assert len({*result.errors, *result.excused} - {"loss"}) == len(GROUPS[group])


def test_attention_equals_torch() -> None:
    result = compare_training(Attention(), ["h=4x24"], (), "mse", steps=1)
    assert result.worst[0] <= TOLERANCE


class Experts(nn.Module):
    """Rows sorted by expert, of which one gets none, as ``transformers`` multiplies them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 5, generator=DRAWN))
        self.first = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformers.integrations.moe  # noqa: F401  # registers the operator

        counts = torch.histc(torch.tensor([0.0] * 7 + [1.0] * 4 + [3.0] * 5), bins=4, min=0, max=3)
        ends = counts.cumsum(0, dtype=torch.int32)
        return torch.ops.transformers.grouped_mm_fallback(self.first(x).reshape(16, 6), self.weight, ends)


def test_products_of_groups_equal_torch() -> None:
    module = Experts()
    result = compare_training(module, ["x=4x24"], (), "mse", steps=1)
    assert result.worst[0] <= TOLERANCE and "weight" in result.errors


REFUSALS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "mode": (lambda h: h.mode(1).values, "aten.mode has no ONNX form"),
    "drawn pools": (lambda h: F.fractional_max_pool2d(image(h), 2, output_size=(2, 3)), "fractional_max_pool2d has no ONNX form"),
    "divisor": (lambda h: F.avg_pool2d(image(h), 3, ceil_mode=True, divisor_override=2), "avg_pool.*divisor_override with ceil_mode"),
    "repeats": (lambda h: h.repeat_interleave(h[0].argsort() * 0 + 1, 1), "depends on data; give output_size"),
    "beyond a view": (lambda h: h[2].as_strided((3, 3), (2, 1), 40), "as_strided.*reads elements .* that its tensor has not"),
    "unequal targets": (
        lambda h: F.ctc_loss(matrices(h).log_softmax(-1), CLASSES, (4,) * 6, (1,) * 6),
        r"joined into one vector .*pad them to \(N, S\)",
    ),
    "without replacement": (lambda h: h.softmax(1).multinomial(3) * h[:, :3], "multinomial.*Gumbel"),
    "selected": (lambda h: h.masked_select(h > 0), "depends on data; compute the mask once"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_said_in_onnx_is_named(name: str) -> None:
    function, message = REFUSALS[name]
    with pytest.raises(ExportError, match=message) as caught:
        export_torch(Each({"it": function}), [InputSpec("x", (4, 24))])  # type: ignore[dict-item]
    assert "test_torch_functions.py:" in str(caught.value) and "\n" not in str(caught.value)
