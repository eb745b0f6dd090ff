"""Permissions of the files beside a stream: at most those of the stream itself.

The one place that decides the permissions of a new file or folder there, and whether an existing
one is used: no symbolic link is followed, and the owner must be this process's user, root, or the
owner of the stream. Another user may be able to write in the folder. Knows nothing of the files'
content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

from datastreamer.errors import UntrustedFile

_LINUX = sys.platform.startswith("linux")
_LINK = "is a symbolic link, which is not followed here"
_IRREGULAR = "is not a regular file"
_ACL = "system.posix_acl_access"
_DEFAULT_ACL = "system.posix_acl_default"
_ACL_OWNER = 1
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Access(NamedTuple):
    """The owner, the group and the permission bits of a stream file."""

    uid: int
    gid: int
    mode: int

    @classmethod
    def of(cls, fd: int) -> Access:
        """The access of an open file."""
        found = os.fstat(fd)
        mode = stat.S_IMODE(found.st_mode)
        least = _least_listed(fd)
        if least is not None:
            mode = mode & ~0o077 | least << 3 | least
        return cls(found.st_uid, found.st_gid, mode)

    @classmethod
    def private(cls, path: str | None = None) -> Access:
        """For files that belong to no stream, and only to this process's user.

        With `path`, which names such a file, the owner of its folder is trusted as well: a file
        system that maps users (CIFS, NFS) reports that owner for our own files.
        """
        owner = os.geteuid()
        if path is not None:
            with contextlib.suppress(OSError):
                owner = os.stat(os.path.dirname(path) or ".").st_uid
        return cls(owner, os.getegid(), 0o600)

    @classmethod
    def by_umask(cls) -> Access:
        """For files whose permissions only the umask limits."""
        return cls(os.geteuid(), os.getegid(), 0o666)

    def file_mode(self, gid: int) -> int:
        """The maximum permissions of a file of group `gid` beside the stream.

        If the group is not the stream's, group and others both get only what both have.
        """
        group, other = self.mode >> 3 & 6, self.mode & 6
        if gid != self.gid:
            group = other = group & other
        return 0o600 | group << 3 | other

    def folder_mode(self, gid: int) -> int:
        """The same for a folder: users who may read may also look up files."""
        mode = self.file_mode(gid)
        return mode | (mode & 0o444) >> 2

    def distrusts(self, found: os.stat_result) -> str:
        """Why a file beside the stream must not be used; empty if it may be."""
        if stat.S_ISLNK(found.st_mode):
            return _LINK
        if found.st_uid not in (os.geteuid(), 0, self.uid):
            return (
                f"belongs to user {found.st_uid}, who is not the user of this process, root or the "
                "owner of the stream or folder"
            )
        return ""


def create_file(path: str, access: Access | None) -> int:
    """Create an empty file and open it for writing; returns a descriptor. The umask applies.

    Without `access` it belongs to no existing stream. Raises `FileExistsError` also if `path` is a
    broken symbolic link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    if access is None:
        return os.open(path, flags, 0o644)
    most = access.file_mode(_group_in(os.stat(os.path.dirname(path) or ".")))
    fd = os.open(path, flags, most)
    try:
        if _drop_acl(fd, most):
            # A user on the folder's default list may have opened it already. The next file is
            # private until its list is removed; as with such a list, the umask does not apply.
            os.unlink(path)
            os.close(fd)
            fd = -1
            fd = os.open(path, flags, 0o600)
            _drop_acl(fd, most)
            os.fchmod(fd, most)
        found = os.fstat(fd)
        _narrow(fd, found, access.file_mode(found.st_gid))
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def open_file(path: str, access: Access, *, write: bool) -> int:
    """Open an existing file beside a stream; returns a descriptor. Raises `UntrustedFile`."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedFile(path, _LINK) from None
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder, a socket
            raise UntrustedFile(path, _IRREGULAR) from None
        raise
    try:
        found = os.fstat(fd)
        why = access.distrusts(found)
        if not why and not stat.S_ISREG(found.st_mode):
            why = _IRREGULAR
        if why:
            raise UntrustedFile(path, why)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_folder(path: str, access: Access) -> None:
    """Create a folder beside a stream, if there is none. The umask applies."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.lexists(parent):
        os.makedirs(parent, exist_ok=True)
    try:
        os.mkdir(path, access.folder_mode(_group_in(os.stat(parent))))
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    # Another user may have replaced it since.
    fd, found = _open_folder(path, access)
    try:
        most = access.folder_mode(found.st_gid)
        _narrow(fd, found, most)
        _drop_acl(fd, most)
    finally:
        os.close(fd)


def check_folder(path: str, access: Access) -> None:
    """Check the owner of a folder beside a stream, which others may write to.

    Raises `UntrustedFile` and `OSError`.
    """
    fd, _ = _open_folder(path, access)
    os.close(fd)


class Folder:
    """An open folder beside a stream in which only trusted users can change a name.

    `path` leads to the open folder even if it is renamed, on Linux. `names` are the files that are
    used in it: existing ones are checked. With `write` a missing folder is created. With `narrow`
    the folder and its files lose the permissions that the stream lacks. `irregular` lists the names
    that are not regular files: opening a named pipe would wait for its other end. Raises
    `UntrustedFile` and `OSError`.
    """

    def __init__(
        self,
        path: str,
        access: Access,
        names: Iterable[str],
        *,
        write: bool,
        narrow: bool = False,
    ) -> None:
        if write and not os.path.lexists(path):
            make_folder(path, access)
        self.fd, found = _open_folder(path, access)
        try:
            most = access.folder_mode(found.st_gid)
            self.file_mode = access.file_mode(_group_in(found))
            self.irregular: list[str] = []
            if narrow:
                found = _narrow(self.fd, found, most)
                try:
                    _drop_acl(self.fd, most)
                except OSError:  # another trusted user owns the folder; new files inherit the list
                    self.file_mode = 0o600
            if _writable_beyond(self.fd, found, most):
                raise _changeable(path, found)
            link = f"/proc/self/fd/{self.fd}"
            self.path = link if _LINUX and os.path.isdir(link) else path
            for name in names:
                self._check(path, name, access, narrow=narrow)
        except BaseException:
            os.close(self.fd)
            raise

    def _check(self, path: str, name: str, access: Access, *, narrow: bool) -> None:
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        why = access.distrusts(found)
        if not why and stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            why = "has another name elsewhere (a hard link)"
        if why:
            raise UntrustedFile(os.path.join(path, name), why)
        most = access.file_mode(found.st_gid)
        # By name: opening and closing a lock file would release this process's locks on it.
        file = os.path.join(self.path, name)
        if narrow:
            with contextlib.suppress(PermissionError):
                if found.st_mode & 0o666 & ~most:
                    os.chmod(name, found.st_mode & most, dir_fd=self.fd)
                    found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                _drop_acl(file, most)
        if not stat.S_ISREG(found.st_mode):
            self.irregular.append(name)
        elif _writable_beyond(file, found, most):
            raise _changeable(os.path.join(path, name), found)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_folder(path: str, access: Access) -> tuple[int, os.stat_result]:
    """A descriptor of a folder beside a stream, and its status. Raises `UntrustedFile`."""
    try:
        fd = os.open(path, _FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = access.distrusts(os.lstat(path)) or "is not a folder"
            raise UntrustedFile(path, why) from None
        raise
    try:
        found = os.fstat(fd)
        why = access.distrusts(found)
        if why:
            raise UntrustedFile(path, why)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def _group_in(folder: os.stat_result) -> int:
    """The group that a new file in the folder gets."""
    inherits = folder.st_mode & stat.S_ISGID or not _LINUX
    return folder.st_gid if inherits else os.getegid()


def _least_listed(file: int | str) -> int | None:
    """The permissions that everyone but the owner has by a file's access control list; None if it
    has no list.

    The file's mode does not say this: its group bits are the maximum of the list.
    """
    if not _LINUX:
        return None
    try:
        packed = os.getxattr(file, _ACL, follow_symlinks=isinstance(file, int))
    except OSError:
        return None
    least = 0o007
    for tag, allowed, _ in struct.iter_unpack("<HHI", packed[4:]):
        if tag != _ACL_OWNER:
            least &= allowed
    return least


def _changeable(path: str, found: os.stat_result) -> UntrustedFile:
    mode = stat.S_IMODE(found.st_mode)
    return UntrustedFile(path, f"can be changed by other users (its mode is {mode:04o})")


def _writable_beyond(file: int | str, found: os.stat_result, most: int) -> bool:
    """Whether users may write to it to whom `most` does not allow that."""
    if found.st_mode & 0o020 and _least_listed(file) is not None:
        most &= ~0o020 | (most & 0o002) << 3  # the list may name anyone
    return bool(found.st_mode & 0o022 & ~most)


def _drop_acl(file: int | str, most: int) -> bool:
    """Remove the access control lists that a file or folder may have inherited; True if it had one.

    Does nothing if `most` lets every user read and write: no list allows more.
    """
    if not _LINUX or most & 0o066 == 0o066:
        return False
    had = False
    for name in (_ACL, _DEFAULT_ACL):
        follow = isinstance(file, int)
        try:
            os.getxattr(file, name, follow_symlinks=follow)
            os.removexattr(file, name, follow_symlinks=follow)
            had = True
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP, errno.ENOSYS, errno.ENOENT):
                raise
    return had


def _narrow(fd: int, found: os.stat_result, most: int) -> os.stat_result:
    """Remove the permissions beyond `most`, if the system allows it."""
    if found.st_mode & 0o777 & ~most:
        with contextlib.suppress(OSError):  # the mount may fix the permissions
            os.fchmod(fd, found.st_mode & (most | 0o7000))
            return os.fstat(fd)
    return found
