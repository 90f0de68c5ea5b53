"""The table of operators in the documentation is what the registry says, and complete."""

from __future__ import annotations

import pytest

from onnxremat.autodiff import lookup
from onnxremat.autodiff.registry import NotDifferentiable, Refused, Rewritten, Vjp
from onnxremat.autodiff.table import standard_operators, table
from tests.factories import ROOT

FUSED = (
    "Attention",
    "BiasAdd",
    "BiasDropout",
    "BiasGelu",
    "BiasSoftmax",
    "BiasSplitGelu",
    "BitmaskBiasDropout",
    "BitmaskDropout",
    "DropoutGrad",
    "EmbedLayerNormalization",
    "FastGelu",
    "FusedConv",
    "FusedGemm",
    "FusedMatMul",
    "FusedMatMulActivation",
    "Gelu",
    "GemmFastGelu",
    "GroupQueryAttention",
    "Inverse",
    "MultiHeadAttention",
    "NhwcConv",
    "NhwcFusedConv",
    "QAttention",
    "QuickGelu",
    "RotaryEmbedding",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "Trilu",
)


def test_the_document_is_up_to_date() -> None:
    assert (ROOT / "docs" / "operators.md").read_text(encoding="utf-8") == table(), "run: python -m onnxremat.autodiff.table > docs/operators.md"


@pytest.mark.parametrize("name", standard_operators())
def test_every_standard_operator_has_a_state(name: str) -> None:
    assert isinstance(lookup(name), Vjp | Rewritten | NotDifferentiable | Refused)


@pytest.mark.parametrize("name", FUSED)
def test_every_fused_operator_has_a_state(name: str) -> None:
    assert isinstance(lookup(name, "com.microsoft"), Vjp | Rewritten | NotDifferentiable | Refused)


def test_refusals_say_what_to_do() -> None:
    for name in (*standard_operators(), *FUSED):
        for domain in ("", "com.microsoft"):
            state = lookup(name, domain)
            if isinstance(state, Refused):
                assert any(sign in state.reason for sign in (";", ",")), f"{name}: {state.reason}"
