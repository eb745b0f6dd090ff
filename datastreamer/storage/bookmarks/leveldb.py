"""The reference implementation's bookmark database: read, never written.

A LevelDB folder of keys and entry numbers (u64, big-endian). Opening one replays its
journal and writes, so a copy is opened. It is not what a scan of the file would give: the
reference writes a bookmark before its commit and never takes one back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from datastreamer.errors import FileMissing, IndexFailed

_NUMBER_SIZE = 8


def database_folder(path: str) -> str:
    """Where the reference keeps the database of the stream file at `path`: named by the path
    up to its first dot, wherever that stands."""
    return path.partition(".")[0] + ".db"


class ReferenceBookmarks:
    """The database in `folder`, as it is now; a context manager.

    Raises `FileMissing`; `IndexFailed` where it is no such database, is in use or damaged,
    or where the package that reads it is not installed.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._plyvel = _plyvel(folder)
        self._held = contextlib.ExitStack()
        try:
            _ensure_at_rest(folder)
            copy = self._held.enter_context(tempfile.TemporaryDirectory(prefix="datastreamer."))
            copied = os.path.join(copy, "db")
            shutil.copytree(folder, copied, copy_function=shutil.copyfile)
            with self._told():
                self._database: Any = self._plyvel.DB(copied, create_if_missing=False)
            self._held.callback(self._database.close)
        except (OSError, shutil.Error) as error:
            self._held.close()
            if isinstance(error, FileMissing | IndexFailed):
                raise
            raise IndexFailed(folder, f"the database cannot be copied: {error}") from error
        except BaseException:
            self._held.close()
            raise

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Around what the database does: its errors become ours."""
        try:
            yield
        except self._plyvel.Error as error:
            raise IndexFailed(self._folder, f"the database cannot be read: {error}") from error

    def items(self) -> Iterator[tuple[bytes, int | None]]:
        """Keys in ascending order with their numbers; None where the value is no number."""
        with self._told():
            for key, value in self._database:
                yield (
                    bytes(key),
                    int.from_bytes(value, "big") if len(value) == _NUMBER_SIZE else None,
                )

    def __contains__(self, key: bytes) -> bool:
        with self._told():
            return self._database.get(key) is not None

    def __enter__(self) -> ReferenceBookmarks:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


def _plyvel(folder: str) -> Any:
    try:
        return import_module("plyvel")
    except ImportError:
        raise IndexFailed(
            folder, "reading it needs plyvel: pip install 'datastreamer[leveldb]'"
        ) from None


def _ensure_at_rest(folder: str) -> None:
    if not os.path.lexists(folder):
        raise FileMissing(folder, "no such folder")
    if not os.path.exists(os.path.join(folder, "CURRENT")):
        raise IndexFailed(folder, "is no LevelDB database")
    try:
        lock = os.open(os.path.join(folder, "LOCK"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        # The reference holds this while it runs, and writes; a copy would be of two moments.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise IndexFailed(folder, "a running program has it open; end that first") from None
    finally:
        os.close(lock)
