"""A bookmark index in LMDB: the folder `FILE.index` beside the stream file.

One environment a process and index, shared by the streams that open it. Keys are the
bookmarks' own bytes, values the entry numbers as big-endian u64, several a key where a
key occurs several times.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, ClassVar, Literal, NamedTuple

import lmdb

from datastreamer.errors import IndexFailed, StreamFileError
from datastreamer.storage.bookmarks._pairs import Merged, Pairs
from datastreamer.storage.bookmarks.base import (
    BookmarkIndex,
    IndexDamaged,
    IndexReadOnly,
    Pace,
    Watermark,
    at_once,
)
from datastreamer.storage.disk import OsDisk
from datastreamer.storage.mounts import ensure_local

# Address space, not memory or disk: a map of so much is reserved once and never has to grow.
_WHOLE_MAP = 1 << 40
_MAP_SIZE = _WHOLE_MAP
# Where the process may not have so much (ulimit -v), a quarter is tried, and so on to this;
# such a map grows when it is full.
_LEAST_MAP_SIZE = 1 << 24
_MAX_READERS = 1024
# As large as LMDB makes it for so many readers.
_LOCK_FILE_BYTES = 128 + 64 * _MAX_READERS
_NUMBER = struct.Struct(">Q")
_WATERMARK = struct.Struct(">IQQ")
_LAYOUT = 1
# What `fill` sorts in memory at a time, and puts into one transaction: 32 and some 25 bytes each.
_RUN = 1_000_000
_BATCH = 1_000_000
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


class _Opened(NamedTuple):
    """An environment with its two databases."""

    env: lmdb.Environment
    meta: Any
    keys: Any
    # Which file it is; None where it was removed at once.
    file_id: tuple[int, int] | None


class _Shared:
    """One process's environment for one index folder; the openers take turns."""

    open_ones: ClassVar[dict[str, _Shared]] = {}
    guard = threading.Lock()

    def __init__(self, folder: str, write: bool, beside_writer: bool) -> None:
        self.folder = folder
        self.users = 0
        self.write = write
        # Taken by who reads or grows a map that is not the whole one: no transaction may be
        # under way then.
        self.turn = threading.Lock()
        self.small = False
        self.opened = self.open(beside_writer)

    def open(self, beside_writer: bool = False) -> _Opened:
        # A reader that takes part in LMDB's lock file writes into it. Where nobody writes
        # the index he need not, and leaves no trace. (Should a writer come all the same:
        # pages of a snapshot are used again two transactions later at the earliest, and
        # each question here is a transaction of its own.)
        lock_file = os.path.join(self.folder, "lock.mdb")
        lock = self.write or (beside_writer and os.access(lock_file, os.W_OK))
        if self.write:
            _reserve(lock_file, _LOCK_FILE_BYTES)
        env = _environment(self.folder, self.write, lock)
        try:
            self.ensure_whole(env, extend=False)
            self.small = env.info()["map_size"] < _WHOLE_MAP
            env.reader_check()
            return _Opened(
                env,
                env.open_db(b"meta", create=self.write),
                env.open_db(b"bookmarks", create=self.write, dupsort=True, dupfixed=True),
                _file_id(self.folder),
            )
        except BaseException:
            env.close()
            raise

    def ensure_whole(self, env: lmdb.Environment, *, extend: bool) -> None:
        """See to it that no page is past the file's end: a look at it would end the process.

        LMDB leaves out free pages at the end now and then; the writer makes up for it after
        each transaction, so that a file that lacks some is taken for one that was cut short.
        """
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        data = os.path.join(self.folder, "data.mdb")
        try:
            size = os.path.getsize(data)
        except FileNotFoundError:
            return  # somebody removed it; ours lives on until it is closed
        if size < needed and not extend:
            raise lmdb.CorruptedError(f"data.mdb has {size} of {needed} bytes")
        if size < needed:
            _reserve(data, needed)

    def grow(self) -> None:
        """Make place for twice as much. Raises `lmdb.Error` where there is none."""
        with self.turn:
            env = self.opened.env
            env.set_mapsize(2 * env.info()["map_size"])

    def renew(self) -> None:
        """Begin anew with empty files. Who asks the old one just now gets his answer: it is
        closed when nobody has a transaction any more."""
        with self.guard:
            os.makedirs(self.folder, exist_ok=True)
            _remove_files(self.folder)
            self.opened = self.open()

    @classmethod
    def get(cls, folder: str, write: bool, beside_writer: bool) -> _Shared:
        """The environment, opened for writing if anybody here needs that."""
        name = os.path.realpath(folder)
        with cls.guard:
            shared = cls.open_ones.get(name)
            if shared is None:
                shared = cls.open_ones[name] = cls(name, write, beside_writer)
            elif write and not shared.write:
                shared.opened.env.close()
                shared.write = True
                try:
                    shared.opened = shared.open()
                except BaseException:
                    shared.write = False  # the next one tries again
                    raise
            shared.users += 1
            return shared

    def release(self) -> None:
        with self.guard:
            self.users -= 1
            if self.users == 0:
                self.open_ones.pop(self.folder, None)
                self.opened.env.close()

    @classmethod
    def forget_all(cls) -> None:
        """In the child of a fork: an environment does not survive one."""
        cls.open_ones = {}
        cls.guard = threading.Lock()


os.register_at_fork(after_in_child=_Shared.forget_all)


class LmdbIndex(BookmarkIndex):
    """The index in one folder. Raises `IndexFailed` with LMDB's own reason."""

    def __init__(self, folder: str, write: bool, *, beside_writer: bool = False) -> None:
        self._folder = folder
        try:
            if write:
                os.makedirs(folder, exist_ok=True)
            self._shared: _Shared | None = _Shared.get(folder, write, beside_writer)
        except (lmdb.Error, OSError) as error:
            raise _cannot_open(folder, error, write) from error

    def _env(self) -> _Shared:
        if self._shared is None:
            raise IndexFailed(self._folder, "the bookmark index is closed")
        return self._shared

    @contextlib.contextmanager
    def _read(self, name: Literal["meta", "keys"]) -> Iterator[lmdb.Transaction]:
        shared = self._env()
        with shared.turn if shared.small else contextlib.nullcontext():
            opened = shared.opened
            try:
                with _begin(opened.env, getattr(opened, name)) as transaction:
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
            return int(_NUMBER.unpack(cursor.value())[0])

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
    def _change(self) -> Iterator[tuple[_Opened, lmdb.Transaction]]:
        shared = self._env()
        opened = shared.opened
        try:
            with _begin(opened.env, None, write=True) as transaction:
                yield opened, transaction
            if opened.file_id == _file_id(self._folder):
                shared.ensure_whole(opened.env, extend=True)
        except _DAMAGE as error:
            raise IndexDamaged(self._folder, f"the bookmark index: {error}") from error
        except (lmdb.Error, OSError) as error:
            raise IndexFailed(self._folder, f"the bookmark index: {error}") from error

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
        return self._env().opened.file_id == _file_id(self._folder)

    def clear(self) -> None:
        # Not page by page: LMDB does not check what it empties, and a damaged page may lead
        # it past the file's end, which ends the process.
        try:
            self._env().renew()
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
    return IndexFailed(folder, f"the bookmark index cannot be opened: {error}{_WAY_OUT * write}")


def _reserve(path: str, size: int) -> None:
    """Have all of the file on disk, `size` bytes at least: where a mapped page has no place
    on a full disk, a look at it ends the process.

    Not for a lock file that is in use here: closing it gives up this process's locks on it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        now = os.fstat(file).st_size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, max(now, size))
        elif now < size:
            os.pwrite(file, bytes(size - now), now)
    finally:
        os.close(file)


def _environment(folder: str, write: bool, lock: bool) -> lmdb.Environment:
    """The environment, with as large a map as the process may have."""
    size = _MAP_SIZE
    while True:
        try:
            return lmdb.open(
                os.fsencode(folder),
                map_size=size,
                max_dbs=2,
                max_readers=_MAX_READERS,
                readonly=not write,
                create=write,
                lock=lock,
                readahead=False,
            )
        except (lmdb.MemoryError, MemoryError):
            size //= 4
            if size < _LEAST_MAP_SIZE:
                raise


def _begin(env: lmdb.Environment, db: Any, *, write: bool = False) -> lmdb.Transaction:
    """A transaction, also where another process has made the file larger than our map."""
    try:
        return env.begin(db=db, write=write)
    except lmdb.MapResizedError:
        env.set_mapsize(0)
        return env.begin(db=db, write=write)


def _put_watermark(transaction: lmdb.Transaction, opened: _Opened, watermark: Watermark) -> None:
    packed = _WATERMARK.pack(_LAYOUT, watermark.length, watermark.entries)
    transaction.put(b"watermark", packed + watermark.identity, db=opened.meta)


def _put(
    transaction: lmdb.Transaction, opened: _Opened, items: Iterable[tuple[bytes, bytes]]
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


def open_index(path: str, write: bool) -> LmdbIndex:
    """The index of the stream file at `path`.

    A damaged one is thrown away and begun anew where `write` allows; raises
    `IndexReadOnly` where it does not, or where there is none to read.
    """
    folder = index_folder(path)
    if not write and not os.path.exists(os.path.join(folder, "data.mdb")):
        raise IndexReadOnly(folder, "there is no bookmark index")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise IndexFailed(folder, "is in the way of the bookmark index; move it elsewhere")
    try:
        ensure_local(folder, "a bookmark index in LMDB")
    except StreamFileError as error:
        if write:
            raise IndexFailed(folder, error.what + _WAY_OUT) from None
        raise IndexReadOnly(folder, error.what) from error
    was_there = _file_id(folder) is not None
    try:
        index = LmdbIndex(folder, write, beside_writer=not write and _is_written(path))
        if write and was_there:
            index.clear_unfinished()
        return index
    except IndexFailed as error:
        if not write:
            raise IndexReadOnly(folder, error.what) from error
        if not isinstance(error.__cause__, _DAMAGE):
            raise  # no memory, no permission: it may be as good as ever
    try:
        _remove_files(folder)
    except OSError as error:
        raise IndexFailed(folder, f"the bookmark index cannot be removed: {error}") from error
    return LmdbIndex(folder, True)


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


def _file_id(folder: str) -> tuple[int, int] | None:
    """Which file it is that holds the index."""
    try:
        found = os.stat(os.path.join(folder, "data.mdb"))
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove_files(folder: str) -> None:
    for name in ("data.mdb", "lock.mdb"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
