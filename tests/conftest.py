"""Artifacts that several tests look at, compiled once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxremat import Artifact, Optimizer
from onnxremat.api import compile as compile_model

from .factories import CNN_INPUT, CNN_LABEL, MLP_INPUT, MLP_LABEL


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of the tests stay apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("ONNXREMAT_CACHE", raising=False)
        yield


@pytest.fixture(scope="session")
def cnn_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny CNN with BatchNorm, dropout and a residual, AdamW, three quarters of its activations: recomputes, verified when compiled."""
    artifact = compile_model(
        "tests.factories:tiny_cnn",
        tmp_path_factory.mktemp("artifacts") / "cnn",
        inputs=[CNN_INPUT],
        labels=[CNN_LABEL],
        loss="cross_entropy",
        activation_budget="75%",
        costs="analytic",
        threads=1,
        time_limit=6,
    )
    assert artifact.plan.recomputed_ops > 0
    return artifact


@pytest.fixture(scope="session")
def momentum_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The tiny CNN without dropout, its update (SGD with momentum and weight decay) inside the training graph."""
    artifact = compile_model(
        "tests.factories:tiny_cnn_without_dropout",
        tmp_path_factory.mktemp("artifacts") / "momentum",
        inputs=[CNN_INPUT],
        labels=[CNN_LABEL],
        loss="cross_entropy",
        optimizer=Optimizer("sgd", learning_rate=0.05, momentum=0.9, weight_decay=1e-3),
        activation_budget="75%",
        costs="analytic",
        threads=1,
        time_limit=6,
        verify=False,
    )
    assert artifact.plan.recomputed_ops > 0
    return artifact


@pytest.fixture(scope="session")
def mlp_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny multi-layer perceptron with AdamW, not reduced and not verified: quick."""
    return _mlp(tmp_path_factory, "tests.factories:tiny_mlp", Optimizer("adamw", learning_rate=0.01, weight_decay=0.1))


@pytest.fixture(scope="session")
def norm_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny perceptron with running statistics, AdamW."""
    return _mlp(tmp_path_factory, "tests.factories:norm_mlp", Optimizer("adamw", learning_rate=0.01))


@pytest.fixture(scope="session")
def noisy_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A perceptron that draws numbers."""
    return _mlp(tmp_path_factory, "tests.factories:noisy_mlp", Optimizer("adamw", learning_rate=0.01))


@pytest.fixture(scope="session")
def sgd_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The perceptron with plain SGD."""
    return _mlp(tmp_path_factory, "tests.factories:tiny_mlp", Optimizer("sgd", learning_rate=0.1))


@pytest.fixture(scope="session")
def momentum_mlp_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The perceptron with an update in the graph."""
    return _mlp(tmp_path_factory, "tests.factories:tiny_mlp", Optimizer("sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.01))


def _mlp(factory: pytest.TempPathFactory, source: str, optimizer: Optimizer) -> Artifact:
    path: Path = factory.mktemp("artifacts") / "mlp"
    return compile_model(
        source,
        path,
        inputs=[MLP_INPUT],
        labels=[MLP_LABEL],
        loss="cross_entropy",
        optimizer=optimizer,
        budget="32MiB",
        costs="analytic",
        threads=1,
        verify=False,
        time_limit=2,
    )
