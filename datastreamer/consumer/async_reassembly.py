"""The reassembly of tasks: payloads as asynchronous iteration.

Owns the public face for Trio and for asyncio; the drivers decide between them. Must not import
trio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Generic, Self, TypeVar, Unpack, cast, overload

from datastreamer.client.effects import DriverTo
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


class Reassembly(ReassemblyBase, Generic[Delivered]):
    """An asynchronous iterator over payloads, made by `reassemble`. One task at a time."""

    @overload
    def __init__(
        self: Reassembly[PayloadComplete],
        driver_to: DriverTo,
        upstreams: Addresses,
        *,
        order: None = None,
        **options: Unpack[OtherOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Reassembly[OrderedItem],
        driver_to: DriverTo,
        upstreams: Addresses,
        *,
        order: Order,
        **options: Unpack[OtherOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: Reassembly[Item],
        driver_to: DriverTo,
        upstreams: Addresses,
        *,
        order: Order | None,
        **options: Unpack[OtherOptions],
    ) -> None: ...

    def __init__(
        self,
        driver_to: DriverTo,
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
        """The payloads that all of `upstreams` publish together, each whole and once::

            async with reassemble([("a", 6900), ("b", 6900)], follow=True) as payloads:
                async for payload in payloads:
                    ...

        An upstream is (host, port), ``tcp://HOST:PORT``, ``tcps://HOST:PORT``, ``unix:PATH``, an
        `Upstream`, or the path of a stream file; a mapping gives them names under which their
        positions are saved. All are read at the same time, and no upstream waits for another: one
        that is lost is retried for `retry_for` seconds, one that fails is reported and retried at
        long intervals, and what the others send is delivered. The iteration ends where the
        last upstream ends; with `follow` it continues with later commits. Upstreams without a
        saved position begin at `start`: an entry's number, a bookmark's key, a time (a `datetime`
        with a zone), or "latest". A slow consumer makes the servers wait: the `budget` and at most
        three batches per upstream are in memory.

        With `store` it resumes where the store was saved. Before it delivers the next payload, it
        saves that the last one has been processed, and again when the block ends without an error.
        A store that writes in the transaction that holds the results, and commits it, makes that
        exactly once.

        With `order`, which returns the `Block` of a payload, the iterator delivers `Applied` and
        `Reorg` instead; `after` is the parent of the first block. Blocks that wait for a parent use
        up to the `budget` again; above that, the furthest ahead is `Rejected`. `on_event` is called
        (and awaited, if it can be) with all other events: `Conflict`, `Malformed`, `Dropped`,
        `Gap`, `Rejected`, `SourceLost`, `SourceBack`, `SourceRolledBack` and `SourceFailed`;
        without it the last four are logged. `subscribe`, `reorg_threshold`, `budget` and `max_age`
        are the `Reassembler`'s; with several upstreams payloads stay known for at least 100,000
        further ones, and without `follow` nothing expires. Messages are the entries of `type`.
        With `subscribe`, which nested headers are added to, servers that can send only the messages
        that are subscribed to; without `batch_reads` no server is asked for that.
        `stream_type` (None: that of sequencers for servers, any for files), `timeout`, `heartbeat`
        and `backoff` are those of `connect`.

        If all upstreams have failed and no further attempt is due, the iterator raises the last
        upstream's error. It also raises what the store raises.
        """
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
        self._driver_to = driver_to
        self._driver = driver_to()
        self._engine = ConsumerEngine(self._driver, options)
        self._reading = AsyncExitStack()

    async def __aenter__(self) -> Self:
        readers = await self._driver.run(self._engine.open(self._driver_to))
        await self._reading.enter_async_context(self._driver.background(*readers))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                await self.save()
        finally:
            await self._aclose()

    async def _aclose(self) -> None:
        """End the connections. Nothing is saved. A second call does nothing."""
        await self._reading.aclose()

    async def save(self) -> None:
        """Save that everything that was delivered has been processed."""
        await self._driver.run(self._engine.save(at_end=True))

    async def next(self, seconds: float | None) -> Delivered | None:
        """The next payload. None at the end, and if no payload is complete within `seconds`.

        After a cancellation it can be called again, and nothing is lost.
        """
        return cast("Delivered | None", await self._driver.run(self._engine.next(seconds)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivered:
        item = await self.next(None)
        if item is None:
            raise StopAsyncIteration
        return item
