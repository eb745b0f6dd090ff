"""The client of tasks: queries, and streaming as asynchronous iteration.

Owns the public face for Trio and for asyncio; the driver decides between them. Must not import
trio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Self

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.base import BatchesBase, ClientBase, IterationBase
from datastreamer.client.effects import AsyncDriver, DriverTo
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.client.link import MAX_LAG
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


class _AsyncIterator(IterationBase):
    """The block of an asynchronous iterator, and its end."""

    def __init__(self, driver: AsyncDriver, iteration: Iteration[EntryBatch]) -> None:
        super().__init__(iteration)
        self._driver = driver

    async def __aenter__(self) -> Self:
        await self._driver.run(self._iteration.begin())
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self._driver.run(self._iteration.leave(kind is not None))

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """End it; the client is usable then. What has arrived and was not delivered is dropped."""
        await self._driver.run(self._iteration.close())


class Batches(_AsyncIterator, BatchesBase):
    """Batches of entries as they arrive: an asynchronous iterator.

    ``async with`` begins it at once and ends it on leaving; without that it begins with
    the first item, and after a ``break`` the client's next call ends it.
    """

    async def __anext__(self) -> EntryBatch:
        batch: EntryBatch | None = await self._driver.run(self._iteration.next())
        if batch is None:
            raise StopAsyncIteration
        return batch


class Entries(_AsyncIterator):
    """Entries one by one: an asynchronous iterator, begun and ended as `Batches`.

    Each run that arrives is a checkpoint, under asyncio if the last one was 1 ms ago; the entries
    within it are not.
    """

    async def __anext__(self) -> Entry:
        iteration = self._iteration
        while True:
            for entry in iteration.entries:
                iteration.last = entry.number
                return entry
            if not await self._driver.run(iteration.next_entries()):
                raise StopAsyncIteration


class Client(ClientBase[Batches, Entries]):
    """A connection to a server, made by `connect`.

    One task at a time: any call except `stop` and `aclose` raises `UsageError` while another is in
    progress. A call ends an iteration that was left open.

    `ServerRefused` leaves the client usable; a refusal may cost the connection, and the next call
    makes another. After `ConnectionLost` and `ProtocolViolation` the next call makes another
    connection, or raises `ConnectionLost` if it cannot. With `resume`, the client sends a query
    again, once, if its connection turns out to be lost, and a streaming continues with the next
    entry when the server is back with the same history. A cancelled query may cost the connection;
    a cancelled wait for streamed entries loses nothing, and the iteration can continue.
    """

    def __init__(
        self,
        driver_to: DriverTo,
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
        """A client of the server at `host` and `port`, closed at the end of the block.

        `host` may be a whole address: ``HOST:PORT``, ``[::1]:6900``, ``tcp://HOST:PORT``,
        ``tcps://HOST:PORT``, which is with TLS, or ``unix:PATH``. `tls` is what `client_tls` makes,
        or any other `ssl.SSLContext`, or True for the CAs that the system trusts; the certificate
        must be for `tls_server_name` (default: `host`).

        `host` may also be a list of servers of one stream: addresses, (host, port), or `Upstream`s
        with options of their own. What a server refuses, does not hold, or does not answer within
        `timeout`, the next one is asked; the error names all that were asked, and what each said. A
        streaming continues on the next server if one is lost, or if another holds more than
        `max_lag` entries more (None: it never compares them), which it looks at every `heartbeat`
        seconds, 10 by default. Raises `HistoryChanged` if a server holds another entry than the one
        that was received last. Without `resume`, the client uses the first server only.

        `timeout` limits, in seconds, each step of connecting and of beginning a streaming; for
        other answers the caller sets a limit (`trio.fail_after`, `asyncio.timeout`). Raises
        `ConnectFailed` and `TLSFailed`. Every request names `stream_type`; a server of another type
        rejects it.

        With `resume`, a streaming continues when its server was lost and is reachable again:
        `backoff` is the waits between attempts, `retry_for` the seconds after which it gives up
        (None: never). `heartbeat` distinguishes a silent server from a quiet stream: when nothing
        arrived for that many seconds, the client queries the server on a second connection. If the
        server does not answer, or has not sent entries that are due, the connection counts as lost.
        Without `batch_reads`, the client neither queries nor uses the server's extensions.

        The client sends `token` first on each connection: a full server gives the clients with its
        operator's token reserved slots. Raises `NotAllowed` if it is wrong; if the server accepts
        no tokens, the client connects without it and logs a warning. Without TLS, others on the
        network can read a token. `client_name`, of up to 64 bytes, names the client in the server's
        list of clients and log; a server that does not know names is connected to again without.
        """
        servers = upstreams_of(host, port, tls, tls_server_name, token, client_name)
        endpoints = [server.endpoint(stream_type) for server in servers]
        self._driver = driver_to(*endpoints)
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

    async def __aenter__(self) -> Self:
        await self._driver.run(self._engine.open())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _batches(self, iteration: Iteration[EntryBatch]) -> Batches:
        return Batches(self._driver, iteration)

    def _entries(self, iteration: Iteration[EntryBatch]) -> Entries:
        return Entries(self._driver, iteration)

    async def aclose(self) -> None:
        """Close the connection. A second call does nothing.

        While another task is in a call, that call raises `StreamClosed`.
        """
        await self._driver.run(self._engine.close())

    async def header(self) -> Header:
        """The stream's header as it is now: what is committed."""
        return await self._driver.run(self._engine.ask(exchanges.header))

    async def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return await self._driver.run(self._engine.ask(exchanges.entry, number))

    async def bookmark(self, key: bytes) -> Entry:
        """The first event at or after the bookmark `key`. Raises `UnknownBookmark`."""
        return await self._driver.run(self._engine.ask(exchanges.bookmark, key))

    async def entry_at(self, time: Moment) -> int:
        """The first entry that was committed at or after a time, or one up to about a second
        earlier; after the last commit the stream's total.

        `time` is Unix milliseconds, RFC 3339, a date (UTC) or a `datetime` with a zone. Raises
        `TimeUnknown`, and `NotSupported` for a server that does not report times.
        """
        query = TimeQuery(moment_ms(time))
        return (await self._driver.run(self._engine.ask(ask_times, query))).next

    async def time_marks(self, from_entry: int) -> TimeMarks:
        """When entries were committed, from `from_entry` on, as far as one answer says it. Raises
        `NotSupported`."""
        return await self._driver.run(self._engine.ask(ask_times, MarksQuery(from_entry)))

    async def capabilities(self) -> Capabilities:
        """The server's extensions of the published protocol; requested once per connection."""
        return await self._driver.run(self._engine.ask(probe))

    async def batch_read(
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
        return await self._driver.run(self._engine.read(wanted, wait))

    async def run(
        self,
        callback: Callable[[Entry], object] | None = None,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        """Call `callback` (and await what it returns, if it can be) for each entry.

        Without a callback each entry is printed as a line: number, type, length of data.
        Returns at `stop`, or when the method of that name is called.
        """
        await self._driver.run(self._run(callback, from_entry, from_bookmark, stop))

    async def stop(self) -> None:
        """End the iteration that is open, or the wait of a `batch_read`, without an error.

        May be called while another task waits for entries; that task still receives what
        arrives before the server's answer.
        """
        await self._driver.run(self._engine.stop())
