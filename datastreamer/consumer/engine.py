"""A consumer of several sources, written once for every driver.

Owns the turns of a consumer: when to save progress, what to wait for, what to report. What follows
from an arrival is `state`'s, how sources are read `sources`'. Must not know sockets, tasks or
clocks: `datastreamer.client.effects` has the steps that its driver performs.
"""

from __future__ import annotations

from datastreamer.client.effects import Beside, Call, Driver, DriverTo, InThread, Now, Steps
from datastreamer.consumer.arrivals import Arrivals
from datastreamer.consumer.options import ReassemblyOptions, named
from datastreamer.consumer.sources import readers_of
from datastreamer.consumer.state import LOOK_SECONDS, ConsumerState, is_item, say
from datastreamer.errors import UsageError
from datastreamer.reassembly.merge import Item, Merge
from datastreamer.transport.fork_guard import ForkGuard


class ConsumerEngine(ForkGuard):
    """Delivers the payloads of several sources: each whole, and once."""

    _called = "reassembly"
    state: ConsumerState

    def __init__(self, driver: Driver, options: ReassemblyOptions) -> None:
        super().__init__()
        self.over = False
        self._driver = driver
        self._options = options
        self._sources = named(options.upstreams)
        self._arrivals = Arrivals(driver, len(self._sources))
        self._store = options.given["store"]
        self._on_event = options.given["on_event"] or say
        self._busy = False

    def open(self, driver_to: DriverTo) -> Steps[list[Steps[None]]]:
        """Begin where the store was saved: gives the steps that read the sources, each by a driver
        of its own."""
        options = self._options
        resume = None
        if self._store is not None:
            resume = yield InThread(self._store.load)
        merge = Merge(
            self._sources,
            options.given["subscribe"],
            type=options.given["type"],
            order=options.order,
            after=options.given["after"],
            reorg_threshold=options.given["reorg_threshold"],
            budget=options.given["budget"],
            max_age=options.given["max_age"] if options.given["follow"] else None,
            resume=resume,
        )
        self.state = ConsumerState(merge, self._sources)
        return readers_of(self._sources, merge, options, self._arrivals, driver_to)

    def now(self) -> float:
        """The time by the driver's clock, which `state` uses."""
        return self._driver.now()

    def next(self, seconds: float | None = None) -> Steps[Item | None]:
        """The next item; None at the end, and if no item is complete within `seconds`.

        After a cancellation it can be called again, and nothing is lost.
        """
        self._ensure_ours()
        if self._busy:
            raise UsageError("another call waits for a payload; only one may wait at a time")
        self._busy = True
        try:
            return (yield from self._next(seconds))
        except BaseException as error:
            if not isinstance(error, (Exception, *self._driver.cancelled)):
                # What was just arriving, or was being delivered, is lost.
                self.state.interrupt()
            raise
        finally:
            self._busy = False

    def _next(self, seconds: float | None) -> Steps[Item | None]:
        state = self.state
        now = yield Now()
        deadline = None if seconds is None else now + seconds
        state.clock(now)
        while True:
            if self._store is not None:
                yield from self.save()
            while (event := state.next_event()) is not None:
                if is_item(event):
                    state.given()
                    state.leave((yield Now()))
                    return event
                yield Call(self._on_event, (event,))
            if state.over:
                self.over = True
                return None
            wait = LOOK_SECONDS
            if deadline is not None:
                wait = min(wait, deadline - (yield Now()))
                if wait <= 0:
                    return None
            arrival = yield Beside(self._arrivals.receive(wait))
            now = state.clock((yield Now()))
            if arrival is None:
                state.expire(now)
            else:
                state.arrive(arrival, now)

    def save(self, *, at_end: bool = False) -> Steps[None]:
        """Save that everything that was delivered has been processed, if that is due."""
        if self._store is None:
            return
        now = yield Now()
        progress = self.state.to_save(now, at_end=at_end)
        if progress is not None:
            yield InThread(self._store.save, (progress,))
            self.state.saved(now)
