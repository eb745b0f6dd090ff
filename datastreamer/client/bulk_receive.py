"""Entries that arrive faster than an event loop turns: received and processed in a thread.

Owns one turn of such a thread. Must not know how entries are processed. A turn is short, because
the loop's other work, such as cancellation, waits for its end.
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
Receiving = Callable[[int], AbstractContextManager[Callable[[memoryview], int | None]]]

PIECE_BYTES: Final = 4 << 20
"""Bytes that are received at once if they arrive fast enough. Measured: a relay copies 1.1, 1.35,
1.5, 1.6 and 1.7 GB/s in pieces of 0.5, 1, 2, 4 and 8 MiB; some of them are in memory at once."""

_MUCH_BYTES: Final = 512 << 10
"""A piece of this size shows that more bytes follow at once."""


def pour(
    receiving: Receiving,
    connection: ClientConnection,
    work: Resumable,
    take: Take,
    settle: Settle,
    seconds: float,
) -> None:
    """Call `take` with each batch that arrives, for `seconds` or until no batch arrives for a
    moment. Call `settle` when everything that has arrived was passed to `take`, and at the end,
    also after an error.

    Runs in a thread that alone uses the arguments; for a `work` without a `stop`. Raises what the
    protocol, `take` and `settle` raise.
    """
    until = time.monotonic() + seconds
    more = False
    try:
        connection.expect_pieces(PIECE_BYTES)
        with receiving(PIECE_BYTES) as receive:
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
                        more = count >= min(len(room), _MUCH_BYTES)
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
