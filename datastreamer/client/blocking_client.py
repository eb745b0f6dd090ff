# Made by .ci/blocking.py from client/async_client.py: change that, and run it.
"""The client for plain threads: the same calls as `async_client`.

This is what a Spark executor or a notebook loads. Must not import trio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Self

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.base import BatchesBase, ClientBase, IterationBase
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.client.link import MAX_LAG
from datastreamer.client.thread_driver import ThreadDriver
from datastreamer.client.upstream import ServerAddress, upstreams_of
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER, Header
from datastreamer.protocol import exchanges
from datastreamer.protocol.batches import Read, ask_times, probe
from datastreamer.protocol.commands import MarksQuery, TimeQuery
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.selection.clauses import Where, selected
from datastreamer.selection.times import Moment, TimeMarks, moment_ms

if TYPE_CHECKING:
    import ssl


class _BlockingIterator(IterationBase):
    """The block of an iterator, and its end."""

    def __init__(self, driver: ThreadDriver, iteration: Iteration[EntryBatch]) -> None:
        super().__init__(iteration)
        self._driver = driver

    def __enter__(self) -> Self:
        self._driver.run(self._iteration.begin())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._driver.run(self._iteration.leave(kind is not None))

    def __iter__(self) -> Self:
        return self

    def close(self) -> None:
        """End it; the client is usable then. What has arrived and was not delivered is dropped."""
        self._driver.run(self._iteration.close())


class BlockingBatches(_BlockingIterator, BatchesBase):
    """Batches of entries as they arrive: an iterator.

    ``with`` begins it at once and ends it on leaving; without that it begins with
    the first item, and after a ``break`` the client's next call ends it.
    """

    def __next__(self) -> EntryBatch:
        batch: EntryBatch | None = self._driver.run(self._iteration.next())
        if batch is None:
            raise StopIteration
        return batch


class BlockingEntries(_BlockingIterator):
    """Entries one by one: an iterator, begun and ended as its batches."""

    def __next__(self) -> Entry:
        iteration = self._iteration
        while True:
            for entry in iteration.entries:
                iteration.last = entry.number
                return entry
            if not self._driver.run(iteration.next_entries()):
                raise StopIteration


class BlockingClient(ClientBase[BlockingBatches, BlockingEntries]):
    """A connection to a server, made at once.

    One thread at a time: any call except `stop` and `close` raises `UsageError` while another is in
    progress. A call ends an iteration that was left open.

    The options are those of `connect`; `timeout` (seconds) bounds the wait for an answer too.
    The wait for streamed entries has no limit. Raises `ConnectFailed` and `TLSFailed`. Errors and
    lost connections leave what they leave of a `Client`.
    """

    def __init__(
        self,
        host: ServerAddress,
        port: int = DEFAULT_PORT,
        *,
        stream_type: int = STREAM_TYPE_SEQUENCER,
        timeout: float = exchanges.TIMEOUT,
        tls: bool | ssl.SSLContext = False,
        tls_server_name: str | None = None,
        resume: bool = True,
        retry_for: float | None = None,
        backoff: Backoff = BACKOFF,
        heartbeat: float | None = None,
        batch_reads: bool = True,
        max_lag: int | None = MAX_LAG,
        token: bytes | str | None = None,
        client_name: str | None = None,
    ) -> None:
        servers = upstreams_of(host, port, tls, tls_server_name, token, client_name)
        endpoints = [server.endpoint(stream_type) for server in servers]
        self._driver = ThreadDriver(*endpoints)
        self._engine = ClientEngine(
            self._driver,
            *[endpoint.peer for endpoint in endpoints],
            stream_type=stream_type,
            timeout=timeout,
            resume=resume,
            retry_for=retry_for,
            backoff=backoff,
            heartbeat=heartbeat,
            batch_reads=batch_reads,
            max_lag=max_lag,
        )
        self._driver.run(self._engine.open())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self, iteration: Iteration[EntryBatch]) -> BlockingBatches:
        return BlockingBatches(self._driver, iteration)

    def _entries(self, iteration: Iteration[EntryBatch]) -> BlockingEntries:
        return BlockingEntries(self._driver, iteration)

    def close(self) -> None:
        """Close the connection. A second call does nothing.

        While another thread is in a call, that call raises `StreamClosed`.
        """
        self._driver.run(self._engine.close())

    def header(self) -> Header:
        """The stream's header as it is now: what is committed."""
        return self._driver.run(self._engine.ask(exchanges.header))

    def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return self._driver.run(self._engine.ask(exchanges.entry, number))

    def bookmark(self, key: bytes) -> Entry:
        """The first event at or after the bookmark `key`. Raises `UnknownBookmark`."""
        return self._driver.run(self._engine.ask(exchanges.bookmark, key))

    def entry_at(self, time: Moment) -> int:
        """The first entry that was committed at or after a time, or one up to about a second
        earlier; after the last commit the stream's total.

        `time` is Unix milliseconds, RFC 3339, a date (UTC) or a `datetime` with a zone. Raises
        `TimeUnknown`, and `NotSupported` for a server that does not report times.
        """
        query = TimeQuery(moment_ms(time))
        return self._driver.run(self._engine.ask(ask_times, query)).next

    def time_marks(self, from_entry: int) -> TimeMarks:
        """When entries were committed, from `from_entry` on, as far as one answer says it. Raises
        `NotSupported`."""
        return self._driver.run(self._engine.ask(ask_times, MarksQuery(from_entry)))

    def capabilities(self) -> Capabilities:
        """The server's extensions of the published protocol; requested once per connection."""
        return self._driver.run(self._engine.ask(probe))

    def batch_read(
        self,
        from_entry: int,
        max_count: int = 0,
        max_bytes: int = 0,
        *,
        wait: float = 0.0,
        types: Collection[int] | None = None,
        where: Iterable[Where | int] | None = None,
        confirmed: bool = True,
        fallback: bool = True,
    ) -> EntryBatch:
        """The entries from `from_entry` on, in one answer: at most `max_count`, of at most
        `max_bytes` with their heads (0: as many as the server gives). From -n on: the last n.

        The server returns any number of entries from one to these limits: the first even if it is
        larger than `max_bytes`. The batch is empty only at the end of the stream, if no entry was
        committed for `wait` seconds or `stop` was called.

        With `confirmed`, a `from_entry` that is not known to be in the stream is compared with
        the server's total first, and raises `UnknownEntry` if it is greater; without `confirmed`,
        the server refuses it: `BadFromEntry`. From a server without batches the client requests
        single entries, repeatedly during `wait`; without `fallback`, it raises `NotSupported`.

        With `types`, only entries of these types, and with `where` those that one of its clauses
        matches, all of them before `next_number`: possibly none, since a server scans a limited
        number of entries. A server that cannot select sends all entries, and the client omits the
        others.
        """
        chosen = selected(types, where)
        wanted = Read(from_entry, max_count, max_bytes, 0, confirmed, fallback, chosen)
        return self._driver.run(self._engine.read(wanted, wait))

    def run(
        self,
        callback: Callable[[Entry], object] | None = None,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        """Call `callback` for each entry.

        Without a callback each entry is printed as a line: number, type, length of data.
        Returns at `stop`, or when the method of that name is called.
        """
        self._driver.run(self._run(callback, from_entry, from_bookmark, stop))

    def stop(self) -> None:
        """End the iteration that is open, or the wait of a `batch_read`, without an error.

        While another thread waits for its next item, that thread still receives what has
        arrived, and the connection is given up; the next call makes another.
        """
        self._driver.run(self._engine.stop())
