"""A relay's upstream: where it is, and whether it tells the story that our file holds.

Owns the comparison of an upstream with a file, and the search for the last entry that
they have in common. Writes nothing but updates that the upstream reports; what follows from a
difference is the relay's.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import trio

from datastreamer._codec import Entry, EntryBatch
from datastreamer.client.async_client import Batches, Client
from datastreamer.client.trio_driver import connect
from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    NoAnswer,
    PeerError,
    ProtocolViolation,
    UnknownEntry,
    UpstreamMismatch,
    UpstreamRewritten,
    UpstreamShorter,
)
from datastreamer.format import Header
from datastreamer.position import KEPT, Identity
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.following import (
    NOTHING_KNOWN,
    ChangeReceived,
    FollowBegun,
    KnownHistory,
    Reports,
)
from datastreamer.relay.apply_changes import ChangeApplier, known_agreement
from datastreamer.storage.header.records import Agreement
from datastreamer.storage.stream import DataStream

# Two operations' bookmarks, and where looking for them ends: there are streams without any.
_MARKS: Final = 4
_MOST_COMPARED: Final = 16 << 20


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
    applying: ChangeApplier


async def join(client: Client, stream: DataStream, timeout: float) -> Joined:
    """The upstream's entries from our head on, once it is sure that it is the same stream.

    What it changed since our file last agreed with it is applied first, if it can report that.
    Then its last entries before our head are compared with ours: 256 of them, and more where the
    last two operations are longer than that (see `_first_compared`). `timeout` bounds the time
    in which nothing comes. Raises `UpstreamDiffers` and `PeerError`.
    """
    with trio.move_on_after(timeout) as patience:
        header = await client.header()
        ours, theirs = Identity.of(stream.header), Identity.of(header)
        if ours != theirs:
            raise UpstreamMismatch(
                f"{client.peer} serves another stream: {theirs}, where {stream.path} holds {ours}"
            )
        total = stream.total_entries
        common = min(total, header.total_entries)
        first = await trio.to_thread.run_sync(_first_compared, stream, common)
        known = known_agreement(stream)
        batches = client.follow(
            first, NOTHING_KNOWN if known is None else KnownHistory(known.stream_id, known.epoch)
        )
        # Where it went back meanwhile it refuses, or nothing comes: the next attempt sees.
        await batches.__aenter__()
        joining = _Joining(client.peer, stream, first, common, batches.begun, known)
        rest = None
        while joining.at < common or joining.lacks_reports:
            batch = await batches.__anext__()
            patience.deadline = math.inf
            if batches.changes:
                await trio.to_thread.run_sync(joining.hear, batches.changes)
            else:
                rest = batch[common - joining.at :] or None
                await trio.to_thread.run_sync(joining.compare, batch)
            patience.deadline = trio.current_time() + timeout
        if common < total:
            raise UpstreamShorter(
                f"{client.peer} holds {common} entries, and entries {common} to {total - 1}, "
                "which are here, are in doubt",
                common,
            )
        await trio.to_thread.run_sync(joining.finish)
        return Joined(header, batches, rest, joining.applying)
    raise NoAnswer(f"no answer from {client.peer} within {timeout:g} s")


class _Joining:
    """The comparison of an upstream's last entries with ours, from entry `at` on.

    What it reports as changed is applied. Where it cannot report all that changed since our file
    agreed with it, entries that differ may have been updated: how many at most, its epoch tells.
    These are not replaced here: they stay in the range that is compared in the background.
    """

    def __init__(
        self,
        peer: str,
        stream: DataStream,
        first: int,
        common: int,
        begun: FollowBegun | None,
        known: Agreement | None,
    ) -> None:
        self.at = self._first = first
        self._peer = peer
        self._stream = stream
        self._common = common
        self._total = stream.total_entries
        self._upto = 0 if begun is None else begun.epoch
        self._another = False
        # The first entry that differs, and how many do.
        self._differs_from: int | None = None
        self._differing = 0
        # From here on the upstream's entries are not those that our file agreed with.
        self._cut = self._total
        agreement, keep = known, True
        if begun is None or begun.reports is Reports.NEVER:
            agreement = None
        elif begun.reports is Reports.UNKNOWN:
            # Each rise of the epoch is one update at most, of an entry there or of one of ours.
            # After a crash what the file keeps may be too old to be `known`, but names the stream.
            kept = stream.agreement
            self._another = kept is None or kept.stream_id != begun.stream_id
            newer = not self._another and known is not None and known.epoch <= begun.epoch
            allowance = -known.epoch if known is not None and newer else stream.epoch
            agreement = Agreement(
                begun.stream_id, begun.epoch, stream.epoch, 0, self._total, allowance
            )
            # That with the upstream before is good for as long as this one is not joined.
            keep = False
        self.applying = ChangeApplier(stream, peer, agreement, keep=keep)

    @property
    def lacks_reports(self) -> bool:
        """Whether changes are still to be reported that were made before the join."""
        return self.applying.agreement is not None and self.applying.heard_epoch < self._upto

    def hear(self, changes: deque[ChangeReceived]) -> None:
        """Apply what was reported. Raises what `ChangeApplier.apply` does.

        An update of an entry that was written after a truncation is not applied: whether it is an
        update of ours, the comparison of what was truncated tells.
        """
        applying = self.applying
        for at, change in enumerate(changes):
            if change.entry is None and change.first < self._total:
                applying.doubt(change.first, self._total)
                self._cut = min(self._cut, change.first)
            elif change.entry is not None and self._cut <= change.first < self._total:
                changes[at] = replace(change, entry=None)
        applying.hear(changes, 0)
        applying.apply()

    def compare(self, batch: EntryBatch) -> None:
        """Compare the entries that are next. Changes nothing.

        Raises `UpstreamRewritten` if those that differ cannot be updates, or come from another
        stream:
        there the last entries are what tells that the history is the same.
        """
        if batch.first_number != self.at or self.lacks_reports:
            raise ProtocolViolation(f"{self._peer} sent entry {batch.first_number} out of turn")
        due = batch.before(self._common)
        differing = _differing(self._stream, due)
        self.at = batch.next_number
        if not differing:
            return
        if self._differs_from is None:
            self._differs_from = differing[0].number
        number = self._differs_from
        if self._another or not self.applying.takes_as_updates(differing, self._differing):
            raise UpstreamRewritten(
                f"{self._peer} tells another history: its entry {number} is not the one "
                f"that is here, of {self._total}",
                # Behind nothing that is the same, only a beginning is certain.
                number if number > self._first or self._first == 0 else None,
            )
        self._differing += len(differing)

    def finish(self) -> None:
        """The upstream's entries are kept from now on."""
        self.applying.begin(self._total if self._differing else self._first)


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


def _differing(stream: DataStream, theirs: EntryBatch) -> list[Entry]:
    """Those of an upstream's entries that are not ours; we have all of these."""
    begin, found = theirs.first_number, []
    for ours in stream.batches(begin, theirs.next_number):
        same = theirs[ours.first_number - begin : ours.next_number - begin]
        if same.packed() != ours.packed():
            found += [one for one, other in zip(same, ours, strict=True) if one != other]
    return found


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
