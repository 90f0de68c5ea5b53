"""Small models by importable factories, such as ``tests.factories:tiny_cnn``; and what the pipeline's tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Array = npt.NDArray[Any]

ROOT = Path(__file__).resolve().parents[1]
#: Batch of ``tiny_cnn``: its activations are several times larger than its weights.
CNN_INPUT = "x=48x3x48x48"
CNN_LABEL = "labels=48:int64:5"
MLP_INPUT = "x=8x12"
MLP_LABEL = "labels=8:int64:4"


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class TinyCNN(nn.Module):
    """Convolutions with batch normalization, a max pooling, two residual blocks and a dropout."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.block1, self.block2 = _Block(16), _Block(16)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block1(torch.relu(self.norm(self.stem(x))))
        y = self.drop(self.block2(self.pool(y)))
        return self.head(y.mean((2, 3)))


def tiny_cnn() -> nn.Module:
    return TinyCNN()


def tiny_cnn_without_dropout() -> nn.Module:
    return TinyCNN(0.0)


def tiny_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def overlapping_pool() -> nn.Module:
    """A pool whose windows overlap, on 9 x 9 images."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(100, 5))


def norm_mlp() -> nn.Module:
    """Running statistics and no dropout, so that two runs are comparable."""
    return nn.Sequential(nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


class Noise(nn.Module):
    """Every way to draw that a graph has: normal and uniform numbers, and whole rows that are dropped by chance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.bernoulli(torch.full((x.shape[0], 1), 0.8, dtype=x.dtype))
        return x * kept + 0.1 * torch.randn_like(x) * torch.rand_like(x)


def noisy_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), Noise(), nn.Tanh(), nn.Linear(32, 4))


def tiny_gpt2() -> nn.Module:
    from onnxremat.models.transformer import gpt2

    return gpt2(layers=2, hidden=32, heads=2, vocab=64, seq=32, dropout=0.1)


def raising() -> nn.Module:
    raise RuntimeError("this factory fails")


def in_new_process(code: str, *, cwd: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh interpreter that finds this checkout."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), environment.get("PYTHONPATH")) if p)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def json_of(code: str) -> Any:
    """The JSON that code prints as its last line, run in a fresh interpreter."""
    return json.loads(in_new_process(code).stdout.strip().splitlines()[-1])


def alter_model(artifact: Path, name: str, change: Any) -> None:
    """Change a model of an artifact (``change(ModelProto)``) and make the manifest's hash agree."""
    import hashlib

    import onnx

    model = onnx.load(str(artifact / name))
    change(model)
    onnx.save(model, str(artifact / name))
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][name] = hashlib.sha256((artifact / name).read_bytes()).hexdigest()
    (artifact / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def batch_of(artifact: Any, seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {spec.name: spec.sample(rng) for spec in (*artifact.inputs, *artifact.labels)}


def mlp12() -> nn.Module:
    """Twelve linear layers whose activations are what takes the memory."""
    width = 256
    layers: list[nn.Module] = [nn.Linear(32, width), nn.ReLU()]
    for _ in range(10):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 8))
