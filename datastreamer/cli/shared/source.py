"""SOURCE: a stream file or a server, read in the same way.

Files are opened for reading only: nothing is written, not
even beside them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator

import typer

from datastreamer._codec import Entry, EntryBatch
from datastreamer.cli.shared.addresses import both_readings, server_addresses
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import NO_OPTIONS, SourceOptions
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    BadFromBookmark,
    DamagedFile,
    FileMissing,
    StreamBusy,
    UnknownBookmark,
    UnknownEntry,
)
from datastreamer.format import STREAM_TYPE_SEQUENCER, Header
from datastreamer.storage.stream import DataStream
from datastreamer.transport.address import Address

# Interval between checks of a followed file for new entries; a check is one small read.
_POLL_SECONDS = 0.01
# Committed entries arrive at once; a server that sends nothing for this time is probed.
_PROBE_SECONDS = 10.0


def open_source(
    text: str,
    options: SourceOptions = NO_OPTIONS,
    *,
    follow: bool = False,
    heartbeat: float | None = None,
    batch_reads: bool = False,
) -> Source:
    """Open the stream that `text` names.

    `follow`: read entries that another process commits later, and reconnect to a lost server.
    `heartbeat`: seconds of silence until a server is probed; None: 10 s, or no probes with
    `follow`. `batch_reads`: use batch reads and filtered reads if the server supports them and
    is not followed.
    """
    addresses = server_addresses(text)
    if addresses:
        with both_readings(*text.split(",")):
            return ServerSource(
                *addresses,
                options=options,
                follow=follow,
                heartbeat=heartbeat,
                batch_reads=batch_reads,
            )
    if heartbeat is not None:
        raise typer.BadParameter(f"--timeout is for servers, and {text} is a file")
    options.check_unused(text)
    return FileSource(text, options.stream_type, follow)


@contextlib.contextmanager
def named_not_found(source: str, key: str = "") -> Iterator[None]:
    """Name the source in errors about missing entries and bookmarks, and the key as the user
    wrote it."""
    try:
        yield
    except UnknownEntry as error:
        raise Failure(f"{source}: {error}") from None
    except UnknownBookmark as error:
        text = str(error).replace(f"0x{error.key.hex()}", key)
        raise Failure(f"{source}: {text}") from None


class FileSource:
    """A stream file; a context manager that closes it."""

    def __init__(self, path: str, stream_type: int | None, follow: bool) -> None:
        self.name = path
        self._follow = follow
        try:
            # What is printed or exported is right, also if its page was in the page cache.
            self.stream = DataStream.open(
                path, stream_type=stream_type, read_only=True, follow=follow, verify="always"
            )
        except FileMissing:
            raise Failure(f"{path}: no such file") from None
        self._epoch = self.stream.epoch

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *raised: object) -> None:
        stream = self.stream
        # Inconsistent data may come from a change of history during the read.
        busy = isinstance(raised[1], DamagedFile) and (
            stream.epoch != self._epoch or stream.outdated
        )
        stream.close()
        if busy:
            raise StreamBusy(
                self.name,
                "busy: it was truncated or updated during the read, which is not damage; try "
                "again, or read a snapshot",
            ) from None

    def header(self) -> Header:
        """The header as committed now."""
        self.stream.refresh()
        return self.stream.header

    def reach(self, start: int | bytes, header: Header) -> Header:
        """The header, or a newer one, of a stream that the entry or bookmark `start` is in. Raises
        `UnknownEntry`; of several servers, also `UnknownBookmark`."""
        if isinstance(start, int):
            check_start(start, header)
        return header

    def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return self.stream.entry(number)

    def first_event(self, key: bytes) -> Entry:
        """The first event at or after a bookmark. Raises `UnknownBookmark`."""
        return self.stream.first_event_after_bookmark(key)

    def bookmark(self, key: bytes) -> int:
        """The number of the bookmark's own entry. Raises `UnknownBookmark`."""
        return self.stream.bookmark(key)

    def batches(
        self, start: int | bytes, stop: int | None, types: frozenset[int] | None = None
    ) -> Generator[EntryBatch, None, None]:
        """Entries from a number or bookmark up to, not including, `stop`; with `types` only those
        of these types.

        Waits for later commits; without a `stop` it does not end.
        """
        stream = self.stream
        number = start if isinstance(start, int) else stream.bookmark(start)
        epoch = stream.epoch
        while True:
            for batch in stream.batches(number, stop):
                number = batch.next_number
                yield batch if types is None else batch.select(types)
            if stop is not None and number >= stop:
                return
            # Without follow, only committed entries were asked for: missing ones were truncated.
            while self._follow and not stream.refresh():
                time.sleep(_POLL_SECONDS)
            if not self._follow or stream.epoch != epoch or stream.total_entries < number:
                raise Failure(
                    f"{self.name}: the stream was truncated or updated during the read (up to "
                    f"entry {number - 1}); it now holds {stream.total_entries} entries"
                )


class ServerSource:
    """A server, read as a `FileSource`, or several of one stream.

    With `follow` the client reconnects when it is lost. Without, of several servers each is asked
    once for what the others do not answer.
    """

    def __init__(
        self,
        *addresses: Address,
        options: SourceOptions = NO_OPTIONS,
        follow: bool = False,
        heartbeat: float | None = None,
        batch_reads: bool = False,
    ) -> None:
        stream_type = options.stream_type
        context = None
        if any(address.tls for address in addresses):
            context = options.context()
        else:
            options.check_unused(",".join(map(str, addresses)))
        servers = [
            Upstream(host, port, context, options.tls_server_name)
            if tls and context is not None
            else Upstream(host, port)
            for host, port, tls in addresses
        ]
        self._several = len(servers) > 1
        self.client = BlockingClient(
            servers,
            stream_type=STREAM_TYPE_SEQUENCER if stream_type is None else stream_type,
            resume=follow or self._several,
            retry_for=None if follow else 0.0,
            heartbeat=_PROBE_SECONDS if heartbeat is None and not follow else heartbeat,
            batch_reads=batch_reads,
        )
        self._batch_reads = batch_reads and not follow
        self.name = ",".join(map(str, addresses)) if self._several else self.client.peer

    def __enter__(self) -> ServerSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def header(self) -> Header:
        return self.client.header()

    def reach(self, start: int | bytes, header: Header) -> Header:
        if self._several:
            # These go to a server that holds it.
            if isinstance(start, bytes):
                self.bookmark(start)
            elif start > header.total_entries:
                self.client.entry(start - 1)
            header = self.client.header()
        if isinstance(start, int):
            check_start(start, header)
        return header

    def entry(self, number: int) -> Entry:
        return self.client.entry(number)

    def first_event(self, key: bytes) -> Entry:
        return self.client.bookmark(key)

    def bookmark(self, key: bytes) -> int:
        try:
            with self.client.batches(from_bookmark=key) as batches:
                return next(batches).first_number
        except BadFromBookmark as error:
            raise self._unknown(key, error) from None

    def batches(
        self, start: int | bytes, stop: int | None, types: frozenset[int] | None = None
    ) -> Generator[EntryBatch, None, None]:
        client = self.client
        try:
            if isinstance(start, int) and stop is not None and self._batch_reads:
                yield from client.read_batches(from_entry=start, stop=stop, types=types)
            elif isinstance(start, int):
                yield from client.batches(from_entry=start, stop=stop, types=types)
            else:
                yield from client.batches(from_bookmark=start, stop=stop, types=types)
        except BadFromBookmark as error:
            assert isinstance(start, bytes)
            raise self._unknown(start, error) from None

    def _unknown(self, key: bytes, error: BadFromBookmark) -> UnknownBookmark:
        return UnknownBookmark(key, str(error) if self._several else "")


Source = FileSource | ServerSource


def check_start(start: int, header: Header) -> None:
    """Raises `UnknownEntry` if `start` is past the head."""
    if start > header.total_entries:
        raise UnknownEntry(start, header.total_entries)
