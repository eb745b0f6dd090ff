"""Where a reader's position is kept between two runs: a file, or an LMDB environment.

A crash leaves the old position or the new one, whole. Must not know where the position comes from.
Each reader needs a cursor of its own: two readers overwrite each other's position.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

import lmdb

from datastreamer.errors import BadPosition, CursorFailed, UntrustedFile
from datastreamer.position import Position
from datastreamer.storage.disk.access import Access, Folder, create_file, open_file
from datastreamer.storage.disk.file_ops import sync_folder
from datastreamer.storage.disk.mounts import ensure_local

# Room for some thousand cursors; only what is used is on disk.
_MAP_SIZE = 16 << 20
_FILES = ("data.mdb", "lock.mdb")


class FileCursor:
    """A position in a small file of its own, as a line of JSON.

    A save writes `path`.new, syncs it and renames it. The file has mode 0600, or the permissions
    that it was given since. Raises `CursorFailed`, also for a symbolic link and for a file that
    belongs to a user other than this process's, root or the owner of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def load(self) -> Position | None:
        """The position that was saved last; None if the file does not exist yet."""
        try:
            with open(open_file(self._path, Access.private(self._path), write=False), "rb") as file:
                return Position.from_json(file.read())
        except FileNotFoundError:
            return None
        except UntrustedFile as error:
            raise CursorFailed(
                self._path, f"{error.what}; remove the file to begin again"
            ) from None
        except OSError as error:
            raise CursorFailed(self._path, f"cannot be read: {error.strerror}") from error
        except BadPosition as error:
            raise CursorFailed(self._path, f"{error}; remove the file to begin again") from error

    def save(self, position: Position) -> None:
        """Replace the saved position; on disk on return."""
        new = f"{self._path}.new"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)  # a save that was killed left it
            with open(create_file(new, Access.private()), "wb") as file:
                with contextlib.suppress(FileNotFoundError):
                    before = os.lstat(self._path)
                    if stat.S_ISREG(before.st_mode) and before.st_uid == os.geteuid():
                        os.fchmod(file.fileno(), before.st_mode & 0o666)
                file.write(position.to_json().encode("ascii") + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path)
            sync_folder(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise CursorFailed(self._path, f"cannot be written: {error.strerror}") from error


class LmdbCursor:
    """A position under a name in an LMDB environment: the caller's own, or one at a path.

    In the caller's own environment `save` can be part of a transaction in which the caller stores
    its results: both are stored, or neither. `database` is a handle of a named database in it. At a
    path, the cursor makes a folder of its own; close it, or use it in a ``with``. Raises
    `CursorFailed`.
    """

    def __init__(
        self,
        where: lmdb.Environment | str | os.PathLike[str],
        name: str = "cursor",
        *,
        database: Any = None,
    ) -> None:
        self._key = name.encode()
        self._database = database
        self._own = not isinstance(where, lmdb.Environment)
        if isinstance(where, lmdb.Environment):
            self._environment = where
            self._path = where.path()
            return
        self._path = os.fspath(where)
        try:
            with Folder(self._path, Access.private(), _FILES, write=True) as folder:
                ensure_local(self._path, "a cursor in LMDB")
                for file in folder.irregular:
                    path = os.path.join(self._path, file)
                    raise CursorFailed(path, "is not a regular file; move it elsewhere")
                self._environment = lmdb.open(
                    folder.path, map_size=_MAP_SIZE, max_spare_txns=0, mode=folder.file_mode
                )
                self._ensure_whole(folder)
        except UntrustedFile as error:
            raise CursorFailed(error.path, f"{error.what}; remove it to begin again") from None
        except (OSError, lmdb.Error) as error:
            raise CursorFailed(self._path, f"cannot be opened: {error}") from error

    def _ensure_whole(self, folder: Folder) -> None:
        """Ensure that the file has all pages: access to a page past its end would end the process.

        LMDB does not write free pages at the end, so a valid file may lack some. If the file was
        cut short, LMDB reads zeros there and reports them as damage.
        """
        pages = self._environment.info()["last_pgno"] + 1
        needed = pages * self._environment.stat()["psize"]
        data = os.open("data.mdb", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
        try:
            if os.fstat(data).st_size < needed:
                os.ftruncate(data, needed)
        finally:
            os.close(data)

    def __enter__(self) -> LmdbCursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environment, if it is this cursor's own."""
        if self._own:
            self._environment.close()

    def load(self) -> Position | None:
        """The position that was saved last; None before the first save."""
        try:
            with self._environment.begin(db=self._database) as transaction:
                found = transaction.get(self._key)
            return None if found is None else Position.from_json(bytes(found))
        except (lmdb.Error, BadPosition) as error:
            raise CursorFailed(self._path, f"the cursor cannot be read: {error}") from error

    def save(self, position: Position, transaction: lmdb.Transaction | None = None) -> None:
        """Replace the saved position; on disk on return, or with the caller's `transaction`."""
        value = position.to_json().encode("ascii")
        try:
            if transaction is not None:
                transaction.put(self._key, value, db=self._database)
                return
            with self._environment.begin(write=True, db=self._database) as own:
                own.put(self._key, value)
        except lmdb.Error as error:
            raise CursorFailed(self._path, f"the cursor cannot be written: {error}") from error
