"""A bookmark index in LMDB: the folder `FILE.index` beside the stream file.

Keys are the bookmarks' own bytes, values the entry numbers as big-endian u64, several a key
where a key occurs several times. Owns what stands in the databases; the environment around
them is `environment.py`'s.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Literal

import lmdb

from datastreamer.errors import IndexFailed, StreamFileError, UntrustedFile
from datastreamer.storage.access import Access, Folder
from datastreamer.storage.bookmarks._pairs import Merged, Pairs
from datastreamer.storage.bookmarks.base import (
    BookmarkIndex,
    IndexDamaged,
    IndexReadOnly,
    IndexUnmade,
    IndexUntrusted,
    Pace,
    Watermark,
    at_once,
)
from datastreamer.storage.bookmarks.environment import (
    INDEX_FILES,
    Opened,
    SharedEnvironment,
    begin,
    file_id,
)
from datastreamer.storage.disk import OsDisk
from datastreamer.storage.mounts import ensure_local

_NUMBER = struct.Struct(">Q")
_WATERMARK = struct.Struct(">IQQ")
_LAYOUT = 1
# What `fill` sorts in memory at a time, and puts into one transaction: 32 and some 25 bytes each.
_RUN = 1_000_000
_BATCH = 1_000_000
_LITTLE_ROOM = 64 * 1024  # bytes: less than any transaction takes
_WAY_OUT = "; or open the stream with index='memory'"
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


def index_folder(path: str) -> str:
    """Where the index of the stream file at `path` is kept."""
    return path + ".index"


class LmdbIndex(BookmarkIndex):
    """The index in one folder, of the stream file that has this `access`. Raises `IndexFailed`
    with LMDB's own reason, `IndexUntrusted`."""

    def __init__(
        self, folder: str, write: bool, access: Access, *, beside_writer: bool = False
    ) -> None:
        self._folder = folder
        for name in INDEX_FILES:
            path = os.path.join(folder, name)
            if os.path.exists(path) and not os.path.isfile(path):
                # Merely opening a named pipe would wait for somebody at its other end.
                raise IndexFailed(
                    path, "is no file, and in the way of the bookmark index; move it elsewhere"
                )
        try:
            self._shared: SharedEnvironment | None = SharedEnvironment.get(
                folder, write, access, beside_writer
            )
        except UntrustedFile as error:
            raise _untrusted(error, write) from error
        except (lmdb.Error, OSError) as error:
            raise _cannot_open(folder, error, write) from error

    def _env(self) -> SharedEnvironment:
        if self._shared is None:
            raise IndexFailed(self._folder, "the bookmark index is closed")
        return self._shared

    @contextlib.contextmanager
    def _read(self, name: Literal["meta", "keys"]) -> Iterator[lmdb.Transaction]:
        shared = self._env()
        with shared.turn if shared.small else contextlib.nullcontext():
            opened = shared.opened
            try:
                with begin(opened.env, getattr(opened, name)) as transaction:
                    yield transaction
            except lmdb.Error as error:
                raise IndexFailed(self._folder, f"the bookmark index: {error}") from error

    def watermark(self) -> Watermark | None:
        with self._read("meta") as transaction:
            packed = transaction.get(b"watermark")
        if packed is None or len(packed) < _WATERMARK.size:
            return None
        layout, length, entries = _WATERMARK.unpack_from(packed)
        if layout != _LAYOUT:
            return None
        return Watermark(length, entries, bytes(packed[_WATERMARK.size :]))

    def newest(self, key: bytes) -> int | None:
        with self._read("keys") as transaction, transaction.cursor() as cursor:
            if not cursor.set_key(key):
                return None
            cursor.last_dup()
            packed = cursor.value()
        if len(packed) != _NUMBER.size:
            what = f"the bookmark index: {len(packed)} bytes stand where an entry number belongs"
            raise IndexFailed(self._folder, what)
        return int(_NUMBER.unpack(packed)[0])

    # For a check against the file.

    def lacks(self, bookmarks: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """Those of `bookmarks` that the index does not hold."""
        with self._read("keys") as transaction, transaction.cursor() as cursor:
            holds = cursor.set_key_dup
            return [(key, n) for key, n in bookmarks if not holds(key, _NUMBER.pack(n))]

    def pairs(self) -> int:
        """How many bookmarks it holds; a key that occurs twice counts twice."""
        with self._read("keys") as transaction:
            return int(transaction.stat(self._env().opened.keys)["entries"])

    def everything(self) -> Iterator[tuple[bytes, int]]:
        """All bookmarks that it holds. The index does not shrink while this is under way."""
        with self._read("keys") as transaction, transaction.cursor() as cursor:
            for key, packed in cursor.iternext(keys=True, values=True):
                yield bytes(key), int.from_bytes(packed, "big")

    @contextlib.contextmanager
    def _change(self) -> Iterator[tuple[Opened, lmdb.Transaction]]:
        shared = self._env()
        opened = shared.opened
        try:
            with begin(opened.env, None, write=True) as transaction:
                yield opened, transaction
            if opened.file_id == file_id(self._folder):
                shared.ensure_whole(opened.env, opened.place, extend=True)
        except _DAMAGE as error:
            raise IndexDamaged(self._folder, f"the bookmark index: {error}") from error
        except (lmdb.Error, OSError) as error:
            why = _why(error, self._folder)
            raise IndexFailed(self._folder, f"the bookmark index: {why}") from error

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        pairs = bookmarks if isinstance(bookmarks, Pairs) else Pairs(bookmarks)
        # Sorted within a transaction, LMDB takes in about twice as many a second.
        run = pairs.sorted()

        def put() -> None:
            with self._change() as (opened, transaction):
                _put(transaction, opened, Merged([run], pace))
                _put_watermark(transaction, opened, watermark)

        self._until_it_fits(put)

    def _until_it_fits(self, write: Callable[[], None]) -> None:
        while True:
            try:
                write()
            except IndexFailed as error:
                if not isinstance(error.__cause__, lmdb.MapFullError):
                    raise
            else:
                return
            try:
                self._env().grow()
            except (lmdb.Error, MemoryError) as error:
                raise IndexFailed(
                    self._folder, f"the bookmark index needs more address space: {error}"
                ) from error

    def fill(
        self, parts: Iterable[Pairs], watermark: Callable[[], Watermark], pace: Pace = at_once
    ) -> None:
        # All of it in the order of the keys: each page is written once and full. Batch by
        # batch of the file, a page would be copied again and again and end half empty.
        try:
            with tempfile.TemporaryFile(dir=os.path.dirname(self._folder)) as aside:
                runs = _runs(parts, aside)
                mark = watermark()
                self._until_it_fits(lambda: self._put_all(Merged(runs, pace), mark))
        except OSError as error:
            raise IndexFailed(self._folder, f"the bookmarks cannot be sorted: {error}") from error

    def _put_all(self, items: Iterator[tuple[bytes, bytes]], watermark: Watermark) -> None:
        # It may hold the batches of a try that did not fit; the map has to stay, it has grown.
        with self._change() as (opened, transaction):
            transaction.drop(opened.keys, delete=False)
            transaction.drop(opened.meta, delete=False)
        while True:
            with self._change() as (opened, transaction):
                if _put(transaction, opened, itertools.islice(items, _BATCH)) < _BATCH:
                    _put_watermark(transaction, opened, watermark)
                    return

    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        gone = list(bookmarks) if isinstance(bookmarks, Iterator) else bookmarks

        def delete() -> None:
            with self._change() as (opened, transaction):
                for key, number in gone:
                    transaction.delete(key, _NUMBER.pack(number), db=opened.keys)
                _put_watermark(transaction, opened, watermark)

        self._until_it_fits(delete)

    def in_place(self) -> bool:
        return self._env().opened.file_id == file_id(self._folder)

    def clear(self) -> None:
        # Not page by page: LMDB does not check what it empties, and a damaged page may lead
        # it past the file's end, which ends the process.
        try:
            self._env().renew()
        except UntrustedFile as error:
            raise _untrusted(error, True) from error
        except (lmdb.Error, OSError) as error:
            raise _cannot_open(self._folder, error, True) from error

    def clear_unfinished(self) -> None:
        """Begin anew where there is no watermark: an index that only seems empty may be damaged,
        and writing into such a one may end the process."""
        with contextlib.suppress(IndexFailed):
            if self.watermark() is not None:
                return
        try:
            self.clear()
        except IndexFailed:
            self.close()
            raise

    def __bool__(self) -> bool:
        return self.pairs() > 0

    def __len__(self) -> int:
        with self._read("keys") as transaction, transaction.cursor() as cursor:
            return sum(1 for _ in cursor.iternext_nodup(keys=True, values=False))

    def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.release()


def _cannot_open(folder: str, error: Exception, write: bool) -> IndexFailed:
    if isinstance(error, lmdb.NotFoundError):
        return IndexUnmade(folder, "the bookmark index is empty: its making was cut off")
    why = _why(error, os.path.dirname(folder))
    return IndexFailed(folder, f"the bookmark index cannot be opened: {why}{_WAY_OUT * write}")


def _untrusted(error: UntrustedFile, write: bool) -> IndexUntrusted:
    why = f"{error.what}; the bookmark index is not used: remove it"
    return IndexUntrusted(error.path, why + _WAY_OUT * write)


def _why(error: Exception, folder: str) -> str:
    """What LMDB says; on a full disk it speaks of an input/output error."""
    with contextlib.suppress(OSError):
        room = os.statvfs(folder)
        if isinstance(error, lmdb.Error) and room.f_bavail * room.f_frsize < _LITTLE_ROOM:
            return f"{os.strerror(errno.ENOSPC)} ({error})"
    return str(error)


def _put_watermark(transaction: lmdb.Transaction, opened: Opened, watermark: Watermark) -> None:
    packed = _WATERMARK.pack(_LAYOUT, watermark.length, watermark.entries)
    transaction.put(b"watermark", packed + watermark.identity, db=opened.meta)


def _put(
    transaction: lmdb.Transaction, opened: Opened, items: Iterable[tuple[bytes, bytes]]
) -> int:
    """Put in what comes, best in ascending order; how many came."""
    with transaction.cursor(db=opened.keys) as cursor:
        consumed: int = cursor.putmulti(items, dupdata=True)[0]
    return consumed


def _runs(parts: Iterable[Pairs], aside: IO[bytes]) -> list[memoryview]:
    """The parts in sorted runs of bounded size, all but the last in the file `aside`."""
    ends, pairs = [0], Pairs()
    for part in parts:
        pairs.extend(part)
        if len(pairs) >= _RUN:
            aside.write(pairs.sorted())
            ends.append(aside.tell())
            pairs = Pairs()
    runs = [memoryview(pairs.sorted())]
    aside.flush()
    if ends[-1]:
        # The map lives as long as the views of it.
        content = memoryview(mmap.mmap(aside.fileno(), 0, access=mmap.ACCESS_READ))
        runs += (content[start:end] for start, end in itertools.pairwise(ends))
    return runs


def new_index(path: str, write: bool, access: Access) -> LmdbIndex:
    """An empty index for the stream file at `path`; one that stands there goes unopened, since
    writing into a damaged one may end the process."""
    return _open_index(path, write, access, anew=write)


def open_index(path: str, write: bool, access: Access) -> LmdbIndex:
    """The index of the stream file at `path`.

    A damaged one is thrown away and begun anew where `write` allows; raises
    `IndexReadOnly` where it does not, or where there is none to read.
    """
    return _open_index(path, write, access, anew=False)


def _open_index(path: str, write: bool, access: Access, *, anew: bool) -> LmdbIndex:
    folder = index_folder(path)
    if not write and not os.path.lexists(os.path.join(folder, "data.mdb")):
        raise IndexReadOnly(folder, "there is no bookmark index")
    if os.path.lexists(folder) and not (os.path.isdir(folder) or os.path.islink(folder)):
        raise IndexFailed(folder, "is in the way of the bookmark index; move it elsewhere")
    try:
        ensure_local(folder, "a bookmark index in LMDB")
    except StreamFileError as error:
        if write:
            raise IndexFailed(folder, error.what + _WAY_OUT) from None
        raise IndexReadOnly(folder, error.what) from error
    if anew:
        _remove(folder, access)
    was_there = file_id(folder) is not None
    try:
        beside_writer = not write and _is_written(path)
        index = LmdbIndex(folder, write, access, beside_writer=beside_writer)
        if write and was_there:
            index.clear_unfinished()
        return index
    except IndexFailed as error:
        if not write:
            raise IndexReadOnly(folder, error.what) from error
        if not isinstance(error.__cause__, _DAMAGE):
            raise  # no memory, no permission: it may be as good as ever
    _remove(folder, access)
    return LmdbIndex(folder, True, access)


def _remove(folder: str, access: Access) -> None:
    try:
        with Folder(folder, access, INDEX_FILES, write=True, narrow=True) as opened:
            opened.remove(INDEX_FILES)
    except UntrustedFile as error:
        raise _untrusted(error, True) from error
    except OSError as error:
        raise IndexFailed(folder, f"the bookmark index cannot be removed: {error}") from error


def _is_written(path: str) -> bool:
    """Whether somebody has the stream file at `path` open for writing."""
    try:
        file = OsDisk().open(path, write=False)
    except OSError:
        return False
    try:
        return file.locked_elsewhere()
    finally:
        file.close()
