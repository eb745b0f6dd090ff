"""A store in memory whose answers fail as a test says, and streams to archive."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from obstore import exceptions

from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.check import check
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store, Stored
from datastreamer.storage.stream import DataStream

URL = "s3://bucket/stream"


class Killed(BaseException):
    """The process ends here."""


class MemoryStore:
    """Objects in a dictionary. `fault(operation, name)` is asked before each operation what goes
    wrong with it; "" for nothing."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, datetime]] = {}
        self.fault: Callable[[str, str], str] = lambda operation, name: ""
        self.operations: list[tuple[str, str]] = []

    def put(self, name: str, data: bytes) -> None:
        fault = self._begin("put", name)
        if fault in ("lost", "killed after") and name not in self.objects:
            self.objects[name] = data, datetime.now(UTC)
        self._fail(fault)
        if fault == "409" or name in self.objects:
            raise exceptions.AlreadyExistsError("exists")
        self.objects[name] = data, datetime.now(UTC)

    def get(self, name: str) -> bytes:
        fault = self._begin("get", name)
        self._fail(fault)
        return self._bytes(name, fault)

    def get_range(self, name: str, start: int, size: int) -> bytes:
        fault = self._begin("get_range", name)
        self._fail(fault)
        data = self._bytes(name, "")[start : start + size]
        return _spoiled(data, fault)

    def _bytes(self, name: str, fault: str) -> bytes:
        if name not in self.objects:
            raise exceptions.NotFoundError(name)
        return _spoiled(self.objects[name][0], fault)

    def list(self, prefix: str, after: str | None) -> Iterator[Stored]:
        self._fail(self._begin("list", prefix))
        for name in sorted(self.objects):
            if name.startswith(prefix) and (after is None or name > after):
                data, when = self.objects[name]
                yield Stored(name, len(data), when)

    def delete(self, name: str) -> None:
        self._fail(self._begin("delete", name))
        self.objects.pop(name, None)

    def _begin(self, operation: str, name: str) -> str:
        self.operations.append((operation, name))
        return self.fault(operation, name)

    @staticmethod
    def _fail(fault: str) -> None:
        if fault in ("killed before", "killed after"):
            raise Killed
        if fault == "403":
            raise exceptions.PermissionDeniedError("403")
        if fault == "412":
            raise exceptions.PreconditionError("412")
        if fault == "404":
            raise exceptions.NotFoundError("404")
        if fault in ("timeout", "500", "lost"):
            raise exceptions.GenericError(fault)


def _spoiled(data: bytes, fault: str) -> bytes:
    if fault == "short":
        return data[: len(data) // 2]
    if fault == "changed" and data:
        at = len(data) // 3
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return data


def opened(memory: MemoryStore, *, timeout: float = 0.0) -> OpenArchive:
    return OpenArchive(Store(URL, timeout=timeout, backend=memory))


def writer_of(
    path: Path, memory: MemoryStore, *, pages: int = 4, takeover: bool = False
) -> ArchiveWriter:
    """A writer that tries each operation once; close its `source`."""
    store = Store(URL, timeout=0.0, backend=memory)
    return ArchiveWriter(ArchivedFile(path), store, segment_pages=pages, takeover=takeover)


def push(path: Path, memory: MemoryStore, *, pages: int = 4, takeover: bool = False) -> bool:
    """One push, as a process of its own makes it."""
    writer = writer_of(path, memory, pages=pages, takeover=takeover)
    try:
        return writer.publish()
    finally:
        writer.source.close()


def ensure_whole(memory: MemoryStore, path: Path | None = None) -> int:
    """Check the archive, also against a file; returns its number of entries."""
    source = None if path is None else ArchivedFile(path)
    try:
        found = check(opened(memory), against=source)
    finally:
        if source is not None:
            source.close()
    assert found.problems == []
    return found.newest.head.entries


def fill(stream: DataStream, pages: float, seed: int = 0) -> None:
    """Append that many pages of entries, every fourth a bookmark."""
    chosen = random.Random(seed)
    end = stream.header.total_length + int(pages * (1 << 20))
    while stream.header.total_length < end:
        with stream.atomic_op() as op:
            for _ in range(3):
                op.add_entry(2, bytes([chosen.randrange(256)]) * chosen.randrange(60_000))
            op.add_bookmark(b"%d" % chosen.randrange(10_000))


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
