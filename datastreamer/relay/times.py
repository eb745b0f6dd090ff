"""Puts the times of the upstream's commits into a relay's file.

Decides when the upstream is asked for them, on a connection that others use too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import trio

from datastreamer.errors import DatastreamerError
from datastreamer.relay.checksums import SumsClient
from datastreamer.relay.client import RelayClient
from datastreamer.storage.stream import DataStream

_PAUSE_SECONDS = 1.0


async def keep_times(
    aside: SumsClient,
    stream: DataStream,
    until: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    """Ask for the times of entries that arrive, until cancelled, and once a second at most unless
    there are more. `until` returns when a condition is true. What fails is tried again."""
    relay, at, epoch = stream.parts.relay, -1, -1

    def grew() -> bool:
        return stream.total_entries > at

    while True:
        if stream.epoch != epoch:
            epoch = stream.epoch
            at = at and await trio.to_thread.run_sync(lambda: relay.times_known_to)
        before = at
        await until(grew)
        with suppress(DatastreamerError, OSError):
            found = await aside.ask(partial(RelayClient.time_marks, from_entry=at))
            total = stream.total_entries
            marks = found.marks[: bisect_left(found.marks, (total, 0))]
            if marks and stream.epoch == epoch:
                put = marks, found.resolution, min(found.next, total)
                await trio.to_thread.run_sync(relay.put_time_marks, *put)
                at = put[-1]
        if at in (before, stream.total_entries):
            await trio.sleep(_PAUSE_SECONDS)
