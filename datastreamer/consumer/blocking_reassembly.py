# Made by .ci/blocking.py from consumer/async_reassembly.py: change that, and run it.
"""The reassembly for plain synchronous code: the same calls as `async_reassembly`.

A thread reads the sources; what arrives is processed in the caller's. Must not import trio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Generic, Self, TypeVar, Unpack, cast, overload

from datastreamer.client.asyncio_driver import AsyncioDriver, LoopDriver
from datastreamer.consumer.base import ReassemblyBase
from datastreamer.consumer.engine import ConsumerEngine
from datastreamer.consumer.options import Addresses, OtherOptions, ReassemblyOptions, Start
from datastreamer.consumer.state import Notice
from datastreamer.protocol.exchanges import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.reassembly.events import PayloadComplete
from datastreamer.reassembly.merge import Item, Order, OrderedItem
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import ReassemblyStore

Delivered = TypeVar("Delivered")


class BlockingReassembly(ReassemblyBase, Generic[Delivered]):
    """An iterator over payloads, and a context manager; the options are those of `reassemble`::

        with BlockingReassembly([("a", 6900), ("b", 6900)], subscribe=[b"\\x01"]) as payloads:
            for payload in payloads:
                ...

    After a KeyboardInterrupt it delivers and saves nothing more; a new reassembly resumes from the
    last save. The thread that requests payloads uses the store and calls `on_event`. One thread at
    a time. Another thread may read `stats`, `sources` and `samples` while no call is in progress.
    """

    @overload
    def __init__(
        self: BlockingReassembly[PayloadComplete],
        upstreams: Addresses,
        *,
        order: None = None,
        **options: Unpack[OtherOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: BlockingReassembly[OrderedItem],
        upstreams: Addresses,
        *,
        order: Order,
        **options: Unpack[OtherOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: BlockingReassembly[Item],
        upstreams: Addresses,
        *,
        order: Order | None,
        **options: Unpack[OtherOptions],
    ) -> None: ...

    def __init__(
        self,
        upstreams: Addresses,
        *,
        subscribe: Iterable[bytes] | None = None,
        store: ReassemblyStore | None = None,
        order: Order | None = None,
        after: bytes | None = None,
        on_event: Callable[[Notice], object] | None = None,
        follow: bool = False,
        start: Start = 0,
        type: int = MESSAGE_TYPE,
        reorg_threshold: int = 1000,
        budget: int = 1 << 30,
        max_age: float | None = 600.0,
        stream_type: int | None = None,
        batch_reads: bool = True,
        timeout: float = TIMEOUT,
        heartbeat: float | None = None,
        backoff: Backoff = BACKOFF,
        retry_for: float | None = None,
    ) -> None:
        options = ReassemblyOptions(
            upstreams,
            order,
            OtherOptions(
                subscribe=subscribe,
                store=store,
                after=after,
                on_event=on_event,
                follow=follow,
                start=start,
                type=type,
                reorg_threshold=reorg_threshold,
                budget=budget,
                max_age=max_age,
                stream_type=stream_type,
                batch_reads=batch_reads,
                timeout=timeout,
                heartbeat=heartbeat,
                backoff=backoff,
                retry_for=retry_for,
            ),
        )
        self._driver_to = AsyncioDriver
        self._driver = LoopDriver()
        self._engine = ConsumerEngine(self._driver, options)
        self._reading = ExitStack()
        readers = self._driver.run(self._engine.open(self._driver_to))
        self._reading.enter_context(self._driver.background(*readers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.save()
        finally:
            self.close()

    def close(self) -> None:
        """End the thread and its connections. Nothing is saved. A second call does nothing."""
        self._reading.close()

    def save(self) -> None:
        """Save that everything that was delivered has been processed."""
        self._driver.run(self._engine.save(at_end=True))

    def next(self, seconds: float | None) -> Delivered | None:
        """The next payload. None at the end, and if no payload is complete within `seconds`."""
        return cast("Delivered | None", self._driver.run(self._engine.next(seconds)))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delivered:
        item = self.next(None)
        if item is None:
            raise StopIteration
        return item
