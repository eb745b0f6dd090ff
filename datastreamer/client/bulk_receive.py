"""Entries that come faster than an event loop turns: received and dealt with in a thread.

Owns one turn of such a thread. Must not know what becomes of the entries. A turn is short, so
that the loop's other work, such as cancellation, waits no longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from datastreamer._codec import EntryBatch

if TYPE_CHECKING:
    from datastreamer.protocol.client import ClientConnection
    from datastreamer.protocol.resume import Resumable

Take = Callable[[EntryBatch], object]
Settle = Callable[[], object]
Receiving = Callable[[], AbstractContextManager[Callable[[memoryview], int | None]]]

PIECE_BYTES: Final = 512 << 10
"""A piece of this size shows that more is to come at once."""


def pour(
    receiving: Receiving,
    connection: ClientConnection,
    work: Resumable,
    take: Take,
    settle: Settle,
    seconds: float,
) -> None:
    """Call `take` with each batch that comes, until none does for a moment, or for `seconds`;
    and `settle` where nothing more has arrived yet, and at the end, whatever ends it.

    In a thread that has all of these for itself; for a `work` without a `stop`. Raises what
    the protocol does, and what `take` and `settle` do.
    """
    until = time.monotonic() + seconds
    more = False
    try:
        with receiving() as receive:
            while time.monotonic() < until:
                flow = work.advance()
                try:
                    while True:
                        due = next(flow)
                        assert due is None, "nothing is sent here"
                        room = connection.receive_buffer()
                        count = receive(room)
                        if count is None:
                            return
                        more = count >= min(len(room), PIECE_BYTES)
                        del room
                        connection.received(count)
                except StopIteration as done:
                    batch: EntryBatch | None = done.value
                if batch is None:
                    return
                take(batch)
                if not more:
                    settle()
    finally:
        settle()
