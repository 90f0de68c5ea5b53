"""The user's cache: what was exported and measured once, addressed by the content that it was made from.

``$ONNXREMAT_CACHE`` names its folder; without it, it is ``onnxremat`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.  It is a help and not a need:
where it can't be written, things are made anew.  Entries are written whole, and may be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UsageError
from .files import write_json
from .locks import MachineLock, file_lock

__all__ = ["KINDS", "CacheUse", "cache_folder", "cache_root", "cached_json", "clear_cache", "entry_lock", "hash_file", "machine_lock", "usage"]

#: Kind of content -> what it is.
KINDS = {
    "exports": "forward graphs of PyTorch models, without their weights",
    "profiles": "seconds of every operator of an unscheduled step",
    "kernels": "scratch memory of kernels",
    "bandwidth": "how fast folders to swap to are",
    "spill": "the library of the swap operators, where it was built on first use",
}
_LOCKS = "locks"


def cache_root() -> Path:
    """The cache's folder, there or not."""
    own = os.environ.get("ONNXREMAT_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnxremat"


def cache_folder(kind: str) -> Path | None:
    """The folder of one kind of content; None where it can't be made or written."""
    folder = cache_root() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def entry_lock(kind: str, key: str) -> Iterator[Path | None]:
    """Within the block no other process makes this entry; gives the folder of the kind, or None where there is no cache."""
    folder, locks = cache_folder(kind), cache_folder(_LOCKS)
    with file_lock(locks / f"{kind}-{key[-2:]}.lock") if locks else nullcontext():
        yield folder


def cached_json(kind: str, key: str, make: Callable[[], Any]) -> Any:
    """The entry of a key, made where it is missing or damaged; by one process, while others that want it wait."""
    with entry_lock(kind, key) as folder:
        path = folder / f"{key}.json" if folder else None
        if path is not None and path.exists():
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                path.unlink(missing_ok=True)
        result = make()
        if path is not None:
            try:
                write_json(path, result)
            except OSError:
                path.unlink(missing_ok=True)
    return result


def machine_lock() -> MachineLock | None:
    """The lock that keeps measurements of time on this machine apart from other work; None where there is no cache folder."""
    folder = cache_folder(f"{_LOCKS}/{socket.gethostname()}")
    return _machine_lock(folder) if folder else None


@functools.cache
def _machine_lock(folder: Path) -> MachineLock:
    return MachineLock(folder)  # one for the process: it knows what the process holds


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What one kind of content takes.

    Attributes:
        kind: its name, one of ``KINDS``.
        entries: files.
        bytes: of them all.
    """

    kind: str
    entries: int
    bytes: int


def usage() -> list[CacheUse]:
    """What each kind of content takes."""
    found = []
    for kind in KINDS:
        sizes = [size for _, size in _files(kind)]
        found.append(CacheUse(kind, len(sizes), sum(sizes)))
    return found


def clear_cache(kinds: Sequence[str] = ()) -> list[CacheUse]:
    """Delete the entries of some kinds, or of all; returns what was deleted.

    Raises:
        UsageError: there is no such kind.
        OSError: a file can't be deleted.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"there is no cache of '{kind}': choose from {', '.join(KINDS)}")
    freed = []
    for kind in kinds or KINDS:
        sizes = []
        for path, size in _files(kind):
            path.unlink(missing_ok=True)
            sizes.append(size)
        freed.append(CacheUse(kind, len(sizes), sum(sizes)))
    return freed


def _files(kind: str) -> list[tuple[Path, int]]:
    found = []
    for path in sorted((cache_root() / kind).glob("*")):
        try:
            if path.is_file():
                found.append((path, path.stat().st_size))
        except FileNotFoundError:
            continue  # another process was faster
    return found
