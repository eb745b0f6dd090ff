"""The LMDB environment of one index folder, which all users in this process share.

Prevents what would end the process: a map that is too small, a page of the file without space on
disk, use of an environment after a fork.
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

# Address space, not memory or disk: more than any index needs. An index that fills its map is not
# written any more.
_MAP_SIZE = 1 << 40
# If the process may not have that (ulimit -v), a quarter of it is tried, and so on down to this.
_LEAST_MAP_SIZE = 1 << 24
_MAX_READERS = 1024
# Bytes that the file has after its last page: in a damaged page, LMDB may look for an entry up to
# 64 KiB after the page, twice; a read after the file's end crashes the process.
_SLACK_BYTES = 128 * 1024
# The size that LMDB gives it for this number of readers.
_LOCK_FILE_BYTES = 128 + 64 * _MAX_READERS


# The folder, and device and inode of the stream file beside it; None if there is none.
_Key = tuple[str, tuple[int, int] | None]


class Opened(NamedTuple):
    """An environment with its database, and its folder: files are changed through the open folder,
    even if another folder has its name by then."""

    place: Folder
    env: lmdb.Environment
    blocks: Any
    # Device and inode of its file; None if that was removed at once.
    file_id: tuple[int, int] | None

    def begin(self, *, write: bool = False) -> lmdb.Transaction:
        return self.env.begin(db=self.blocks, write=write, buffers=True)


class SharedEnvironment:
    """This process's environment for one index folder.

    Each stream file that was at the folder's path has its own: a writer may still have a file open
    that was replaced since.
    """

    open_ones: ClassVar[dict[_Key, SharedEnvironment]] = {}
    guard = threading.Lock()

    def __init__(self, key: _Key, write: bool, access: Access, beside_writer: bool) -> None:
        self.key = key
        self.folder = key[0]
        self.access = access
        self.users = 0
        self.write = write
        self.opened = self.open(beside_writer)

    def open(self, beside_writer: bool = False) -> Opened:
        with contextlib.ExitStack() as undo:
            place = undo.enter_context(self._folder())
            for name in place.irregular:
                raise IndexFailed(
                    os.path.join(self.folder, name),
                    "is in the place of a file of the bookmark index; move it elsewhere",
                )
            # A reader that uses LMDB's lock file writes to it, which it need not do if no process
            # writes the index. (If a writer starts nevertheless: LMDB reuses the pages of a
            # snapshot two transactions later at the earliest, and a transaction of look-ups lasts
            # some milliseconds at most.)
            lock = self.write or (beside_writer and os.access("lock.mdb", os.W_OK, dir_fd=place.fd))
            if self.write:
                _reserve(place, "lock.mdb", _LOCK_FILE_BYTES)
            env = _environment(place, self.write, lock)
            undo.callback(env.close)
            self.ensure_whole(env, place, extend=False)
            env.reader_check()
            blocks = env.open_db(b"blocks", create=self.write)
            undo.pop_all()
            return Opened(place, env, blocks, file_id(self.folder))

    def _folder(self) -> Folder:
        write = self.write
        return Folder(self.folder, self.access, INDEX_FILES, write=write, narrow=write)

    def ensure_whole(self, env: lmdb.Environment, place: Folder, *, extend: bool) -> None:
        """Ensure that no page is past the file's end: reading it would end the process.

        LMDB sometimes leaves out free pages at the end; the writer adds them after each
        transaction, so that a file that lacks some is known to be truncated.
        """
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        try:
            size = os.stat("data.mdb", dir_fd=place.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return  # it was removed; the open file remains until it is closed
        if size < needed and not extend:
            raise lmdb.CorruptedError(f"data.mdb has {size} of {needed} bytes")
        if size < needed:
            _reserve(place, "data.mdb", needed)
        if extend and size < needed + _SLACK_BYTES:
            with contextlib.suppress(OSError):  # a full disk
                _reserve(place, "data.mdb", needed + _SLACK_BYTES)

    def renew(self) -> None:
        """Replace the files by empty ones. The old ones are closed when their last transaction
        ends."""
        with self.guard:
            with self._folder() as place:
                place.remove(INDEX_FILES)
            before, self.opened = self.opened, self.open()
            before.place.close()

    @classmethod
    def get(
        cls, folder: str, write: bool, access: Access, beside_writer: bool
    ) -> SharedEnvironment:
        """The environment, opened for writing if any user needs that."""
        # The folder itself must not be a symbolic link.
        parent, own = os.path.split(os.path.abspath(folder))
        name = os.path.join(os.path.realpath(parent), own)
        key = name, _identity(name.removesuffix(INDEX_SUFFIX))
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
        """The open environment of a stream file that is no longer at the path, for a reader to
        share: LMDB does not open an environment twice in a process. A writer gets new files.
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
        """In the child of a fork, where an environment cannot be used."""
        for shared in cls.open_ones.values():
            shared.opened.place.close()
        cls.open_ones = {}
        cls.guard = threading.Lock()


os.register_at_fork(after_in_child=SharedEnvironment.forget_all)


def _reserve(place: Folder, name: str, size: int) -> None:
    """Allocate disk space for all of the file, at least `size` bytes: reading a mapped page that
    has none on a full disk ends the process.

    Not for a lock file in use: closing it releases this process's locks on it.
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
    """The environment, with the largest map that the process may have."""
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


def file_id(folder: str) -> tuple[int, int] | None:
    """Device and inode of the file that holds the index; None if there is none."""
    return _identity(os.path.join(folder, "data.mdb"))


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
