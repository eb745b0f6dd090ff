"""What arrives from an upstream, written to our file: in the loop's turn or in a thread.

Owns the order of writes, and that the event loop does not wait for the disk. Knows no
connection.
"""

from __future__ import annotations

import functools
from typing import Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.errors import ProtocolViolation
from datastreamer.net.iteration import Batches
from datastreamer.storage.stream import DataStream

AT_ONCE: Final = 64 << 10
"""Bytes that are written in the loop's own turn: that takes less time than a thread does to
begin. Behind more than that comes more, as a rule, and a thread receives and writes it."""

TURN_SECONDS: Final = 0.1
"""So long a thread goes on before the loop looks at how far it is."""


async def keep(stream: DataStream, batch: EntryBatch, batches: Batches) -> int:
    """Append a batch, and of the `batches` behind it those that come without a wait; gives the
    number of the next entry.

    Each is a commit of its own: what has arrived. It does not wait for the disk; readers see
    it as the stream's sync policy says. Raises what `append` does, and what `batches` do; what
    came before is appended then.
    """
    if batch.nbytes <= AT_ONCE and stream.takes_at_once(batch.nbytes):
        append(stream, batch)
    else:
        await trio.to_thread.run_sync(append, stream, batch)
        await batches.pour(functools.partial(append, stream), TURN_SECONDS)
    return stream.atomic_op().next_number


def append(stream: DataStream, batch: EntryBatch) -> None:
    """One operation with these entries, as they are; the numbers must be those due.

    Raises `ProtocolViolation` for other numbers, and what a commit raises; nothing is
    appended then.
    """
    stream.start_atomic_op()
    op = stream.atomic_op()
    try:
        if batch.first_number != op.next_number:
            raise ProtocolViolation(
                f"entry {batch.first_number} came, where entry {op.next_number} was due"
            )
        op.add_batch(batch)
        stream.commit_atomic_op(wait=False)
    finally:
        if op.is_open:
            stream.rollback_atomic_op()
