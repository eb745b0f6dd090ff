"""The stream that a streaming query follows: a growing file, or a server.

Owns how the driver inspects it: its end, a digest of entries, the parts of a batch. Executors read
the entries themselves.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from pyspark.sql.datasource import InputPartition
from xxhash import xxh3_128

from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    DamagedEntry,
    DatastreamerError,
    HistoryChanged,
    PeerError,
    StreamFileError,
    UsageError,
)
from datastreamer.format import HEADER_PAGE_SIZE, Header, page_of, page_start
from datastreamer.position import KEPT
from datastreamer.protocol.commands import KnownHistory
from datastreamer.protocol.history import Trail
from datastreamer.protocol.retry import BACKOFF
from datastreamer.spark.options import Options, StartTime
from datastreamer.spark.read.files import (
    FileSnapshot,
    open_location,
    open_reader,
    snapshot_of,
    take_snapshot,
)
from datastreamer.spark.read.history_client import HistoryClient
from datastreamer.spark.read.partitions import FilePart, cut_entries, parts_of_entries
from datastreamer.spark.read.paths import FileLocation, find, is_single
from datastreamer.spark.read.planning import finder, pages_of
from datastreamer.spark.read.servers import (
    Servers,
    find_at_server,
    position_at,
    take_server_snapshot,
)
from datastreamer.spark.stream.offsets import digest_of
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import NO_ID, Change
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from datastreamer.zkevm.bookmark_keys import BookmarkName

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Bytes per read when entries are hashed for a digest.
_HASH_READ: Final = 64 << 10


class FollowedStream(Protocol):
    """A stream as the driver of a streaming query uses it."""

    name: str

    def refresh(self) -> Header:
        """Read the header. The other methods describe the stream as of this call.

        Raises `ConnectFailed` and `ConnectionLost` if no server answers.
        """

    def entry_of(self, name: BookmarkName | StartTime) -> int:
        """The entry of a block's or batch's bookmark, or of a time. Raises `UnknownBookmark` and
        `TimeUnknown`."""

    def digest_before(self, entry: int) -> str:
        """A digest of the last entries before this one; empty if they cannot be read."""

    def hash_of(self, start: int, stop: int) -> str:
        """A hash of all entries from `start` up to `stop`; empty if some are missing or damaged."""

    def history(self) -> KnownHistory | None:
        """The stream's history; None if it reports none. Entries that are read may be newer."""

    def changes(self, since: KnownHistory) -> Sequence[Change] | None:
        """What changed since an older state of this history; None if that is not known."""

    def entry_after(self, start: int, size: int) -> int:
        """The entry about `size` bytes after entry `start`."""

    def parts(self, start: int, stop: int, part_bytes: int) -> Sequence[InputPartition]:
        """The parts of a batch, one per task."""

    def changed(self, what: str, entry: int) -> DatastreamerError:
        """An error: the entries before this one are not those that were read."""

    def close(self) -> None:
        """Close files and connections."""


def followed_stream(options: Options) -> FollowedStream:
    """The stream that the options name. Raises `UsageError` unless it is exactly one."""
    if options.servers:
        return ServedStream(options)
    found = find(options.paths)
    if len(found) != 1 or not is_single(options.paths):
        raise UsageError(
            f"{', '.join(options.paths)}: only one file can be followed: name one, or follow each "
            "by itself"
        )
    return GrowingFile(found[0], options)


class GrowingFile:
    """A file that another process writes."""

    def __init__(self, location: FileLocation, options: Options) -> None:
        self.name = location.path
        self._location = location
        self._options = options
        self._file: StreamFile | None = None
        # For a remote file, a reader that is opened when needed and used until `refresh`.
        self._snapshot: FileSnapshot | None = None
        self._remote: Readable | None = None
        self._remote_reader: Reader | None = None

    def refresh(self) -> Header:
        if self._location.uri is not None:
            self._close_remote()
            self._snapshot = take_snapshot(
                self._location, self._options.stream_type, self._options.generation
            )
            # Of an archive, this manifest.
            self._location = self._snapshot.location
            return self._snapshot.header
        file = self._file
        if file is not None:
            epoch = file.epoch
            if self._replaced(file):
                file = None
            else:
                file.refresh()
                if file.epoch != epoch:
                    # Reopen, so that nothing read from the old history is reused.
                    file = None
        if file is None:
            self.close()
            self._file = file = StreamFile.open(
                self._location.path, stream_type=self._options.stream_type
            )
        self._snapshot = snapshot_of(self._location, file)
        return self._snapshot.header

    def _replaced(self, file: StreamFile) -> bool:
        """Whether the path now has another file, or none."""
        return file.opened_by is None or bool(file.opened_by.difference())

    def entry_of(self, name: BookmarkName | StartTime) -> int:
        snapshot, _ = self._seen()
        with open_reader(snapshot, verify=self._options.verify) as reader:
            return finder(self._options, snapshot, reader)(name)

    def digest_before(self, entry: int) -> str:
        _, reader = self._seen()
        trail = Trail(max(0, entry - KEPT))
        with contextlib.suppress(DamagedEntry):
            for batch in reader.batches(trail.next_number, entry, _HASH_READ):
                trail.extend(batch)
            return digest_of(trail.hashes)
        return ""

    def hash_of(self, start: int, stop: int) -> str:
        snapshot, _ = self._seen()
        if stop > snapshot.head.entries:
            return ""
        with (
            contextlib.suppress(DamagedEntry),
            open_reader(snapshot, verify=self._options.verify) as found,
        ):
            return hash_range(found, start, stop, 1 << 62)[1].hex()
        return ""

    def history(self) -> KnownHistory | None:
        snapshot, _ = self._seen()
        if not snapshot.recorded or snapshot.stream_id == NO_ID:
            return None
        return KnownHistory(snapshot.stream_id, snapshot.epoch)

    def changes(self, since: KnownHistory) -> Sequence[Change] | None:
        snapshot, _ = self._seen()
        with contextlib.closing(open_location(self._location)) as file:
            return HeaderPage.of(file).changes_between(since.epoch, snapshot.epoch)

    def entry_after(self, start: int, size: int) -> int:
        snapshot, reader = self._seen()
        try:
            end = reader.cursor(start).offset + size
            if end >= snapshot.head.length:
                return snapshot.head.entries
            page = page_of(end)
            first = Cursor(page_start(page), reader.first_number(page))
            room = end - first.offset
            return reader.run(first, room)[1].number if room else first.number
        except DamagedEntry:
            return start + int(size / _mean_size(snapshot.header))

    def parts(self, start: int, stop: int, part_bytes: int) -> Sequence[InputPartition]:
        snapshot, reader = self._seen()
        pages = pages_of(reader, snapshot, start, stop)
        return FilePart(snapshot, pages.start, pages.stop, start, stop).cut(part_bytes)

    def changed(self, what: str, entry: int) -> DatastreamerError:
        return StreamFileError(self.name, what)

    def _seen(self) -> tuple[FileSnapshot, Reader]:
        assert self._snapshot is not None
        if self._file is not None:
            return self._snapshot, self._file.reader
        if self._remote_reader is None:
            self._remote = open_location(self._location)
            self._remote_reader = Reader(self._remote, self.name, self._snapshot.head)
        return self._snapshot, self._remote_reader

    def close(self) -> None:
        self._close_remote()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close_remote(self) -> None:
        if self._remote is not None:
            self._remote.close()
        self._remote = self._remote_reader = None


class ServedStream:
    """A stream that one or more servers serve."""

    def __init__(self, options: Options) -> None:
        self._servers = Servers.of(options)
        self.name = ", ".join(map(str, options.servers))
        self._options = options
        self._client: HistoryClient | None = None
        self._turn = 0
        self._header: Header | None = None
        # Only for the option changes.
        self._history: KnownHistory | None = None

    def refresh(self) -> Header:
        if self._client is not None:
            # The connection may be stale, for example after a restart of the server.
            with contextlib.suppress(ConnectionError):
                return self._look(self._client)
            self.close()
        addresses = self._servers.addresses
        for left in reversed(range(len(addresses))):
            try:
                self._client = self._servers.connect(addresses[self._turn])
                header = self._look(self._client)
            except PeerError as error:
                self.close()
                self._turn = (self._turn + 1) % len(addresses)
                if not left or not isinstance(error, ConnectionError):
                    raise
            else:
                return header
        raise AssertionError("no server address")

    def _look(self, client: HistoryClient) -> Header:
        # Before the header: what the history says of entries holds for older ones.
        self._history = client.history() if self._options.changes else None
        self._header = client.header()
        return self._header

    def entry_of(self, name: BookmarkName | StartTime) -> int:
        return find_at_server(self._options, *self._seen(), name)

    def digest_before(self, entry: int) -> str:
        client, _ = self._seen()
        return digest_of(position_at(client, entry).trail)

    def hash_of(self, start: int, stop: int) -> str:
        client, header = self._seen()
        if stop > header.total_entries:
            return ""
        hasher = xxh3_128()
        with client.batches(from_entry=start, stop=stop) as batches:
            for batch in batches:
                hasher.update(batch.packed())
        return hasher.hexdigest()

    def history(self) -> KnownHistory | None:
        return self._history

    def changes(self, since: KnownHistory) -> Sequence[Change] | None:
        client, header = self._seen()
        return client.changes(since, header.total_entries)

    def entry_after(self, start: int, size: int) -> int:
        _, header = self._seen()
        return min(header.total_entries, start + int(size / _mean_size(header)))

    def parts(self, start: int, stop: int, part_bytes: int) -> Sequence[InputPartition]:
        client, header = self._seen()
        known = {self._turn: client.history()}
        pieces = cut_entries(header, start, stop, part_bytes)
        snapshot = take_server_snapshot(self._servers, client, header, stop, known, len(pieces))
        return list(parts_of_entries(snapshot, pieces))

    def changed(self, what: str, entry: int) -> DatastreamerError:
        total = 0 if self._header is None else self._header.total_entries
        return HistoryChanged(
            f"{self.name}: {what}", next_entry=entry, total_entries=total, first_differing=None
        )

    def _seen(self) -> tuple[HistoryClient, Header]:
        assert self._header is not None
        if self._client is None:
            self.refresh()
        assert self._client is not None
        return self._client, self._header

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class Looks:
    """Looks at a stream, whose servers may be unreachable for `retry_for` seconds."""

    def __init__(self, stream: FollowedStream, retry_for: float) -> None:
        self.stream = stream
        self.total: int | None = None
        """The number of its entries at the last look."""

        self._retry_for = retry_for
        self._failing_since: float | None = None
        self._attempts = 0
        self._retry_at = 0.0

    def wait_for(self, work: Callable[[Header], T]) -> T:
        """The result of `work`; retries while the server does not answer."""
        while True:
            result = self.attempt(work)
            if result is not None:
                return result
            time.sleep(max(0.0, self._retry_at - time.monotonic()))

    def attempt(self, work: Callable[[Header], T]) -> T | None:
        """The result of `work`; None if the server does not answer or the next retry is not due.

        Raises `ConnectFailed` or `ConnectionLost` after `retry_for` without an answer.
        """
        if time.monotonic() < self._retry_at:
            return None
        try:
            header = self.stream.refresh()
            self.total = header.total_entries
            result = work(header)
        except (ConnectFailed, ConnectionLost) as error:
            now = time.monotonic()
            if self._failing_since is None:
                self._failing_since = now
                _log.warning("%s; retrying", error)
            if now - self._failing_since >= self._retry_for:
                raise
            self._retry_at = now + BACKOFF.wait(self._attempts, random.random())  # noqa: S311
            self._attempts += 1
            return None
        self._failing_since, self._attempts, self._retry_at = None, 0, 0.0
        return result


def _mean_size(header: Header) -> float:
    """The mean size of an entry in bytes."""
    size = (header.total_length - HEADER_PAGE_SIZE) / max(1, header.total_entries)
    return max(1.0, size)
