"""Files are written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import OnnxRematError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place when the block ends well, and vanishes when it does not.

    A folder that stands at ``target`` already is replaced only then.

    Raises:
        OnnxRematError: the place can't be written (full disk, no permission).
    """
    target = Path(os.path.abspath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise OnnxRematError(f"can't write to {target.parent}: {error.strerror or error}") from error
    try:
        yield staging
        staging.chmod(0o755)
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


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
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
