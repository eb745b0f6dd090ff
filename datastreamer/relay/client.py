"""A relay's connection to its upstream: a client that also receives reports of changes.

Owns what only a relay needs of a client. `joining.py` decides what to ask an upstream.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from datastreamer._codec import EntryBatch
from datastreamer.client.async_client import Batches, Client
from datastreamer.client.bulk_receive import Settle, Take
from datastreamer.client.effects import opener
from datastreamer.client.iteration import Iteration
from datastreamer.client.trio_driver import trio_driver_to
from datastreamer.client.upstream import Upstream
from datastreamer.errors import PeerError
from datastreamer.protocol import exchanges
from datastreamer.protocol.commands import HashQuery, KnownHistory, SumsQuery
from datastreamer.protocol.following import ChangeReceived, FollowBegun, RangeHash, SumsFound
from datastreamer.protocol.messages import NO_EXTENSIONS, Capabilities
from datastreamer.protocol.resume import Resumable
from datastreamer.transport.listeners import leads_to


class RelayBatches(Batches):
    """Batches as they arrive, with the changes of committed entries that arrive among them."""

    @property
    def begun(self) -> FollowBegun | None:
        """The server's report at the beginning of a `RelayClient.follow`; None if it does not
        report changes."""
        streaming = self._iteration.streaming
        return None if streaming is None else streaming.begun

    @property
    def changes(self) -> deque[ChangeReceived]:
        """Changes that were reported since the batch before, in order, to be removed by the
        caller; each comes with a batch of no entries."""
        streaming = self._iteration.streaming
        return deque() if streaming is None else streaming.changes

    async def pour(self, take: Take, settle: Settle, seconds: float) -> None:
        """Have batches received in a thread for a turn: see `ClientEngine.pour`."""
        await self._driver.run(self._iteration.pour(take, settle, seconds))


class RelayClient(Client):
    """A client that does not reconnect: the relay decides which upstream is next."""

    @property
    def closed_on_asking(self) -> bool:
        """Whether the server closed a connection in answer to the capabilities query. The client
        then assumes a server without extensions, although the connection may have failed for
        another reason."""
        return self._engine.closed_on_asking

    @property
    def known_capabilities(self) -> Capabilities:
        """What the server has reported that it can do."""
        return self._engine.known_capabilities or NO_EXTENSIONS

    def leads_to(self, listeners: Collection[socket.socket]) -> bool:
        """Whether one of `listeners`, which are this process's, is at the other end."""
        connection = getattr(self._engine.channel, "connection", lambda: None)()
        return connection is not None and leads_to(connection, listeners)

    def follow(self, from_entry: int, known: KnownHistory) -> RelayBatches:
        """As `batches` with `commits`, and with each change of committed entries since the state
        `known` from a server that reports them: see `RelayBatches.begun` and `.changes`."""
        work = Resumable(from_entry, careful=False, commits=True, known=known)
        return self._batches(Iteration(self._engine, work))

    async def range_hash(self, first: int, end: int, max_bytes: int = 0) -> RangeHash:
        """The server's hash of the entries from `first` up to before `end`.

        The hash may be of fewer entries, as `max_bytes` and the server's limit allow. For servers
        whose capabilities include `changes`. Raises `BadFromEntry` if the stream does not hold
        entry `first`, and `EntriesDamaged` if they do not match the server's checksums.
        """
        query = HashQuery(first, end, max_bytes)
        return await self._driver.run(self._engine.ask(exchanges.ask, query, RangeHash))

    async def page_sums(self, from_entry: int) -> SumsFound:
        """The checksums of the server's pages from the one on that holds entry `from_entry`, up to
        the server's limit.

        Raises `PeerError` if the server has none, and `BadFromEntry` if the stream ends before
        `from_entry`.
        """
        if not (await self.capabilities()).page_sums:
            raise PeerError(f"{self.peer} has no checksums on this connection")
        query = SumsQuery(from_entry)
        return await self._driver.run(self._engine.ask(exchanges.ask, query, SumsFound))

    def _batches(self, iteration: Iteration[EntryBatch]) -> RelayBatches:
        return RelayBatches(self._driver, iteration)


connect_relay = opener(RelayClient, trio_driver_to, "connect_relay", __name__)


@asynccontextmanager
async def client_of(
    upstream: Upstream,
    stream_type: int,
    timeout: float,
    heartbeat: float | None,
    own: Collection[socket.socket],
    name: str | None = None,
) -> AsyncIterator[RelayClient]:
    """A client of `upstream`; `name` replaces the client's name.

    `own` are the relay's listeners. Raises `PeerError` if one of them is at the other end: the
    relay would always agree with itself, and never use the other upstreams.
    """
    async with connect_relay(
        upstream.host,
        upstream.port,
        stream_type=stream_type,
        timeout=timeout,
        tls=upstream.tls,
        tls_server_name=upstream.tls_server_name,
        resume=False,
        heartbeat=heartbeat,
        token=upstream.token,
        client_name=name or upstream.client_name,
    ) as client:
        if client.leads_to(own):
            raise PeerError(
                f"{client.peer} is this relay itself; name another server to relay from"
            )
        yield client
