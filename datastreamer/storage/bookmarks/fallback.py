"""The index in LMDB, or in memory while no file can be created beside the stream.

For servers, which also start on a full disk and in a folder without write permission. Owns the
choice between the two and the return to disk. The index in memory takes about 250 bytes a bookmark.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from datastreamer.errors import IndexFailed
from datastreamer.storage.bookmarks import lmdb
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexDamaged,
    IndexElsewhere,
    IndexUntrusted,
    Pace,
    Watermark,
    at_once,
)
from datastreamer.storage.bookmarks.lmdb_environment import INDEX_FILES
from datastreamer.storage.bookmarks.memory import MemoryIndex
from datastreamer.storage.disk.access import Access, Folder

_log = logging.getLogger(__package__)

LMDB_OR_MEMORY: Final = "lmdb-or-memory"
"""The name of this backend."""

# The system's messages for why no file can be created; an `IndexFailed` quotes them.
_NO_PLACE = tuple(
    os.strerror(number)
    for number in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
    )
)
# Interval between attempts to return to disk, and the space that must be free there: a minimum,
# plus a number of bytes per bookmark. An index must leave space for the stream.
_RETRY_SECONDS = 10.0
_LEAST_FREE = 4 << 20
_BYTES_EACH = 128
# Bookmarks per part when the index is copied to disk.
_PART = 100_000


class FallbackIndex:
    """A `BookmarkIndex`: an `LmdbIndex` or a `MemoryIndex` does all that is not done here."""

    def __init__(self, path: str, access: Access) -> None:
        self._path = path
        self._access = access
        self._tried = 0.0
        self._full = ""
        self._index: BookmarkIndex
        try:
            self._index = lmdb.open_index(path, True, access)
        except IndexFailed as error:
            if not _has_no_place(error):
                raise
            self._to_memory(error.what)

    def _to_memory(self, why: str) -> None:
        self._index, self._full, self._tried = MemoryIndex(), "", time.monotonic()
        _log.warning(
            "%s: the bookmark index is kept in memory until it fits on disk: %s",
            self._path,
            why.partition("; or open the stream")[0],
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        with self._while_empty():
            self._index.add(bookmarks, watermark, pace)

    def fill(
        self, parts: Iterable[Pairs], watermark: Callable[[], Watermark], pace: Pace = at_once
    ) -> None:
        with self._while_empty(filling=True):
            self._index.fill(parts, watermark, pace)

    @contextlib.contextmanager
    def _while_empty(self, *, filling: bool = False) -> Iterator[None]:
        """If the disk has no space for the first write to the index, abandon it. An index with a
        watermark stays in use: look-ups read what it lacks from the stream."""
        try:
            yield
        except IndexFailed as error:
            if not (self._index.on_disk and _has_no_place(error)):
                raise
            if not filling and self._index.watermark() is not None:
                raise
            # `clear` replaces it by one in memory; until then it answers look-ups.
            self._full = error.what
            raise IndexDamaged(error.path, error.what) from error

    def clear(self) -> None:
        if self._full:
            self._index.close()
            _remove(self._path, self._access)
            self._to_memory(self._full)
        self._index.clear()

    def upkeep(self, pace: Pace = at_once) -> None:
        """Return to disk if there is space."""
        index, now = self._index, time.monotonic()
        if not isinstance(index, MemoryIndex) or now - self._tried < _RETRY_SECONDS:
            return
        self._tried = now
        mark = index.watermark()
        if mark is None or _free(self._path) < _LEAST_FREE + _BYTES_EACH * index.pairs():
            return
        made: BookmarkIndex | None = None
        try:
            made = lmdb.open_index(self._path, True, self._access)
            made.fill(index.parts(_PART), lambda: mark, pace)
        except BaseException as error:
            if made is not None:
                made.close()
                if not isinstance(error, IndexElsewhere):
                    _remove(self._path, self._access)
            if not (isinstance(error, IndexFailed) and _has_no_place(error)):
                raise
            return
        self._index = made
        _log.info("%s: the bookmark index is on disk now", self._path)

    def __bool__(self) -> bool:
        return bool(self._index)

    def __len__(self) -> int:
        return len(self._index)


def _has_no_place(error: IndexFailed) -> bool:
    return isinstance(error, IndexUntrusted) or any(words in error.what for words in _NO_PLACE)


def _free(path: str) -> int:
    try:
        room = os.statvfs(os.path.dirname(path) or ".")
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


def _remove(path: str, access: Access) -> None:
    """Remove the index files, to free their space."""
    folder = lmdb.index_folder(path)
    with contextlib.suppress(OSError):
        with Folder(folder, access, INDEX_FILES, write=False) as opened:
            opened.remove(INDEX_FILES)
        os.rmdir(folder)


def open_index(path: str, write: bool, access: Access) -> BookmarkIndex:
    """The index of the stream file at `path`; a reader gets an `LmdbIndex`."""
    if not write:
        return lmdb.open_index(path, False, access)
    return cast("BookmarkIndex", FallbackIndex(path, access))
