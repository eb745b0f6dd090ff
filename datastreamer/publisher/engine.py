"""A publisher's connections to one server, written once for every driver.

Owns the making of connections, the retries, and that the lease is renewed while there is nothing
to send. The operations are `datastreamer.protocol.publish.publisher`'s. Must not know sockets,
tasks or clocks: `datastreamer.client.effects` has the steps that its driver performs.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable
from typing import Final

from datastreamer.client.effects import (
    Beside,
    CancellationPoint,
    Channel,
    Close,
    Connect,
    Driver,
    Now,
    Race,
    Receive,
    Send,
    Sleep,
    Steps,
    Wait,
)
from datastreamer.client.engine import ClientEngine
from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    DatastreamerError,
    LeaseLost,
    NoAnswer,
    NoOperation,
    NotWritten,
    OperationOpen,
    OperationTooSlow,
    PeerError,
    SourceBusy,
    StreamClosed,
    UsageError,
)
from datastreamer.format import U32_MAX
from datastreamer.protocol import exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.publish.messages import ANY_EPOCH, SOURCE_ID_SIZE, Receipt
from datastreamer.protocol.publish.publisher import (
    Outgoing,
    SourceConnection,
    SourceTerms,
    Underway,
)
from datastreamer.protocol.retry import Backoff, check_seconds, check_waits
from datastreamer.transport.connection_errors import (
    answer_timeout,
    host_silent,
    say_back,
    say_lost,
    silent_twice,
)
from datastreamer.transport.fork_guard import ForkGuard
from datastreamer.transport.tcp_info import tcp_info

_log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 60.0
"""How long a publisher tries to reach a lost server, by default."""
UNACKNOWLEDGED_BYTES: Final = 16 << 20
"""The bytes in flight from which on a commit waits, by default."""

_RECEIVE_SIZE: Final = 64 << 10
# Errors after which a publisher that had the lease makes another connection.
_PASSING: Final = (
    ConnectFailed,
    ConnectionLost,
    LeaseLost,
    OperationTooSlow,
    NotWritten,
    SourceBusy,
)


class PublisherEngine(ForkGuard):
    """One connection after another, on which operations are sent until they are acknowledged.

    `serve` runs in the driver's background while the publisher is open, beside its calls.
    """

    _called = "publisher"

    def __init__(
        self,
        driver: Driver,
        peer: str,
        *,
        token: bytes | str | None,
        stream_type: int,
        epoch: int,
        take_over: bool,
        next_entry: int | None,
        lease: float | None,
        timeout: float,
        retry_for: float | None,
        backoff: Backoff,
        max_unacknowledged: int,
    ) -> None:
        super().__init__()
        check_number("stream_type", stream_type)
        check_number("epoch", epoch)
        if next_entry is not None:
            check_number("next_entry", next_entry)
        if lease is not None:
            check_seconds("lease", lease, zero=True)
            if lease * 1000 > U32_MAX:
                raise UsageError(f"lease must be at most {U32_MAX // 1000} seconds, not {lease!r}")
        check_waits(timeout, retry_for)
        check_number("max_unacknowledged", max_unacknowledged, 1)
        self.source = SourceConnection(
            SourceTerms(
                stream_type,
                os.urandom(SOURCE_ID_SIZE),
                token.encode() if isinstance(token, str) else token or b"",
                ANY_EPOCH if take_over else epoch,
                round((lease or 0) * 1000),
                next_entry,
            )
        )
        self.timeout = timeout
        self.retry_for = retry_for
        self.channel: Channel | None = None
        self._closed = False
        self._driver = driver
        self._peer = peer
        self._stream_type = stream_type
        self._backoff = backoff
        self._most = max_unacknowledged
        self._open: Outgoing | None = None
        # Set when an answer has arrived or `serve` has ended; and when there is something to send.
        self._moved = driver.signal()
        self._news = driver.signal()

    # Operations

    def open(self, operation: Outgoing) -> None:
        """Make it the open operation."""
        self._open = operation

    def first_of_next(self) -> int:
        """The first entry of an operation that begins now. Raises `OperationOpen`."""
        self._ensure_ours()
        if self._open is not None:
            raise OperationOpen("an operation is open already; commit it or roll it back")
        return self.source.next_entry

    def is_open(self, operation: Outgoing) -> bool:
        """Whether it was neither committed nor rolled back."""
        return self._open is operation

    def roll_back(self, operation: Outgoing) -> None:
        """Discard it, if it is open."""
        if self._open is operation:
            self._open = None
            operation.close()

    def commit(self, operation: Outgoing) -> Steps[Underway]:
        """Send it, once less than the limit is in flight."""
        yield CancellationPoint()
        while True:
            self._ensure_ours()
            if self._open is not operation:
                raise NoOperation("the operation is over")
            with self._driver.guard:
                if self._has_room():
                    self._check()
                    underway = self.source.put(operation)
                    self.roll_back(operation)
                    break
            yield Beside(self._until(self._has_room))
        self._driver.soon(self._wake)
        return underway

    def _has_room(self) -> bool:
        """Whether a commit need not wait."""
        return self.source.size < self._most or self.source.failure is not None

    def _wake(self) -> None:
        self._news.set()

    def receipt(self, operation: Underway) -> Steps[Receipt]:
        """Wait until it is on disk. Raises what prevents that."""
        self._ensure_ours()
        yield Beside(self._until(lambda: operation.receipt is not None or operation.dropped))
        if operation.receipt is None:
            raise NoOperation("the operation was dropped after it was refused")
        return operation.receipt

    def flush(self) -> Steps[None]:
        """Wait until all that was committed is on disk. Raises what prevents that."""
        self._ensure_ours()
        yield CancellationPoint()
        yield Beside(self._until(lambda: not self.source.underway))
        if self.source.over:
            self._check()

    def granted(self) -> Steps[None]:
        """Wait for the first lease. Raises what prevents that."""
        yield Beside(self._until(lambda: self.source.granted))

    def resend(self) -> None:
        """Send everything without a receipt again."""
        self._ensure_ours()
        self._driver.call(self._resend)

    def _resend(self) -> None:
        self.source.resend()
        self._news.set()

    def drop(self) -> None:
        """Discard the operations without a receipt."""
        self._ensure_ours()
        self._driver.call(self._drop)

    def _drop(self) -> None:
        self.source.drop()
        self._open = None
        self._moved.set()

    def _until(self, done: Callable[[], bool]) -> Steps[None]:
        """Wait until `done`, or until an error prevents it, which is raised."""
        while not done():
            self._check()
            yield from self.moves()

    def moves(self) -> Steps[None]:
        """Wait until an answer has arrived, or `serve` has ended."""
        if self._moved.is_set():
            self._moved = self._driver.signal()
        yield Wait(self._moved)

    def _check(self) -> None:
        if self.source.failure is not None:
            raise self.source.failure
        if self._closed:
            raise StreamClosed("the publisher is closed")

    def close(self) -> None:
        """Make no more connections. In a forked child, close the copy of the parent's."""
        self._closed = True
        if not self.ours and self.channel is not None:
            self.channel.connection().close()

    # Connections

    def serve(self) -> Steps[None]:
        """Make one connection after another, until the publisher is closed or an error is final,
        which the calls that wait raise."""
        source, attempt, lost_at = self.source, 0, math.inf
        try:
            while not self._closed:
                before = source.lease
                try:
                    self.channel = yield Connect(self.timeout)
                    try:
                        yield from self._converse(self.channel, back=lost_at < math.inf)
                    finally:
                        source.granted = False
                        channel, self.channel = self.channel, None
                        yield Close(channel, farewell=self.ours)
                except _PASSING as error:
                    if source.lease is None:
                        raise
                    now = yield Now()
                    if source.lease is not before or lost_at == math.inf:
                        attempt, lost_at = 0, now
                        say_lost(_log, self._peer, error)
                    if self.retry_for is not None and now - lost_at >= self.retry_for:
                        raise
                    wait = self._backoff.wait(attempt, random.random())  # noqa: S311
                    yield Sleep(now + wait)
                    attempt += 1
        except Exception as error:  # noqa: BLE001 - raised by the calls, which would wait for ever
            source.end(error)
        finally:
            self._moved.set()

    def _converse(self, channel: Channel, *, back: bool) -> Steps[None]:
        """Exchange messages with the server until that ends; raises why."""
        failures: list[DatastreamerError] = []

        def guarded(steps: Steps[None]) -> Steps[None]:
            try:
                yield from steps
            except DatastreamerError as error:
                failures.append(error)

        with self._driver.guard:
            self.source.begin(self._peer)
        self._news.set()
        yield Race((guarded(self._receive(channel, back)), guarded(self._send(channel))))
        # The server's answer matters more than the send that failed because of it.
        answers = [error for error in failures if not isinstance(error, ConnectionLost)]
        raise (answers or failures)[0]

    def _receive(self, channel: Channel, back: bool) -> Steps[None]:
        source, buffer = self.source, memoryview(bytearray(_RECEIVE_SIZE))
        while True:
            granted, seconds = source.granted, self.timeout
            if granted and source.lease is not None:
                # The publisher sends three requests within the lease.
                seconds += source.lease.lease_ms / 1000
            try:
                size = yield Receive(channel, buffer, seconds)
            except TimeoutError:
                if not (granted and source.underway):
                    raise answer_timeout(self._peer, seconds) from None
                # The disk or the network is slow, or the server cannot be reached.
                yield from self._ensure_alive(channel, seconds)
                continue
            try:
                with self._driver.guard:
                    source.receive(buffer[:size])
            finally:
                self._moved.set()
            self._news.set()
            if back and source.granted and not granted:
                say_back(_log, self._peer, source.total_entries)

    def _ensure_alive(self, channel: Channel, seconds: float) -> Steps[None]:
        """No receipt has arrived for `seconds`: raise `NoAnswer` if the server's host is down, by
        the system's information, or the server does not answer on another connection."""
        connection = channel.connection()
        known = tcp_info(connection) if connection is not None else None
        if known is not None and known.dead_for(seconds):
            raise host_silent(self._peer, known.silent_seconds)
        asking = ClientEngine(
            self._driver,
            self._peer,
            stream_type=self._stream_type,
            timeout=self.timeout,
            answer_timeout=self.timeout,
            resume=False,
            batch_reads=False,
        )
        began = yield Now()
        try:
            yield from asking.open()
            yield from asking.ask(exchanges.header)
        except PeerError as error:
            # Any other answer, also a refusal, shows that the server is alive.
            if isinstance(error, NoAnswer) or (yield Now()) - began >= self.timeout:
                raise silent_twice(self._peer, seconds, self.timeout) from None
        finally:
            yield from asking.close()

    def _send(self, channel: Channel) -> Steps[None]:
        source = self.source
        sent_at = yield Now()
        while True:
            with self._driver.guard:
                data = source.take()
            if data:
                yield Send(channel, data)
                sent_at = yield Now()
                continue
            self._news = self._driver.signal()
            seconds = None
            if source.lease is not None:
                seconds = max(0.0, sent_at + source.lease.lease_ms / 3000 - (yield Now()))
            try:
                yield Wait(self._news, seconds)
            except TimeoutError:
                with self._driver.guard:
                    source.ask_where()
                sent_at = yield Now()
