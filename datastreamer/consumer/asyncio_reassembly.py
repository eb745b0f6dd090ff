"""Makes the reassemblies of asyncio. Must not import trio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from datastreamer.client.asyncio_driver import AsyncioDriver
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


def driver_to(
    upstream: Upstream | None, timeout: float, stream_type: int
) -> tuple[AsyncioDriver, str]:
    """A driver that connects to an upstream, or to none, and the server as messages name it."""
    endpoint = None if upstream is None else endpoint_to(upstream, stream_type)
    return AsyncioDriver(endpoint), "" if endpoint is None else endpoint.peer


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
    """The payloads that all of `upstreams` publish together, each whole and once: see
    `datastreamer.reassemble`, whose options these are."""
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
