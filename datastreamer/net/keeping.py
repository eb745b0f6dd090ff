"""What arrives from an upstream, written to our file: in the loop's turn or in a thread.

Owns the order of writes, and that the event loop does not wait for the disk. Knows no
connection.
"""

from __future__ import annotations

from typing import Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.errors import ProtocolViolation
from datastreamer.net.iteration import Batches
from datastreamer.storage.operation import AtomicOp
from datastreamer.storage.stream import DataStream

AT_ONCE: Final = 64 << 10
"""Bytes that are written in the loop's own turn: that takes less time than a thread does to
begin. Behind more than that comes more, as a rule, and a thread receives and writes it."""

TURN_SECONDS: Final = 0.1
"""So long a thread goes on before the loop looks at how far it is."""


COMMIT_BYTES: Final = 8 << 20
"""Where more comes than is written, so many bytes are a commit."""


async def keep(stream: DataStream, batch: EntryBatch, batches: Batches) -> int:
    """Append a batch, and of the `batches` behind it those that come without a wait; gives the
    number of the next entry.

    A commit is what has arrived, up to some MiB. It does not wait for the disk; readers see
    it as the stream's sync policy says. Raises what `append` does, and what `batches` do; what
    came before is appended then.
    """
    if batch.nbytes <= AT_ONCE and stream.takes_at_once(batch.nbytes):
        append(stream, batch)
    else:
        await trio.to_thread.run_sync(append, stream, batch)
        pouring = Pouring(stream)
        await batches.pour(pouring.take, pouring.commit, TURN_SECONDS)
    return stream.atomic_op().next_number


def append(stream: DataStream, batch: EntryBatch) -> None:
    """One operation with these entries, as they are; the numbers must be those due.

    Raises `ProtocolViolation` for other numbers, and what a commit raises; nothing is
    appended then.
    """
    stream.start_atomic_op()
    op = stream.atomic_op()
    try:
        _ensure_due(op, batch)
        op.add_batch(batch)
        stream.commit_atomic_op(wait=False)
    finally:
        if op.is_open:
            stream.rollback_atomic_op()


class Pouring:
    """Many batches, one after the other: written as they come, and made known together."""

    def __init__(self, stream: DataStream) -> None:
        self._stream = stream
        self._op = stream.atomic_op()
        self._size = 0

    def take(self, batch: EntryBatch) -> None:
        """Write a batch; its memory is not to change before the next call or `commit`.

        Raises what `append` does; the batches before it wait for their commit then.
        """
        op = self._op
        if not op.is_open:
            self._stream.start_atomic_op()
            self._size = 0
        _ensure_due(op, batch)
        op.place_batch(batch)
        self._size += batch.nbytes
        if self._size >= COMMIT_BYTES:
            self.commit()

    def commit(self) -> None:
        """Make known what was taken. Raises what a commit does; none of it is appended then."""
        if not self._op.is_open:
            return
        try:
            self._stream.commit_atomic_op(wait=False)
        finally:
            if self._op.is_open:
                self._stream.rollback_atomic_op()


def _ensure_due(op: AtomicOp, batch: EntryBatch) -> None:
    if batch.first_number != op.next_number:
        raise ProtocolViolation(
            f"entry {batch.first_number} came, where entry {op.next_number} was due"
        )
