"""Joins an upstream's stream and checks that both hold the same entries.

Owns the comparison of an upstream with the file, and the search for the last entry that they have
in common. Writes nothing but updates that the upstream reports; `relay.py` decides what follows
from a difference.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import trio

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import (
    DamagedEntry,
    EntriesDamaged,
    NoAnswer,
    ProtocolViolation,
    UnknownEntry,
    UpstreamDamaged,
    UpstreamMismatch,
    UpstreamRewritten,
    UpstreamShorter,
)
from datastreamer.format import Header
from datastreamer.position import KEPT, Identity
from datastreamer.printable import counted
from datastreamer.protocol import exchanges
from datastreamer.protocol.commands import NOTHING_KNOWN, KnownHistory
from datastreamer.protocol.following import ChangeReceived, FollowBegun, Reports
from datastreamer.relay.apply_changes import (
    ChangeApplier,
    ensure_whole,
    known_agreement,
    reading,
)
from datastreamer.relay.client import RelayBatches, RelayClient
from datastreamer.storage.header.records import Agreement
from datastreamer.storage.stream import DataStream

# Two operations' bookmarks, and where looking for them ends: there are streams without any.
_MARKS: Final = 4
_MOST_COMPARED: Final = 16 << 20


@dataclass(slots=True)
class Joined:
    """An upstream whose entries continue the file. `rest` are new entries that arrived with those
    that were compared, to append before those of `batches`; None: there are none."""

    header: Header
    batches: RelayBatches
    rest: EntryBatch | None
    change_applier: ChangeApplier


async def join(client: RelayClient, stream: DataStream, timeout: float) -> Joined:
    """Join the upstream's stream at the file's head, after checking that it is the same stream.

    Changes since the file last agreed with the upstream are applied first, if it reports them.
    Then its last entries before the file's head are compared: 256 of them, and more if the last
    two operations are longer (see `first_compared`). `timeout` bounds the time without any
    answer. Raises `UpstreamDiffers` and `PeerError`, and `DamagedEntry` if a page of the file that
    a change or the comparison concerns is damaged.
    """
    with trio.move_on_after(timeout) as patience:
        header = await header_of_same(client, stream)
        total = stream.total_entries
        await trio.to_thread.run_sync(ensure_whole, stream, total - 1, total)
        common = min(total, header.total_entries)
        first = await trio.to_thread.run_sync(first_compared, stream, common)
        known = known_agreement(stream)
        batches = client.follow(
            first, NOTHING_KNOWN if known is None else KnownHistory(known.stream_id, known.epoch)
        )
        # If it was truncated meanwhile it refuses, or sends nothing: the next attempt finds out.
        await batches.__aenter__()
        joining = _Joining(client.peer, stream, first, common, batches.begun, known)
        rest = None
        while joining.at < common or joining.lacks_reports:
            batch = await batches.__anext__()
            patience.deadline = math.inf
            if batches.changes:
                await trio.to_thread.run_sync(joining.add_reports, batches.changes)
            else:
                rest = batch[common - joining.at :] or None
                await trio.to_thread.run_sync(joining.compare, batch)
            patience.deadline = trio.current_time() + timeout
        if common < total:
            raise shorter(client.peer, common, total)
        await trio.to_thread.run_sync(joining.finish)
        return Joined(header, batches, rest, joining.change_applier)
    raise NoAnswer(f"no answer from {client.peer} within {timeout:g} s")


async def header_of_same(client: RelayClient, stream: DataStream) -> Header:
    """The header of the upstream's stream. Raises `UpstreamMismatch` if it is another stream than
    the file's, and `PeerError`."""
    header = await client.header()
    ours, theirs = Identity.of(stream.header), Identity.of(header)
    if ours != theirs:
        raise UpstreamMismatch(
            f"{client.peer} serves another stream: {theirs}, but {stream.path} holds {ours}"
        )
    return header


def shorter(peer: str, common: int, total: int) -> UpstreamShorter:
    """The error for an upstream that holds `common` of the file's `total` entries."""
    return UpstreamShorter(
        f"{peer} holds only {counted(common)}; entries {common} to {total - 1} of this relay are "
        "in doubt",
        common,
    )


class _Joining:
    """Compares an upstream's last entries with the file's, from entry `at` on.

    Reported changes are applied. If the upstream cannot report all changes since the file agreed
    with it, entries that differ may have been updated: its epoch limits how many. These are not
    replaced here: they remain in the range that is compared in the background.
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
        self._other_stream = False
        # The first entry that differs, and how many do.
        self._differs_from: int | None = None
        self._differing = 0
        # From this entry on, the upstream's entries are not those that the file agreed with.
        self._cut = self._total
        agreement, keep = known, True
        if begun is None or begun.reports is Reports.NEVER:
            agreement = None
        elif begun.reports is Reports.UNKNOWN:
            # Each rise of the epoch is at most one update, of an entry there or in the file. After
            # a crash the stored agreement may be too old to be `known`, but names the stream.
            kept = stream.parts.relay.agreement
            self._other_stream = kept is None or kept.stream_id != begun.stream_id
            newer = not self._other_stream and known is not None and known.epoch <= begun.epoch
            allowance = -known.epoch if known is not None and newer else stream.epoch
            agreement = Agreement(
                begun.stream_id, begun.epoch, stream.epoch, 0, self._total, allowance
            )
            # The agreement with the previous upstream stays valid until this one is joined.
            keep = False
        self.change_applier = ChangeApplier(stream, peer, agreement, keep=keep)

    @property
    def lacks_reports(self) -> bool:
        """Whether changes made before the join are still to be reported."""
        return (
            self.change_applier.agreement is not None
            and self.change_applier.reported_epoch < self._upto
        )

    def add_reports(self, changes: deque[ChangeReceived]) -> None:
        """Apply reported changes. Raises what `ChangeApplier.apply` does.

        An update of an entry that was written after a truncation is not applied: the comparison
        of the truncated range decides whether it fits the file's entry.
        """
        change_applier = self.change_applier
        for at, change in enumerate(changes):
            if change.entry is None and change.first < self._total:
                change_applier.add_uncompared(change.first, self._total)
                self._cut = min(self._cut, change.first)
            elif change.entry is not None and self._cut <= change.first < self._total:
                changes[at] = replace(change, entry=None)
        change_applier.add_reports(changes, 0)
        change_applier.apply()

    def compare(self, batch: EntryBatch) -> None:
        """Compare the next entries. Changes nothing.

        Raises `UpstreamRewritten` if those that differ cannot be updates, or if the upstream is
        not the one that the file agreed with: then only equal last entries prove that the history
        is the same. Raises `DamagedEntry` if the file's entries are damaged.
        """
        if batch.first_number != self.at or self.lacks_reports:
            raise ProtocolViolation(
                f"{self._peer} sent entry {batch.first_number} at the wrong time"
            )
        due = batch.before(self._common)
        with reading(self._stream, due.first_number, due.next_number):
            differing = _differing(self._stream, due)
        self.at = batch.next_number
        if not differing:
            return
        ensure_whole(self._stream, due.first_number, due.next_number)
        if self._differs_from is None:
            self._differs_from = differing[0].number
        number = self._differs_from
        if self._other_stream or not self.change_applier.can_be_updates(differing, self._differing):
            raise UpstreamRewritten(
                f"{self._peer} has another history: its entry {number} differs from this relay's, "
                f"which holds {self._total}",
                # Without an equal entry before it, it is the first that differs only at entry 0.
                number if number > self._first or self._first == 0 else None,
            )
        self._differing += len(differing)

    def finish(self) -> None:
        """Entries of the upstream are appended from now on."""
        self.change_applier.begin(self._total if self._differing else self._first)


def first_compared(stream: DataStream, end: int) -> int:
    """The first entry to compare, for a comparison that ends before entry `end`.

    A replaced block may end with as many equal entries as it has transactions. So at least the
    last two operations are compared: bookmarks, of which an operation usually has at most two,
    show where these begin. Without bookmarks, or with very long operations, about
    `_MOST_COMPARED` bytes of entries are compared.
    """
    first = reached = max(0, end - KEPT)
    while True:
        marks: list[int] = []
        size = 0
        with reading(stream, first, end):
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


async def ensure_undamaged(
    client: RelayClient, stream: DataStream, found: UpstreamRewritten
) -> None:
    """Raises `UpstreamDamaged` if the upstream's entries, from where it was found to differ, do not
    match its own checksums: then it has no other history. Raises `PeerError`."""
    if not (await client.capabilities()).page_sums:
        return
    total, first = stream.total_entries, found.first_differing
    if first is None:
        # The upstream may hold fewer entries.
        common = min(total, (await client.header()).total_entries)
        first = await trio.to_thread.run_sync(first_compared, stream, common)
    try:
        await client.range_hash(first, total)
    except EntriesDamaged as error:
        raise UpstreamDamaged(f"{found}; it reports that these are damaged: {error}") from error


def _differing(stream: DataStream, theirs: EntryBatch) -> list[Entry]:
    """The upstream's entries that differ from the file's, which holds all of these numbers."""
    begin, found = theirs.first_number, []
    for ours in stream.batches(begin, theirs.next_number):
        same = theirs[ours.first_number - begin : ours.next_number - begin]
        if same.packed() != ours.packed():
            found += [one for one, other in zip(same, ours, strict=True) if one != other]
    return found


async def common_entries(client: RelayClient, stream: DataStream, most: int) -> int:
    """How many of the file's first `most` entries the upstream also holds, by bisection.

    Each step compares a run of 256 entries, the last one first: different blocks may end in equal
    entries. A damaged entry of the file is one that differs. Raises `PeerError`.
    """
    same, end = 0, most
    while same < end:
        middle = (same + end + 1) // 2
        differing = await differs_at(client, stream, range(middle - 1, middle))
        if differing is None:
            first = max(same, middle - KEPT)
            differing = await differs_at(client, stream, range(first, middle - 1))
        if differing is None:
            same = middle
        else:
            end = differing
    return same


async def differs_at(client: RelayClient, stream: DataStream, numbers: range) -> int | None:
    """The first of these entries that differs; None if all are equal."""
    try:
        async with client.entries_by_number(numbers, window=exchanges.WINDOW) as entries:
            async for entry in entries:
                with suppress(DamagedEntry, OSError):
                    if entry == stream.entry(entry.number):
                        continue
                return entry.number
    except UnknownEntry as error:
        return error.number
    return None
