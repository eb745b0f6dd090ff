"""SOURCE: a stream file or a server, read in the same way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import typer

from datastreamer._codec import Entry, EntryBatch
from datastreamer.cli.commands.contexts import remember_server
from datastreamer.cli.shared.addresses import both_readings, server_addresses
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import NO_OPTIONS, SourceOptions, check_start
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import BadFromBookmark, PeerError, UnknownBookmark, UnknownEntry
from datastreamer.format import STREAM_TYPE_SEQUENCER, Header
from datastreamer.selection.clauses import Selection
from datastreamer.selection.times import TimeMarks
from datastreamer.transport.address import Address

# Committed entries arrive at once; a server that sends nothing for this time is probed.
_PROBE_SECONDS = 10.0


if TYPE_CHECKING:
    from datastreamer.cli.shared.file_source import FileSource

    Source: TypeAlias = "FileSource | ServerSource"


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
    # Opening files loads the storage, which servers do not need.
    from datastreamer.cli.shared.file_source import FileSource

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
        servers = options.upstreams(addresses, ",".join(map(str, addresses)))
        self._several = len(servers) > 1
        self._open = partial(
            BlockingClient,
            servers,
            stream_type=STREAM_TYPE_SEQUENCER if stream_type is None else stream_type,
            heartbeat=_PROBE_SECONDS if heartbeat is None and not follow else heartbeat,
            batch_reads=batch_reads,
        )
        resume = follow or self._several
        self.client = self._open(resume=resume, retry_for=None if follow else 0.0)
        self.entry_at = self.client.entry_at
        self._aside: BlockingClient | None = None
        self._batch_reads = batch_reads and not follow
        self.name = ",".join(map(str, addresses)) if self._several else self.client.peer
        if sys.stdin is not None and sys.stdin.isatty():
            for address in addresses:
                remember_server(f"tcps://{address}" if address.tls else str(address))

    def __enter__(self) -> ServerSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self._aside is not None:
            self._aside.close()

    def header(self) -> Header:
        return self.client.header()

    def reach(self, start: int | bytes, header: Header, last: int | None = None) -> Header:
        if self._several:
            # These go to a server that holds it.
            if last is not None:
                try:
                    self.client.entry(last)
                except UnknownEntry as error:
                    if error.total_entries:
                        # The longest one.
                        self.client.entry(error.total_entries - 1)
                header = self.client.header()
            if isinstance(start, bytes):
                self.bookmark(start)
            elif start > header.total_entries:
                self.client.entry(start - 1)
            header = self.client.header()
        if isinstance(start, int):
            check_start(start, header)
        return header

    def time_marks(self, number: int, _: int) -> TimeMarks:
        """Asked on another connection: this one streams. What fails leaves times unknown."""
        try:
            self._aside = self._aside or self._open(resume=False)
            return self._aside.time_marks(number)
        except PeerError:
            return TimeMarks()

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
        self, start: int | bytes, stop: int | None, where: Selection | None = None
    ) -> Generator[EntryBatch, None, None]:
        client = self.client
        try:
            if isinstance(start, int) and stop is not None and self._batch_reads:
                yield from client.read_batches(from_entry=start, stop=stop, where=where)
            elif isinstance(start, int):
                yield from client.batches(from_entry=start, stop=stop, where=where)
            else:
                yield from client.batches(from_bookmark=start, stop=stop, where=where)
        except BadFromBookmark as error:
            assert isinstance(start, bytes)
            raise self._unknown(start, error) from None

    def _unknown(self, key: bytes, error: BadFromBookmark) -> UnknownBookmark:
        return UnknownBookmark(key, str(error) if self._several else "")
