"""Makes the publishers of Trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from datastreamer.client.trio_driver import TrioDriver
from datastreamer.format import DEFAULT_PORT, STREAM_TYPE_SEQUENCER
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
from datastreamer.transport.trio_channel import dial

if TYPE_CHECKING:
    import ssl


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
    """The source of the stream that the server at `host` and `port` serves.

    `host`, `port`, `tls`, `tls_server_name` and `timeout` are those of `connect`; `token` is what
    the server's operator gave out. The lease is requested with `epoch` (0: the next one, if the
    lease is free); with `take_over` its present holder is fenced. `lease` is the seconds of
    silence after which it ends (None: the server's default). `next_entry` is the first entry of
    the first operation: None is the end of the stream; a smaller number is for operations that
    may be there already, which are compared then.

    A lost connection is made again for `retry_for` seconds (None: without end), and what was
    not acknowledged is sent again: each operation is in the stream once. With
    `max_unacknowledged` bytes underway a commit waits.

    Leaving the block waits for what is underway, unless by an exception. Raises `ConnectFailed`,
    `TLSFailed`, `NotSupported` (the server accepts no publishers), `NotAllowed`, `SourceBusy`,
    `Fenced`.
    """
    terms = source_terms(
        stream_type=stream_type,
        token=token,
        epoch=epoch,
        take_over=take_over,
        next_entry=next_entry,
        lease=lease,
    )
    endpoint = endpoint_of(host, port, tls, tls_server_name)
    driver = TrioDriver(partial(dial, endpoint, timeout), endpoint.peer)
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
