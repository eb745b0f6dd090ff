"""The life of one iteration, written once for every driver.

Decides when it begins and ends, when a rollback is reported, and when a cursor is saved. The
connections are `engine`'s. Must not know sockets, tasks or clocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from datastreamer._codec import Entry
from datastreamer.client.bulk_receive import Settle, Take
from datastreamer.client.effects import Call, InThread, Steps
from datastreamer.client.engine import LOST, ClientEngine
from datastreamer.errors import ConnectionLost, PeerError, UsageError
from datastreamer.position import CursorStore, Position
from datastreamer.protocol.exchanges import Work
from datastreamer.protocol.resume import Resumable, Rollback
from datastreamer.protocol.retry import Recovery

Item = TypeVar("Item")


class Iteration(Generic[Item]):
    """The life of one `Work`."""

    reports_outages = False
    """Whether to call `report_outage` when the server is lost and when it is back, instead of
    logging that."""
    keeps_empty = False
    """Whether `next` returns runs that hold no wanted entry, which only move the position."""

    def __init__(
        self,
        engine: ClientEngine,
        work: Work[Item],
        cursor: CursorStore | None = None,
        on_rollback: Callable[[Rollback], object] | None = None,
    ) -> None:
        if isinstance(cursor, str | os.PathLike):
            raise UsageError(f"a cursor stores a position: FileCursor({str(cursor)!r})")
        self.work = work
        self.recovery: Recovery | None = None
        self.over = False
        # Whether another call has ended it on the connection already.
        self.settled = False
        # The entries of the last item, and the number of the one that was delivered last.
        self.entries: Iterator[Entry] = iter(())
        self.last: int | None = None
        self.streaming = work if isinstance(work, Resumable) else None
        self._engine = engine
        # How long a streaming waits for entries is not limited.
        self._seconds = engine.answer_timeout if self.streaming is None else None
        self._cursor = cursor
        self._on_rollback = on_rollback
        self._outage = False
        self._saved: Position | None = None
        self._begun = False
        self._taken_over = False
        # Whether a cancellation has ended it, in the middle of a request.
        self._broken = False

    @property
    def position(self) -> Position | None:
        """The position after what was delivered last."""
        if self.streaming is None:
            return None
        return self.streaming.position(None if self.last is None else self.last + 1)

    def finish(self) -> None:
        """No more items."""
        self.over = True
        self.entries = iter(())

    def take_over(self) -> None:
        """No more items, because of another call: the next use raises `UsageError`."""
        self._taken_over = not self.over
        self.finish()

    def begin(self) -> Steps[None]:
        """Begin, at the position that the cursor has saved if it has one."""
        if self._begun or self.over:
            return
        if self._cursor is not None and self.streaming is not None:
            self._saved = yield InThread(self._cursor.load)
            if self._saved is not None:
                self.streaming.go_on_from(self._saved)
        yield from self._engine.begin(self)
        self._begun = True
        if self._cursor is not None and self._saved is None:
            self._saved = self.position

    def next(self) -> Steps[Item | None]:
        """The next item; None at the end. After a cancellation it can be called again."""
        if self._taken_over:
            raise UsageError("this iteration was ended by a later call on its client")
        if self._broken:
            raise ConnectionLost("a wait was cancelled in the middle of a request; iterate again")
        if not self._begun:
            yield from self.begin()
        engine, streaming = self._engine, self.streaming
        while not self.over:
            # Checked here: a generator that finds nothing to do costs more than the check.
            if self._cursor is not None:
                yield from self._save()
            if self.reports_outages:
                yield from self._report_outages()
            if engine.channel is None and not (yield from engine.join(self)):
                break
            if self.reports_outages:
                yield from self._report_outages()
            if streaming is not None and streaming.rollback is not None:
                # Only when it was reported: a cancellation must not lose it.
                yield from self.report_rollback(streaming.rollback)
                streaming.rollback = None
                yield from self._save()
            item: Any
            try:
                item = yield from engine.advance(self, self._seconds)
            except Exception:
                raise
            except BaseException:
                self._broken = self.over and not self.settled
                raise
            if item is None:
                break
            # A run may hold no entry of the requested types.
            if item is not LOST and (
                item or self.keeps_empty or streaming is None or streaming.changes
            ):
                found: Item = item
                return found
        self.finish()
        return None

    def next_entries(self) -> Steps[bool]:
        """Make the entries of the next item the `entries`; False at the end."""
        self.last = None
        item: Iterable[Entry] | None = yield from self.next()  # type: ignore[assignment]
        if item is None:
            return False
        self.entries = iter(item)
        return True

    def pour(self, take: Take, settle: Settle, seconds: float) -> Steps[None]:
        """See `ClientEngine.pour`."""
        return self._engine.pour(self, take, settle, seconds)

    def leave(self, failed: bool) -> Steps[None]:
        """End it where its block ends."""
        try:
            if not failed:
                yield from self._save()
        finally:
            yield from self.close()

    def close(self) -> Steps[None]:
        """End it; the client is usable then. What has arrived and was not delivered is dropped."""
        self.finish()
        if not self.settled:
            self.settled = True
            yield from self._engine.settle(self)

    def _save(self) -> Steps[None]:
        """Save the position after what was delivered, which has been processed."""
        if self._cursor is None or self.streaming is None or not self._begun:
            return
        position = self.position
        if self.streaming.rollback is None and position not in (None, self._saved):
            yield InThread(self._cursor.save, (position,))
            self._saved = position

    def _report_outages(self) -> Steps[None]:
        """Report that the server is lost, or back, if that has changed."""
        recovery = self.recovery
        error = recovery.error if recovery is not None and recovery.down else None
        if self._outage != (error is not None):
            yield from self.report_outage(error)
            self._outage = error is not None

    def report_outage(self, error: PeerError | None) -> Steps[None]:
        """The server is lost because of `error`; or it is back (None)."""
        raise NotImplementedError

    def report_rollback(self, rollback: Rollback) -> Steps[None]:
        """The server truncated entries that were delivered."""
        if self._on_rollback is not None:
            yield Call(self._on_rollback, (rollback,))
