"""The clients for asyncio: the same as the package's own for Trio.

Needs an event loop that watches descriptors (`add_reader`), as those of Unix do. Does not load
trio.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from datastreamer.client.async_client import Batches, Client, Entries
from datastreamer.client.asyncio_driver import AsyncioDriver
from datastreamer.client.face import engine_of
from datastreamer.consumer.async_reassembly import Reassembly
from datastreamer.consumer.asyncio_reassembly import reassemble
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol.authentication import token_request
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.publisher.async_publisher import Publisher, publishing
from datastreamer.publisher.engine import (
    RETRY_SECONDS,
    UNACKNOWLEDGED_BYTES,
    PublisherEngine,
    source_terms,
)
from datastreamer.transport.endpoint import endpoint_of

if TYPE_CHECKING:
    import ssl

__all__ = [
    "Batches",
    "Client",
    "Entries",
    "Publisher",
    "Reassembly",
    "connect",
    "connect_publisher",
    "reassemble",
]


@asynccontextmanager
async def connect(
    host: str,
    port: int = DEFAULT_PORT,
    *,
    stream_type: int = STREAM_TYPE_SEQUENCER,
    timeout: float = TIMEOUT,
    tls: bool | ssl.SSLContext = False,
    tls_server_name: str | None = None,
    resume: bool = True,
    retry_for: float | None = None,
    backoff: Backoff = BACKOFF,
    heartbeat: float | None = None,
    batch_reads: bool = True,
    token: bytes | str | None = None,
) -> AsyncIterator[Client]:
    """A client of the server at `host` and `port`, closed at the end of the block: see
    `datastreamer.connect`, whose options these are.

    For an answer the caller sets a limit (`asyncio.timeout` or `asyncio.wait_for`).
    """
    endpoint = endpoint_of(host, port, tls, tls_server_name, token_request(stream_type, token))
    driver = AsyncioDriver(endpoint)
    engine = engine_of(
        driver,
        endpoint.peer,
        stream_type=stream_type,
        timeout=timeout,
        resume=resume,
        retry_for=retry_for,
        backoff=backoff,
        heartbeat=heartbeat,
        batch_reads=batch_reads,
    )
    await driver.run(engine.open())
    client = Client(driver, engine)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def connect_publisher(
    host: str,
    port: int = DEFAULT_PORT,
    *,
    token: bytes | str | None = None,
    stream_type: int = STREAM_TYPE_SEQUENCER,
    epoch: int = 0,
    take_over: bool = False,
    next_entry: int | None = None,
    lease: float | None = None,
    timeout: float = TIMEOUT,
    tls: bool | ssl.SSLContext = False,
    tls_server_name: str | None = None,
    retry_for: float | None = RETRY_SECONDS,
    backoff: Backoff = BACKOFF,
    max_unacknowledged: int = UNACKNOWLEDGED_BYTES,
) -> AsyncIterator[Publisher]:
    """The source of the stream that the server at `host` and `port` serves: see
    `datastreamer.connect_publisher`, whose options these are."""
    terms = source_terms(
        stream_type=stream_type,
        token=token,
        epoch=epoch,
        take_over=take_over,
        next_entry=next_entry,
        lease=lease,
    )
    endpoint = endpoint_of(host, port, tls, tls_server_name)
    driver = AsyncioDriver(endpoint)
    engine = PublisherEngine(
        driver,
        endpoint.peer,
        terms,
        timeout=timeout,
        retry_for=retry_for,
        backoff=backoff,
        max_unacknowledged=max_unacknowledged,
    )
    async with publishing(driver, engine) as publisher:
        yield publisher
