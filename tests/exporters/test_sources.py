"""SOURCE: factories, the zoo, files; and the import discipline of the folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onnxremat.exporters import ExportError, InputSpec, build_module, load_source

FACTORIES = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
    def forward(self, x):
        return self.lin(x)

def sized(width, depth=1, names=("a",)):
    return nn.Sequential(*[nn.Linear(4, width) if not i else nn.Linear(width, width) for i in range(depth)])

def number():
    return 3

def broken():
    raise RuntimeError("no weights here")

value = 5
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "remat_user_models.py").write_text(FACTORIES)
    (tmp_path / "remat_user_broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "remat_user_models", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["small", "Net"])
def test_factory_and_class(here: Path, name: str) -> None:
    spec = f"remat_user_models:{name}"
    path = list(sys.path)
    graph = load_source(spec, [InputSpec("x", (2, 4))], (), "cross_entropy", seed=5)
    assert sys.path == path
    assert graph.source["kind"] == "torch" and graph.source["spec"] == spec and graph.source["seed"] == 5
    assert graph.source["inputs"] == ["x=2x4"] and graph.source["labels"] == ["labels=2:int64:3"]
    again = build_module(spec, 5)
    for key, value in again.state_dict().items():
        assert np.array_equal(graph.model.graph.initializers[key].const_value.numpy(), value.numpy())
    other = build_module(spec, 6)
    assert not torch.equal(next(iter(other.parameters())), next(iter(again.parameters())))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("remat_user_models:number", "returned int, not an nn.Module"),
        ("remat_user_models:broken", "RuntimeError: no weights here"),
        ("remat_user_models:value", "not callable"),
        ("remat_user_models:absent", "has no absent"),
        ("remat_user_broken:net", "no module named nothing_of_that_name; install"),
        ("remat_nowhere.models:net", "no module named remat_nowhere; run from"),
        ("remat_user_models", "not understood"),
        ("remat_user_models.py", "write remat_user_models:factory, with"),
        ("./remat_user_models.py:small", "write remat_user_models:factory, with"),
        ("folder/remat_user_models:small", "write remat_user_models:factory in the folder folder, with"),
        (":small", "not understood"),
        ("remat_user_models:sized(width=", "arguments are not understood"),
        ("remat_user_models:sized(width=torch)", "arguments are not understood"),
        ("remat_user_models:sized(*[3])", "arguments are not understood"),
        ("remat_user_models:sized(**{'width': 3})", "arguments are not understood"),
        ("remat_user_models:sized(3)(4)", "arguments are not understood"),
        ("remat_user_models:sized(height=3)", "unexpected keyword argument 'height'"),
        ("zoo:alexnet", "no such model; it has .*resnet18"),
        ("none.onnx", "no such file"),
    ],
)
def test_bad_sources(here: Path, spec: str, message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        load_source(spec, [InputSpec("x", (2, 4))])
    assert "\n" not in str(caught.value)


def test_arguments_of_a_factory(here: Path) -> None:
    spec = "remat_user_models:sized(3, depth=2, names=('b', 'c'))"
    graph = load_source(spec, [InputSpec("x", (2, 4))], (), "mse")
    assert graph.source["spec"] == spec and len(graph.trainable) == 4
    assert [len(list(build_module(f"remat_user_models:sized({a})"))) for a in ("width=3", "3 ,depth=4", "3,\n 2")] == [1, 4, 2]
    assert build_module("zoo:resnet18(num_classes=7, width=4)").fc.out_features == 7


def test_inputs_are_needed(here: Path) -> None:
    with pytest.raises(ExportError, match="no inputs given"):
        load_source("remat_user_models:small")


def test_an_onnx_file_has_no_module() -> None:
    with pytest.raises(ExportError, match="no torch module"):
        build_module("file.onnx")


def test_seeding_leaves_onnxruntime_alone(here: Path) -> None:
    """torch.manual_seed(0) would, through onnxruntime-training's hook, give two dropouts of the next session one mask."""
    build_module("remat_user_models:small", 0)
    first = torch.rand(3)
    torch.default_generator.manual_seed(0)
    nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))
    assert torch.equal(first, torch.rand(3))


def test_importing_the_folder_is_light() -> None:
    heavy = "sorted(m for m in ('torch', 'transformers', 'onnxruntime') if m in sys.modules)"
    code = f"import sys, onnxremat.exporters as e; e.ExportError; e.InputSpec; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]"


def test_the_folder_imports_nothing_of_the_rest_of_the_package() -> None:
    folder = Path(__file__).parents[2] / "exporters"
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2 and not (node.module or "").startswith("onnxremat"), file.name
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("onnxremat") for alias in node.names), file.name
