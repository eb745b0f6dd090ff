"""The reassembly for plain synchronous code: a thread of its own reads the sources.

Owns that thread, and the calls into it. Arrivals are processed in the caller's thread. Must not
import trio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from datastreamer.client.asyncio_driver import AsyncioDriver
from datastreamer.client.effects import Call, Steps
from datastreamer.client.thread_driver import ThreadDriver
from datastreamer.consumer.arrivals import Arrivals
from datastreamer.consumer.base import ReassemblyBase
from datastreamer.consumer.engine import ConsumerEngine
from datastreamer.consumer.options import Addresses, ReassemblyOptions, Start
from datastreamer.consumer.sources import readers_of
from datastreamer.consumer.state import Arrival, Notice
from datastreamer.protocol.exchanges import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.reassembly.merge import Item, Order
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import ReassemblyStore
from datastreamer.transport.asyncio_thread import AsyncioThread


class BlockingReassembly(ReassemblyBase):
    """An iterator over payloads, and a context manager; the options are those of `reassemble`::

        with BlockingReassembly([("a", 6900), ("b", 6900)], subscribe=[b"\\x01"]) as payloads:
            for payload in payloads:
                ...

    After a KeyboardInterrupt it delivers and saves nothing more; a new reassembly resumes from the
    last save. The thread that requests payloads uses the store and calls `on_event`. One thread at
    a time. Another thread may read `stats`, `sources` and `samples` while no call is in progress.
    """

    def __init__(
        self,
        upstreams: Addresses,
        *,
        subscribe: Iterable[bytes] | None = None,
        store: ReassemblyStore | None = None,
        order: Order | None = None,
        after: bytes | None = None,
        on_event: Callable[[Notice], object] | None = None,
        follow: bool = True,
        start: Start = 0,
        type: int = MESSAGE_TYPE,
        reorg_threshold: int = 1000,
        budget: int = 1 << 30,
        max_age: float | None = 600.0,
        stream_type: int | None = None,
        timeout: float = TIMEOUT,
        heartbeat: float | None = None,
        backoff: Backoff = BACKOFF,
        retry_for: float | None = None,
    ) -> None:
        options = ReassemblyOptions(
            upstreams=upstreams,
            subscribe=subscribe,
            store=store,
            order=order,
            after=after,
            on_event=on_event,
            follow=follow,
            start=start,
            type=type,
            reorg_threshold=reorg_threshold,
            budget=budget,
            max_age=max_age,
            stream_type=stream_type,
            timeout=timeout,
            heartbeat=heartbeat,
            backoff=backoff,
            retry_for=retry_for,
        )
        self._driver = ThreadDriver()
        resume = None if store is None else store.load()
        self._engine = engine = ConsumerEngine(self._driver, options, resume)
        self._reader = AsyncioDriver()
        self._arrivals = arrivals = Arrivals(self._reader, len(engine.sources))
        engine.receive_from(self._receiving)
        readers = readers_of(engine.sources, engine.merge, options, arrivals, AsyncioDriver)
        self._thread = AsyncioThread("reassembly", "sources")
        for reader, steps in readers:
            self._thread.serve(reader.run(steps))

    def __enter__(self) -> BlockingReassembly:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.save()
        finally:
            self.close()

    def save(self) -> None:
        """Save that everything that was delivered has been processed."""
        self._driver.run(self._engine.save(at_end=True))

    def close(self) -> None:
        """End the thread and its connections. Nothing is saved. A second call does nothing."""
        self._thread.close()

    def next(self, seconds: float | None) -> Item | None:
        """The next payload. None at the end, and if no payload is complete within `seconds`."""
        return self._driver.run(self._engine.next(seconds))

    def __iter__(self) -> BlockingReassembly:
        return self

    def __next__(self) -> Item:
        item = self.next(None)
        if item is None:
            raise StopIteration
        return item

    def _receiving(self, seconds: float) -> Steps[Arrival | None]:
        arrival: Arrival | None = yield Call(self._receive, (seconds,))
        return arrival

    def _receive(self, seconds: float) -> Arrival | None:
        return self._thread.run(self._reader.run(self._arrivals.receive(seconds)))
