"""The stream file that is archived: its durable entries, page by page.

Owns which entries count as durable, and that a page is the one that was committed. Reads only.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from xxhash import xxh3_128_digest

from datastreamer._codec import scan
from datastreamer.errors import CorruptEntries, DamagedPage, StreamBusy
from datastreamer.format import PAGE_SIZE, Header, page_start
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.header import records
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Agreement, Change, Head
from datastreamer.storage.objects.segment import SegmentPage, zero_padding
from datastreamer.storage.pages._page_sums import chain_over
from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum, hash_page, last_page
from datastreamer.storage.pages.proof import Digests
from datastreamer.storage.pages.sidecar import PageSum
from datastreamer.storage.read.change_watch import steady_page
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.summaries.times import opened_summaries

# Records that are read at once.
_MANY = 4096


class DurableState(NamedTuple):
    """The durable stream at one moment; `known` is what the commit record says of its entries
    (None: nothing)."""

    head: Head
    known: EndSum | None
    epoch: int
    stream_id: bytes
    agreement: Agreement | None

    @property
    def pages(self) -> int:
        """The number of pages before the last one."""
        return last_page(self.head.length)


class ArchivedPage(NamedTuple):
    """A page to archive: the number of its first entry, its entries, its record and bookmarks."""

    first_entry: int
    entries: bytes
    record: SegmentPage
    bookmarks: Pairs


class ArchivedFile:
    """One open stream file. One thread at a time, apart from `page`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises what `StreamFile.open` raises."""
        self.path = os.fspath(path)
        self._file = StreamFile.open(path)
        self._digests = Digests()
        self._known_to, self._known_epoch = 0, self._file.epoch

    @property
    def header(self) -> Header:
        return self._file.header

    def close(self) -> None:
        self._file.close()

    def state(self) -> DurableState:
        """The newest commit that a power cut leaves.

        Raises `StreamBusy` while entries are changed.
        """
        self._file.refresh()
        page = steady_page(self._file.file)
        record = page.record
        epoch = self._file.epoch if record is None else record.epoch
        if page.changing:
            raise StreamBusy(self.path, "busy: entries are being truncated or updated; try again")
        if epoch != self._known_epoch:
            self._digests, self._known_to, self._known_epoch = Digests(), 0, epoch
        if record is None:
            # Another program wrote it, and nothing says what is on disk.
            self._file.file.sync()
            return DurableState(self._file.head, None, epoch, self._file.stream_id, None)
        most = _durable(page, self._file.head)
        heads = record.after, record.mid, record.base
        head = next(each for each in heads if each.entries <= most or each == record.base)
        agreement = records.get_agreement(page)
        if agreement is not None and (
            agreement.own_epoch != epoch or agreement.low < agreement.high
        ):
            agreement = None
        return DurableState(head, record.sum_at(head), epoch, record.stream_id, agreement)

    def changes_since(self, epoch: int) -> list[Change] | None:
        """What was truncated or updated since an epoch; None if that is not known."""
        found = self._file.recorded_changes(epoch)
        return None if found is None else list(found)

    def digests(self, stop: int) -> bytearray:
        """The hashes of the whole pages before page `stop`; those without a record are computed.

        Raises `DamagedPage`.
        """
        stored = self._file.records()
        for first in range(self._known_to, stop, _MANY):
            end = min(first + _MANY, stop)
            found = [None] * (end - first) if stored is None else stored.get_many(first, end)
            hashes = [
                self._computed(page) if each is None else each.digest
                for page, each in enumerate(found, first)
            ]
            self._digests.put(first, b"".join(hashes))
            self._known_to = end
        return self._digests.packed(0, stop)

    def _computed(self, page: int) -> bytes:
        found = hash_page(self._file.file.read(PAGE_SIZE, page_start(page)), page)
        if found is None:
            raise self._damaged(page, "it does not hold whole entries")
        return found.digest

    def page(self, page: int, digest: bytes, now: int) -> ArchivedPage:
        """A whole page, which must have this hash; from any thread. `now` is the time of entries
        whose time is not known. Raises `DamagedPage`."""
        content = self._file.file.read(PAGE_SIZE, page_start(page))
        found, damage = None, None
        try:
            found = self._archived(page, content, now)
        except DamagedPage as error:
            damage = error
        if found is not None and found.record.sum.digest == digest:
            return found
        # It does not stay in the page cache, where a server would take it for what it has compared.
        self._file.pages.compare([page])
        raise damage or self._damaged(page, "the entries do not match their checksum")

    def last_page(self, state: DurableState, now: int) -> ArchivedPage:
        """The entries of the last page. Raises `DamagedPage`."""
        start = page_start(state.pages)
        content = self._file.file.read(state.head.length - start, start)
        # (A stream that was truncated may end with the padding.)
        found = self._archived(state.pages, content, now)
        known = found.record.sum
        if state.known is not None and known.digest != state.known.tail:
            raise self._damaged(state.pages, "the entries do not match their checksum")
        if found.record.sum.next_number != state.head.entries:
            raise self._damaged(state.pages, "it does not end with the stream's last entry")
        return found

    def starts_with(self, page: int, end: int, digest: str) -> bool:
        """Whether a page begins with entries that have this hash, up to the file offset `end`."""
        start = page_start(page)
        content = self._file.file.read(end - start, start)
        try:
            entries = content[: scan(content, None, file_offset=start).end]
        except CorruptEntries:
            return False
        return xxh3_128_digest(entries).hex() == digest

    def _archived(self, page: int, content: bytes, now: int) -> ArchivedPage:
        """The page with this content."""
        try:
            batch = scan(content, None, file_offset=page_start(page))
        except CorruptEntries as error:
            raise self._damaged(page, str(error)) from None
        entries = content[: batch.end]
        digest = xxh3_128_digest(entries)
        padding = zero_padding(len(entries))
        record = PageSum(NO_CHAIN, digest, batch.next_number, len(entries), padding)
        known = SegmentPage(record, self._time(page, digest, now))
        bookmarks = Pairs()
        bookmarks.take(batch)
        return ArchivedPage(batch.first_number, entries, known, bookmarks)

    def _time(self, page: int, digest: bytes, now: int) -> int:
        """Unix ms of the newest commit in a page, or less than a resolution later."""
        with opened_summaries(self._file) as stored:
            found = None if stored is None else stored.get(page, self._file.stream_id)
        if found is None or found.digest != digest or not found.spans:
            return now
        _, stop, last = found.spans[-1]
        # The record may lack the times of the last commits.
        return min(now, last + found.resolution - 1) if stop == found.next_number else now

    def _damaged(self, page: int, what: str) -> DamagedPage:
        first = self._file.reader.first_number(page)
        stop = self._file.head.entries
        if page < last_page(self._file.head.length):
            stop = self._file.reader.first_number(page + 1)
        return DamagedPage(self.path, page_start(page), what, page, first, stop)


def _durable(page: HeaderPage, visible: Head) -> int:
    """The number of entries that a power cut leaves, if a header is known to end there."""
    writer, record = records.get_writer(page), page.record
    assert record is not None
    if writer is None or not writer.may_lose:
        return visible.entries
    synced = (
        each.header.total_entries
        for each in page.synced
        if (each.stream_id, each.epoch) == (record.stream_id, record.epoch)
    )
    return max(record.base.entries, *synced, 0)


def chains_at(digests: bytes, stops: list[int]) -> list[bytes]:
    """The chains over the pages up to each of `stops`, which rise."""
    found, chain, at = [], NO_CHAIN, 0
    for stop in stops:
        chain = chain_over(digests, at, stop, chain)
        found.append(chain)
        at = stop
    return found


def now_ms() -> int:
    return time.time_ns() // 1_000_000
