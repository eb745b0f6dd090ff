# Made by .ci/blocking.py from publisher/async_publisher.py: change that, and run it.
"""A publisher for plain synchronous code: the same calls as `async_publisher`.

A thread renews the lease, receives receipts and replaces lost connections while the caller does
something else. Must not import trio.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from datastreamer.client.asyncio_driver import LoopDriver
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol.exchanges import TIMEOUT
from datastreamer.protocol.publish.messages import Receipt
from datastreamer.protocol.publish.publisher import Underway
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.publisher.base import OperationBase, PublisherBase, ReceiptBase
from datastreamer.publisher.engine import RETRY_SECONDS, UNACKNOWLEDGED_BYTES, PublisherEngine
from datastreamer.transport.endpoint import endpoint_of

if TYPE_CHECKING:
    import ssl


class BlockingReceipt(ReceiptBase):
    """An operation that was sent, and may not be on disk yet."""

    def __init__(self, driver: LoopDriver, engine: PublisherEngine, underway: Underway) -> None:
        super().__init__(engine, underway)
        self._driver = driver

    def wait(self) -> Receipt:
        """Return when it is on disk. Raises what prevents that."""
        return self._driver.run(self._engine.receipt(self._underway))


class BlockingOp(OperationBase):
    """One atomic operation: what is added here becomes visible together, or not at all.

    A context manager: leaving it commits, and waits until it is on disk; an
    exception discards it. `add_entry`, `add_bookmark`, `add_entries` and `add_batch` are those
    of `AtomicOp`; the operation is in memory as a whole.
    """

    def __init__(self, driver: LoopDriver, engine: PublisherEngine) -> None:
        super().__init__(engine)
        self._driver = driver

    def commit(self, *, wait: bool = True) -> BlockingReceipt:
        """Send it. With `wait` it is on disk when this returns, else when the pending receipt's
        `wait` does. Raises what a `Publisher` raises; if it was not sent yet it stays open."""
        underway = self._driver.run(self._engine.commit(self))
        pending = BlockingReceipt(self._driver, self._engine, underway)
        if wait:
            pending.wait()
        return pending

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
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
        self._driver = LoopDriver(endpoint)
        self._engine = PublisherEngine(
            self._driver,
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
        )
        self._serving = ExitStack()
        serving = self._driver.background(self._engine.serve())
        self._serving.enter_context(serving)
        try:
            self._driver.run(self._engine.granted())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Release the lease, without waiting for operations in flight. In a forked child the lease
        stays the parent's."""
        self._engine.close()
        self._serving.close()

    def atomic_op(self) -> BlockingOp:
        """An operation to add entries to: ``with publisher.atomic_op() as op``.

        Raises `OperationOpen` if the last one was neither committed nor rolled back.
        """
        return BlockingOp(self._driver, self._engine)

    def flush(self) -> None:
        """Return when all that was committed is on disk. Raises what prevents that."""
        self._driver.run(self._engine.flush())

    def resend(self) -> None:
        """After a temporary refusal: send everything without a receipt again."""
        self._engine.resend()

    def drop(self) -> None:
        """After a refusal: discard the operations without a receipt."""
        self._engine.drop()
