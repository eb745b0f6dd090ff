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
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
from datastreamer.protocol.authentication import token_request
from datastreamer.protocol.flows import TIMEOUT
from datastreamer.protocol.retry import BACKOFF, Backoff
from datastreamer.transport.endpoint import endpoint_of

if TYPE_CHECKING:
    import ssl

__all__ = ["Batches", "Client", "Entries", "connect"]


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
