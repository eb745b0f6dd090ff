"""The Trio client: queries, and streaming as asynchronous iteration.

Owns the public face alone: how a connection is used, ended and replaced stands in
`link`, what is said on it in `datastreamer.protocol`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING

import trio

from datastreamer._codec import Entry, EntryBatch
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER, Header
from datastreamer.net.channel import dial
from datastreamer.net.link import Iteration, Link
from datastreamer.net.place import place_of
from datastreamer.protocol import exchanges

if TYPE_CHECKING:
    import ssl


@asynccontextmanager
async def connect(
    host: str,
    port: int = DEFAULT_PORT,
    *,
    stream_type: int = STREAM_TYPE_SEQUENCER,
    timeout: float = exchanges.TIMEOUT,
    tls: bool | ssl.SSLContext = False,
    tls_server_name: str | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `host` and `port`, closed at the end of the block.

    A `host` of ``unix:PATH`` is a Unix socket. `tls` is what `client_tls` makes, or any
    other `ssl.SSLContext`, or True for the CAs that the system trusts; the certificate is
    to be for `tls_server_name` (None: for `host`).

    `timeout` bounds, in seconds, the making of a connection, also of a later one; how
    long an answer may take is the caller's to say (`trio.fail_after`). Raises
    `ConnectFailed` and `TLSFailed`. A server of another stream type shows at the
    first request.
    """
    place = place_of(host, port, tls, tls_server_name)
    redial = partial(dial, place, timeout)
    client = Client(
        await redial(),
        stream_type=stream_type,
        timeout=timeout,
        redial=redial,
        peer=place.peer,
    )
    try:
        yield client
    finally:
        await client.aclose()


class Client:
    """A connection to a server.

    Made by `connect`; or from a `stream` of one's own, which it takes over (`redial`
    makes another where one is needed). One task at a time: a call while another is
    underway raises `UsageError`, but for `stop`. A call ends an iteration that was left
    open.

    What is raised, and what it leaves: `ServerRefused` - the client is usable; a refusal
    may cost the connection, and the next call makes another. `ConnectionLost`,
    `ProtocolViolation` - the next call makes another, or raises `ConnectionLost` where
    it cannot. A cancelled query has the same effect; a cancelled wait for streamed
    entries loses nothing, and the iteration can go on.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        stream_type: int = STREAM_TYPE_SEQUENCER,
        timeout: float = exchanges.TIMEOUT,
        redial: Callable[[], Awaitable[trio.abc.Stream]] | None = None,
        peer: str = "the server",
    ) -> None:
        self._link = Link(stream, stream_type, timeout, redial, peer)

    @property
    def stream_type(self) -> int:
        """The type that every request names."""
        return self._link.stream_type

    @property
    def peer(self) -> str:
        """The server as messages name it."""
        return self._link.peer

    async def aclose(self) -> None:
        """Close the connection. A second call does nothing."""
        await self._link.aclose()

    # Queries

    async def header(self) -> Header:
        """The stream's header as it is now: what is committed."""
        return await self._link.call(exchanges.header)

    async def entry(self, number: int) -> Entry:
        """The entry of this number. Raises `UnknownEntry`."""
        return await self._link.call(exchanges.entry, number)

    async def bookmark(self, key: bytes) -> Entry:
        """The first event at or after the bookmark `key`. Raises `UnknownBookmark`."""
        return await self._link.call(exchanges.bookmark, key)

    def entries_by_number(
        self, numbers: Iterable[int], *, window: int = exchanges.WINDOW
    ) -> Entries:
        """The entries of these numbers, in this order, with `window` queries underway.

        Raises `UnknownEntry` at the first that is not there.
        """
        return Entries(self._link, exchanges.Lookup(numbers, window))

    # Streaming

    def entries(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> Entries:
        """Entries one by one, from a number (0 if nothing is said) or a bookmark's entry on.

        Goes on with what is committed later, without end, or up to and not including
        number `stop`. The iteration begins when it is entered (``async with``) or asked
        for its first item, and raises `BadFromEntry` or `BadFromBookmark` then.
        """
        return Entries(self._link, exchanges.streaming(from_entry, from_bookmark, stop))

    def batches(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> Batches:
        """As `entries`, in runs as they arrive: for many entries the quick way.

        A batch keeps its bytes, within a receive buffer of up to 1 MiB.
        """
        return Batches(self._link, exchanges.streaming(from_entry, from_bookmark, stop))

    async def run(
        self,
        callback: Callable[[Entry], object] | None = None,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        stop: int | None = None,
    ) -> None:
        """Call `callback` (and wait for what it returns, if it can be) for each entry.

        Without a callback each entry is printed as a line: number, type, length of data.
        Returns at `stop`, or when another task calls the method of that name.
        """
        work = exchanges.streaming(from_entry, from_bookmark, stop)
        if callback is None:
            async with Batches(self._link, work) as batches:
                async for batch in batches:
                    sys.stdout.write(exchanges.lines(batch))
                    sys.stdout.flush()
            return
        async with Entries(self._link, work) as entries:
            async for entry in entries:
                outcome = callback(entry)
                if isawaitable(outcome):
                    await outcome

    async def stop(self) -> None:
        """End the iteration that is open, if there is one; it ends without an error.

        The one method that may be called while another task waits for entries; that
        task still gets what arrives before the server's answer.
        """
        await self._link.stop()


class Batches(Iteration[EntryBatch]):
    """Batches of entries as they arrive: an asynchronous iterator.

    ``async with`` begins it at once and ends it on leaving; without that it begins with
    the first item, and after a ``break`` the client's next call ends it.
    """

    async def __aenter__(self) -> Batches:
        await self._begin()
        return self

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> EntryBatch:
        return await self._next()


class Entries(Iteration[Iterable[Entry]]):
    """Entries one by one: an asynchronous iterator, begun and ended as `Batches`.

    Each run that arrives is a checkpoint; the entries within it are not.
    """

    _items: Iterator[Entry] = iter(())

    async def __aenter__(self) -> Entries:
        await self._begin()
        return self

    def __aiter__(self) -> Entries:
        return self

    async def __anext__(self) -> Entry:
        while True:
            for entry in self._items:
                return entry
            self._items = iter(await self._next())

    def finish(self) -> None:
        super().finish()
        self._items = iter(())
