"""A relay's upstream: where it is, and whether it tells the story that our file holds.

Owns the comparison of an upstream with a file, and the search for the last entry that
they have in common. Writes nothing; what follows from a difference is the relay's.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from datastreamer._codec import EntryBatch
from datastreamer.errors import DatastreamerError, NoAnswer, PeerError, UnknownEntry
from datastreamer.format import DEFAULT_PORT, Header
from datastreamer.net.client import Client, connect
from datastreamer.net.iteration import Batches
from datastreamer.net.listen import UNIX, address_of
from datastreamer.net.place import check_place
from datastreamer.position import KEPT, Identity
from datastreamer.protocol import exchanges
from datastreamer.protocol.authentication import token_request
from datastreamer.storage.stream import DataStream

if TYPE_CHECKING:
    import ssl

# Two operations' bookmarks, and where looking for them ends: there are streams without any.
_MARKS: Final = 4
_MOST_COMPARED: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Upstream:
    """A server to relay: what `connect` is told of it. Raises `UsageError` as that does."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool | ssl.SSLContext = False
    tls_server_name: str | None = None
    token: bytes | str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_place(self.host, self.port, self.tls, self.tls_server_name)
        token_request(0, self.token)

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
    upstream: Upstream,
    stream_type: int,
    timeout: float,
    heartbeat: float | None = None,
    own: Collection[socket.socket] = (),
) -> AsyncIterator[Client]:
    """A client that gives up where its connection is lost: the relay decides what is next.

    `own` are the relay's listeners. Raises `PeerError` where one of them is at the other end: it
    would always hold what we do, and keep us from the upstreams behind it.
    """
    async with connect(
        upstream.host,
        upstream.port,
        stream_type=stream_type,
        timeout=timeout,
        tls=upstream.tls,
        tls_server_name=upstream.tls_server_name,
        resume=False,
        heartbeat=heartbeat,
        token=upstream.token,
    ) as client:
        if client.leads_to(own):
            raise PeerError(f"{client.peer} is this relay itself; nothing is to be had from it")
        yield client


async def header_of(
    upstream: Upstream, stream_type: int, timeout: float, own: Collection[socket.socket] = ()
) -> Header:
    """What the upstream says of its stream now. Raises `PeerError`."""
    with trio.move_on_after(timeout):
        async with client_of(upstream, stream_type, timeout, own=own) as client:
            return await client.header()
    raise NoAnswer(f"no answer from {upstream.name} within {timeout:g} s")


@dataclass(slots=True)
class Joined:
    """An upstream whose entries go on where ours end. `rest` came with those compared: the
    first of ours that are due, before those of `batches`; None: none did."""

    header: Header
    batches: Batches
    rest: EntryBatch | None


async def join(client: Client, stream: DataStream, timeout: float) -> Joined:
    """The upstream's entries from our head on, once it is sure that it is the same stream.

    Its last entries before there are compared with ours: 256 of them, and more where the last
    two operations are longer than that (see `_first_compared`). Raises `AnotherStream`,
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
        common = min(total, header.total_entries)
        first = await trio.to_thread.run_sync(_first_compared, stream, common)
        batches = client.batches(from_entry=first, commits=True)
        # Where it went back meanwhile it refuses, or nothing comes: the next attempt sees.
        await batches.__aenter__()
        at, rest = first, None
        while at < common:
            batch = await batches.__anext__()
            due = common - at
            differing = await trio.to_thread.run_sync(_first_differing, stream, batch[:due])
            if differing is not None:
                raise Rewritten(
                    f"{client.peer} tells another history: its entry {differing} is not the one "
                    f"that is here, of {total}",
                    # Behind nothing that is the same, only a beginning is certain.
                    differing if differing > first or first == 0 else None,
                )
            at = batch.next_number
            rest = batch[due:] or None
        if common < total:
            raise Behind(
                f"{client.peer} holds {common} entries, and entries {common} to {total - 1}, "
                "which are here, are in doubt",
                common,
            )
        return Joined(header, batches, rest)
    raise NoAnswer(f"no answer from {client.peer} within {timeout:g} s")


def _first_compared(stream: DataStream, end: int) -> int:
    """The first entry to compare before entry `end`.

    A block that was replaced may end in as many of the same entries as it has transactions. So
    it is the last two operations at least: where these begin bookmarks tell, of which an
    operation has two at most, as a rule. Without them, or with very long ones, so many entries
    are compared as are within `_MOST_COMPARED` bytes, more or less.
    """
    first = reached = max(0, end - KEPT)
    while True:
        marks: list[int] = []
        size = 0
        for batch in stream.batches(first, end):
            marks += [number for _, number in batch.bookmarks()]
            size += batch.nbytes
            if size > _MOST_COMPARED:
                return reached
        reached = first
        if len(marks) >= _MARKS:
            return min(marks[-_MARKS], max(0, end - KEPT))
        if first == 0:
            return first
        first = max(0, end - 4 * (end - first))


def _first_differing(stream: DataStream, theirs: EntryBatch) -> int | None:
    """The first of an upstream's entries that is not ours; we have all of these."""
    begin = theirs.first_number
    for ours in stream.batches(begin, theirs.next_number):
        same = theirs[ours.first_number - begin : ours.next_number - begin]
        if same.packed() == ours.packed():
            continue
        for one, other in zip(same, ours, strict=True):
            if one != other:
                return one.number
    return None


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
