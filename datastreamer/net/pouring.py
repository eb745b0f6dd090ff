"""Entries that come faster than an event loop turns: received and dealt with in a thread.

Owns a turn of such a thread. Must not know what becomes of the entries. A turn is short, so
that whatever the loop sees to - cancellation, a server that is silent - waits for it only so
long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from datastreamer._codec import EntryBatch

if TYPE_CHECKING:
    from datastreamer.net.channel import SocketChannel
    from datastreamer.protocol.client import ClientConnection
    from datastreamer.protocol.resume import Resumable

Take = Callable[[EntryBatch], object]


def pour(
    channel: SocketChannel,
    connection: ClientConnection,
    work: Resumable,
    take: Take,
    seconds: float,
) -> None:
    """Call `take` with each batch that comes, until none does for a moment, or for `seconds`.

    In a thread that has all of these for itself; for a `work` without a `stop`. Raises what
    the protocol does, and what `take` does.
    """
    until = time.monotonic() + seconds
    with channel.for_thread() as receive:
        while time.monotonic() < until:
            flow = work.advance()
            try:
                while True:
                    due = next(flow)
                    assert due is None, "nothing is sent here"
                    count = receive(connection.receive_buffer())
                    if count is None:
                        return
                    connection.received(count)
            except StopIteration as done:
                batch: EntryBatch | None = done.value
            if batch is None:
                return
            take(batch)
