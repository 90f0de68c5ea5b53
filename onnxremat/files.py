"""Files are written whole or not at all."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import OnnxRematError


@contextmanager
def whole_folder(target: Path, ours: Sequence[str]) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place when the block ends well, and vanishes when it does not.

    A folder that stands at ``target`` already is replaced only then, and only where all that it holds are files of the same kind.

    Args:
        target: where the folder is to be.
        ours: patterns of the names of files that may be replaced.

    Raises:
        OnnxRematError: the place can't be written (full disk, no permission), or holds something else.
    """
    target = Path(os.path.realpath(target))
    _require_ours(target, ours)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise OnnxRematError(f"can't write to {target.parent}: {error.strerror or error}") from error
    try:
        yield staging
        staging.chmod(0o755)
        _require_ours(target, ours)  # it may have been filled in the meantime
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.rename(target, old / "old")
            os.rename(staging, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(staging, target)
    except OSError as error:
        raise OnnxRematError(f"can't write {target}: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_ours(target: Path, ours: Sequence[str]) -> None:
    """Raise where replacing ``target`` would cost somebody something else than files of these names."""
    if not target.exists():
        return
    if not target.is_dir():
        raise OnnxRematError(f"{target} is there already and no folder: name another one")
    if target == Path.cwd():
        raise OnnxRematError(f"{target} is the current folder, which is not replaced: name one in it")
    try:
        entries = sorted(target.iterdir())
    except OSError as error:
        raise OnnxRematError(f"can't write to {target}: {error.strerror or error}") from error
    for entry in entries:
        if entry.is_dir() or not any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in ours):
            raise OnnxRematError(f"{target} is not replaced, since '{entry.name}' in it was not written by onnxremat: name another folder")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all; what is there and no file, such as /dev/stdout, is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json.dumps(data, indent=1, sort_keys=False, allow_nan=False) + "\n")
