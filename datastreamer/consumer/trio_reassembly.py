"""Makes the reassemblies of Trio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

from datastreamer.client.trio_driver import TrioDriver
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.async_reassembly import Reassembly, reassembling
from datastreamer.consumer.consumption import Addresses, Notice
from datastreamer.consumer.engine import ReassemblyOptions
from datastreamer.consumer.readers import Start, endpoint_to
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.reassembly.merge import Order
from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.reassembly.progress import ReassemblyStore
from datastreamer.transport.trio_channel import dial


def driver_to(
    upstream: Upstream | None, timeout: float, stream_type: int
) -> tuple[TrioDriver, str]:
    """A driver that connects to an upstream, or to none, and the server as messages name it."""
    if upstream is None:
        return TrioDriver(None, ""), ""
    endpoint = endpoint_to(upstream, stream_type)
    return TrioDriver(partial(dial, endpoint, timeout), endpoint.peer), endpoint.peer


@asynccontextmanager
async def reassemble(
    upstreams: Addresses,
    *,
    subscribe: Iterable[bytes] | None = None,
    store: ReassemblyStore | None = None,
    order: Order | None = None,
    after: bytes | None = None,
    on_event: Callable[[Notice], object] | None = None,
    follow: bool = True,
    start: Start = 0,
    type: int = MESSAGE_TYPE,
    reorg_threshold: int = 1000,
    budget: int = 1 << 30,
    max_age: float | None = 600.0,
    stream_type: int | None = None,
    timeout: float = TIMEOUT,
    heartbeat: float | None = None,
    backoff: Backoff = BACKOFF,
    retry_for: float | None = None,
) -> AsyncIterator[Reassembly]:
    """The payloads that all of `upstreams` publish together, each whole and once::

        async with reassemble([("a", 6900), ("b", 6900)], subscribe=[b"\\x01"]) as payloads:
            async for payload in payloads:
                ...

    An upstream is (host, port), an `Upstream`, or the path of a stream file; a mapping gives them
    names under which their positions are saved. All are read at once, and none waits for another:
    one that is lost is tried again for `retry_for` seconds, one that fails is reported and tried
    again at long intervals, and what the others have is delivered. With `follow` it goes on with
    what is committed later; else it ends where the last upstream ends. Upstreams without a saved
    position begin at `start`: an entry's number, a bookmark's key, or "latest". A slow consumer
    makes the servers wait: in memory are the `budget` and at most three batches for each upstream.

    With `store` it resumes where it was saved. Before the next payload is delivered it saves that
    the last one has been dealt with, and once more where the block ends without an error. A store
    that writes in the transaction which holds the results, and commits that, makes it exactly
    once.

    With `order`, which returns the `Block` of a payload, the iterator delivers `Applied` and
    `Reorg` instead; `after` is the parent of the first block. Those that wait for a parent use up
    to the `budget` once more; above that the furthest ahead is `Rejected`. `on_event` is called
    (and awaited, if it can be) with all other events: `Conflict`, `Malformed`, `Dropped`, `Gap`,
    `Rejected`, `SourceLost`, `SourceBack`, `SourceRolledBack` and `SourceFailed`; without it the
    last four are logged. `subscribe`, `reorg_threshold`, `budget` and `max_age` are the
    `Reassembler`'s; with several upstreams payloads stay known for 100,000 further ones at least,
    and without `follow` nothing expires. `timeout`, `heartbeat` and `backoff` are those of
    `connect`.

    The iterator raises the last upstream's error where all upstreams have failed and none is
    tried again, and what the store raises.
    """
    options = ReassemblyOptions(
        upstreams=upstreams,
        subscribe=subscribe,
        store=store,
        order=order,
        after=after,
        on_event=on_event,
        follow=follow,
        start=start,
        type=type,
        reorg_threshold=reorg_threshold,
        budget=budget,
        max_age=max_age,
        stream_type=stream_type,
        timeout=timeout,
        heartbeat=heartbeat,
        backoff=backoff,
        retry_for=retry_for,
    )
    async with reassembling(options, driver_to) as payloads:
        yield payloads
