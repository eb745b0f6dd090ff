"""The part that all clients have in common: what they know, and their iterations.

Owns the documentation of these. How a call waits is in its face: `async_client` or
`blocking_client`. Must not import trio.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.effects import Call, Steps
from datastreamer.client.engine import ClientEngine
from datastreamer.client.iteration import Iteration
from datastreamer.position import CursorStore, Position
from datastreamer.protocol import exchanges
from datastreamer.protocol.batches import BATCH_BYTES, REQUESTS, BatchLimits, RangeReading
from datastreamer.protocol.resume import Resumable, Rollback
from datastreamer.selection.clauses import Where, selected
from datastreamer.selection.times import Moment, moment_ms

BatchesT = TypeVar("BatchesT")
EntriesT = TypeVar("EntriesT")

OnRollback = Callable[[Rollback], object]


class ClientBase(ABC, Generic[BatchesT, EntriesT]):
    """The methods of a client that do not wait."""

    _engine: ClientEngine

    @abstractmethod
    def _batches(self, iteration: Iteration[EntryBatch]) -> BatchesT:
        """An iterator over these batches."""

    @abstractmethod
    def _entries(self, iteration: Iteration[Any]) -> EntriesT:
        """An iterator over the entries of these items."""

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} of {self.peer}, stream type {self.stream_type}: {self._engine.state}>"

    @property
    def stream_type(self) -> int:
        """The stream type that every request names."""
        return self._engine.stream_type

    @property
    def peer(self) -> str:
        """The server as messages name it."""
        return self._engine.peer

    @property
    def total_entries(self) -> int | None:
        """The newest total that the server sent on this connection; None before the first."""
        return self._engine.total_entries

    # Batches

    def read_batches(
        self,
        *,
        from_entry: int = 0,
        from_position: Position | None = None,
        from_time: Moment | None = None,
        stop: int | None = None,
        max_count: int = 0,
        max_bytes: int = BATCH_BYTES,
        requests: int = REQUESTS,
        types: Collection[int] | None = None,
        where: Iterable[Where | int] | None = None,
        cursor: CursorStore | None = None,
        on_rollback: OnRollback | None = None,
    ) -> BatchesT:
        """As `batches`, requested in batches of `max_count` entries and `max_bytes`, with
        `requests` in flight: the server sends no more than is requested.

        Ends before entry `stop`, or at the stream's end as of the beginning. A server without
        batches streams the same entries, and the client cuts them into such batches.
        """
        first = from_entry if (from_position, from_time) == (None, None) else None
        start = (first, None, from_position, from_time)
        batched = BatchLimits(max_count, max_bytes, requests)
        options = {"where": selected(types, where), "batched": batched}
        return self._batches(self._streaming(start, stop, cursor, on_rollback, **options))

    def between_bookmarks(self, first: bytes, last: bytes) -> BatchesT:
        """The entries from one bookmark to another, both included, as they are now.

        Raises `BadFromBookmark`, `BadToBookmark` (also if the second precedes the first), and
        `NotSupported`: few servers support this.
        """
        return self._batches(Iteration(self._engine, RangeReading(first, last)))

    def entries_by_number(
        self, numbers: Iterable[int], *, window: int = exchanges.WINDOW
    ) -> EntriesT:
        """The entries of these numbers, in this order, with `window` queries in flight.

        Raises `UnknownEntry` at the first number that the stream does not hold.
        """
        return self._entries(Iteration(self._engine, exchanges.Lookup(numbers, window)))

    # Streaming

    def entries(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        from_position: Position | None = None,
        from_time: Moment | None = None,
        stop: int | None = None,
        types: Collection[int] | None = None,
        where: Iterable[Where | int] | None = None,
        cursor: CursorStore | None = None,
        on_rollback: OnRollback | None = None,
    ) -> EntriesT:
        """Entries one by one, from an entry's number (default 0), a bookmark's entry, a
        position or a time on.

        Continues with later commits, without end, or ends before entry `stop`. The iteration
        begins when its block is entered or its first item is requested, and raises `BadFromEntry`
        or `BadFromBookmark` then. `types` selects entries of these types, and `where` those that
        one of its clauses matches; others are dropped before objects are made of them, by the
        server if it can. `types=[2]` is short for `where=[Where(2)]`; `UsageError` for both.

        With `from_time` it begins at the entry that `entry_at` returns, and raises as it does.

        With `cursor` it begins at the position saved there, if there is one. The position after
        an item is saved when the next is requested, and when the block ends without an error:
        each item is delivered at least once. A program that stores the iteration's `position`
        together with its results, and passes it as `from_position` the next time, receives each
        entry exactly once.

        Raises `HistoryChanged` if the server was lost and then holds other entries than those that
        were delivered, or fewer. With `on_rollback`, that is called (and awaited, if it can be)
        instead if the last entry in common is among the last 256; the iteration then continues
        after that entry.
        """
        start = (from_entry, from_bookmark, from_position, from_time)
        chosen = selected(types, where)
        return self._entries(self._streaming(start, stop, cursor, on_rollback, where=chosen))

    def batches(
        self,
        *,
        from_entry: int | None = None,
        from_bookmark: bytes | None = None,
        from_position: Position | None = None,
        from_time: Moment | None = None,
        stop: int | None = None,
        types: Collection[int] | None = None,
        where: Iterable[Where | int] | None = None,
        cursor: CursorStore | None = None,
        on_rollback: OnRollback | None = None,
        commits: bool = False,
    ) -> BatchesT:
        """As `entries`, in runs as they arrive: the fast way for many entries.

        A batch keeps its bytes, in a receive buffer of up to 1 MiB. With `commits`, a server that
        can reports where atomic operations end (`commit_ahead`): for a streaming from an entry or
        a position; `from_bookmark` and `types` raise `UsageError`.
        """
        start = (from_entry, from_bookmark, from_position, from_time)
        options = {"where": selected(types, where), "commits": commits}
        return self._batches(self._streaming(start, stop, cursor, on_rollback, **options))

    def _streaming(
        self,
        start: tuple[int | None, bytes | None, Position | None, Moment | None],
        stop: int | None,
        cursor: CursorStore | None = None,
        on_rollback: OnRollback | None = None,
        **options: Any,
    ) -> Iteration[EntryBatch]:
        from_entry, from_bookmark, from_position, from_time = start
        work = Resumable(
            from_entry,
            from_bookmark,
            stop,
            from_position=from_position,
            from_ms=None if from_time is None else moment_ms(from_time),
            follow_rollbacks=on_rollback is not None,
            careful=self._engine.resumes,
            **options,
        )
        return Iteration(self._engine, work, cursor, on_rollback)

    def _run(
        self,
        callback: Callable[[Entry], object] | None,
        from_entry: int | None,
        from_bookmark: bytes | None,
        stop: int | None,
    ) -> Steps[None]:
        """Call `callback` for each entry, or print a line for each."""
        iteration = self._streaming((from_entry, from_bookmark, None, None), stop)
        failed = True
        try:
            while (batch := (yield from iteration.next())) is not None:
                if callback is None:
                    sys.stdout.write(exchanges.lines(batch))
                    sys.stdout.flush()
                    continue
                for entry in batch:
                    yield Call(callback, (entry,))
                    if iteration.over:
                        break
            failed = False
        finally:
            yield from iteration.leave(failed)


class IterationBase:
    """The part that all iterators of a client have in common."""

    def __init__(self, iteration: Iteration[Any]) -> None:
        self._iteration = iteration

    @property
    def position(self) -> Position | None:
        """The position after the last delivered item, to be stored with the results.

        None if nothing is known yet, and for entries by number.
        """
        return self._iteration.position


class BatchesBase(IterationBase):
    """The part that iterators over batches have in common."""

    @property
    def commit_ahead(self) -> int | None:
        """Where the atomic operations of the newest batch end: no entry from there on was
        delivered. None without `commits`, or if the server does not report them."""
        streaming = self._iteration.streaming
        return None if streaming is None else streaming.commit_ahead
