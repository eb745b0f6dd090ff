"""Finds stream files: paths, folders and globs, local or on `pyarrow.fs` file systems.

Owns which files a path means and how to open one. Of a file's content it knows only the first
bytes, which distinguish a stream file.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from pyarrow import fs

from datastreamer.archive import PREFIX, is_archive
from datastreamer.errors import FileMissing, StreamFileError, UsageError
from datastreamer.format import HEADER_OFFSET, MAGICS
from datastreamer.spark.read import archives
from datastreamer.spark.read.remote_file import RemoteFile
from datastreamer.storage.disk.file_ops import Readable

_SCHEME: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")
# A secret may have slashes: what follows a colon is one, unless it is a port.
_KEYS: Final = re.compile(r"://(?:[^/]*|[^/:]*:(?!\d+/).*)@")
_MAGIC_CHARACTERS: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class FileLocation:
    """A file. `uri` is None for a local file; messages name the file by `path`.

    `archive` is the number of the manifest of an archive whose URL is `uri`; 0: the newest one.
    """

    path: str
    uri: str | None = None
    archive: int | None = None

    def beside(self, suffix: str) -> FileLocation:
        """The file whose name is this one's with `suffix`."""
        if self.uri is None:
            return FileLocation(self.path + suffix)
        base, query = _parts(self.uri)
        return FileLocation(self.path + suffix, base + suffix + query)

    def pinned(self, generation: int | None = None) -> FileLocation:
        """The same for all tasks of a query: of an archive, the manifest that is the newest now."""
        if self.archive is None or self.uri is None:
            return self
        return replace(self, archive=archives.newest(self.uri, generation))

    def open_remote(self) -> Readable:
        """Open the remote file. Raises `FileMissing`, `StreamFileError`."""
        assert self.uri is not None
        if self.archive is not None:
            return archives.opened(self.uri, self.archive)
        system, path = _system(self.uri)
        try:
            return RemoteFile(system.open_input_file(path), self.path)
        except FileNotFoundError:
            raise FileMissing(self.path, "no such file") from None
        except OSError as error:
            raise StreamFileError(self.path, f"cannot be opened: {error}") from error


def is_single(paths: tuple[str, ...]) -> bool:
    """Whether the query names exactly one file, so that all rows are of one stream."""
    if len(paths) > 1:
        return False
    if is_archive(paths[0]):
        return True
    local = local_path(paths[0])
    if local is not None:
        return os.path.isfile(local) or not (
            _MAGIC_CHARACTERS.search(local) or os.path.isdir(local)
        )
    uri, _ = _parts(paths[0])
    if _MAGIC_CHARACTERS.search(uri):
        return False
    system, path = _system(paths[0])
    return bool(_info(system, path, paths[0]).type != fs.FileType.Directory)


def find(paths: tuple[str, ...], *, deep: bool = False) -> list[FileLocation]:
    """The stream files that `paths` mean, without duplicates, sorted by name within each path.

    In a folder (`deep`: and its subfolders), files that begin as streams; names that begin with a
    dot or an underscore are skipped, as Spark does. Raises `FileMissing` for a path that leads to
    no stream file.
    """
    found: dict[str, FileLocation] = {}
    for path in paths:
        if is_archive(path):
            url = path.removeprefix(PREFIX).rstrip("/")
            found[path] = FileLocation(f"{PREFIX}{url}", url, 0)
            continue
        local = local_path(path)
        # Executors may have another working directory.
        locations = list(
            _find_remote(path, deep=deep)
            if local is None
            else _find_local(os.path.abspath(local), deep=deep)
        )
        if not locations:
            more = "" if deep else "; for those in its subfolders set recursiveFileLookup to true"
            raise FileMissing(_shown(path), f"it holds no stream file{more}")
        found |= {location.path: location for location in locations}
    return list(found.values())


def _find_local(path: str, *, deep: bool) -> Iterator[FileLocation]:
    # A file whose name contains a bracket is that file, not a glob.
    if os.path.isfile(path):
        yield FileLocation(path)
    elif os.path.isdir(path):
        for folder, subfolders, names in os.walk(path, onerror=_refuse_folder):
            subfolders[:] = sorted(it for it in subfolders if deep and not _is_hidden(it))
            for name in sorted(os.path.join(folder, name) for name in names):
                if not _is_hidden(name) and os.path.isfile(name) and _begins_as_stream(name):
                    yield FileLocation(name)
    elif _MAGIC_CHARACTERS.search(path):
        for name in sorted(glob.glob(path)):
            yield from _find_local(name, deep=deep)
    elif os.path.exists(path):
        raise StreamFileError(path, "neither a file nor a folder")
    else:
        raise FileMissing(path, "no such file")


def _refuse_folder(error: OSError) -> None:
    raise StreamFileError(error.filename, f"cannot be listed: {error.strerror}") from error


def _begins_as_stream(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(HEADER_OFFSET) in MAGICS
    except OSError as error:
        raise StreamFileError(path, f"cannot be read: {error.strerror or error}") from error


def _find_remote(uri: str, *, deep: bool) -> Iterator[FileLocation]:
    base, query = _parts(uri)
    magic = _MAGIC_CHARACTERS.search(base)
    if magic is not None:
        # A URI cannot contain brackets, so the file system receives only the part before them.
        root, _, pattern = base[: magic.start()].rpartition("/")
        pattern += base[magic.start() :]
        system, folder = _system(root + query)
        for info in _listing(system, folder, uri, deep="/" in pattern):
            if info.type == fs.FileType.File and _matches(info.path, f"{folder}/{pattern}"):
                yield _remote_location(root, query, folder, info.path)
        return
    system, path = _system(uri)
    info = _info(system, path, uri)
    if info.type == fs.FileType.NotFound:
        raise FileMissing(_shown(uri), "no such file")
    if info.type == fs.FileType.File:
        yield _remote_location(base, query, path, path)
        return
    for info in _listing(system, path, uri, deep=deep):
        below = info.path[len(path) :].split("/")
        if info.type != fs.FileType.File or any(map(_is_hidden, below)):
            continue
        location = _remote_location(base, query, path, info.path)
        file = location.open_remote()
        try:
            if file.read(HEADER_OFFSET, 0) in MAGICS:
                yield location
        finally:
            file.close()


def _matches(path: str, pattern: str) -> bool:
    """Like a shell glob: a star does not match a slash."""
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, like) for part, like in zip(parts, wanted, strict=True)
    )


def _remote_location(base: str, query: str, asked: str, path: str) -> FileLocation:
    # The URI ends with the file system's own path; replace that.
    uri = base.rstrip("/")
    asked = asked.rstrip("/")
    if not uri.endswith(asked):
        raise UsageError(f"{_shown(base)}: the URI does not contain its path, {asked}")
    uri = uri[: len(uri) - len(asked)] + path
    return FileLocation(_shown(uri), uri + query)


def _listing(system: Any, folder: str, uri: str, *, deep: bool) -> list[Any]:
    try:
        found = system.get_file_info(fs.FileSelector(folder, recursive=deep, allow_not_found=True))
    except OSError as error:
        raise StreamFileError(_shown(uri), f"cannot be listed: {error}") from error
    return sorted(found, key=lambda info: info.path)


def _info(system: Any, path: str, uri: str) -> Any:
    try:
        return system.get_file_info(path)
    except OSError as error:
        raise StreamFileError(_shown(uri), f"cannot be inspected: {error}") from error


def _is_hidden(path: str) -> bool:
    return posixpath.basename(path).startswith((".", "_"))


def local_path(path: str) -> str | None:
    """The local path; None if it is a URI of another file system."""
    found = _SCHEME.match(path)
    if found is None:
        return path.removeprefix("file:")
    if found[1].lower() != "file":
        return None
    try:
        return fs.FileSystem.from_uri(path)[1]  # type: ignore[no-any-return]
    except ValueError as error:
        # Not a valid URI, because of a space or a bracket for example: use the text as it is.
        plain = path[found.end() :]
        if not plain.startswith("/"):
            raise UsageError(f"{path}: {str(error).partition(chr(10))[0]}") from None
        return plain


def _parts(uri: str) -> tuple[str, str]:
    """A URI and its query, which configures the file system."""
    base, mark, query = uri.partition("?")
    return base, mark + query


def _shown(uri: str) -> str:
    """A URI as messages show it: without credentials."""
    base = _parts(uri)[0] if _SCHEME.match(uri) else uri
    return _KEYS.sub("://", base)


@functools.lru_cache(maxsize=16)
def _system(uri: str) -> tuple[Any, str]:
    """The file system of a URI, cached, and the path in it. Raises `UsageError`."""
    base, query = _parts(uri)
    # Spark users know S3 by the schemes of Hadoop's clients.
    asked = re.sub(r"^s3[an]://", "s3://", base) + query
    try:
        system, path = fs.FileSystem.from_uri(asked)
    except (ValueError, OSError, NotImplementedError) as error:
        # For HDFS, Arrow lists each library that it tried on a line of its own.
        reason = str(error).replace(asked, _shown(uri)).partition("\n")[0]
        if "Unable to load" in reason:
            reason += "; HDFS needs Hadoop's client: set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        raise UsageError(f"{_shown(uri)}: {reason}") from None
    return system, path
