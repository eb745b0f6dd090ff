"""Whether committed entries are being truncated or updated, by this process or another.

Owns the turn: it is another after each such change, and odd while one runs. What was read in one
turn is sent in the same turn only. Owns the report of a change to readers that are no clients of
this protocol, too. `server.py` begins, reports and ends changes. Knows no client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import trio

from datastreamer.errors import UNREADABLE, NotFound
from datastreamer.storage.stream import DataStream

T = TypeVar("T")


class Changed(Exception):
    """Committed entries were truncated or updated during a read. Internal to the server."""


class EntryChange(NamedTuple):
    """The entries from `start` up to `stop`, at file offsets `offset` to `end`, are about to be
    updated, or, if `stop` is None, truncated with all that follow. With `late` another process has
    done so already."""

    start: int
    offset: int
    stop: int | None
    end: int
    late: bool


class OtherReader(Protocol):
    """A reader of the stream. Its methods do not wait and do not fail."""

    def changed(self, change: EntryChange) -> None: ...

    def lost(self) -> None:
        """The stream's file was removed or replaced, and the stream that was read is closed; or it
        is not known which entries were changed."""


class Turns:
    """The turns of one stream, for the event loop's thread."""

    def __init__(self, stream: DataStream) -> None:
        self.epoch = stream.epoch
        """The stream's epoch that all clients are at."""
        self._stream = stream
        # Changes that are over, and changes by this process that run.
        self._ended = 0
        self._running = 0
        self._waiting = trio.lowlevel.ParkingLot()
        self.on_wait: Callable[[], None] = lambda: None
        """Called when a task begins to wait for the end of a change."""

    @property
    def awaited(self) -> bool:
        """Whether a task waits for the end of a change."""
        return bool(self._waiting)

    @property
    def now(self) -> int:
        """The turn, as of the last look at the header page."""
        return 2 * self._ended + self.changing

    @property
    def changing(self) -> bool:
        """Whether a change runs, as of the last look, or clients were not notified of it yet."""
        stream = self._stream
        return self._running > 0 or stream.epoch != self.epoch or stream.changing

    def look(self) -> bool:
        """The same, as the header page shows it now."""
        self._stream.refresh_open_file()
        return self.changing

    def is_at(self, turn: int) -> bool:
        """Whether what was read in this turn is of the stream as it is now. No if a change ran when
        it was read."""
        return not self.look() and turn == 2 * self._ended

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Raises `Changed` at the end of the block unless it was in one turn, also instead of an
        error that the change may have caused. No other task runs between the last look at the
        stream and the end of the block."""
        turn = self.now
        try:
            yield
        except (*UNREADABLE, NotFound):
            if not self.is_at(turn):
                raise Changed from None
            raise
        if not self.is_at(turn):
            raise Changed

    async def steadily(self, read: Callable[[], Awaitable[T]]) -> T:
        """The result of `read()`, repeated until it was read in one turn. No other task runs
        between the last look at the stream and the return."""
        while True:
            await self.settled()
            with contextlib.suppress(Changed), self.one():
                return await read()

    async def settled(self) -> None:
        """Return when no change runs."""
        while self.changing:
            self.on_wait()
            await self._waiting.park()

    # Changes.

    def begin(self) -> None:
        """This process begins a change."""
        self._running += 1

    def end(self) -> None:
        """It is over; `settle` follows."""
        self._running -= 1

    def settle(self, epoch: int) -> None:
        """Clients that the changes up to `epoch` affect have been notified."""
        self.epoch = epoch
        self._ended += 1
        self._waiting.unpark_all()

    def settle_if_awaited(self) -> None:
        """A change by another process may have ended without a new epoch."""
        if self._waiting and not self.changing:
            self.settle(self.epoch)

    async def until_idle(self) -> None:
        """Return when this process makes no change."""
        while self._running:
            await self._waiting.park()
