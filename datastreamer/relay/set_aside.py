"""Tries the upstreams again that were set aside.

Owns when, and which entries show that one holds what the relay holds. Writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from datastreamer.errors import DatastreamerError, UpstreamRewritten, UpstreamShorter
from datastreamer.position import KEPT
from datastreamer.relay.client import RelayClient
from datastreamer.relay.joining import differs_at, first_compared, header_of_same
from datastreamer.relay.upstream_state import UpstreamState
from datastreamer.storage.stream import DataStream

# It is compared with the file at every such query of the other upstreams' heads.
_LOOKS: Final = 6


async def try_again(
    states: Sequence[UpstreamState],
    connect: Callable[[UpstreamState], AbstractAsyncContextManager[RelayClient]],
    stream: DataStream,
    look_seconds: float,
    notify: Callable[[], object],
) -> None:
    """Compare each upstream that is set aside with the file, every six `look_seconds`. One that
    agrees is joined when its turn comes; the state of any other, and the log, stay as they are."""
    while True:
        await trio.sleep(_LOOKS * look_seconds)
        for state in states:
            if state.set_aside is None:
                continue
            with contextlib.suppress(DatastreamerError, OSError):
                async with connect(state) as client:
                    if await _agrees(client, stream, state.set_aside):
                        state.used_again()
                        notify()


async def _agrees(client: RelayClient, stream: DataStream, reason: DatastreamerError) -> bool:
    """Whether the upstream holds all of the file's entries, as far as its last ones and those show
    for which it was set aside. Raises `DatastreamerError`."""
    total = stream.total_entries
    if (await header_of_same(client, stream)).total_entries < total:
        return False
    since = reason.total if isinstance(reason, UpstreamShorter) else None
    if isinstance(reason, UpstreamRewritten):
        since = reason.first_differing
    last = await trio.to_thread.run_sync(first_compared, stream, total)
    older = range(0) if since is None else range(since, min(since + KEPT, last))
    for numbers in (older, range(last, total)):
        if numbers and await differs_at(client, stream, numbers) is not None:
            return False
    return True
