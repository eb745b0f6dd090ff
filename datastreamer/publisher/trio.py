"""A stream's source, under Trio: operations made here, committed on a server elsewhere.

Owns the connection: its making, its end and the next one, and that the lease is kept while there
is nothing to say. What is said, and said again, stands in `datastreamer.protocol.publisher`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Final

import trio

from datastreamer.client.trio_driver import client_over
from datastreamer.errors import (
    ConnectionLost,
    DatastreamerError,
    NoOperation,
    OperationOpen,
    PeerError,
    StreamClosed,
)
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.publisher import Outgoing, SourceTerms, Underway
from datastreamer.protocol.publishing import Receipt
from datastreamer.protocol.retry import BACKOFF, Backoff, check_waits
from datastreamer.publisher.connection import (
    PASSING,
    RETRY_SECONDS,
    UNACKNOWLEDGED_BYTES,
    Standing,
    terms_of,
)
from datastreamer.transport.connection_errors import (
    answer_timeout,
    host_silent,
    say_back,
    say_lost,
    silent_twice,
)
from datastreamer.transport.endpoint import Endpoint, endpoint_of
from datastreamer.transport.tcp_info import tcp_info
from datastreamer.transport.trio_channel import Channel, channel_over, dial

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)

_RECEIVE_SIZE: Final = 64 << 10


@asynccontextmanager
async def connect_publisher(
    host: str,
    port: int = DEFAULT_PORT,
    *,
    token: bytes | str | None = None,
    stream_type: int = STREAM_TYPE_SEQUENCER,
    epoch: int = 0,
    take_over: bool = False,
    next_entry: int | None = None,
    lease: float | None = None,
    timeout: float = TIMEOUT,
    tls: bool | ssl.SSLContext = False,
    tls_server_name: str | None = None,
    retry_for: float | None = RETRY_SECONDS,
    backoff: Backoff = BACKOFF,
    max_unacknowledged: int = UNACKNOWLEDGED_BYTES,
) -> AsyncIterator[Publisher]:
    """The source of the stream that the server at `host` and `port` serves.

    `host`, `port`, `tls`, `tls_server_name` and `timeout` are those of `connect`; `token` is what
    the server's operator gave out. The lease is asked for with `epoch` (0: the next one, if
    nobody has the lease); with `take_over` whoever has it is fenced. `lease` is for how many
    seconds it is to last in silence (None: as the server likes). `next_entry` is where the first
    operation begins: None, where the stream ends; one before that for operations that may be
    there already, which are compared then.

    A connection that is lost is made again for `retry_for` seconds (None: for ever), and what was
    not acknowledged is sent again: each operation is in the stream once. With
    `max_unacknowledged` bytes underway a commit waits.

    Leaving the block waits for what is underway, unless by an exception. Raises `ConnectFailed`,
    `TLSFailed`, `NotSupported` (the server takes no publishers), `NotAllowed`, `SourceBusy`,
    `Fenced`.
    """
    check_waits(timeout, retry_for)
    place = endpoint_of(host, port, tls, tls_server_name)
    terms = terms_of(stream_type, token, epoch, take_over, next_entry, lease)
    publisher = Publisher(place, terms, timeout, retry_for, backoff, max_unacknowledged)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publisher._run)
        try:
            await publisher._granted()
            yield publisher
            await publisher.flush()
        except BaseException as error:  # noqa: BLE001 - raised below, outside of the nursery's group
            failure = error
        publisher._closed = True
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class Publisher(Standing):
    """A stream's source. Made by `connect_publisher`. One task makes operations; any may wait
    for them.

    After an operation was refused (`NotWritten`, `PublishInDoubt`, `OperationTooLarge`) that is
    raised by each wait and each commit, until `resend` or `drop`. `Fenced`, `HistoryChanged` and
    the rest are for good.
    """

    def __init__(
        self,
        place: Endpoint,
        terms: SourceTerms,
        timeout: float,
        retry_for: float | None,
        backoff: Backoff,
        most: int,
    ) -> None:
        super().__init__(terms, most)
        self._place = place
        self._stream_type = terms.stream_type
        self._timeout = timeout
        self._retry_for = retry_for
        self._backoff = backoff
        self._open: PublishedOp | None = None
        self._closed = False
        # Set whenever an answer came, or all is over; and when there is something to send.
        self._moved = trio.Event()
        self._news = trio.Event()

    def atomic_op(self) -> PublishedOp:
        """``async with publisher.atomic_op() as op: op.add_entry(...)``: commits, or forgets.

        Raises `OperationOpen` where the last one was neither.
        """
        self._ensure_ours()
        if self._open is not None:
            raise OperationOpen("an operation is open already; commit it or roll it back")
        self._open = PublishedOp(self, self._source.next_entry)
        return self._open

    async def flush(self) -> None:
        """Return when all that was committed is on disk. Raises what keeps it from that."""
        source = self._source
        await trio.lowlevel.checkpoint()
        while source.underway:
            self._check()
            await self._moves()
        if source.over:
            self._check()

    def resend(self) -> None:
        """After a refusal that passes: have everything without a receipt sent again."""
        self._source.resend()
        self._news.set()

    def drop(self) -> None:
        """After a refusal: forget the operations without a receipt."""
        self._source.drop()
        self._open = None
        self._moved.set()

    # Within.

    def _check(self) -> None:
        if self._source.failure is not None:
            raise self._source.failure
        if self._closed:
            raise StreamClosed("the publisher is closed")

    async def _moves(self) -> None:
        if self._moved.is_set():
            self._moved = trio.Event()
        await self._moved.wait()

    async def _granted(self) -> None:
        while not self._source.granted:
            self._check()
            await self._moves()

    async def _put(self, operation: Outgoing) -> Underway:
        source = self._source
        self._ensure_ours()
        await trio.lowlevel.checkpoint_if_cancelled()
        while source.size >= self._most and source.failure is None:
            await self._moves()
        self._check()
        made = source.put(operation)
        self._news.set()
        return made

    async def _receipt(self, operation: Underway) -> Receipt:
        await trio.lowlevel.checkpoint()
        while operation.receipt is None:
            self._check()
            if operation.dropped:
                raise NoOperation("the operation was dropped after it was refused")
            await self._moves()
        return operation.receipt

    # Connections.

    async def _run(self) -> None:
        """One connection after the other, until nothing goes on any more."""
        source, attempt, lost_at = self._source, 0, math.inf
        try:
            while True:
                before = source.lease
                try:
                    stream = await dial(self._place, self._timeout)
                    channel = channel_over(stream, self._place.peer)
                    try:
                        await self._converse(channel, back=lost_at < math.inf)
                    finally:
                        source.granted = False
                        with trio.CancelScope(shield=True):
                            await channel.aclose()
                except PASSING as error:
                    now = trio.current_time()
                    if source.lease is None:
                        raise
                    if source.lease is not before or lost_at == math.inf:
                        attempt, lost_at = 0, now
                        say_lost(_log, self._place.peer, error)
                    if self._retry_for is not None and now - lost_at >= self._retry_for:
                        raise
                    await trio.sleep(self._backoff.wait(attempt, random.random()))  # noqa: S311
                    attempt += 1
        except DatastreamerError as error:
            source.end(error)
        finally:
            self._moved.set()

    async def _converse(self, channel: Channel, *, back: bool) -> None:
        """Speak with the server until that ends; raises why."""
        source, failures = self._source, list[DatastreamerError]()
        source.begin(self._place.peer)
        self._news.set()
        async with trio.open_nursery() as nursery:

            async def guarded(work: Callable[[], Awaitable[None]]) -> None:
                try:
                    await work()
                except DatastreamerError as error:
                    failures.append(error)
                except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
                    failures.append(ConnectionLost(f"{self._place.peer}: {error}"))
                nursery.cancel_scope.cancel()

            nursery.start_soon(guarded, partial(self._receive, channel, back))
            nursery.start_soon(guarded, partial(self._send, channel))
        # What the server said comes before what a send to it ran into.
        first = next((e for e in failures if not isinstance(e, ConnectionLost)), None)
        if first is not None or failures:
            raise first or failures[0]

    async def _receive(self, channel: Channel, back: bool) -> None:
        source, buffer = self._source, memoryview(bytearray(_RECEIVE_SIZE))
        while True:
            granted, seconds = source.granted, self._timeout
            if granted and source.lease is not None:
                # Something is asked three times meanwhile.
                seconds += source.lease.lease_ms / 1000
            with trio.move_on_after(seconds) as patience:
                size = await channel.receive_into(buffer)
            if patience.cancelled_caught:
                if granted and source.underway:
                    # A slow disk, or a long way for much - or a path on which nothing comes.
                    await self._ensure_there(channel, seconds)
                    continue
                raise answer_timeout(self._place.peer, seconds)
            try:
                source.receive(buffer[:size])
            finally:
                self._moved.set()
            self._news.set()
            if back and source.granted and not granted:
                say_back(_log, self._place.peer, source.total_entries)

    async def _ensure_there(self, channel: Channel, seconds: float) -> None:
        """No receipt came for so long: raise `NoAnswer` where the server's host is gone, as the
        system sees it, or the server leaves a question on another connection unanswered."""
        peer = self._place.peer
        connection = channel.connection()
        known = tcp_info(connection) if connection is not None else None
        if known is not None and known.dead_for(seconds):
            raise host_silent(peer, known.silent_seconds)
        with trio.move_on_after(self._timeout) as patience:
            # Whatever is said, or that it may not be asked: it is there.
            with contextlib.suppress(PeerError):
                stream = await dial(self._place, math.inf)
                client = client_over(
                    stream, stream_type=self._stream_type, peer=peer, batch_reads=False
                )
                try:
                    await client.header()
                finally:
                    with trio.CancelScope(shield=True):
                        await client.aclose()
        if patience.cancelled_caught:
            raise silent_twice(peer, seconds, self._timeout)

    async def _send(self, channel: Channel) -> None:
        source, said_at = self._source, trio.current_time()
        while True:
            data = source.take()
            if data:
                await channel.send(data)
                said_at = trio.current_time()
                continue
            self._news = trio.Event()
            seconds = math.inf if source.lease is None else source.lease.lease_ms / 3000
            with trio.move_on_at(said_at + seconds):
                await self._news.wait()
                continue
            source.ask_where()
            said_at = trio.current_time()


class PublishedOp(Outgoing):
    """One atomic operation: what is added here becomes visible together, or not at all.

    An asynchronous context manager: leaving it commits, and waits until it is on disk; an
    exception forgets it. `add_entry`, `add_bookmark`, `add_entries` and `add_batch` do as those
    of `AtomicOp`; it stands in memory as a whole.
    """

    def __init__(self, publisher: Publisher, first: int) -> None:
        super().__init__(first)
        self._publisher = publisher

    async def commit(self, *, wait: bool = True) -> PendingReceipt:
        """Send it. With `wait` it is on disk when this returns, else when the pending receipt's
        `wait` does. Raises what a `Publisher` raises; where it was not sent yet it stays open."""
        publisher = self._publisher
        if publisher._open is not self:
            raise NoOperation("the operation is over")
        underway = await publisher._put(self)
        publisher._open = None
        self.close()
        pending = PendingReceipt(publisher, underway)
        if wait:
            await pending.wait()
        return pending

    def roll_back(self) -> None:
        """Forget it. Nothing of it was sent."""
        if self._publisher._open is self:
            self._publisher._open = None
            self.close()

    async def __aenter__(self) -> PublishedOp:
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            self.roll_back()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._publisher._open is not self:
            return  # ended by hand inside the block
        if kind is not None:
            self.roll_back()
            return
        try:
            await self.commit()
        finally:
            self.roll_back()


class PendingReceipt:
    """An operation that was sent, and may not be on disk yet."""

    __slots__ = ("_publisher", "_underway")

    def __init__(self, publisher: Publisher, underway: Underway) -> None:
        self._publisher = publisher
        self._underway = underway

    @property
    def receipt(self) -> Receipt | None:
        """First entry, number of entries, and the stream's total then; None: not yet."""
        return self._underway.receipt

    async def wait(self) -> Receipt:
        """Return when it is on disk. Raises what keeps it from that."""
        return await self._publisher._receipt(self._underway)


__all__ = ["PendingReceipt", "PublishedOp", "Publisher", "connect_publisher"]
