"""The same reassembly for plain synchronous code: sources are read in a thread of its own.

Owns that thread, and the calls into it. What follows from an arrival happens in the caller's
thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from datastreamer.consumer.stats import Observed
from datastreamer.errors import StreamClosed, UsageError
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.reassembly.merge import Item, Merge, Order
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import ReassemblyStore

if TYPE_CHECKING:
    import trio

    from datastreamer.consumer.consumption import Addresses, Arrival, Notice
    from datastreamer.consumer.readers import Start


class BlockingReassembly(Observed):
    """An iterator over payloads, and a context manager; arguments and meaning are those of
    `reassemble`::

        with BlockingReassembly([("a", 6900), ("b", 6900)], subscribe=[b"\\x01"]) as payloads:
            for payload in payloads:
                ...

    After a KeyboardInterrupt it gives and saves no more; another goes on behind what was saved.
    The store is used, and `on_event` called, in the thread that asks for payloads. One thread at
    a time, but for `stats`, `sources`, `samples` while none is in a call.
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
        import trio

        from datastreamer.consumer.consumption import Consumption, named, say
        from datastreamer.consumer.readers import Reading, Sources

        sources = named(upstreams)
        merge = Merge(
            sources,
            subscribe,
            type=type,
            order=order,
            after=after,
            reorg_threshold=reorg_threshold,
            budget=budget,
            max_age=max_age if follow else None,
            resume=None if store is None else store.load(),
        )
        self._consumption = Consumption(merge, sources)
        self._store = store
        self._on_event = on_event or say
        self._busy = False
        self._closed = False
        how = Reading(follow, start, stream_type, timeout, heartbeat, backoff, retry_for)
        places = {name: merge.source_progress(name) for name in sources}
        self._make = partial(Sources, sources, places, how)
        self._sources: Sources | None = None
        self._over = False
        self._failure: BaseException | None = None
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sources", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        import trio

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            self._sources = self._make()
            self._ready.set()
            with self._scope:
                await self._sources.run()
                # What has arrived is still to be taken.
                await trio.sleep_forever()

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - raised where payloads are waited for
            self._failure = error
        finally:
            self._ready.set()

    def _now(self) -> float:
        return time.monotonic()

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
        """Save that everything that was given has been dealt with."""
        self._save(at_end=True)

    def close(self) -> None:
        """End the thread and its connections. Nothing is saved. A second call does nothing."""
        import trio

        if not self._closed and self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self._closed = True
        self._thread.join()

    def __iter__(self) -> BlockingReassembly:
        return self

    def __next__(self) -> Item:
        item = self.next(None)
        if item is None:
            raise StopIteration
        return item

    def next(self, seconds: float | None) -> Item | None:
        """The next payload. None: at the end, and where none came for so many seconds."""
        if self._busy:
            raise UsageError("another thread is waiting for a payload; there is one at a time")
        self._busy = True
        try:
            return self._next(None if seconds is None else time.monotonic() + seconds)
        except Exception:
            raise
        except BaseException:
            # What was just arriving, or was being given, is lost.
            self._consumption.interrupt()
            raise
        finally:
            self._busy = False

    @property
    def over(self) -> bool:
        """Whether all upstreams have ended and what they had was given."""
        return self._over

    def _next(self, deadline: float | None) -> Item | None:
        from datastreamer.consumer.consumption import LOOK_SECONDS, is_item

        consumption = self._consumption
        consumption.clock(time.monotonic())
        while True:
            self._save()
            while (event := consumption.next_event()) is not None:
                if is_item(event):
                    consumption.given()
                    consumption.leave(time.monotonic())
                    return event
                self._on_event(event)
            if consumption.over:
                self._over = True
                return None
            seconds = LOOK_SECONDS
            if deadline is not None:
                seconds = min(seconds, deadline - time.monotonic())
                if seconds <= 0:
                    return None
            arrival = self._receive(seconds)
            now = consumption.clock(time.monotonic())
            if arrival is None:
                consumption.expire(now)
            else:
                consumption.arrive(arrival, now)

    def _receive(self, seconds: float) -> Arrival | None:
        import trio

        if self._closed:
            raise StreamClosed("this reassembly is closed")
        sources, token = self._sources, self._token
        if sources is None or token is None:
            raise self._failure or StreamClosed("this reassembly is closed")

        async def receive() -> Arrival | None:
            with trio.move_on_after(seconds):
                return await sources.arrivals.receive()
            return None

        try:
            return trio.from_thread.run(receive, trio_token=token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise self._failure or StreamClosed("this reassembly is closed") from None

    def _save(self, *, at_end: bool = False) -> None:
        if self._store is None:
            return
        now = time.monotonic()
        progress = self._consumption.to_save(now, at_end=at_end)
        if progress is not None:
            self._store.save(progress)
            self._consumption.saved(now)
