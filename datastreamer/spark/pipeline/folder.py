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
from typing import Any, Final, Protocol

from datastreamer.errors import StreamFileError, UsageError
from datastreamer.spark.read.paths import local_path

_TAKEN: Final = "another ingest is writing to it"
_MAGIC: Final = re.compile(r"([\[\]{}*?\\])")


class TableFolder(Protocol):
    """A folder. Names are relative to it; errors are `StreamFileError`."""

    url: str
    """As Spark knows it."""

    def lock(self) -> None:
        """Make it, and refuse other ingests until `close` where the file system can."""

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder in it, sorted; none if it does not exist."""

    def read(self, name: str) -> bytes | None:
        """A file; None if it does not exist."""

    def put(self, name: str, data: bytes) -> None:
        """Make a file that does not exist, as a whole or not at all."""

    def remove(self, pattern: str) -> None:
        """Remove the files and folders that match."""

    def close(self) -> None:
        """Unlock it."""


class LocalFolder:
    """A folder that driver and executors see under one name."""

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(path)
        self._path = Path(self.url)
        self._lock: int | None = None

    def lock(self) -> None:
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
        try:
            return sorted(os.listdir(self._path / folder))
        except OSError:
            return []

    def read(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        path = self._path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.with_name(f".{path.name}.tmp")
            whole.write_bytes(data)
            whole.rename(path)
        except OSError as error:
            raise StreamFileError(str(path), f"cannot be written: {error.strerror}") from None

    def remove(self, pattern: str) -> None:
        for path in self._path.glob(pattern):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                what = f"cannot be removed: {error.strerror}"
                raise StreamFileError(str(path), what) from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class HadoopFolder:
    """A folder that Spark reaches through Hadoop, such as ``s3a://bucket/tables``.

    Nothing locks it: of two ingests, one fails when both make the same file.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        from pyspark import SparkContext

        java: Any = SparkContext._jvm
        self._path = java.org.apache.hadoop.fs.Path
        with self._errors(self.url):
            conf = java.org.apache.spark.SparkContext.getOrCreate().hadoopConfiguration()
            self._system = self._path(self.url).getFileSystem(conf)

    def _at(self, name: str) -> Any:
        return self._path(f"{self.url}/{name}")

    @contextlib.contextmanager
    def _errors(self, name: str) -> Any:
        from py4j.protocol import Py4JJavaError

        try:
            yield
        except Py4JJavaError as error:
            raise StreamFileError(name, str(error.java_exception.getMessage())) from None

    def lock(self) -> None:
        with self._errors(self.url):
            self._system.mkdirs(self._path(self.url))

    def names(self, folder: str) -> list[str]:
        with self._errors(folder):
            if not self._system.exists(self._at(folder)):
                return []
            found = self._system.listStatus(self._at(folder))
            return sorted(each.getPath().getName() for each in found)

    def read(self, name: str) -> bytes | None:
        with self._errors(name):
            if not self._system.exists(self._at(name)):
                return None
            source = self._system.open(self._at(name))
            try:
                return bytes(source.readAllBytes())
            finally:
                source.close()

    def put(self, name: str, data: bytes) -> None:
        parent, _, last = name.rpartition("/")
        whole = self._at(f"{parent}/.{last}.tmp")
        with self._errors(name):
            made = self._system.create(whole, True)
            made.write(bytearray(data))
            made.close()
            there = self._system.exists(self._at(name))
            if there or not self._system.rename(whole, self._at(name)):
                raise StreamFileError(self.url, _TAKEN)

    def remove(self, pattern: str) -> None:
        with self._errors(pattern):
            for found in self._system.globStatus(self._at(pattern)) or ():
                self._system.delete(found.getPath(), True)

    def close(self) -> None:
        pass


def folder_of(out: str | os.PathLike[str], spark: Any = None) -> TableFolder:
    """The folder of a path or URL. Raises `UsageError` for one that needs a session, without it."""
    path = local_path(os.fspath(out))
    if path is not None:
        return LocalFolder(path)
    if spark is None:
        raise UsageError(f"{out}: only a Spark session reaches it")
    return HadoopFolder(os.fspath(out))


def escaped(text: str) -> str:
    """The text for a pattern that matches it alone."""
    return _MAGIC.sub(r"\\\1", text)
