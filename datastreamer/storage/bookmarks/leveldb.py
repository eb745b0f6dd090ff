"""Reads the reference implementation's bookmark database.

A LevelDB folder of keys and entry numbers (u64, big-endian). Opening one replays its journal and
writes, so a copy is opened. Its content may differ from a scan of the file: the reference writes a
bookmark before the commit and never removes one.
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
    """The folder in which the reference keeps the database of the stream file at `path`: the path
    up to its first dot, even one in a folder's name, and ".db"."""
    return path.partition(".")[0] + ".db"


class ReferenceBookmarks:
    """The database in `folder`, as it is now; a context manager.

    Raises `FileMissing`, or `IndexFailed` if it is not such a database, is in use or damaged, or
    if plyvel is not installed.
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
            with self._converted_errors():
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
    def _converted_errors(self) -> Iterator[None]:
        """Raise plyvel's errors as `IndexFailed`."""
        try:
            yield
        except self._plyvel.Error as error:
            raise IndexFailed(self._folder, f"the database cannot be read: {error}") from error

    def items(self) -> Iterator[tuple[bytes, int | None]]:
        """Keys in ascending order with their numbers; None if the value is not a number."""
        with self._converted_errors():
            for key, value in self._database:
                yield (
                    bytes(key),
                    int.from_bytes(value, "big") if len(value) == _NUMBER_SIZE else None,
                )

    def __contains__(self, key: bytes) -> bool:
        with self._converted_errors():
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
        raise IndexFailed(folder, "is not a LevelDB database")
    try:
        lock = os.open(os.path.join(folder, "LOCK"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        # The reference holds this lock while it runs; a copy would be inconsistent.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise IndexFailed(folder, "is in use; stop the program that has it open") from None
    finally:
        os.close(lock)
