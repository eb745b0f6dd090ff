"""The folder of a pipeline's tables, on a local disk or on a file system of Hadoop's.

Owns how a small file is put there as a whole. Must not know what the files say.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from datastreamer.errors import StreamFileError, UsageError
from datastreamer.spark.read.paths import local_path

_TAKEN: Final = "another ingest is writing to it"
_MAGIC: Final = re.compile(r"([\[\]{}*?\\])")


class TableFolder:
    """A folder that driver and executors see under one name. Names are relative to it; errors are
    `StreamFileError`."""

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(path)
        self._path = Path(self.url)
        self._lock: int | None = None

    def lock(self) -> None:
        """Make it, and refuse other ingests until `close` where the file system can."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise StreamFileError(self.url, f"cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StreamFileError(self.url, _TAKEN) from None

    def names(self, folder: str) -> list[str]:
        """The names in a folder in it, sorted; none if it does not exist."""
        with contextlib.suppress(OSError):
            return sorted(os.listdir(self._path / folder))
        return []

    def read(self, name: str) -> bytes | None:
        """A file; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return (self._path / name).read_bytes()
        return None

    def put(self, name: str, data: bytes) -> None:
        """Make a file that does not exist, as a whole or not at all."""
        path = self._path / name
        whole = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(data)
            whole.rename(path)
        except OSError as error:
            raise StreamFileError(path, f"cannot be written: {error.strerror}") from None

    def remove(self, pattern: str) -> None:
        """Remove the files and folders that match."""
        for path in self._path.glob(pattern):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise StreamFileError(path, f"cannot be removed: {error.strerror}") from None

    def close(self) -> None:
        """Unlock it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class HadoopFolder(TableFolder):
    """A folder that Spark reaches through Hadoop, such as ``s3a://bucket/tables``.

    Nothing locks it: of two ingests, one fails when both make the same file.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url.rstrip("/")
        from pyspark import SparkContext

        java: Any = SparkContext._jvm
        self._named = java.org.apache.hadoop.fs.Path
        with self._errors(self.url):
            conf = java.org.apache.spark.SparkContext.getOrCreate().hadoopConfiguration()
            self._system = self._named(self.url).getFileSystem(conf)

    def _at(self, name: str) -> Any:
        return self._named(f"{self.url}/{name}")

    @contextlib.contextmanager
    def _errors(self, name: str) -> Any:
        from py4j.protocol import Py4JJavaError

        try:
            yield
        except Py4JJavaError as error:
            raise StreamFileError(name, str(error.java_exception.getMessage())) from None

    def lock(self) -> None:
        with self._errors(self.url):
            self._system.mkdirs(self._named(self.url))

    def names(self, folder: str) -> list[str]:
        with self._errors(folder):
            found = self._system.globStatus(self._at(f"{folder}/*")) or ()
            return sorted(each.getPath().getName() for each in found)

    def read(self, name: str) -> bytes | None:
        with self._errors(name):
            if not self._system.exists(self._at(name)):
                return None
            with contextlib.closing(self._system.open(self._at(name))) as source:
                return bytes(source.readAllBytes())

    def put(self, name: str, data: bytes) -> None:
        parent, _, last = name.rpartition("/")
        whole = self._at(f"{parent}/.{last}.tmp")
        with self._errors(name):
            with contextlib.closing(self._system.create(whole, True)) as made:
                made.write(bytearray(data))
            there = self._system.exists(self._at(name))
            if there or not self._system.rename(whole, self._at(name)):
                raise StreamFileError(self.url, _TAKEN)

    def remove(self, pattern: str) -> None:
        with self._errors(pattern):
            for found in self._system.globStatus(self._at(pattern)) or ():
                self._system.delete(found.getPath(), True)


def folder_of(out: str | os.PathLike[str], spark: Any = None) -> TableFolder:
    """The folder of a path or URL. Raises `UsageError` for one that needs a session, without it."""
    path = local_path(os.fspath(out))
    if path is not None:
        return TableFolder(path)
    if spark is None:
        raise UsageError(f"{out}: only a Spark session reaches it")
    return HadoopFolder(os.fspath(out))


def escaped(text: str) -> str:
    """The text for a pattern that matches it alone."""
    return _MAGIC.sub(r"\\\1", text)
