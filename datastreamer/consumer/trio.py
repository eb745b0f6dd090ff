"""Payloads that several producers publish, from their servers: whole, and each once.

Owns the Trio face alone: what follows from an arrival stands in `reassembling`, how sources are
read in `sources`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from inspect import isawaitable

import trio

from datastreamer.consumer.consumption import (
    LOOK_SECONDS,
    Addresses,
    Arrival,
    Consumption,
    Notice,
    is_item,
    named,
    say,
)
from datastreamer.consumer.readers import Reading, Sources, Start
from datastreamer.consumer.stats import Observed
from datastreamer.errors import UsageError
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.reassembly.merge import Item, Merge, Order
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import ReassemblyStore


@asynccontextmanager
async def reassemble(
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
) -> AsyncIterator[Reassembly]:
    """The payloads that all of `upstreams` publish together, each whole and once::

        async with reassemble([("a", 6900), ("b", 6900)], subscribe=[b"\\x01"]) as payloads:
            async for payload in payloads:
                ...

    An upstream is (host, port), an `Upstream`, or the path of a stream file; a mapping gives them
    names under which their places are kept. All are read at once, and none waits for another: one
    that is lost is waited for, up to `retry_for` seconds, one that fails is told of and tried again
    now and then, and what the others have is given. With `follow` it goes on with what is committed
    later; else it ends where the last upstream ends. Upstreams without a place begin at `start`:
    an entry's number, a bookmark's key, or "latest". The next request being late makes the
    servers wait: in memory are the `budget` and at most three batches for each upstream.

    With `store` it goes on where it was saved. Saved is, before the next payload is given, that
    the one before has been dealt with, and once more where the block is left without an error.
    A store that writes to the transaction which the results are in, and commits that, makes it
    exactly once.

    With `order`, which says the `Block` of a payload, the iterator gives `Applied` and `Reorg`
    instead; `after` is the parent of the first block. Those that wait for a parent take up to the
    `budget` once more; above that the furthest ahead is `Rejected`. All other events go to
    `on_event`, which is waited for: `Conflict`, `Malformed`, `Dropped`, `Gap`, `Rejected`,
    `SourceLost`, `SourceBack`, `SourceRolledBack` and `SourceFailed`; without it the last four are
    logged. `subscribe`, `reorg_threshold`, `budget` and `max_age` are the `Reassembler`'s; of
    several upstreams payloads stay known for 100,000 further ones at least, and without `follow`
    nothing ages. `timeout`, `heartbeat` and `backoff` are those of `connect`.

    Raises, from the iterator, what all upstreams have failed with (the last of them) where none is
    left that was read and may be again, and what the store raises.
    """
    sources = named(upstreams)
    before = None if store is None else await trio.to_thread.run_sync(store.load)
    merge = Merge(
        sources,
        subscribe,
        type=type,
        order=order,
        after=after,
        reorg_threshold=reorg_threshold,
        budget=budget,
        max_age=max_age if follow else None,
        resume=before,
    )
    how = Reading(follow, start, stream_type, timeout, heartbeat, backoff, retry_for)
    places = {name: merge.source_progress(name) for name in sources}
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        reading = Sources(sources, places, how)
        nursery.start_soon(reading.run)
        try:
            payloads = Reassembly(Consumption(merge, sources), reading.arrivals, store, on_event)
            try:
                yield payloads
                await payloads.save()
            finally:
                nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - raised below, without a group around it
            failure = error
    if failure is not None:
        raise failure


class Reassembly(Observed):
    """An asynchronous iterator over payloads, made by `reassemble`. One task at a time."""

    def __init__(
        self,
        consumption: Consumption,
        arrivals: trio.MemoryReceiveChannel[Arrival],
        store: ReassemblyStore | None,
        on_event: Callable[[Notice], object] | None,
    ) -> None:
        self._consumption = consumption
        self._arrivals = arrivals
        self._store = store
        self._on_event = on_event or say
        self._busy = False

    def _now(self) -> float:
        return trio.current_time()

    async def save(self) -> None:
        """Save that everything that was given has been dealt with."""
        await self._save(at_end=True)

    def __aiter__(self) -> Reassembly:
        return self

    async def __anext__(self) -> Item:
        """The next payload. Cancelled, it can be asked for again, and nothing is lost."""
        if self._busy:
            raise UsageError("another task is waiting for a payload; there is one at a time")
        self._busy = True
        try:
            return await self._next()
        except KeyboardInterrupt:
            # What was just being given is lost.
            self._consumption.interrupt()
            raise
        finally:
            self._busy = False

    async def _next(self) -> Item:
        consumption = self._consumption
        consumption.clock(trio.current_time())
        while True:
            await self._save()
            while (event := consumption.next_event()) is not None:
                if is_item(event):
                    consumption.given()
                    consumption.leave(trio.current_time())
                    return event
                outcome = self._on_event(event)
                if isawaitable(outcome):
                    await outcome
            if consumption.over:
                raise StopAsyncIteration
            arrival = None
            with trio.move_on_after(LOOK_SECONDS):
                arrival = await self._arrivals.receive()
            now = consumption.clock(trio.current_time())
            if arrival is None:
                consumption.expire(now)
            else:
                consumption.arrive(arrival, now)

    async def _save(self, *, at_end: bool = False) -> None:
        if self._store is None:
            return
        now = trio.current_time()
        progress = self._consumption.to_save(now, at_end=at_end)
        if progress is not None:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._store.save, progress)
            self._consumption.saved(now)
