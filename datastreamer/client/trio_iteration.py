"""The Trio client's iterators: batches and entries as they arrive.

Owns the life of an iteration as its user sees it: when it begins and ends, what is told
of a rollback, and when a cursor is saved. The connections are `link`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from inspect import isawaitable
from types import TracebackType
from typing import Generic, TypeVar

import trio

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.bulk_receive import Settle, Take
from datastreamer.client.trio_driver import LOST, Link
from datastreamer.errors import PeerError, UsageError
from datastreamer.position import CursorStore, Position
from datastreamer.protocol.flows import Work
from datastreamer.protocol.following import ChangeReceived, FollowBegun
from datastreamer.protocol.resume import Resumable, Rollback
from datastreamer.protocol.retry import Recovery

Item = TypeVar("Item")


class Iteration(Generic[Item]):
    """What the iterators of a client have in common: the life of one `Work`."""

    def __init__(
        self,
        link: Link,
        work: Work[Item],
        cursor: CursorStore | None = None,
        on_rollback: Callable[[Rollback], object] | None = None,
    ) -> None:
        self.work = work
        self.recovery: Recovery | None = None
        # Told the error where the server is lost, and None where it is back; the log is not.
        self.on_outage: Callable[[PeerError | None], Awaitable[None]] | None = None
        self._outage = False
        self._streaming = work if isinstance(work, Resumable) else None
        self._link = link
        self._cursor = cursor
        self._on_rollback = on_rollback
        self._kept: Position | None = None
        self._begun = False
        self._over = False
        self._taken_over = False
        self._closing = False

    @property
    def position(self) -> Position | None:
        """The place behind what was handed out last: to be kept with what was made of it.

        None where nothing is known yet, and for entries by number.
        """
        return None if self._streaming is None else self._streaming.position(self._before())

    @property
    def _untold(self) -> bool:
        """Whether there is a rollback that the caller has not dealt with."""
        return self._streaming is not None and self._streaming.rollback is not None

    def _before(self) -> int | None:
        """The first entry that was received and not handed out yet, if there is one."""
        return None

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                await self._keep()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End it; the client is usable then. What has arrived and was not taken is dropped."""
        self.finish()
        if not self._closing:
            self._closing = True
            await self._link.settle(self)

    def finish(self) -> None:
        """No more items."""
        self._over = True

    def take_over(self) -> None:
        """No more items, and whoever asks for one is told why."""
        self._taken_over = not self._over
        self.finish()

    async def _begin(self) -> None:
        if self._begun or self._over:
            return
        if self._cursor is not None and self._streaming is not None:
            self._kept = await trio.to_thread.run_sync(self._cursor.load)
            if self._kept is not None:
                self._streaming.go_on_from(self._kept)
        await self._link.begin(self)
        self._begun = True
        if self._cursor is not None and self._kept is None:
            self._kept = self.position

    async def _next(self) -> Item:
        if self._taken_over:
            raise UsageError("this iteration was ended by a later call on its client")
        if not self._begun:
            await self._begin()
        while not self._over:
            # Asked here: a call that finds nothing to do costs more than the question.
            if self._cursor is not None:
                await self._keep()
            if self.on_outage is not None:
                await self._tell_outage()
            if not self._link.connected and not await self._link.join(self):
                break
            if self.on_outage is not None:
                await self._tell_outage()
            if self._untold:
                await self._tell()
            item = await self._link.advance(self)
            if item is None:
                break
            if item is not LOST and (item or self._streaming is None or self._streaming.changes):
                return item
        self.finish()
        raise StopAsyncIteration

    async def _keep(self) -> None:
        """Save the place behind what was handed out: it has been dealt with."""
        if self._cursor is not None and self._begun and not self._untold:
            position = self.position
            if position is not None and position != self._kept:
                await trio.to_thread.run_sync(self._cursor.save, position)
                self._kept = position

    async def _tell_outage(self) -> None:
        """Tell that the server is lost, or back, where that is news."""
        if self.on_outage is not None:
            recovery = self.recovery
            error = recovery.error if recovery is not None and recovery.down else None
            if self._outage != (error is not None):
                await self.on_outage(error)
                self._outage = error is not None

    async def _tell(self) -> None:
        """Tell of a rollback, and only then forget it."""
        if self._streaming is not None and self._streaming.rollback is not None:
            if self._on_rollback is not None:
                outcome = self._on_rollback(self._streaming.rollback)
                if isawaitable(outcome):
                    await outcome
            self._streaming.rollback = None
            await self._keep()


class Batches(Iteration[EntryBatch]):
    """Batches of entries as they arrive: an asynchronous iterator.

    ``async with`` begins it at once and ends it on leaving; without that it begins with
    the first item, and after a ``break`` the client's next call ends it.
    """

    async def __aenter__(self) -> Batches:
        await self._begin()
        return self

    def __aiter__(self) -> Batches:
        return self

    async def __anext__(self) -> EntryBatch:
        return await self._next()

    @property
    def commit_ahead(self) -> int | None:
        """Where the atomic operations end to which the batch that came last belongs: no entry
        behind that was handed out. None where `commits` were not asked for, or the server does
        not tell."""
        return None if self._streaming is None else self._streaming.commit_ahead

    @property
    def begun(self) -> FollowBegun | None:
        """What the server said on the beginning of a `Client.follow`; None where it does not
        report changes."""
        return None if self._streaming is None else self._streaming.begun

    @property
    def changes(self) -> deque[ChangeReceived]:
        """Changes that were reported since the batch before, in order, to be removed by the
        caller; each comes with a batch of no entries."""
        return deque() if self._streaming is None else self._streaming.changes

    async def pour(self, take: Take, settle: Settle, seconds: float) -> None:
        """Have `take` called, in a thread, with the batches that come next, for `seconds` or
        until none does for a moment: without the loop's turns in between. `settle` is called
        when all that has arrived was taken. Where that cannot be it does nothing. Raises what
        these do; for clients that do not resume."""
        await self._link.pour(self, take, settle, seconds)


class Entries(Iteration[Iterable[Entry]]):
    """Entries one by one: an asynchronous iterator, begun and ended as `Batches`.

    Each run that arrives is a checkpoint; the entries within it are not.
    """

    _items: Iterator[Entry] = iter(())
    _last: int | None = None

    async def __aenter__(self) -> Entries:
        await self._begin()
        return self

    def __aiter__(self) -> Entries:
        return self

    async def __anext__(self) -> Entry:
        while True:
            for entry in self._items:
                self._last = entry.number
                return entry
            self._last = None
            self._items = iter(await self._next())

    def _before(self) -> int | None:
        return None if self._last is None else self._last + 1

    def finish(self) -> None:
        super().finish()
        self._items = iter(())
