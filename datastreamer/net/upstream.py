"""A relay's upstream: where it is, and whether it tells the story that our file holds.

Owns the comparison of an upstream with a file, and the search for the last entry that
they have in common. Writes nothing; what follows from a difference is the relay's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from datastreamer.errors import (
    DatastreamerError,
    HistoryChanged,
    NoAnswer,
    UnknownEntry,
)
from datastreamer.format import DEFAULT_PORT, Header
from datastreamer.net.client import Client, connect
from datastreamer.net.iteration import Batches
from datastreamer.net.listen import UNIX, address_of
from datastreamer.position import KEPT, Identity, Position
from datastreamer.protocol import exchanges
from datastreamer.protocol.trail import Trail
from datastreamer.storage.stream import DataStream

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server to relay: what `connect` is told of it."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool | ssl.SSLContext = False
    tls_server_name: str | None = None

    @property
    def name(self) -> str:
        """As messages name it."""
        return self.host if self.host.startswith(UNIX) else address_of((self.host, self.port))


class AnotherStream(DatastreamerError):
    """The upstream's header is not that of our file."""


class Behind(DatastreamerError):
    """The upstream holds the first `total` entries that we hold, and no more."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__(what)
        self.total = total


class Rewritten(DatastreamerError):
    """The upstream holds other entries than we do.

    `first_differing` is the first of them, None where it is not among the last ones.
    """

    def __init__(self, what: str, first_differing: int | None) -> None:
        super().__init__(what)
        self.first_differing = first_differing


@asynccontextmanager
async def client_of(
    upstream: Upstream, stream_type: int, timeout: float, heartbeat: float | None = None
) -> AsyncIterator[Client]:
    """A client that gives up where its connection is lost: the relay decides what is next."""
    async with connect(
        upstream.host,
        upstream.port,
        stream_type=stream_type,
        timeout=timeout,
        tls=upstream.tls,
        tls_server_name=upstream.tls_server_name,
        resume=False,
        heartbeat=heartbeat,
    ) as client:
        yield client


async def header_of(upstream: Upstream, stream_type: int, timeout: float) -> Header:
    """What the upstream says of its stream now. Raises `PeerError`."""
    with trio.move_on_after(timeout):
        async with client_of(upstream, stream_type, timeout) as client:
            return await client.header()
    raise NoAnswer(f"no answer from {upstream.name} within {timeout:g} s")


async def join(client: Client, stream: DataStream, timeout: float) -> tuple[Batches, Header]:
    """The upstream's entries from our head on, once it is sure that it is the same stream.

    Its last 256 entries before there are compared with ours. Raises `AnotherStream`,
    `Behind`, `Rewritten`, `PeerError`.
    """
    with trio.move_on_after(timeout):
        header = await client.header()
        ours, theirs = Identity.of(stream.header), Identity.of(header)
        if ours != theirs:
            raise AnotherStream(
                f"{client.peer} serves another stream: {theirs}, where {stream.path} holds {ours}"
            )
        total = stream.total_entries
        least = min(total, header.total_entries)
        place = await trio.to_thread.run_sync(_position_at, stream, least)
        batches = client.batches(from_position=place)
        try:
            await batches.__aenter__()
        except HistoryChanged as error:
            if error.first_differing is None or error.first_differing < error.total_entries:
                raise Rewritten(str(error), error.first_differing) from error
            # It went back while it was asked.
            raise _behind(client, error.total_entries, total) from error
        if least < total:
            await batches.aclose()
            raise _behind(client, least, total)
        return batches, header
    raise NoAnswer(f"no answer from {client.peer} within {timeout:g} s")


def _behind(client: Client, theirs: int, ours: int) -> Behind:
    return Behind(
        f"{client.peer} holds {theirs} entries, and entries {theirs} to {ours - 1}, which are "
        "here, are in doubt",
        theirs,
    )


def _position_at(stream: DataStream, number: int) -> Position:
    """The place before entry `number`, as somebody would keep it who has read up to there."""
    first = max(0, number - KEPT)
    trail = Trail(first)
    for batch in stream.batches(first, number):
        trail.extend(batch)
    return Position(number, trail.hashes, Identity.of(stream.header))


async def common_entries(client: Client, stream: DataStream, most: int) -> int:
    """How many of our first `most` entries the upstream holds too, at least; by bisection.

    Each step compares a run of 256 entries, never one alone: blocks that differ may end in
    the same bytes. Raises `PeerError`.
    """
    same, end = 0, most
    while same < end:
        middle = (same + end + 1) // 2
        differing = await _difference(client, stream, max(same, middle - KEPT), middle)
        if differing is None:
            same = middle
        else:
            end = differing
    return same


async def _difference(client: Client, stream: DataStream, first: int, end: int) -> int | None:
    """An entry from `first` up to `end` that is not the same: the last, if that is not (one
    question tells), else the first of them."""
    differing = await _differs_at(client, stream, range(end - 1, end))
    if differing is not None:
        return differing
    return await _differs_at(client, stream, range(first, end - 1))


async def _differs_at(client: Client, stream: DataStream, numbers: range) -> int | None:
    try:
        async with client.entries_by_number(numbers, window=exchanges.WINDOW) as entries:
            async for entry in entries:
                if entry != stream.entry(entry.number):
                    return entry.number
    except UnknownEntry as error:
        return error.number
    return None
