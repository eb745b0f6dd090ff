"""Entries that come faster than an event loop turns: received and dealt with in a thread.

Owns a turn of such a thread, and says when all that has arrived was handed over. Must not
know what becomes of the entries. A turn is short, so that whatever the loop sees to -
cancellation, a server that is silent - waits for it only so long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from datastreamer._codec import EntryBatch
from datastreamer.transport.client_stream import PIECE_BYTES

if TYPE_CHECKING:
    from datastreamer.protocol.client import ClientConnection
    from datastreamer.protocol.resume import Resumable
    from datastreamer.transport.client_stream import SocketChannel

Take = Callable[[EntryBatch], object]
Settle = Callable[[], object]


def pour(
    channel: SocketChannel,
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
        with channel.for_thread() as receive:
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
