"""What cannot be exported is refused in one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxremat.errors import DifferentiationError
from onnxremat.exporters import ExportError, InputSpec, export_torch
from onnxremat.training_graph import build_training_graph
from tests.exporters.support import x
from tests.exporters.test_hazards import Apply


def refused(function: Any, message: str, specs: Any = None, **parts: Any) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        export_torch(Apply(function, **parts), [x(2, 4)] if specs is None else specs)
    assert "\n" not in str(caught.value)


def branch(self: Any, a: torch.Tensor) -> torch.Tensor:
    if a.sum() > 0:  # the line that the message must quote
        return a
    return -a


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_control_flow_on_data_names_the_line() -> None:
    refused(branch, r"test_bad_input.py:\d+ \(if a.sum\(\) > 0:.*torch.where")


def test_shapes_that_depend_on_data() -> None:
    refused(lambda self, a: a[a > 0], "depends on data")


def test_a_list_of_numbers() -> None:
    refused(lambda self, a: a.sum(1).tolist()[0], "a Python value computed from data.*no .tolist")


def test_item() -> None:
    refused(lambda self, a: a * a.sum().item(), "computed from data")


def test_an_exception_of_the_model_names_the_line() -> None:
    refused(lambda self, a: a @ torch.zeros(3, 3), r"test_bad_input.py:\d+")


def test_a_line_inside_a_library_is_named_with_the_one_that_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "site-packages" / "somebodys.py"
    library.parent.mkdir()
    library.write_text(
        "import torch\n\ndef longest(a):\n    return a if a.any() else -a\n\ndef made_up(a, mask=None):\n"
        "    if mask is None and not torch.compiler.is_compiling():\n        mask = a > 0\n    return a * mask.float()\n"
    )
    monkeypatch.syspath_prepend(str(library.parent))
    import somebodys

    called = r"called at test_bad_input.py:\d+: .*"
    refused(lambda self, a: somebodys.longest(a), rf"somebodys.py:4 \(return a if a.any\(\) else -a\), {called}torch.where or masks")
    refused(lambda self, a: somebodys.made_up(a), rf"somebodys.py:9 .*{called}torch runs it, .*give forward the inputs that it makes up")


def test_wrong_shape_and_dtype() -> None:
    refused(lambda self, a: self.lin(a), "cannot be traced", lin=nn.Linear(5, 2))
    refused(lambda self, a: self.e(a), "cannot be traced", e=nn.Embedding(5, 2))


def test_complex_values() -> None:
    refused(lambda self, a: torch.fft.fft(a).abs(), "complex")


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.zeros((2, 4), np.complex64)], ids=["strings", "complex"])
def test_inputs_that_are_no_numbers(array: Any) -> None:
    refused(lambda self, a: a, f"example input 0: .*{array.dtype.name}.*give float, integer or bool", [array])


@pytest.mark.parametrize(
    ("dtype", "way_out"), [(torch.float64, r"float\(\)"), (torch.bfloat16, r"float\(\)"), (torch.complex64, "pairs of real tensors")]
)
def test_parameters_of_other_dtypes(dtype: torch.dtype, way_out: str) -> None:
    refused(lambda self, a: self.lin(a), f"parameter lin.weight: {str(dtype)[6:]} .*{way_out}", lin=nn.Linear(4, 4, dtype=dtype))


def test_float64_that_nothing_writes_is_taken() -> None:
    frozen = nn.Linear(4, 4).double().requires_grad_(False)
    graph = export_torch(Apply(lambda self, a: self.lin(self.frozen(a.double()).float()), lin=nn.Linear(4, 4), frozen=frozen), [x(2, 4)])
    assert graph.frozen == ("frozen.weight", "frozen.bias")


def test_float64_state() -> None:
    norm = nn.BatchNorm1d(4, affine=False).double()
    refused(lambda self, a: self.norm(a.double()).float(), "buffer norm.running_mean: float64 .*updates it in place", norm=norm)


def test_arithmetic_in_bfloat16() -> None:
    def forward(self: Any, a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.lin(a).float()

    refused(forward, "Gemm .*no CPU kernel for it in bfloat16; .*autocast", lin=nn.Linear(4, 4))
    table = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    export_torch(Apply(lambda self, a: a + self.table.t()[:, 1].float(), table=nn.Parameter(table, False)), [x(2, 4)])


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.lin(a).argmax(1).float()  # the line that the message must quote


class Held(Cut):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.lin(a)
        return hidden * 2


class Unread(Cut):
    def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.relu(), self.lin(a)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Cut, r"no gradient passes ArgMax .* at test_bad_input.py:\d+ \(return self.lin\(a\).argmax"),
        (Held, r"a detach or no_grad .*module 'lin' at test_bad_input.py:\d+ \(hidden = self.lin\(a\)\)"),
        (Unread, "the loss is computed from none of them"),
    ],
)
def test_a_cut_gradient_path_names_the_line(module: type[Cut], message: str) -> None:
    with pytest.raises(DifferentiationError, match=f"no trainable parameter reaches the loss: .*{message}") as caught:
        build_training_graph(export_torch(module(), [x(2, 4)], (), "mse"))
    assert "\n" not in str(caught.value)


def test_no_tensor_output_and_foreign_output() -> None:
    refused(lambda self, a: None, "returns no tensor")
    refused(lambda self, a: object(), "not a tensor")


def test_custom_autograd_function() -> None:
    refused(lambda self, a: Straight.apply(a), r"autograd.Function Straight: .*not the derivative of its forward \(off by .*detach\(\)")
    assert torch.autograd.Function.apply.__self__ is torch.autograd.Function


def test_hooks() -> None:
    module = nn.Linear(4, 4)
    handle = module.register_full_backward_hook(lambda *a: None)
    with pytest.raises(ExportError, match="backward hooks"):
        export_torch(module, [x(2, 4)])
    handle.remove()
    module.weight.register_hook(lambda g: g * 2)
    with pytest.raises(ExportError, match="parameter weight"):
        export_torch(module, [x(2, 4)])


def test_alpha_dropout_and_dropout_of_everything() -> None:
    refused(lambda self, a: self.d(a), "alpha_dropout d.*nn.Dropout", d=nn.AlphaDropout(0.1))
    refused(lambda self, a: self.d(a), "p=1.0", d=nn.Dropout(1.0))
    export_torch(Apply(lambda self, a: self.d(a) + 1, d=nn.AlphaDropout(0.1).eval()), [x(2, 4)])


def test_packed_sequences() -> None:
    def forward(self: Any, a: torch.Tensor) -> torch.Tensor:
        return self.r(nn.utils.rnn.pack_padded_sequence(a, torch.tensor([3, 2]), enforce_sorted=False))[0].data

    refused(forward, "packed sequence.*padded sequences", [x(3, 2, 4)], r=nn.LSTM(4, 4))


def test_a_loss_that_torch_decomposes_wrongly() -> None:
    target = torch.tensor([[1, -1, 0, 0], [0, 2, -1, 0]])
    refused(lambda self, a: F.multilabel_margin_loss(a, target), "multilabel_margin_loss.*soft_margin")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda self, a: torch.lgamma(a), "lgamma"),
        (lambda self, a: torch.linalg.svd(a)[1], "linalg_svd"),
        (lambda self, a: torch.linalg.inv(a.T @ a), "linalg_inv"),
    ],
    ids=["lgamma", "svd", "inv"],
)
def test_operations_without_onnx_form_are_named_with_their_line(function: Any, name: str) -> None:
    refused(function, rf"at test_\w+.py:\d+ .*{name}\w* has no ONNX form; replace it")


def test_writes_to_parameters() -> None:
    def forward(self: Any, a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-1, 1)
        return self.lin(a)

    refused(forward, "lin.weight", lin=nn.Linear(4, 4))


def test_operation_without_onnx_form_names_module_and_line() -> None:
    class Factors(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.linalg.qr(a)[0]

    with pytest.raises(ExportError, match=r"module 0 at test_bad_input.py:\d+ \(return torch.linalg.qr.*linalg_qr has no ONNX form"):
        export_torch(nn.Sequential(Factors()), [x(2, 4)])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no inputs"),
        ([InputSpec("a", (2, 4)), InputSpec("a", (2, 4))], "named twice"),
        ([InputSpec("a", (2, 4)), InputSpec("b", (2, 4)), InputSpec("c", (2, 4))], r"cannot take by position"),
        ([InputSpec("p", (2, 4))], "cannot take by position"),
        ([InputSpec("u", (2, 4))], "no input given for v"),
    ],
)
def test_inputs_that_do_not_fit_forward(specs: list[InputSpec], message: str) -> None:
    class Two(nn.Module):
        def forward(self, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return u + v

    with pytest.raises(ExportError, match=message):
        export_torch(Two(), specs)


def test_not_a_module() -> None:
    with pytest.raises(ExportError, match="not an nn"):
        export_torch(lambda a: a, [x(2)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["x", "x=", "=2x3", "x=2xa", "x=2x3:float99", "x=2:int64:abc", "x=2:float32:5", "x=0x2", "x=2:int64:0", "x=2:int64:3:4"],
)
def test_input_spec_text(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        InputSpec.parse(text)
    assert "\n" not in str(caught.value)
