"""The LMDB environment of one index folder, shared by all in this process that open it.

Owns what ends a process that does not know it: how large the map is, that every page of the
file has its place on disk, who may be under way while the map changes, what a fork leaves.
Knows nothing of bookmarks but the name of the database.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, ClassVar, Final, NamedTuple

import lmdb

from datastreamer.errors import IndexFailed
from datastreamer.storage.disk.access import Access, Folder

INDEX_FILES: Final = ("data.mdb", "lock.mdb")
INDEX_SUFFIX: Final = ".index"

# Address space, not memory or disk: a map of so much is reserved once and never has to grow.
_WHOLE_MAP = 1 << 40
_MAP_SIZE = _WHOLE_MAP
# Where the process may not have so much (ulimit -v), a quarter is tried, and so on to this;
# such a map grows when it is full.
_LEAST_MAP_SIZE = 1 << 24
_MAX_READERS = 1024
# Behind its last page the file has this much more: where a page is damaged, LMDB may look for an
# entry of it up to 64 KiB after it, twice; after the file's end that crashes the process.
_SLACK_BYTES = 128 * 1024
# As large as LMDB makes it for so many readers.
_LOCK_FILE_BYTES = 128 + 64 * _MAX_READERS


# The folder, and device and inode of the stream file beside it; None: there is none.
_Key = tuple[str, tuple[int, int] | None]


class Opened(NamedTuple):
    """An environment with its database. Its folder is open as long as it is: its files are
    changed there, whatever is at the folder's name by then."""

    place: Folder
    env: lmdb.Environment
    blocks: Any
    # Which file it is; None where it was removed at once.
    file_id: tuple[int, int] | None


class SharedEnvironment:
    """One process's environment for one index folder; the openers take turns.

    Each stream file that was at the folder's path has one of its own: a writer may still have
    the file open that another one has replaced since.
    """

    open_ones: ClassVar[dict[_Key, SharedEnvironment]] = {}
    guard = threading.Lock()

    def __init__(self, key: _Key, write: bool, access: Access, beside_writer: bool) -> None:
        self.key = key
        self.folder = key[0]
        self.access = access
        self.users = 0
        self.write = write
        # Held by a thread that reads or grows a map that is not the whole one: no transaction is
        # open then.
        self.turn = threading.Lock()
        self.small = False
        self.opened = self.open(beside_writer)

    def open(self, beside_writer: bool = False) -> Opened:
        # A reader that uses LMDB's lock file writes into it. If no process writes the index it
        # need not, and leaves no trace. (If a writer comes nevertheless:
        # pages of a snapshot are used again two transactions later at the earliest, and
        # each question here is a transaction of its own.)
        place = self._folder()
        try:
            return self._open_in(place, beside_writer)
        except BaseException:
            place.close()
            raise

    def _folder(self) -> Folder:
        write = self.write
        return Folder(self.folder, self.access, INDEX_FILES, write=write, narrow=write)

    def _open_in(self, place: Folder, beside_writer: bool) -> Opened:
        for name in place.irregular:
            raise IndexFailed(
                os.path.join(self.folder, name),
                "is no file, and in the way of the bookmark index; move it elsewhere",
            )
        lock = self.write or (beside_writer and os.access("lock.mdb", os.W_OK, dir_fd=place.fd))
        if self.write:
            _reserve(place, "lock.mdb", _LOCK_FILE_BYTES)
        env = _environment(place, self.write, lock)
        try:
            self.ensure_whole(env, place, extend=False)
            self.small = env.info()["map_size"] < _WHOLE_MAP
            env.reader_check()
            return Opened(
                place,
                env,
                env.open_db(b"blocks", create=self.write),
                file_id(self.folder),
            )
        except BaseException:
            env.close()
            raise

    def ensure_whole(self, env: lmdb.Environment, place: Folder, *, extend: bool) -> None:
        """See to it that no page is past the file's end: a look at it would end the process.

        LMDB leaves out free pages at the end now and then; the writer makes up for it after
        each transaction, so that a file that lacks some is known to be truncated.
        """
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        try:
            size = os.stat("data.mdb", dir_fd=place.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return  # it was removed; the open one lives on until it is closed
        if size < needed and not extend:
            raise lmdb.CorruptedError(f"data.mdb has {size} of {needed} bytes")
        if size < needed:
            _reserve(place, "data.mdb", needed)
        if extend and size < needed + _SLACK_BYTES:
            with contextlib.suppress(OSError):  # a full disk
                _reserve(place, "data.mdb", needed + _SLACK_BYTES)

    def grow(self) -> None:
        """Double the map. Raises `lmdb.Error` if there is no address space."""
        with self.turn:
            env = self.opened.env
            env.set_mapsize(2 * env.info()["map_size"])

    def renew(self) -> None:
        """Begin again with empty files. A question to the old ones is still answered: they are
        closed when no transaction is open any more."""
        with self.guard:
            with self._folder() as place:
                place.remove(INDEX_FILES)
            before, self.opened = self.opened, self.open()
            before.place.close()

    @classmethod
    def get(
        cls, folder: str, write: bool, access: Access, beside_writer: bool
    ) -> SharedEnvironment:
        """The environment, opened for writing if anybody here needs that."""
        # Of the folder itself a link is not followed.
        parent, own = os.path.split(os.path.abspath(folder))
        name = os.path.join(os.path.realpath(parent), own)
        key = name, _stream_file(name)
        with cls.guard:
            shared = cls.open_ones.get(key) or cls._of_another_file(name, write, access)
            if shared is None:
                shared = cls.open_ones[key] = cls(key, write, access, beside_writer)
            elif write and not shared.write:
                shared.opened.env.close()
                shared.opened.place.close()
                shared.write = True
                try:
                    shared.opened = shared.open()
                except BaseException:
                    shared.write = False  # the next one tries again
                    raise
            shared.users += 1
            return shared

    @classmethod
    def _of_another_file(cls, folder: str, write: bool, access: Access) -> SharedEnvironment | None:
        """What a reader shares that a stream file has open which is not at the path any more:
        LMDB does not open an environment twice in a process. A writer begins with new files.
        """
        found = file_id(folder)
        for shared in cls.open_ones.values():
            if shared.folder == folder and found is not None and shared.opened.file_id == found:
                if not write:
                    return shared
                with Folder(folder, access, INDEX_FILES, write=True) as place:
                    place.remove(INDEX_FILES)
                break
        return None

    def release(self) -> None:
        with self.guard:
            self.users -= 1
            if self.users == 0:
                self.open_ones.pop(self.key, None)
                self.opened.env.close()
                self.opened.place.close()

    @classmethod
    def forget_all(cls) -> None:
        """In the child of a fork: an environment does not survive one, and needs no folder."""
        for shared in cls.open_ones.values():
            shared.opened.place.close()
        cls.open_ones = {}
        cls.guard = threading.Lock()


os.register_at_fork(after_in_child=SharedEnvironment.forget_all)


def _reserve(place: Folder, name: str, size: int) -> None:
    """Have all of the file on disk, `size` bytes at least: where a mapped page has no place
    on a full disk, a look at it ends the process.

    Not for a lock file that is in use here: closing it gives up this process's locks on it.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, place.file_mode, dir_fd=place.fd)
    try:
        now = os.fstat(file).st_size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, max(now, size))
        elif now < size:
            os.pwrite(file, bytes(size - now), now)
    finally:
        os.close(file)


def _environment(place: Folder, write: bool, lock: bool) -> lmdb.Environment:
    """The environment, with as large a map as the process may have."""
    size = _MAP_SIZE
    while True:
        try:
            return lmdb.open(
                os.fsencode(place.path),
                map_size=size,
                mode=place.file_mode,
                max_dbs=1,
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


def begin(env: lmdb.Environment, db: Any, *, write: bool = False) -> lmdb.Transaction:
    """A transaction, also where another process has made the file larger than our map."""
    try:
        return env.begin(db=db, write=write, buffers=True)
    except lmdb.MapResizedError:
        env.set_mapsize(0)
        return env.begin(db=db, write=write, buffers=True)


def file_id(folder: str) -> tuple[int, int] | None:
    """Which file it is that holds the index."""
    return _identity(os.path.join(folder, "data.mdb"))


def _stream_file(folder: str) -> tuple[int, int] | None:
    """Which file it is that the index in `folder` belongs to."""
    return _identity(folder.removesuffix(INDEX_SUFFIX))


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
