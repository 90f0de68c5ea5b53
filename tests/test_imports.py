"""Who imports whom, and what merely importing the package costs."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import onnxremat

from .factories import ROOT, in_new_process, json_of

HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "scipy")


def _imports(folder: str) -> Iterator[tuple[Path, int, str, int]]:
    """(file, line, module, level) of every import statement below a folder, those inside functions too."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, node.lineno, alias.name, 0) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield path, node.lineno, node.module or "", node.level


@pytest.mark.parametrize("folder", ["exporters", "scheduler"])
def test_a_room_imports_nothing_of_the_house_outside_itself(folder: str) -> None:
    found = list(_imports(folder))
    assert len(found) > 20
    for path, line, module, level in found:
        where = f"{path.relative_to(ROOT)}:{line}"
        assert level or module.split(".")[0] not in ("onnxremat", "exporters", "scheduler", "models"), f"{where} imports {module} absolutely"
        depth = len(path.relative_to(ROOT / folder).parts)
        assert level <= depth, f"{where} reaches out of {folder}/"


def test_the_scheduler_knows_neither_onnx_nor_torch() -> None:
    for path, line, module, _ in _imports("scheduler"):
        assert module.split(".")[0] not in ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "torch"), f"{path}:{line} imports {module}"


def test_only_exporters_and_checks_import_torch() -> None:
    allowed = {"onnxremat/verification.py", "onnxremat/drawn.py"}
    users = {str(p.relative_to(ROOT)) for p, _, module, _ in _imports("onnxremat") if module.split(".")[0] == "torch"}
    outside = {u for u in users if not u.startswith(("onnxremat/exporters", "onnxremat/models"))}
    assert outside <= allowed


@pytest.mark.parametrize("module", ["onnxremat", "onnxremat.exporters", "onnxremat.cli", "onnxremat.models"])
def test_importing_is_light(module: str) -> None:
    loaded = json_of(f"import sys, json, {module}; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))")
    assert loaded == []


def test_importing_the_scheduler_loads_no_solver() -> None:
    loaded = json_of(f"import sys, json, onnxremat.scheduler; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))")
    assert loaded == []


def test_training_loads_no_torch(mlp_artifact: onnxremat.Artifact) -> None:
    loaded = json_of(
        "import sys, json, numpy as np, onnxremat\n"
        f"t = onnxremat.Trainer({str(mlp_artifact.path)!r})\n"
        "t.train_step({s.name: s.sample(np.random.default_rng(0)) for s in (*t.artifact.inputs, *t.artifact.labels)})\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    assert loaded is False


def test_a_script_beside_modules_of_the_same_names(tmp_path: Path) -> None:
    """A user's own scheduler.py, exporters.py and models/ neither shadow ours nor are shadowed."""
    (tmp_path / "scheduler.py").write_text("mine = 'scheduler'\n", encoding="utf-8")
    (tmp_path / "exporters.py").write_text("mine = 'exporters'\n", encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("mine = 'models'\n", encoding="utf-8")
    done = in_new_process(
        "import sys; sys.path.insert(0, '.')\n"
        "import scheduler, exporters, models\n"
        "import onnxremat.scheduler, onnxremat.exporters, onnxremat.models.zoo\n"
        "print(scheduler.mine, exporters.mine, models.mine, onnxremat.scheduler.solve.__name__, len(onnxremat.models.zoo.load_zoo()) > 0)",
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["scheduler", "exporters", "models", "solve", "True"]


@pytest.mark.parametrize("name", [n for n in onnxremat.__all__ if n != "__version__"])
def test_every_public_name_is_there_and_explained(name: str) -> None:
    value = getattr(onnxremat, name)
    assert inspect.getdoc(value), f"onnxremat.{name} has no docstring"
    if inspect.isclass(value):
        assert value.__doc__, f"onnxremat.{name} inherits its docstring"
        assert not value.__doc__.startswith(f"{value.__name__}("), f"onnxremat.{name} has the docstring that dataclass makes"
    assert name in dir(onnxremat)


def test_functions_are_not_hidden_by_modules_of_their_names() -> None:
    """Importing the command line, or a module by hand, must not turn ``onnxremat.compile`` into a module."""
    found = json_of(
        "import json, onnxremat, onnxremat.cli, onnxremat.api\n"
        "onnxremat.compile\n"
        "print(json.dumps([callable(onnxremat.compile), callable(onnxremat.verify)]))"
    )
    assert found == [True, True]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        onnxremat.nothing


def test_modules_have_docstrings() -> None:
    for folder in ("onnxremat", "exporters", "scheduler", "models"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
