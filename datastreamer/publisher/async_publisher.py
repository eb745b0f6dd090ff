"""A publisher of tasks: operations made here, committed by a server elsewhere.

Owns the public face for Trio and for asyncio; the driver decides between them. Must not import
trio.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from datastreamer.client.effects import AsyncDriver, DriverTo
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


class PendingReceipt(ReceiptBase):
    """An operation that was sent, and may not be on disk yet."""

    def __init__(self, driver: AsyncDriver, engine: PublisherEngine, underway: Underway) -> None:
        super().__init__(engine, underway)
        self._driver = driver

    async def wait(self) -> Receipt:
        """Return when it is on disk. Raises what prevents that."""
        return await self._driver.run(self._engine.receipt(self._underway))


class PublishedOp(OperationBase):
    """One atomic operation: what is added here becomes visible together, or not at all.

    An asynchronous context manager: leaving it commits, and waits until it is on disk; an
    exception discards it. `add_entry`, `add_bookmark`, `add_entries` and `add_batch` are those
    of `AtomicOp`; the operation is in memory as a whole.
    """

    def __init__(self, driver: AsyncDriver, engine: PublisherEngine) -> None:
        super().__init__(engine)
        self._driver = driver

    async def commit(self, *, wait: bool = True) -> PendingReceipt:
        """Send it. With `wait` it is on disk when this returns, else when the pending receipt's
        `wait` does. Raises what a `Publisher` raises; if it was not sent yet it stays open."""
        underway = await self._driver.run(self._engine.commit(self))
        pending = PendingReceipt(self._driver, self._engine, underway)
        if wait:
            await pending.wait()
        return pending

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._engine.is_open(self):
                await self.commit()
        finally:
            self.roll_back()


class Publisher(PublisherBase):
    """A stream's source, made by `connect_publisher`. One task makes operations; any may wait
    for them.

    After the server has refused an operation (`NotWritten`, `PublishInDoubt`,
    `OperationTooLarge`), each wait and each commit raises that, until `resend` or `drop`. `Fenced`,
    `HistoryChanged` and other errors are final.
    """

    def __init__(
        self,
        driver_to: DriverTo,
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
        """The source of the stream that the server at `host` and `port` serves.

        `host`, `port`, `stream_type`, `tls`, `tls_server_name` and `timeout` are those of
        `connect`; the server's operator issues the `token`. The publisher requests the lease with
        `epoch` (0: the next one, if the lease is free); with `take_over` it fences the present
        holder. `lease` is the number of seconds of silence after which the lease ends (None: the
        server's default). `next_entry` is the first entry of the first operation. Without it, the
        publisher continues at the end of the stream; with a smaller number, the server compares the
        operations that the stream already holds.

        A lost connection is made again for `retry_for` seconds (None: without a limit), and
        operations without an acknowledgement are sent again: each operation is in the stream once.
        With `max_unacknowledged` bytes in flight, a commit waits.

        Leaving the block waits for what is in flight, unless an exception leaves it. Raises
        `ConnectFailed`, `TLSFailed`, `NotSupported` (the server accepts no publishers),
        `NotAllowed`, `SourceBusy`, `Fenced`.
        """
        endpoint = endpoint_of(host, port, tls, tls_server_name)
        self._driver = driver_to(endpoint)
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
        self._serving = AsyncExitStack()

    async def __aenter__(self) -> Self:
        serving = self._driver.background(self._engine.serve())
        await self._serving.enter_async_context(serving)
        try:
            await self._driver.run(self._engine.granted())
        except BaseException:
            await self._aclose()
            raise
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            await self._aclose()

    async def _aclose(self) -> None:
        """Release the lease, without waiting for operations in flight. In a forked child the lease
        stays the parent's."""
        self._engine.close()
        await self._serving.aclose()

    def atomic_op(self) -> PublishedOp:
        """An operation to add entries to: ``async with publisher.atomic_op() as op``.

        Raises `OperationOpen` if the last one was neither committed nor rolled back.
        """
        return PublishedOp(self._driver, self._engine)

    async def flush(self) -> None:
        """Return when all that was committed is on disk. Raises what prevents that."""
        await self._driver.run(self._engine.flush())

    def resend(self) -> None:
        """After a temporary refusal: send everything without a receipt again."""
        self._engine.resend()

    def drop(self) -> None:
        """After a refusal: discard the operations without a receipt."""
        self._engine.drop()
