"""One tiny module per hazard of exporting for training: outputs and state as torch's, effects alive."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxremat.exporters import ExportError, InputSpec, export_torch
from onnxremat.exporters.audit import BATCH_NORM, DETACH, DROPOUT, FROZEN_BATCH_NORM, RANDOM, graph_effects
from onnxremat.runtime import memory
from tests.exporters.support import close, op_counts, run_onnx, same_as_torch, sample_all, x


class Apply(nn.Module):
    """A module made of submodules and a function of (self, *inputs)."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def kinds(graph: Any) -> dict[str, int]:
    totals: dict[str, int] = {}
    for effect, count in graph_effects(graph).items():
        totals[effect.kind] = totals.get(effect.kind, 0) + count
    return totals


def test_training_batch_norm_updates_state_as_torch() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    graph = export_torch(module, [x(2, 3, 6, 6)])
    assert graph.state == {
        "1.running_mean": "1.running_mean.next",
        "1.running_var": "1.running_var.next",
        "1.num_batches_tracked": "1.num_batches_tracked.next",
    }
    assert graph.trainable == ("0.weight", "0.bias", "1.weight", "1.bias")
    got, _ = same_as_torch(graph, module)
    assert got["1.num_batches_tracked.next"] == 1


def test_running_variance_is_unbiased_at_small_batches() -> None:
    module = nn.BatchNorm1d(5)
    graph = export_torch(module, [x(2, 5)])
    same_as_torch(graph, module)


def test_several_steps_of_state() -> None:
    module = nn.Sequential(nn.BatchNorm1d(5, momentum=0.3))
    graph = export_torch(module, [x(6, 5)])
    for step in range(3):
        feeds = sample_all(graph, step)
        got = run_onnx(graph, feeds)
        module(torch.from_numpy(feeds["x"].copy()))
        for name, output in graph.state.items():
            close(got[output], module.state_dict()[name])
            value = graph.model.graph.initializers[name]
            value.const_value = type(value.const_value)(got[output], name=name)


def test_cumulative_batch_norm() -> None:
    module = nn.Sequential(nn.BatchNorm1d(5, momentum=None))
    module(torch.randn(4, 5))
    module(torch.randn(4, 5))
    graph = export_torch(module, [x(6, 5)])
    assert kinds(graph) == {BATCH_NORM: 1}
    got, _ = same_as_torch(graph, module)
    assert got["0.num_batches_tracked.next"] == 3
    assert module[0].momentum is None and "forward" not in vars(module[0])


def test_batch_norm_without_running_statistics() -> None:
    module = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    graph = export_torch(module, [x(2, 3, 4, 4)])
    assert not graph.state and kinds(graph) == {BATCH_NORM: 2}
    # A kernel may overwrite the statistics it was fed: no two nodes share them, and momentum 1 keeps them as they are.
    nodes = [node for node in graph.model.graph if node.op_type == "BatchNormalization"]
    stats = [value for node in nodes for value in node.inputs[3:5]]
    assert len(set(stats)) == 4
    assert all(node.attributes["momentum"].value == 1.0 for node in nodes)
    same_as_torch(graph, module)


def test_frozen_batch_norm_in_a_training_model() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    module[1].running_mean.normal_()
    module[1].eval()
    graph = export_torch(module, [x(2, 3, 4, 4)])
    assert kinds(graph) == {FROZEN_BATCH_NORM: 1, BATCH_NORM: 1}
    assert {"1.running_mean", "1.running_var"} <= set(graph.frozen)
    assert set(graph.state) == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    same_as_torch(graph, module)


def test_batch_norm_used_twice_updates_twice() -> None:
    module = Apply(lambda self, a: self.bn(self.bn(a).relu()), bn=nn.BatchNorm1d(4))
    graph = export_torch(module, [x(5, 4)])
    assert kinds(graph) == {BATCH_NORM: 2}
    got, _ = same_as_torch(graph, module)
    assert got["bn.num_batches_tracked.next"] == 2


def test_dropouts_are_alive_and_independent() -> None:
    module = Apply(lambda self, a: (self.d1(a), self.d2(a)), d1=nn.Dropout(0.5), d2=nn.Dropout(0.5))
    graph = export_torch(module, [x(64, 8)])
    assert kinds(graph) == {DROPOUT: 2}
    assert all("seed" not in node.attributes for node in graph.model.graph)
    feeds = {"x": np.ones((64, 8), np.float32)}
    first, second = run_onnx(graph, feeds, dropout=True).values()
    assert set(np.unique(first)) == {0.0, 2.0} and not np.array_equal(first, second)


def test_eval_dropout_is_absent() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.0))
    module[1].eval()
    graph = export_torch(module, [x(2, 4)])
    assert op_counts(graph) == {"Gemm": 1}


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (4, 8, 5)), (nn.Dropout2d, (4, 8, 3, 3))])
def test_feature_dropout_draws_per_channel(layer: Any, shape: tuple[int, ...]) -> None:
    graph = export_torch(layer(0.5), [x(*shape)])
    assert kinds(graph) == {DROPOUT: 1}
    (got,) = run_onnx(graph, {"x": np.ones(shape, np.float32)}, dropout=True).values()
    per_channel = got.reshape(*shape[:2], -1)
    assert (per_channel == per_channel[..., :1]).all() and set(np.unique(got)) == {0.0, 2.0}
    same_as_torch(graph, layer(0.5))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_keeps_its_dropout(causal: bool) -> None:
    module = Apply(lambda self, a: F.scaled_dot_product_attention(a, a * 2, a + 1, dropout_p=0.25, is_causal=causal))
    graph = export_torch(module, [x(2, 3, 5, 4)])
    assert kinds(graph) == {DROPOUT: 1}
    assert op_counts(graph)["IsNaN"] == 0
    plain = Apply(lambda self, a: F.scaled_dot_product_attention(a, a * 2, a + 1, is_causal=causal))
    same_as_torch(graph, plain)


def test_attention_with_a_boolean_mask_input_and_an_empty_row() -> None:
    module = Apply(lambda self, a, m: F.scaled_dot_product_attention(a, a, a, attn_mask=m))
    graph = export_torch(module, [x(2, 2, 5, 4), InputSpec("m", (2, 1, 5, 5), "bool")])
    feeds = sample_all(graph)
    feeds["m"][0, 0, 2] = False
    got = run_onnx(graph, feeds)["output"]
    close(got, module(torch.from_numpy(feeds["x"]), torch.from_numpy(feeds["m"])))
    assert np.isfinite(got).all() and (got[0, :, 2] == 0).all()


def test_attention_with_a_constant_mask_is_lean() -> None:
    def attend(self: Any, a: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(a, a, a, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril())

    module = Apply(attend)
    graph = export_torch(module, [x(2, 2, 5, 4)])
    assert op_counts(graph) == {"Mul": 1, "Transpose": 1, "MatMul": 2, "Add": 1, "Softmax": 1}
    same_as_torch(graph, module)


def test_attention_with_a_float_mask_and_grouped_heads() -> None:
    module = Apply(lambda self, q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m, scale=0.3, enable_gqa=True))
    graph = export_torch(module, [InputSpec("q", (2, 4, 5, 4)), InputSpec("k", (2, 2, 6, 4)), InputSpec("m", (5, 6))])
    same_as_torch(graph, module)


def test_causal_masks_of_many_layers_are_one_constant() -> None:
    module = Apply(lambda self, a: F.scaled_dot_product_attention(F.scaled_dot_product_attention(a, a, a, is_causal=True), a, a, is_causal=True))
    graph = export_torch(module, [x(1, 1, 16, 4)])
    shapes = [tuple(v.shape.numpy()) for v in graph.model.graph.initializers.values()]
    assert shapes.count((16, 16)) == 1


def test_a_mask_expanded_over_the_batch_is_resident_once() -> None:
    def attend(self: Any, a: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril().expand(a.shape[0], 1, 16, 16)
        return F.scaled_dot_product_attention(a, a, a, attn_mask=mask)

    graph = export_torch(Apply(attend), [x(3, 2, 16, 4)])
    shapes = [tuple(v.shape.numpy()) for v in graph.model.graph.initializers.values()]
    assert (1, 1, 16, 16) in shapes and (3, 1, 16, 16) not in shapes
    same_as_torch(graph, Apply(attend))


def test_integer_tables_beyond_the_reference_evaluator_fold() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kinds", torch.arange(80).reshape(1, 80) % 3)
            self.register_buffer("places", torch.arange(80).flip(0).reshape(1, 80))
            self.embed = nn.Embedding(3, 4)

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            kinds = torch.gather(self.kinds[:, :64].expand(1, 64), 1, self.places[:, 20:40])
            return a + self.embed(kinds)

    module = Tables()
    graph = export_torch(module, [x(2, 20, 4)])
    assert graph.source["folded_buffers"] == ["kinds", "places"] and op_counts(graph) == {"Gather": 1, "Add": 1}


def test_transformer_layer_in_training_mode() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    graph = export_torch(module, [x(2, 5, 8)])
    assert kinds(graph) == {DROPOUT: 4}
    same_as_torch(graph, module)


def test_detach_is_marked() -> None:
    module = Apply(lambda self, a: self.lin(a) + self.lin(a).detach() * 2, lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    assert len(graph.stop_gradient) == 1 and kinds(graph) == {DETACH: 1}
    (name,) = graph.stop_gradient
    node = next(node for node in graph.model.graph if node.outputs[0].name == name)
    assert node.op_type == "Identity" and node.inputs[0].producer().op_type == "Gemm"
    same_as_torch(graph, module)


def test_detach_of_data_is_no_node() -> None:
    module = Apply(lambda self, a: self.lin(a.detach()), lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    assert not graph.stop_gradient and op_counts(graph) == {"Gemm": 1}


def test_no_grad_region_is_detached() -> None:
    def forward(self: Any, a: torch.Tensor) -> torch.Tensor:
        y = self.lin(a)
        with torch.no_grad():
            z = torch.sin(y) * 2
            w = z + y
        return y * z + w

    module = Apply(forward, lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    assert len(graph.stop_gradient) == 2
    same_as_torch(graph, module)


def test_enable_grad_inside_no_grad() -> None:
    def forward(self: Any, a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.lin(a)
            with torch.enable_grad():
                z = self.lin(y)
        return z

    module = Apply(forward, lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    (name,) = graph.stop_gradient
    node = next(node for node in graph.model.graph if node.outputs[0].name == name)
    assert [use.op_type for use, _ in node.outputs[0].uses()] == ["Gemm"]
    assert not node.outputs[0].is_graph_output()
    same_as_torch(graph, module)


def test_ema_buffer_updated_under_no_grad_is_state() -> None:
    class Ema(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("ema", torch.zeros(4))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            y = self.lin(a)
            with torch.no_grad():
                self.ema.mul_(0.9).add_(y.mean(0), alpha=0.1)
            return y - self.ema

    module = Ema()
    graph = export_torch(module, [x(2, 4)])
    assert graph.state == {"ema": "ema.next"} and graph.frozen == ()
    assert graph.stop_gradient
    same_as_torch(graph, module)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.detach().mul_(0.9),
        lambda weight: weight.data[0].zero_(),
        lambda weight: setattr(weight, "data", weight.data * 0.9),
    ],
)
def test_a_parameter_written_by_way_of_a_view_is_refused(write: Any) -> None:
    def forward(self: Any, a: torch.Tensor) -> torch.Tensor:
        write(self.frozen.weight)
        return self.lin(a) + self.frozen(a)

    module = Apply(forward, lin=nn.Linear(4, 4), frozen=nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(ExportError, match=r"parameter frozen.weight: .*writes to it"):
        export_torch(module, [x(2, 4)])


def test_tied_weights_are_one_initializer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    module = Tied()
    graph = export_torch(module, [InputSpec("ids", (2, 5), "int64", 11)])
    assert graph.trainable == ("embed.weight",) and graph.tied == {"head.weight": "embed.weight"}
    assert len(graph.model.graph.initializers["embed.weight"].uses()) == 2
    same_as_torch(graph, module)


def test_module_used_twice_with_dropout() -> None:
    module = Apply(lambda self, a: self.block(self.block(a)), block=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)))
    graph = export_torch(module, [x(2, 4)])
    assert kinds(graph) == {DROPOUT: 2} and len(graph.trainable) == 2
    same_as_torch(graph, module)


def test_frozen_and_unused_parameters() -> None:
    module = Apply(lambda self, a: self.b(self.a(a)), a=nn.Linear(4, 4), b=nn.Linear(4, 4), idle=nn.Linear(4, 4))
    module.a.weight.requires_grad_(False)
    graph = export_torch(module, [x(2, 4)])
    assert graph.trainable == ("a.bias", "b.weight", "b.bias") and graph.frozen == ("a.weight",)
    assert graph.source["unused"] == ["idle.bias", "idle.weight"]


def test_buffers_float_and_integer() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(4))
            self.register_buffer("order", torch.tensor([2, 0, 1, 3]))
            self.lin = nn.Linear(4, 4)

        def forward(self, a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return self.lin(a[rows][:, self.order] * self.scale)

    module = Buffers()
    graph = export_torch(module, [x(3, 4), InputSpec("rows", (5,), "int64", 3)])
    assert set(graph.frozen) == {"scale", "order"} - set(graph.source["folded_buffers"])
    assert "scale" in graph.frozen
    same_as_torch(graph, module)


def test_boolean_and_int32_inputs_by_keyword() -> None:
    def forward(self: Any, a: torch.Tensor, keep: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, a, self.e(ids))

    module = Apply(forward, e=nn.Embedding(7, 4))
    graph = export_torch(module, [x(3, 4), InputSpec("keep", (3, 1), "bool"), InputSpec("ids", (3,), "int32", 7)])
    same_as_torch(graph, module)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    parts: Any = None


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda y: {"a": y, "b": {"c": y + 1}}, ("a", "b_c")),
        (lambda y: (y, [y + 1, y + 2]), ("output_0", "output_1_0", "output_1_1")),
        (lambda y: Result(y, None, {"p": y + 1}), ("logits", "parts_p")),
    ],
)
def test_structured_outputs(make: Any, names: tuple[str, ...]) -> None:
    module = Apply(lambda self, a: make(self.lin(a)), lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    assert graph.outputs == names
    same_as_torch(graph, module)


def test_an_output_that_is_an_input_or_appears_twice() -> None:
    module = Apply(lambda self, a: (a, self.lin(a), self.lin.weight), lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    same_as_torch(graph, module)


def test_random_ops_are_kept() -> None:
    module = Apply(lambda self, a: self.lin(a) + torch.rand_like(a) + torch.randn_like(a), lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)])
    assert kinds(graph) == {RANDOM: 2}


def test_layer_norm_and_gelu_are_one_node_each() -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.GELU(approximate="tanh"), nn.Linear(8, 3))
    graph = export_torch(module, [x(2, 5, 8)])
    assert op_counts(graph) == {"LayerNormalization": 1, "Gelu": 2, "Reshape": 2, "Gemm": 1}
    same_as_torch(graph, module)


def test_convolutions_have_explicit_pads() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 4, padding="same"), nn.Conv2d(4, 4, 3, padding="valid"), nn.ConvTranspose2d(4, 2, 2, 2))
    graph = export_torch(module, [x(1, 3, 7, 7)])
    for node in graph.model.graph:
        if node.op_type.startswith("Conv"):
            assert "pads" in node.attributes and "auto_pad" not in node.attributes
    same_as_torch(graph, module)


def test_own_scalar_loss_comes_first() -> None:
    module = Apply(lambda self, a, t: {"logits": self.lin(a), "loss": F.mse_loss(self.lin(a), t)}, lin=nn.Linear(4, 4))
    graph = export_torch(module, [x(2, 4)], [InputSpec("t", (2, 4))])
    assert graph.loss == "loss" and graph.outputs == ("logits", "loss")
    assert [v.name for v in graph.model.graph.outputs] == ["loss", "logits"]
    assert [s.name for s in graph.labels] == ["t"]
    same_as_torch(graph, module)


def test_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    graph = export_torch(module, [x(2, 4)])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        module[0].weight.zero_()
    assert graph.model.graph.initializers["0.weight"].const_value.numpy().any()


def test_example_arrays_instead_of_specs() -> None:
    module = Apply(lambda self, a: self.e(a), e=nn.Embedding(7, 4))
    graph = export_torch(module, [np.array([[1, 6]])])
    assert graph.inputs[0].high == 7 and graph.inputs[0].shape == (1, 2)


def test_export_is_deterministic() -> None:
    import onnx_ir as ir

    def build() -> bytes:
        torch.manual_seed(0)
        graph = export_torch(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)), [x(2, 3, 6, 6)])
        proto = ir.serde.serialize_model(graph.model)
        return proto.SerializeToString(deterministic=True)

    assert build() == build()


def test_long_vectors_take_no_memory_for_each_element() -> None:
    # onnx's data propagation notes a dimension for each element of a vector, at each operator.
    def flattened(self: Any, image: torch.Tensor) -> torch.Tensor:
        flat = self.layer(image).flatten()
        rows = torch.stack([flat, flat * 2.0, flat.abs() + 1.0], -1)
        return rows[torch.arange(0, len(rows), 2)].square().mean()

    memory.reset_peak()
    before = memory.resident_bytes()
    graph = export_torch(Apply(flattened, layer=nn.Linear(1000, 1000)), [InputSpec("image", (2000, 1000))])
    assert graph.model.graph.outputs[0].shape == ()
    assert memory.peak_resident_bytes() - before < 400 << 20
