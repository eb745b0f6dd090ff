"""Puts the times of the upstream's commits into a relay's file.

Decides when the upstream is asked for them, on a connection that others use too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from datastreamer.errors import DatastreamerError, NotSupported
from datastreamer.relay.checksums import SumsClient
from datastreamer.relay.client import RelayClient
from datastreamer.storage.stream import DataStream

_PAUSE_SECONDS = 1.0


async def keep_times(
    aside: SumsClient,
    stream: DataStream,
    until: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:
    """Ask for the times of entries that arrive, once a second at most unless there are more; until
    cancelled, or the upstream reports no times any more. `until` returns when a condition is true.
    What fails is tried again."""
    relay, epoch, at = stream.parts.relay, -1, 0

    def grew() -> bool:
        return stream.total_entries > at

    while True:
        if stream.epoch != epoch:
            epoch = stream.epoch
            at = await trio.to_thread.run_sync(lambda: relay.times_known_to)
        await until(grew)
        asked = at
        try:
            marks, resolution, following = await aside.ask(
                partial(RelayClient.time_marks, from_entry=asked)
            )
            known_to = min(following, stream.total_entries)
            if marks and marks[0][0] < known_to and stream.epoch == epoch:
                put = marks, resolution, known_to
                await trio.to_thread.run_sync(relay.put_time_marks, *put)
                at = known_to
        except NotSupported:
            return
        except (DatastreamerError, OSError):
            pass
        if at in (asked, stream.total_entries):
            await trio.sleep(_PAUSE_SECONDS)
