"""Servers: what a stream holds when a query is planned, and a part of it read later.

Owns which of several servers is asked, and when another one is; and that all that is read is
of the history that was planned. Knows no table and no column.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from datastreamer._codec import EntryBatch
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    ConnectionLost,
    HistoryChanged,
    PeerError,
    UnknownBookmark,
)
from datastreamer.format import Header
from datastreamer.position import KEPT, Identity, Position
from datastreamer.protocol.retry import BACKOFF
from datastreamer.spark.options import TLS, ServerAddress
from datastreamer.storage.header.records import NO_ID
from datastreamer.zkevm.keys import BookmarkName, Kind, key_of


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of one stream, the preferred one first."""

    addresses: tuple[ServerAddress, ...]
    stream_type: int
    tls: TLS | None
    timeout: float
    retry_for: float

    def connect(self, address: ServerAddress) -> BlockingClient:
        """A connection to one of them. Raises `ConnectFailed`, `TLSFailed`, `BadCertificate`."""
        context = None
        if self.tls is not None:
            from datastreamer.transport.tls import client_tls

            context = client_tls(self.tls.ca, self.tls.certificate, self.tls.key)
        return BlockingClient(
            *address,
            stream_type=self.stream_type,
            timeout=self.timeout,
            tls=context or False,
            tls_server_name=None if self.tls is None else self.tls.server_name,
            resume=False,
        )

    def any(self) -> tuple[int, BlockingClient]:
        """The first that answers, and a connection to it. Raises what the last one did."""
        turns = Failover(self, 0)
        while True:
            try:
                return turns.at, self.connect(turns.address)
            except ConnectFailed as error:
                turns.lost(error)


class Failover:
    """Whose turn it is: the next server's where one is lost, until all were for too long."""

    def __init__(self, servers: Servers, first: int) -> None:
        self._servers = servers
        self.at = first % len(servers.addresses)
        self._attempts = 0
        self._since = time.monotonic()

    @property
    def address(self) -> ServerAddress:
        """The server to ask."""
        return self._servers.addresses[self.at]

    def served(self) -> None:
        """Something came of it."""
        self._attempts = 0
        self._since = time.monotonic()

    def lost(self, error: PeerError) -> None:
        """Go to the next server; after all of them, wait first. Raises `error` at the end."""
        self._attempts += 1
        count = len(self._servers.addresses)
        self.at = (self.at + 1) % count
        rounds, within = divmod(self._attempts, count)
        if within:
            return
        wait = BACKOFF.wait(rounds - 1, random.random())  # noqa: S311
        if time.monotonic() + wait > self._since + self._servers.retry_for:
            raise error
        time.sleep(wait)


class History(NamedTuple):
    """What a server tells of its stream beyond the header: the epoch rises with everything that
    is taken back or changed."""

    stream_id: bytes
    epoch: int


Histories = Mapping[int, History | None]
"""The histories of servers, by their places among the addresses; None for one that was asked
and does not tell."""


def history_of(client: BlockingClient) -> History | None:
    """What the server tells of its history; None where it does not. A connection says it once:
    as it was then."""
    told = client.capabilities()
    return History(told.stream_id, told.epoch) if told.revision else None


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """A stream as its servers told it: what was committed, and how the part that is read ends."""

    servers: Servers
    header: Header
    end: Position
    """Behind the last entry that is read, with the hashes of those before it."""

    histories: Histories
    """Of the servers that parts begin with, but for those that were away."""


def look_at_servers(
    servers: Servers,
    client: BlockingClient,
    header: Header,
    stop: int,
    known: Histories,
    parts: int,
) -> ServerSnapshot:
    """What is to be read in so many parts up to, not including, entry `stop`, which is at most
    the total.

    The histories that are `known` are of a time before the header's.
    """
    histories = dict(known)
    for at, address in enumerate(servers.addresses[:parts]):
        if at not in histories:
            # What is wrong with it, its parts find out.
            with contextlib.suppress(PeerError), servers.connect(address) as other:
                histories[at] = history_of(other)
    return ServerSnapshot(servers, header, position_at(client, stop), histories)


def entry_of_bookmark(client: BlockingClient, version: int, kind: Kind, number: int) -> int:
    """The entry of the bookmark of this block or batch. Raises `UnknownBookmark`."""
    key = key_of(version, BookmarkName(kind, number))
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
    changed since the snapshot: what was read is sure when this ends, and not before.
    """
    turns = Failover(snapshot.servers, first_server)
    histories = dict(snapshot.histories)
    position: Position | None = None
    while True:
        try:
            with snapshot.servers.connect(turns.address) as client:
                told = _ensure_history(client, snapshot, histories, turns.at)
                if start >= stop and told:
                    return
                _ensure_same(client, snapshot)
                if start >= stop:
                    return
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


def _ensure_history(
    client: BlockingClient, snapshot: ServerSnapshot, histories: dict[int, History | None], at: int
) -> bool:
    """Whether server number `at` tells that its history is the one of `histories`, where it is
    put if it is not known; raises `HistoryChanged` where it is another one."""
    due = histories.get(at)
    if due is None and at in histories:
        return False
    found = histories[at] = history_of(client)
    if due is None:
        return False
    if found is not None and found.stream_id != due.stream_id:
        # Another server of this address, or another file: entries are to tell.
        histories[at] = due
        return False
    if found is None:
        histories[at] = due
        raise ConnectionLost(f"{client.peer} does not tell its history any more")
    if found != due:
        what = "entries were taken back or changed"
        _changed(client, client.header(), snapshot.end, what)
    return found.stream_id != NO_ID


def _ensure_same(client: BlockingClient, snapshot: ServerSnapshot) -> None:
    """Raise `HistoryChanged` where this server's stream is another one now, or the entries
    before the end are others; `ConnectionLost` where it does not have all of it yet, as a relay
    may."""
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
