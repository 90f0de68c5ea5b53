"""The profile of the unscheduled step runs on numbers that training has."""

from __future__ import annotations

from pathlib import Path

import pytest

import onnxremat
from onnxremat.optimizers import FUSED, Optimizer


def test_a_step_that_updates_parameters_is_profiled_without_nans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second step takes the maxima of what the first one's update left: MaxUnpool ends a step whose maxima are NaN."""
    monkeypatch.setenv("ONNXREMAT_CACHE", str(tmp_path / "cache"))
    artifact = onnxremat.compile(
        "tests.factories:tiny_cnn",
        tmp_path / "out",
        inputs=["x=2x3x16x16"],
        loss="cross_entropy",
        optimizer=Optimizer("adamw", update=FUSED),
        target="onnxruntime",
        threads=1,
        verify=False,
    )
    assert artifact.manifest["time"]["costs"] == "measured"
