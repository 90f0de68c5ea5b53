"""The operator library: found beside this module, or built on first use, and registered with a session."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from ..cache import cache_folder
from ..errors import SpillFailed, SpillUnavailable
from ..units import format_bytes

#: Domain of the operators, and what a file that has them says in its opset imports.
DOMAIN = "onnxremat.spill"
#: Session option and environment variable that name the folder to swap to; the option comes first.
DIRECTORY_KEY, DIRECTORY_VARIABLE = "onnxremat.spill_dir", "ONNXREMAT_SPILL_DIR"
_SOURCE = Path(__file__).with_name("_spill.c")
_WAY_OUT = "install a C compiler (such as gcc), or plan without swap (--swap none): recomputing needs none"
_ELSEWHERE = f"choose another folder with --spill-dir or {DIRECTORY_VARIABLE}"


@functools.cache
def library_path() -> Path:
    """The library, built with the package or, where that had no compiler, now.

    Raises:
        SpillUnavailable: it is neither there nor can it be built.
    """
    for suffix in EXTENSION_SUFFIXES:
        path = _SOURCE.with_name(f"_spill{suffix}")
        if path.exists():
            return path
    return _built()


def _built() -> Path:
    """The library compiled into the user's cache."""
    if not sys.platform.startswith("linux"):
        raise SpillUnavailable(f"swapping to disk works on Linux only, not on {sys.platform}: plan without swap (--swap none)")
    folder = cache_folder("spill")
    if folder is None:
        raise SpillUnavailable("the swap operators can't be built, since the cache can't be written: set ONNXREMAT_CACHE to a writable folder")
    compiler = next((found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise SpillUnavailable(f"the swap operators were not built with the package, and there is no C compiler: {_WAY_OUT}")
    path = folder / f"spill-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / path.name
        command = [compiler, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-o", str(made), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SpillUnavailable(f"{compiler} does not build the swap operators ({' '.join(done.stderr.split())[:200]}): {_WAY_OUT}")
        os.replace(made, path)
    return path


def needed(model: str | Path | bytes) -> bool:
    """Whether a model, as a file or its bytes, has the operators: it then names their domain."""
    return DOMAIN.encode() in (model if isinstance(model, bytes) else Path(model).read_bytes())


def register(settings: Any, directory: str | Path | None = None) -> None:
    """Let sessions made from these ``SessionOptions`` run the operators, and swap to ``directory``; None leaves it to the environment.

    Raises:
        SpillUnavailable: the library can't be had.
    """
    path = library_path()
    settings.add_session_config_entry(DIRECTORY_KEY, str(spill_directory(directory)))
    settings.register_custom_ops_library(str(path))


@contextmanager
def spilling_to(directory: Path | None) -> Iterator[None]:
    """Let this process and those that it starts swap to a folder for the while, where one is given."""
    before = os.environ.get(DIRECTORY_VARIABLE)
    if directory is not None:
        os.environ[DIRECTORY_VARIABLE] = str(directory)
    try:
        yield
    finally:
        if directory is not None:
            os.environ.pop(DIRECTORY_VARIABLE)
            if before is not None:
                os.environ[DIRECTORY_VARIABLE] = before


def spill_directory(directory: str | Path | None = None) -> Path:
    """The folder that is swapped to: the one given, or $ONNXREMAT_SPILL_DIR, or $TMPDIR, or /var/tmp."""
    return Path(directory or os.environ.get(DIRECTORY_VARIABLE) or os.environ.get("TMPDIR") or "/var/tmp")


def require_room(nbytes: int, directory: str | Path | None = None) -> None:
    """Raise SpillFailed unless the folder that is swapped to has so many bytes free; a step finds out only when it needs them."""
    where = spill_directory(directory)
    try:
        free = shutil.disk_usage(where).free
    except OSError as error:
        raise SpillFailed(f"can't swap to {where}: {error.strerror or error}; {_ELSEWHERE}") from error
    if free < nbytes:
        raise SpillFailed(f"a step swaps {format_bytes(nbytes)} out, and {where} has {format_bytes(free)} free: make room there, or {_ELSEWHERE}")
