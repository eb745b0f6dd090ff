"""The blocking client's iterators: batches and entries as they arrive.

Owns the life of an iteration as its user sees it: when it begins and ends, what is told
of a rollback, and when a cursor is saved. The connections are `blocking_link`'s. Must not
import trio.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeAlias, TypeVar

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import UsageError
from datastreamer.position import CursorStore, Position
from datastreamer.protocol.flows import Work
from datastreamer.protocol.resume import Resumable, Rollback
from datastreamer.protocol.retry import Recovery

if TYPE_CHECKING:
    from datastreamer.client.thread_driver import BlockingLink

Item = TypeVar("Item")


class _Lost(enum.Enum):
    LOST = enum.auto()


LOST: Final = _Lost.LOST
"""In place of an item: the connection is gone, and the iteration may join again."""
Lost: TypeAlias = Literal[_Lost.LOST]


class Iteration(Generic[Item]):
    """What the iterators of a client have in common: the life of one `Work`."""

    def __init__(
        self,
        client: BlockingLink,
        work: Work[Item],
        timeout: float | None,
        cursor: CursorStore | None = None,
        on_rollback: Callable[[Rollback], object] | None = None,
    ) -> None:
        self.work = work
        self.recovery: Recovery | None = None
        self._streaming = work if isinstance(work, Resumable) else None
        self._client = client
        self._timeout = timeout
        self._cursor = cursor
        self._on_rollback = on_rollback
        self._kept: Position | None = None
        self._begun = False
        self._over = False
        self._taken_over = False

    @property
    def position(self) -> Position | None:
        """The place behind what was handed out last: to be kept with what was made of it.

        None where nothing is known yet, and for entries by number.
        """
        return None if self._streaming is None else self._streaming.position(self._before())

    @property
    def over(self) -> bool:
        """Whether no more items are wanted."""
        return self._over

    @property
    def _untold(self) -> bool:
        """Whether there is a rollback that the caller has not dealt with."""
        return self._streaming is not None and self._streaming.rollback is not None

    def _before(self) -> int | None:
        """The first entry that was received and not handed out yet, if there is one."""
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._keep()
        finally:
            self.close()

    def close(self) -> None:
        """End it; the client is usable then. What has arrived and was not taken is dropped."""
        self.finish()
        self._client.settle(self)

    def finish(self) -> None:
        """No more items."""
        self._over = True

    def take_over(self) -> None:
        """No more items, and whoever asks for one is told why."""
        self._taken_over = not self._over
        self.finish()

    def _begin(self) -> None:
        if self._begun or self._over:
            return
        if self._cursor is not None and self._streaming is not None:
            self._kept = self._cursor.load()
            if self._kept is not None:
                self._streaming.go_on_from(self._kept)
        self._client.begin(self)
        self._begun = True
        if self._cursor is not None and self._kept is None:
            self._kept = self.position

    def _next(self) -> Item:
        if self._taken_over:
            raise UsageError("this iteration was ended by a later call on its client")
        if not self._begun:
            self._begin()
        while not self._over:
            self._keep()
            self._client.join(self)
            self._tell()
            item = self._client.advance(self, self._timeout)
            if item is None:
                break
            if item is not LOST and (item or self._streaming is None):
                return item
        self.finish()
        raise StopIteration

    def _keep(self) -> None:
        """Save the place behind what was handed out: it has been dealt with."""
        if self._cursor is not None and self._begun and not self._untold:
            position = self.position
            if position is not None and position != self._kept:
                self._cursor.save(position)
                self._kept = position

    def _tell(self) -> None:
        """Tell of a rollback, and only then forget it."""
        if self._streaming is not None and self._streaming.rollback is not None:
            if self._on_rollback is not None:
                self._on_rollback(self._streaming.rollback)
            self._streaming.rollback = None
            self._keep()


class Batches(Iteration[EntryBatch]):
    """Batches of entries as they arrive: an iterator.

    ``with`` begins it at once and ends it on leaving; without that it begins with
    the first item, and after a ``break`` the client's next call ends it.
    """

    def __enter__(self) -> Batches:
        self._begin()
        return self

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> EntryBatch:
        return self._next()

    @property
    def commit_ahead(self) -> int | None:
        """Where the atomic operations end to which the batch that came last belongs: no entry
        behind that was handed out. None where `commits` were not asked for, or the server does
        not tell."""
        return None if self._streaming is None else self._streaming.commit_ahead


class Entries(Iteration[Iterable[Entry]]):
    """Entries one by one: an iterator, begun and ended as `Batches`."""

    _items: Iterator[Entry] = iter(())
    _last: int | None = None

    def __enter__(self) -> Entries:
        self._begin()
        return self

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        while True:
            for entry in self._items:
                self._last = entry.number
                return entry
            self._last = None
            self._items = iter(self._next())

    def _before(self) -> int | None:
        return None if self._last is None else self._last + 1

    def finish(self) -> None:
        super().finish()
        self._items = iter(())
