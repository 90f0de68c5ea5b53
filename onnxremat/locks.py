"""Locks between processes, which end with the process that holds them: a killed job leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no POSIX: then nothing is kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["MachineLock", "file_lock", "try_lock"]


def _take(file: IO[str], shared: bool = False, wait: bool = True) -> None:
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _leave(file: IO[str]) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Within the block this process alone holds ``path``; waits for others. The file stays behind, empty."""
    with open(path, "a", encoding="utf-8") as file:
        _take(file)
        yield


def try_lock(path: Path) -> IO[str] | None:
    """The open file that holds the lock of ``path`` until it is closed, or None where another process has it."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    try:
        _take(file, wait=False)
    except BlockingIOError:
        file.close()
        return None
    return file


class MachineLock:
    """Keeps measurements of time apart from other work of this program on the machine.

    Any number of processes may be ``busy`` at a time, or one may be ``alone``.  One that waits to be alone is not overtaken by others that
    become busy: those wait at a gate before.

    Args:
        folder: where the lock's two files are; processes that name the same folder know of each other.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._room = folder / "gate.lock", folder / "room.lock"
        self._held: IO[str] | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within the block no other process is alone, except while this one waits for that itself."""
        with open(self._room, "a", encoding="utf-8") as room:
            with file_lock(self._gate):
                _take(room, shared=True)
            self._held = room
            try:
                yield
            finally:
                self._held = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no other process is busy or alone; waits for them. A process that is busy is so again afterwards."""
        if self._held is not None:
            _leave(self._held)
        with open(self._room, "a", encoding="utf-8") if self._held is None else _borrowed(self._held) as room, file_lock(self._gate):
            _take(room)
            try:
                yield
            finally:
                if self._held is not None:
                    _take(room, shared=True)


@contextmanager
def _borrowed(file: IO[str]) -> Iterator[IO[str]]:
    yield file
