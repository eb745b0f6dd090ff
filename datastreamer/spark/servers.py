"""Servers: what a stream holds when a query is planned, and a part of it read later.

Owns which of several servers is asked, and when another one is; and that all that is read is
of the history that was planned. Knows no table and no column.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from datastreamer._codec import EntryBatch
from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    ConnectionLost,
    HistoryChanged,
    PeerError,
    UnknownBookmark,
)
from datastreamer.format import Header
from datastreamer.net.blocking import BlockingClient
from datastreamer.position import KEPT, Identity, Position
from datastreamer.protocol.endurance import BACKOFF
from datastreamer.spark.bounds import MarkKind
from datastreamer.spark.options import TLS, Address
from datastreamer.zkevm.keys import Mark, key_of


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of one stream, the preferred one first."""

    addresses: tuple[Address, ...]
    stream_type: int
    tls: TLS | None
    timeout: float
    retry_for: float

    def connect(self, address: Address) -> BlockingClient:
        """A connection to one of them. Raises `ConnectFailed`, `TLSFailed`, `BadCertificate`."""
        context = None
        if self.tls is not None:
            from datastreamer.net.tls import client_tls

            context = client_tls(self.tls.ca, self.tls.certificate, self.tls.key)
        return BlockingClient(
            *address,
            stream_type=self.stream_type,
            timeout=self.timeout,
            tls=context or False,
            tls_server_name=None if self.tls is None else self.tls.server_name,
            resume=False,
        )

    def any(self) -> BlockingClient:
        """A connection to the first that answers. Raises what the last one did."""
        turns = Turns(self, 0)
        while True:
            try:
                return self.connect(turns.address)
            except ConnectFailed as error:
                turns.lost(error)


class Turns:
    """Whose turn it is: the next server's where one is lost, until all were for too long."""

    def __init__(self, servers: Servers, first: int) -> None:
        self._servers = servers
        self._at = first % len(servers.addresses)
        self._attempts = 0
        self._since = time.monotonic()

    @property
    def address(self) -> Address:
        """The server to ask."""
        return self._servers.addresses[self._at]

    def served(self) -> None:
        """Something came of it."""
        self._attempts = 0
        self._since = time.monotonic()

    def lost(self, error: PeerError) -> None:
        """Go to the next server; after all of them, wait first. Raises `error` at the end."""
        self._attempts += 1
        count = len(self._servers.addresses)
        self._at = (self._at + 1) % count
        rounds, within = divmod(self._attempts, count)
        if within:
            return
        wait = BACKOFF.wait(rounds - 1, random.random())  # noqa: S311
        if time.monotonic() + wait > self._since + self._servers.retry_for:
            raise error
        time.sleep(wait)


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """A stream as its servers told it: what was committed, and how the part that is read ends."""

    servers: Servers
    header: Header
    end: Position
    """Behind the last entry that is read, with the hashes of those before it."""


def look_at_servers(
    servers: Servers, client: BlockingClient, header: Header, stop: int
) -> ServerSnapshot:
    """What is to be read up to, not including, entry `stop`, which is at most the total."""
    return ServerSnapshot(servers, header, position_at(client, stop))


def entry_of_mark(client: BlockingClient, version: int, kind: MarkKind, number: int) -> int:
    """The entry of the bookmark of this block or batch. Raises `UnknownBookmark`."""
    key = key_of(version, Mark(kind, number))
    try:
        with client.batches(from_bookmark=key) as batches:
            return next(batches).first_number
    except BadFromBookmark:
        raise UnknownBookmark(key, f"{client.peer}: no bookmark {kind}:{number}") from None


def position_at(client: BlockingClient, number: int) -> Position:
    """The place before entry `number`, with the hashes of up to 256 entries before it."""
    with client.batches(from_entry=max(0, number - KEPT), stop=number) as batches:
        for _ in batches:
            pass
        return batches.position or Position(number)


def read_entries(
    snapshot: ServerSnapshot,
    start: int,
    stop: int,
    first_server: int,
    types: frozenset[int] | None = None,
) -> Iterator[EntryBatch]:
    """The entries from `start` up to, not including, `stop`, in runs as they come; with `types`
    those of these alone, which servers that can choose are asked for.

    Goes on with the next server where one is lost, for `retry_for` seconds without an entry.
    Raises what the last one did then, and `HistoryChanged` where the stream was cut back or
    changed since the snapshot.
    """
    turns = Turns(snapshot.servers, first_server)
    position: Position | None = None
    while start < stop:
        try:
            with snapshot.servers.connect(turns.address) as client:
                _ensure_same(client, snapshot)
                begin = start if position is None else None
                with client.batches(
                    from_entry=begin, from_position=position, stop=stop, types=types
                ) as batches:
                    for batch in batches:
                        yield batch
                        start, position = batch.next_number, batches.position
                        turns.served()
                    position = batches.position
                    start = start if position is None else position.next_entry
            if start < stop:
                raise ConnectionLost(f"{turns.address} ended the stream before entry {start}")
        except (ConnectFailed, ConnectionLost) as error:
            turns.lost(error)


def _ensure_same(client: BlockingClient, snapshot: ServerSnapshot) -> None:
    """Raise `HistoryChanged` where this server's stream is another one now, or has another
    history; `ConnectionLost` where it does not have all of it yet, as a relay may."""
    header, end = client.header(), snapshot.end
    if Identity.of(header) != Identity.of(snapshot.header):
        _changed(client, header, end, f"it serves another stream, {Identity.of(header)}")
    if header.total_entries < end.next_entry:
        if len(snapshot.servers.addresses) == 1:
            _changed(client, header, end, "the stream was cut back")
        raise ConnectionLost(
            f"{client.peer} holds {header.total_entries} entries, and {end.next_entry} are read"
        )
    if position_at(client, end.next_entry).trail != end.trail:
        _changed(client, header, end, f"the entries before {end.next_entry} are others now")


def _changed(client: BlockingClient, header: Header, end: Position, why: str) -> NoReturn:
    raise HistoryChanged(
        f"{client.peer}: {why} since this query was planned; run it again",
        next_entry=end.next_entry,
        total_entries=header.total_entries,
        first_differing=None,
    )
