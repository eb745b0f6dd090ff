"""A stream's source for plain synchronous code: what `publisher.py` does, on a plain socket.

Owns the socket, its timeouts, and a thread that keeps the lease while the caller has nothing to
say. Must not import trio. What is said, and said again, stands in
`datastreamer.protocol.publisher`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final

from datastreamer.errors import (
    ConnectionLost,
    DatastreamerError,
    NoOperation,
    OperationOpen,
    StreamClosed,
)
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.publisher import Outgoing, Underway
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
    connection_lost,
    say_back,
    say_lost,
    watch_over,
)
from datastreamer.transport.endpoint import close_blocking, connect_blocking, endpoint_of

if TYPE_CHECKING:
    import ssl

_log = logging.getLogger(__name__)

# Answers to more than so many fit into no socket's buffer for sure, and nobody reads them while
# this side sends.
_MOST_UNDERWAY: Final = 512
_RECEIVE_SIZE: Final = 64 << 10


class BlockingPublisher(Standing):
    """The source of a stream: ``with BlockingPublisher("127.0.0.1", 6900, token=token) as
    publisher: with publisher.atomic_op() as op: op.add_entry(3, data)``

    Takes what `connect_publisher` takes, and raises it at once. `timeout` also bounds the wait
    for each answer, a receipt's too. One thread at a time. A thread of its own keeps the
    lease while nothing is said.
    """

    def __init__(
        self,
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
    ) -> None:
        terms = terms_of(stream_type, token, epoch, take_over, next_entry, lease)
        super().__init__(terms, max_unacknowledged)
        check_waits(timeout, retry_for)
        self._place = endpoint_of(host, port, tls, tls_server_name)
        self._timeout = timeout
        self._retry_for = retry_for
        self._backoff = backoff
        self._socket: socket.socket | None = None
        self._buffer = memoryview(bytearray(_RECEIVE_SIZE))
        self._open: BlockingOp | None = None
        self._closed = threading.Event()
        # Whoever uses the socket has it.
        self._turn = threading.Lock()
        self._said_at = 0.0
        with self._turn:
            try:
                self._connect()
            except BaseException:
                self._disconnect()
                raise
        self._keeper = threading.Thread(
            target=self._keep, name=f"lease at {self._place.peer}", daemon=True
        )
        self._keeper.start()

    def atomic_op(self) -> BlockingOp:
        """As `Publisher.atomic_op`."""
        self._ensure_ours()
        if self._open is not None:
            raise OperationOpen("an operation is open already; commit it or roll it back")
        self._open = BlockingOp(self, self._source.next_entry)
        return self._open

    def flush(self) -> None:
        """Return when all that was committed is on disk. Raises what keeps it from that."""
        self._ensure_ours()
        with self._turn:
            self._until(lambda: not self._source.underway)

    def resend(self) -> None:
        """After a refusal that passes: have everything without a receipt sent again."""
        self._ensure_ours()
        with self._turn:
            self._source.resend()

    def drop(self) -> None:
        """After a refusal: forget the operations without a receipt."""
        self._ensure_ours()
        with self._turn:
            self._source.drop()
        self._open = None

    def give_up(self) -> None:
        """Wait for a lost server no longer than one more attempt takes: whoever does is told why
        that failed. For a signal's handler: it only sets a number."""
        self._retry_for = 0.0

    def close(self) -> None:
        """Give the lease up. What is underway is not waited for. In a forked child it stays the
        parent's."""
        self._closed.set()
        if not self._ours:
            # The turn may be that of a thread that is not here.
            if self._socket is not None:
                socket.socket.close(self._socket)
            return
        with self._turn:
            self._disconnect()
        self._keeper.join()

    def __enter__(self) -> BlockingPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    # Within; the caller has the turn.

    def _check(self) -> None:
        if self._source.failure is not None:
            raise self._source.failure
        if self._closed.is_set():
            raise StreamClosed("the publisher is closed")

    def _put(self, operation: Outgoing) -> Underway:
        self._ensure_ours()
        source = self._source
        with self._turn:
            self._check()
            self._until(lambda: source.size < self._most and len(source.underway) < _MOST_UNDERWAY)
            made = source.put(operation)
            self._attempt(self._exchange)
            return made

    def _receipt(self, operation: Underway) -> Receipt:
        self._ensure_ours()
        with self._turn:
            self._until(lambda: operation.receipt is not None or operation.dropped)
        if operation.receipt is None:
            raise NoOperation("the operation was dropped after it was refused")
        return operation.receipt

    def _until(self, done: Callable[[], bool]) -> None:
        """Go on until `done()`, over as many connections as it takes."""
        while not done():
            self._check()
            self._attempt(self._exchange_and_wait)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do it; where the connection turns out to be lost make another, and be content.

        What a signal's handler raises meanwhile costs the connection: half a request may have
        gone out, and what comes next would be taken for the rest of it.
        """
        try:
            try:
                work()
            except PASSING as error:
                self._disconnect()
                say_lost(_log, self._place.peer, error)
                self._reconnect()
        except DatastreamerError as error:
            self._disconnect()
            self._source.end(error)
            raise
        except BaseException:
            self._disconnect()
            raise

    def _reconnect(self) -> None:
        began, attempt = time.monotonic(), 0
        while True:
            self._check()
            try:
                self._connect()
            except PASSING:
                self._disconnect()
                retry_for = self._retry_for
                if retry_for is not None and time.monotonic() - began >= retry_for:
                    raise
            else:
                say_back(_log, self._place.peer, self._source.total_entries)
                return
            self._closed.wait(self._backoff.wait(attempt, random.random()))  # noqa: S311
            attempt += 1

    def _connect(self) -> None:
        source = self._source
        self._socket = connect_blocking(self._place, self._timeout)
        watch_over(self._socket.setsockopt)
        self._socket.settimeout(self._timeout)
        source.begin(self._place.peer)
        while not source.granted:
            self._exchange_and_wait()
        self._exchange()

    def _disconnect(self) -> None:
        made, self._socket = self._socket, None
        self._source.granted = False
        if made is not None:
            close_blocking(made)

    def _exchange(self) -> None:
        """Send what there is, and hear what was said meanwhile."""
        made, source = self._connected(), self._source
        try:
            while data := source.take():
                made.sendall(data)
                self._said_at = time.monotonic()
                # (A TLS connection may hold what came; it is heard when a receipt is waited for.)
                while select.select([made], [], [], 0)[0]:
                    self._hear(made)
        except TimeoutError:
            raise answer_timeout(self._place.peer, self._timeout) from None
        except OSError as error:
            self._last_words(made)
            raise connection_lost(self._place.peer, error) from None

    def _exchange_and_wait(self) -> None:
        self._exchange()
        if self._source.asking:
            self._hear(self._connected())

    def _hear(self, made: socket.socket) -> None:
        try:
            size = made.recv_into(self._buffer)
        except TimeoutError:
            raise answer_timeout(self._place.peer, self._timeout) from None
        except OSError as error:
            raise connection_lost(self._place.peer, error) from None
        self._source.receive(self._buffer[:size])

    def _last_words(self, made: socket.socket) -> None:
        """Where a send fails: what the server has said before it closed tells why."""
        with contextlib.suppress(OSError, ConnectionLost):
            while True:
                self._source.receive(self._buffer[: made.recv_into(self._buffer)])

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionLost(f"the connection to {self._place.peer} is lost")
        return self._socket

    # The lease, while nothing is said.

    def _keep(self) -> None:
        lease = self._source.lease
        assert lease is not None
        while not self._closed.wait(lease.lease_ms / 3000):
            with self._turn:
                quiet = time.monotonic() - self._said_at >= lease.lease_ms / 4000
                if self._closed.is_set() or self._socket is None or not quiet:
                    continue
                try:
                    self._source.ask_where()
                    self._exchange()
                    while self._source.asking:
                        self._hear(self._connected())
                except DatastreamerError as error:
                    self._disconnect()
                    if not isinstance(error, PASSING):
                        self._source.end(error)
                    # Whoever has something to say makes another.


class BlockingOp(Outgoing):
    """As `PublishedOp`, without ``async``."""

    def __init__(self, publisher: BlockingPublisher, first: int) -> None:
        super().__init__(first)
        self._publisher = publisher

    def commit(self, *, wait: bool = True) -> BlockingReceipt:
        """As `PublishedOp.commit`."""
        publisher = self._publisher
        if publisher._open is not self:
            raise NoOperation("the operation is over")
        underway = publisher._put(self)
        publisher._open = None
        self.close()
        pending = BlockingReceipt(publisher, underway)
        if wait:
            pending.wait()
        return pending

    def roll_back(self) -> None:
        """Forget it. Nothing of it was sent."""
        if self._publisher._open is self:
            self._publisher._open = None
            self.close()

    def __enter__(self) -> BlockingOp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._publisher._open is not self:
            return  # ended by hand inside the block
        try:
            if kind is None:
                self.commit()
        finally:
            self.roll_back()


class BlockingReceipt:
    """As `PendingReceipt`, without ``async``."""

    __slots__ = ("_publisher", "_underway")

    def __init__(self, publisher: BlockingPublisher, underway: Underway) -> None:
        self._publisher = publisher
        self._underway = underway

    @property
    def receipt(self) -> Receipt | None:
        """As `PendingReceipt.receipt`."""
        return self._underway.receipt

    def wait(self) -> Receipt:
        """Return when it is on disk. Raises what keeps it from that."""
        return self._publisher._receipt(self._underway)
