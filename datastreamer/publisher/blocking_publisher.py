"""A publisher for plain synchronous code: the same engine, in an event loop in a thread.

Owns that thread, which renews the lease, receives receipts and replaces lost connections
while its user does something else. Must not import trio.
"""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from datastreamer.client.asyncio_driver import AsyncioDriver
from datastreamer.client.effects import Steps
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol.exchanges import TIMEOUT
from datastreamer.protocol.publish.messages import Receipt
from datastreamer.protocol.publish.publisher import Outgoing, Underway
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.publisher.base import OperationBase, PublisherBase, ReceiptBase
from datastreamer.publisher.engine import RETRY_SECONDS, UNACKNOWLEDGED_BYTES, PublisherEngine
from datastreamer.transport.asyncio_thread import AsyncioThread
from datastreamer.transport.endpoint import endpoint_of

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")


class _Thread(AsyncioThread):
    """The event loop of one publisher."""

    def __init__(self, driver: AsyncioDriver, engine: PublisherEngine, peer: str) -> None:
        super().__init__("publisher", f"publisher to {peer}")
        self._driver = driver
        self._engine = engine
        self._waking = False
        self.serve(driver.run(engine.serve()))

    def perform(self, steps: Steps[T]) -> T:
        """Perform `steps` in the loop."""
        return self.run(self._driver.run(steps))

    def commit(self, operation: Outgoing) -> Underway:
        """Commit an operation, without waiting for the loop if there is room."""
        engine = self._engine
        with engine.guard:
            engine.ensure_open(operation)
            underway = engine.put(operation) if engine.has_room else None
            wakes, self._waking = not self._waking, True
        if wakes:
            self.call_soon(self._wake)
        return self.perform(engine.commit(operation)) if underway is None else underway

    def _wake(self) -> None:
        self._waking = False
        self._engine.wake()


class BlockingReceipt(ReceiptBase):
    """An operation that was sent, and may not be on disk yet."""

    def __init__(self, thread: _Thread, engine: PublisherEngine, underway: Underway) -> None:
        super().__init__(engine, underway)
        self._thread = thread

    def wait(self) -> Receipt:
        """Return when it is on disk. Raises what prevents that."""
        return self._thread.perform(self._engine.receipt(self._underway))


class BlockingOp(OperationBase):
    """One atomic operation: what is added here becomes visible together, or not at all.

    A context manager: leaving it commits, and waits until it is on disk; an exception discards
    it. `add_entry`, `add_bookmark`, `add_entries` and `add_batch` are those of `AtomicOp`; the
    operation is in memory as a whole.
    """

    def __init__(self, thread: _Thread, engine: PublisherEngine) -> None:
        super().__init__(engine)
        self._thread = thread

    def commit(self, *, wait: bool = True) -> BlockingReceipt:
        """Send it. With `wait` it is on disk when this returns, else when the pending receipt's
        `wait` does. Raises what a `Publisher` raises; if it was not sent yet it stays open."""
        underway = self._thread.commit(self)
        pending = BlockingReceipt(self._thread, self._engine, underway)
        if wait:
            pending.wait()
        return pending

    def __enter__(self) -> BlockingOp:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._engine.is_open(self):
                self.commit()
        finally:
            self.roll_back()


class BlockingPublisher(PublisherBase):
    """A stream's source: ``with BlockingPublisher("127.0.0.1", 6900, token=token) as publisher``.

    The options and errors are those of `connect_publisher`. One thread makes operations; any may
    wait for them. Refusals are raised as by a `Publisher`.
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
        endpoint = endpoint_of(host, port, tls, tls_server_name)
        driver = AsyncioDriver(endpoint)
        self._engine = PublisherEngine(
            driver,
            endpoint.peer,
            token=token,
            stream_type=stream_type,
            epoch=epoch,
            take_over=take_over,
            next_entry=next_entry,
            lease=lease,
            timeout=timeout,
            retry_for=retry_for,
            backoff=backoff,
            max_unacknowledged=max_unacknowledged,
            guard=threading.Lock(),
        )
        self._thread = _Thread(driver, self._engine, endpoint.peer)
        try:
            self._thread.perform(self._engine.granted())
        except BaseException:
            self.close()
            raise

    def atomic_op(self) -> BlockingOp:
        """An operation to add entries to: ``with publisher.atomic_op() as op``.

        Raises `OperationOpen` if the last one was neither committed nor rolled back.
        """
        return BlockingOp(self._thread, self._engine)

    def flush(self) -> None:
        """Return when all that was committed is on disk. Raises what prevents that."""
        self._thread.perform(self._engine.flush())

    def resend(self) -> None:
        """After a temporary refusal: send everything without a receipt again."""
        self._thread.call(self._engine.resend)

    def drop(self) -> None:
        """After a refusal: discard the operations without a receipt."""
        self._thread.call(self._engine.drop)

    def close(self) -> None:
        """Release the lease, without waiting for operations in flight. In a forked child the lease
        stays the parent's."""
        self._engine.closed = True
        if self._engine.ours:
            self._thread.close()
        elif self._engine.channel is not None:
            socket.socket.close(self._engine.channel.connection())

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
