"""A bookmark index in LMDB: the folder `FILE.index` beside the stream file.

Stores the blocks of `_blocks.pyx` under the last place of their range, and the watermark.
LMDB has no checksums, so this checks everything that it reads: a block that does not match its
checksum, or is not the one for the key, raises `IndexDamaged`. Owns the content of the database;
`lmdb_environment.py` owns the environment.
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
from typing import IO, NamedTuple

import lmdb
from xxhash import xxh3_64_digest

from datastreamer.errors import DatastreamerError, IndexFailed, StreamFileError, UntrustedFile
from datastreamer.storage.bookmarks._blocks import (
    FIRST,
    LAST,
    PAIR_SIZE,
    PLACE_SIZE,
    Blocks,
    BlockSearch,
    DamagedBlockError,
    MissingBlockError,
    empty_block,
    lacking,
    merged,
    place_at,
    unpacked,
    without,
)
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexDamaged,
    IndexReading,
    IndexReadOnly,
    IndexUnmade,
    IndexUntrusted,
    IndexWentBack,
    Pace,
    Watermark,
    at_once,
)
from datastreamer.storage.bookmarks.lmdb_environment import (
    INDEX_FILES,
    INDEX_SUFFIX,
    Opened,
    SharedEnvironment,
    file_id,
)
from datastreamer.storage.disk.access import Access, Folder
from datastreamer.storage.disk.file_ops import Buffer, OsDisk
from datastreamer.storage.disk.mounts import ensure_local

_WATERMARK = struct.Struct(">IQQ")
_WATERMARK_KEY = LAST + b"\xff"  # after all blocks
_SUM_SIZE = 8
_LAYOUT = 2
# Pairs that `fill` sorts in memory at a time, at 32 bytes each, three copies during the sort.
_RUN = 250_000
# Blocks per transaction of `fill`: about 21 MB.
_BATCH = 16_000
# Blocks that `add` changes between two calls of `pace`.
_STEP = 32
_FULL_DISK_BYTES = 64 * 1024  # less free space than any transaction needs
_ALTERNATIVE = "; or open the stream with index='memory'"
_MAX_MARK = 1024  # bytes of a watermark that are read
_Change = Callable[[Buffer, bytes, int], tuple[list[tuple[bytes, bytes]], int]]
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)


def _damaged(folder: str, what: str) -> IndexDamaged:
    return IndexDamaged(folder, f"the bookmark index is damaged: {what}")


def index_folder(path: str) -> str:
    """The folder of the index of the stream file at `path`."""
    return path + INDEX_SUFFIX


class _KnownWatermark(NamedTuple):
    """A watermark as it was last read or written, and the transaction that did so."""

    opened: Opened | None
    transaction: int
    packed: bytes
    entries: int


class _LmdbReading(BlockSearch, IndexReading):
    """A read transaction and its cursor."""

    __slots__ = ("_folder", "_known", "_opened", "_transaction")

    def __init__(self, folder: str, opened: Opened, known: _KnownWatermark) -> None:
        self._folder = folder
        self._opened = opened
        self._known = known
        try:
            self._transaction = opened.begin()
            # The end of the transaction closes it.
            super().__init__(self._transaction.cursor())
        except lmdb.Error as error:
            raise IndexFailed(folder, f"the bookmark index: {error}") from error
        if opened is known.opened and self._transaction.id() < known.transaction:
            self.end()
            raise _damaged(folder, "an older state has replaced the newest")

    def ensure_newest(self) -> None:
        """Without the key: check that its block belongs to the newest state."""
        known = self._known
        packed = self._transaction.get(_WATERMARK_KEY, b"")
        if packed == known.packed or self._opened is not known.opened:
            return
        mark = _unpack_watermark(bytes(packed[:_MAX_MARK]))
        covers = 0 if mark is None else mark.entries
        if covers < known.entries:
            why = f"the bookmark index covers {covers} entries, fewer than before ({known.entries})"
            raise IndexWentBack(self._folder, why)

    def failed(self, error: Exception) -> None:
        """A look-up failed; returns if there may be no block."""
        if isinstance(error, lmdb.Error):
            raise IndexFailed(self._folder, f"the bookmark index: {error}") from error
        if isinstance(error, DamagedBlockError):
            never_written = self._opened is not self._known.opened
            if never_written and isinstance(error, MissingBlockError):
                return
            raise _damaged(self._folder, str(error)) from None
        raise error

    def end(self) -> None:
        self._transaction.abort()


class LmdbIndex(BookmarkIndex):
    """The index in one folder, of the stream file that has this `access`. Raises `IndexFailed`
    with LMDB's reason, or `IndexUntrusted`."""

    def __init__(
        self, folder: str, write: bool, access: Access, *, beside_writer: bool = False
    ) -> None:
        self._folder = folder
        # The last watermark, and that of the transaction in progress.
        self._known = self._putting = _KnownWatermark(None, 0, b"", 0)
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
    def _read(self) -> Iterator[tuple[Opened, lmdb.Transaction]]:
        opened = self._env().opened
        try:
            with opened.begin() as transaction:
                yield opened, transaction
        except lmdb.Error as error:
            raise IndexFailed(self._folder, f"the bookmark index: {error}") from error
        except DamagedBlockError as error:
            raise _damaged(self._folder, str(error)) from None

    def watermark(self) -> Watermark | None:
        with self._read() as (opened, transaction):
            packed = bytes(transaction.get(_WATERMARK_KEY, b"")[:_MAX_MARK])
            mark = _unpack_watermark(packed)
            if mark is not None:
                self._known = _KnownWatermark(opened, transaction.id(), packed, mark.entries)
            return mark

    def newest(self, key: bytes) -> int | None:
        reading = self.reading()
        try:
            return reading.newest(key)
        finally:
            reading.end()

    def reading(self) -> IndexReading:
        return _LmdbReading(self._folder, self._env().opened, self._known)

    # For a comparison with the file.

    def lacks(self, bookmarks: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """Those of `bookmarks` that the index does not have."""
        run, at, missing = _run_of(bookmarks), 0, []
        with self._read() as (_, transaction), transaction.cursor() as cursor:
            while at < len(run) // PAIR_SIZE:
                some, at = lacking(_block_for(cursor, run, at), run, at)
                missing += some
        return missing

    def pairs(self) -> int:
        """The number of bookmarks; a key that occurs twice counts twice."""
        return sum(len(pairs) for pairs in self._blocks())

    def everything(self) -> Iterator[tuple[bytes, int]]:
        """All bookmarks, in one read transaction."""
        return itertools.chain.from_iterable(self._blocks())

    def _blocks(self) -> Iterator[list[tuple[bytes, int]]]:
        before = FIRST
        with self._read() as (_, transaction), transaction.cursor() as cursor:
            for place, block in cursor.iternext(keys=True, values=True):
                if len(place) != PLACE_SIZE:
                    break
                pairs, before = unpacked(block, before)
                yield pairs
            if before not in (LAST, FIRST):
                raise DamagedBlockError("its end is missing")

    @contextlib.contextmanager
    def _change(self) -> Iterator[tuple[Opened, lmdb.Transaction]]:
        shared = self._env()
        opened = shared.opened
        try:
            with opened.begin(write=True) as transaction:
                yield opened, transaction
            self._known = self._putting
            if opened.file_id == file_id(self._folder):
                shared.ensure_whole(opened.env, opened.place, extend=True)
        except _DAMAGE as error:
            raise IndexDamaged(self._folder, f"the bookmark index: {error}") from error
        except DamagedBlockError as error:
            raise _damaged(self._folder, str(error)) from None
        except (lmdb.Error, OSError) as error:
            why = _why(error, self._folder)
            raise IndexFailed(self._folder, f"the bookmark index: {why}") from error

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        self._replace(merged, _run_of(bookmarks), watermark, pace)

    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        self._replace(without, _run_of(bookmarks), watermark, at_once)

    def _replace(self, change: _Change, run: bytes, watermark: Watermark, pace: Pace) -> None:
        """Change the blocks that the pairs of `run` belong to, in one transaction."""
        at = steps = 0
        with self._change() as (opened, transaction):
            with transaction.cursor() as cursor:
                if not cursor.first():
                    transaction.put(LAST, empty_block())
                while at < len(run) // PAIR_SIZE:
                    blocks, at = change(_block_for(cursor, run, at), run, at)
                    cursor.putmulti(blocks)
                    steps += 1
                    if not steps % _STEP:
                        pace()
            self._put_watermark(opened, transaction, watermark)

    def _put_watermark(
        self, opened: Opened, transaction: lmdb.Transaction, watermark: Watermark
    ) -> None:
        packed = _WATERMARK.pack(_LAYOUT, watermark.length, watermark.entries)
        packed += watermark.identity
        packed += xxh3_64_digest(packed)
        transaction.put(_WATERMARK_KEY, packed)
        self._putting = _KnownWatermark(opened, transaction.id(), packed, watermark.entries)

    def fill(
        self, parts: Iterable[Pairs], watermark: Callable[[], Watermark], pace: Pace = at_once
    ) -> None:
        # In the order of the keys each page is written once, and full. In the order of the file,
        # pages would be copied repeatedly and end half empty.
        try:
            with tempfile.TemporaryFile(dir=os.path.dirname(self._folder)) as aside:
                runs = _runs(parts, aside)
                self._put_all(Blocks(runs, pace), watermark())
        except DatastreamerError:
            raise  # also one of what yields the parts, which may be an OSError
        except OSError as error:
            raise IndexFailed(self._folder, f"the bookmarks cannot be sorted: {error}") from error

    def _put_all(self, blocks: Iterator[tuple[bytes, bytes]], watermark: Watermark) -> None:
        with self._change() as (opened, transaction):
            transaction.drop(opened.blocks, delete=False)
        while True:
            with self._change() as (opened, transaction):
                if _put(transaction, itertools.islice(blocks, _BATCH)) < _BATCH:
                    self._put_watermark(opened, transaction, watermark)
                    return

    def in_place(self) -> bool:
        return self._env().opened.file_id == file_id(self._folder)

    def clear(self) -> None:
        # New files, because LMDB does not check the pages that it empties: a damaged one may make
        # it read past the file's end, which ends the process.
        try:
            self._env().renew()
        except UntrustedFile as error:
            raise _untrusted(error, True) from error
        except (lmdb.Error, OSError) as error:
            raise _cannot_open(self._folder, error, True) from error

    def clear_unfinished(self) -> None:
        """Replace an index without a watermark: it may only seem empty because it is damaged, and
        writing to a damaged one may end the process."""
        with contextlib.suppress(IndexFailed):
            if self.watermark() is not None:
                return
        try:
            self.clear()
        except IndexFailed:
            self.close()
            raise

    def __bool__(self) -> bool:
        with self._read() as (_, transaction):
            return int(transaction.stat(self._env().opened.blocks)["entries"]) > 0

    def __len__(self) -> int:
        return sum(1 for _ in itertools.groupby(self.everything(), lambda pair: pair[0]))

    def close(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.release()


def _cannot_open(folder: str, error: Exception, write: bool) -> IndexFailed:
    if isinstance(error, lmdb.NotFoundError):
        return IndexUnmade(folder, "the bookmark index is empty: its creation was interrupted")
    why = _why(error, os.path.dirname(folder))
    return IndexFailed(folder, f"the bookmark index cannot be opened: {why}{_ALTERNATIVE * write}")


def _untrusted(error: UntrustedFile, write: bool) -> IndexUntrusted:
    why = f"{error.what}; the bookmark index is not used: remove it"
    return IndexUntrusted(error.path, why + _ALTERNATIVE * write)


def _why(error: Exception, folder: str) -> str:
    """LMDB's message; or the reason, where LMDB's message does not say what to do."""
    if isinstance(error, lmdb.MapFullError):
        return f"needs more address space (ulimit -v): {error}"
    # On a full disk LMDB reports an input/output error.
    with contextlib.suppress(OSError):
        room = os.statvfs(folder)
        if isinstance(error, lmdb.Error) and room.f_bavail * room.f_frsize < _FULL_DISK_BYTES:
            return f"{os.strerror(errno.ENOSPC)} ({error})"
    return str(error)


def _unpack_watermark(packed: bytes) -> Watermark | None:
    """The watermark; None if it is missing or of another layout. Raises `DamagedBlockError`."""
    if not packed:
        return None
    if len(packed) < _WATERMARK.size + _SUM_SIZE or (
        xxh3_64_digest(packed[:-_SUM_SIZE]) != packed[-_SUM_SIZE:]
    ):
        raise DamagedBlockError("the checksum of the watermark does not match")
    layout, length, entries = _WATERMARK.unpack_from(packed)
    if layout != _LAYOUT:
        return None
    return Watermark(length, entries, packed[_WATERMARK.size : -_SUM_SIZE])


def _block_for(cursor: lmdb.Cursor, run: bytes, at: int) -> Buffer:
    """The block for pair `at` of `run`. Raises `DamagedBlockError` if there is none."""
    if not cursor.set_range(place_at(run, at)):
        raise DamagedBlockError("a block is missing")
    return cursor.value()


def _run_of(bookmarks: Iterable[tuple[bytes, int]]) -> bytes:
    if isinstance(bookmarks, Pairs):
        return bookmarks.sorted()
    return Pairs(sorted(bookmarks, key=lambda pair: pair[1])).sorted()


def _put(transaction: lmdb.Transaction, blocks: Iterable[tuple[bytes, bytes]]) -> int:
    """Append blocks; returns how many there were."""
    with transaction.cursor() as cursor:
        consumed: int = cursor.putmulti(blocks, append=True)[0]
    return consumed


def _runs(parts: Iterable[Pairs], aside: IO[bytes]) -> list[memoryview]:
    """The parts as sorted runs of bounded size, all but the last in the file `aside`."""
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
        content = memoryview(mmap.mmap(aside.fileno(), 0, access=mmap.ACCESS_READ))
        runs += (content[start:end] for start, end in itertools.pairwise(ends))
    return runs


def open_index(path: str, write: bool, access: Access, *, anew: bool = False) -> LmdbIndex:
    """The index of the stream file at `path`.

    With `write` a damaged one is replaced by an empty one; with `anew` any one is, without opening
    it: writing to a damaged one may end the process. Without `write`, raises `IndexReadOnly` if it
    is damaged or there is none.
    """
    folder = index_folder(path)
    if not write and not os.path.lexists(os.path.join(folder, "data.mdb")):
        raise IndexReadOnly(folder, "there is no bookmark index")
    if os.path.lexists(folder) and not (os.path.isdir(folder) or os.path.islink(folder)):
        raise IndexFailed(folder, "is in the place of the bookmark index; move it elsewhere")
    try:
        ensure_local(folder, "a bookmark index in LMDB")
    except StreamFileError as error:
        if write:
            raise IndexFailed(folder, error.what + _ALTERNATIVE) from None
        raise IndexReadOnly(folder, error.what) from error
    if anew and write:
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
            raise IndexReadOnly(error.path, error.what) from error
        if not isinstance(error.__cause__, _DAMAGE):
            raise  # for lack of memory or permission: the index may be intact
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
    """Whether a process has the stream file at `path` open for writing."""
    try:
        with contextlib.closing(OsDisk().open(path, write=False)) as file:
            return file.locked_elsewhere()
    except OSError:
        return False
