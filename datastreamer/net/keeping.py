"""What arrives from an upstream, written to our file: in the loop's turn or beside it.

Owns the order of writes, how much may wait for the disk, and that the event loop does not.
Knows no connection.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.errors import DatastreamerError, ProtocolViolation
from datastreamer.storage.stream import DataStream

AT_ONCE: Final = 64 << 10
"""Bytes that are written in the loop's own turn: that takes less time than a thread does to
begin. More is written in a thread, while the next bytes are received."""

WAITING: Final = 512 << 10
"""Bytes that may wait for a thread; the upstream waits beyond that. Few, so that they stand in
the two or three receive buffers that are used again and again, and need not be made."""


class Keeper:
    """Appends batches to `stream`, whole and in order.

    Each commit takes what has arrived. It does not wait for the disk; readers see it as the
    stream's sync policy says. Run `run` beside the calls of `keep`; what the stream raises is
    in `failure` then, `scope` is cancelled, and nothing is kept any more.
    """

    def __init__(self, stream: DataStream, scope: trio.CancelScope) -> None:
        self.failure: DatastreamerError | None = None
        self._stream = stream
        self._scope = scope
        self._waiting: list[EntryBatch] = []
        self._size = 0
        self._underway = False
        self._arrived = trio.Event()
        self._written = trio.Event()

    async def keep(self, batch: EntryBatch) -> None:
        """Append these. May return before they are committed. Raises what the stream raises
        where they are small, and are written now."""
        idle = not (self._underway or self._waiting)
        if idle and batch.nbytes <= AT_ONCE and self._stream.takes_at_once(batch.nbytes):
            append(self._stream, [batch])
            return
        while self._size > WAITING:
            self._written = trio.Event()
            await self._written.wait()
        self._waiting.append(batch)
        self._size += batch.nbytes
        self._arrived.set()

    async def settle(self) -> None:
        """Return when nothing waits any more: all that was kept is committed, or `failure`
        says why not."""
        while self._underway or self._waiting:
            self._written = trio.Event()
            await self._written.wait()

    async def run(self) -> None:
        """Write what waits, until cancelled: all that is being written is committed then."""
        while True:
            await self._arrived.wait()
            self._arrived = trio.Event()
            taken, self._waiting, self._size = self._waiting, [], 0
            self._underway = True
            self._written.set()
            try:
                await trio.to_thread.run_sync(functools.partial(append, self._stream, taken))
            except DatastreamerError as error:
                self.failure = error
                self._scope.cancel()
                return
            finally:
                self._underway = False
            self._written.set()


def append(stream: DataStream, batches: Sequence[EntryBatch]) -> None:
    """One operation with these entries, as they are; the numbers must be those due.

    Raises `ProtocolViolation` for other numbers, and what a commit raises; nothing is
    appended then.
    """
    stream.start_atomic_op()
    op = stream.atomic_op()
    try:
        for batch in batches:
            if batch.first_number != op.next_number:
                raise ProtocolViolation(
                    f"entry {batch.first_number} came, where entry {op.next_number} was due"
                )
            op.add_batch(batch)
        stream.commit_atomic_op(wait=False)
    finally:
        if op.is_open:
            stream.rollback_atomic_op()
