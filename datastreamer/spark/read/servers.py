"""Servers: a snapshot of a stream when a query is planned, and later reads of its parts.

Owns the choice of the server to ask, and that a query reads only the history that it was planned
for. Must not know tables or columns.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

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
from datastreamer.format import U64_MAX, Header
from datastreamer.position import KEPT, Identity, Position
from datastreamer.protocol.commands import KnownHistory
from datastreamer.protocol.retry import BACKOFF
from datastreamer.selection.clauses import Selection
from datastreamer.server.publish.policy import read_tokens
from datastreamer.spark.options import TLS, Options, StartTime
from datastreamer.spark.read.history_client import HistoryClient
from datastreamer.storage.header.records import NO_ID
from datastreamer.transport.address import Address
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers of one stream, the preferred one first."""

    addresses: tuple[Address, ...]
    stream_type: int
    tls: TLS | None
    timeout: float
    retry_for: float
    batch_reads: bool
    token_file: str | None

    @classmethod
    def of(cls, options: Options) -> Servers:
        """The servers that a query names."""
        return cls(
            *(options.servers, options.stream_type, options.tls, options.timeout),
            *(options.retry_for, options.batch_reads, options.token_file),
        )

    def context(self) -> ssl.SSLContext | None:
        """For TLS, with the files that the options name; None without them."""
        if self.tls is None:
            return None
        from datastreamer.transport.tls import client_tls

        return client_tls(self.tls.ca, self.tls.certificate, self.tls.key)

    def token(self) -> bytes | None:
        """The first one in the file. Raises `UsageError` if there is none."""
        return None if self.token_file is None else read_tokens(self.token_file)[0]

    def connect(self, address: Address) -> HistoryClient:
        """Connect to one of them. Raises `ConnectFailed`, `TLSFailed`, `BadCertificate`."""
        return HistoryClient(
            address.host,
            address.port,
            stream_type=self.stream_type,
            timeout=self.timeout,
            tls=self.context() or address.tls,
            tls_server_name=None if self.tls is None else self.tls.server_name,
            resume=False,
            batch_reads=self.batch_reads,
            token=self.token(),
        )

    def connect_any(self) -> tuple[int, HistoryClient]:
        """Connect to the first server that answers; its index and the connection.

        Raises the error of the last server if none answers for `retry_for` seconds.
        """
        failover = Failover(self, 0)
        while True:
            try:
                return failover.index, self.connect(failover.address)
            except ConnectFailed as error:
                failover.failed(error)


class Failover:
    """Chooses the server to ask: the next one after a failure, with a pause after each round."""

    def __init__(self, servers: Servers, first: int) -> None:
        self._servers = servers
        self.index = first % len(servers.addresses)
        self._attempts = 0
        self._since = time.monotonic()

    @property
    def address(self) -> Address:
        """The server to ask."""
        return self._servers.addresses[self.index]

    def succeeded(self) -> None:
        """The server delivered data: reset the retry timeout."""
        self._attempts = 0
        self._since = time.monotonic()

    def failed(self, error: PeerError) -> None:
        """Choose the next server; wait after each round. Raises `error` after `retry_for` seconds
        without success."""
        self._attempts += 1
        count = len(self._servers.addresses)
        self.index = (self.index + 1) % count
        rounds, within = divmod(self._attempts, count)
        if within:
            return
        wait = BACKOFF.wait(rounds - 1, random.random())  # noqa: S311
        if time.monotonic() + wait > self._since + self._servers.retry_for:
            raise error
        time.sleep(wait)


Histories = Mapping[int, KnownHistory | None]
"""The histories by the server's index; None for a server that does not report its history."""


def history_of(client: BlockingClient) -> KnownHistory | None:
    """The history that the server reported at the start of the connection; None if it does not
    report one."""
    found = client.capabilities()
    return KnownHistory(found.stream_id, found.epoch) if found.revision else None


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """A stream as its servers reported it: what was committed, and how the planned part ends."""

    servers: Servers
    header: Header
    end: Position
    """The position after the last planned entry, with the hashes of the entries before it."""

    histories: Histories
    """Of the servers that parts begin with, except those that did not answer."""


def take_server_snapshot(
    servers: Servers,
    client: BlockingClient,
    header: Header,
    stop: int,
    known: Histories,
    parts: int,
) -> ServerSnapshot:
    """Plan to read up to, not including, entry `stop`, in this number of parts.

    The `known` histories must be older than the header.
    """
    histories = dict(known)
    for index, address in enumerate(servers.addresses[:parts]):
        if index not in histories:
            # A server that fails now is handled when a part reads from it.
            with contextlib.suppress(PeerError), servers.connect(address) as other:
                histories[index] = history_of(other)
    return ServerSnapshot(servers, header, position_at(client, stop), histories)


def find_at_server(
    options: Options, client: BlockingClient, header: Header, place: BookmarkName | StartTime
) -> int:
    """The entry of the bookmark of a block or batch, or of a time. Raises `UnknownBookmark` and
    `TimeUnknown`."""
    if isinstance(place, StartTime):
        return min(header.total_entries, client.entry_at(place.ms))
    key = key_of(options.version_of(header), place)
    try:
        with client.batches(from_bookmark=key) as batches:
            return next(batches).first_number
    except BadFromBookmark:
        what = f"{client.peer}: no bookmark {place.kind}:{place.number}"
        raise UnknownBookmark(key, what) from None


def position_at(client: BlockingClient, number: int) -> Position:
    """The position before entry `number`, with the hashes of up to `KEPT` entries before it."""
    with client.batches(from_entry=max(0, number - KEPT), stop=number) as batches:
        for _ in batches:
            pass
        return batches.position or Position(number)


def read_entries(
    snapshot: ServerSnapshot,
    start: int,
    stop: int,
    first_server: int,
    where: Selection | None = None,
) -> Iterator[EntryBatch]:
    """The entries from `start` up to, not including, `stop`, as batches arrive; with `where` only
    those that it selects, which a server that can select sends alone.

    On failure, continues with the next server, for `retry_for` seconds without progress; then
    raises the last server's error. Raises `HistoryChanged` if the stream was truncated or changed
    since the snapshot, at the latest at the end: until then the entries are unconfirmed.
    """
    failover = Failover(snapshot.servers, first_server)
    histories = dict(snapshot.histories)
    position: Position | None = None
    while True:
        try:
            with snapshot.servers.connect(failover.address) as client:
                confirmed = _ensure_history(client, snapshot, histories, failover.index)
                if start >= stop and confirmed:
                    return
                _ensure_same(client, snapshot)
                if start >= stop:
                    return
                if stop == U64_MAX:
                    # It has no end: its entries may be a long time apart.
                    failover.succeeded()
                begin = start if position is None else None
                with client.batches(
                    from_entry=begin, from_position=position, stop=stop, where=where
                ) as batches:
                    try:
                        yield from batches
                    finally:
                        # Also over entries that are not selected.
                        reached = batches.position
                        if reached is not None and reached.next_entry > start:
                            start, position = reached.next_entry, reached
                            failover.succeeded()
            if start < stop:
                raise ConnectionLost(f"{failover.address} ended the stream before entry {start}")
        except (ConnectFailed, ConnectionLost) as error:
            failover.failed(error)


def _ensure_history(
    client: BlockingClient,
    snapshot: ServerSnapshot,
    histories: dict[int, KnownHistory | None],
    index: int,
) -> bool:
    """Whether the server confirms that its history is the one in `histories`; adds its history if
    none is known. Raises `HistoryChanged` if it reports another epoch."""
    planned = histories.get(index)
    if planned is None and index in histories:
        return False
    found = histories[index] = history_of(client)
    if planned is None:
        return False
    if found is not None and found.stream_id != planned.stream_id:
        # Another server or another file has this address now: compare entries instead.
        histories[index] = planned
        return False
    if found is None:
        histories[index] = planned
        raise ConnectionLost(f"{client.peer} no longer reports its history")
    if found != planned:
        what = "entries were truncated or changed"
        _changed(client, client.header(), snapshot.end, what)
    return found.stream_id != NO_ID


def _ensure_same(client: BlockingClient, snapshot: ServerSnapshot) -> None:
    """Raise `HistoryChanged` if the server has another stream or other entries before the end of
    the plan; `ConnectionLost` if it lacks some of them, as a relay may."""
    header, end = client.header(), snapshot.end
    if Identity.of(header) != Identity.of(snapshot.header):
        _changed(client, header, end, f"it serves another stream, {Identity.of(header)}")
    if header.total_entries < end.next_entry:
        if len(snapshot.servers.addresses) == 1:
            _changed(client, header, end, "the stream was truncated")
        raise ConnectionLost(
            f"{client.peer} holds {header.total_entries} entries, but the query needs "
            f"{end.next_entry}"
        )
    if position_at(client, end.next_entry).trail != end.trail:
        _changed(client, header, end, f"the entries before {end.next_entry} changed")


def _changed(client: BlockingClient, header: Header, end: Position, why: str) -> NoReturn:
    raise HistoryChanged(
        f"{client.peer}: {why} since this query was planned; run it again",
        next_entry=end.next_entry,
        total_entries=header.total_entries,
        first_differing=None,
    )
