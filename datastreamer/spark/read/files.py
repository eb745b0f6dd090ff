"""Stream files: a snapshot of a file when a query is planned, and later reads of its parts.

Owns that a query reads exactly what was committed at its snapshot; a file that was truncated or
changed since is an error. Must not know tables or columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from datastreamer._codec import EntryBatch
from datastreamer.archive import PREFIX
from datastreamer.errors import (
    BadFileSize,
    DamagedEntry,
    EvictedEntry,
    StreamFileError,
    UsageError,
)
from datastreamer.format import PAGE_SIZE, Header, page_start, pages_for
from datastreamer.position import Identity
from datastreamer.printable import counted
from datastreamer.spark.read import archives
from datastreamer.spark.read.page_sums import PageComparison, SumsState, open_records
from datastreamer.spark.read.paths import FileLocation
from datastreamer.spark.read.remote_file import RemoteFile
from datastreamer.storage.disk.file_ops import OsDisk, Readable
from datastreamer.storage.header.judgement import judge
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import NO_ID, Head
from datastreamer.storage.pages.hashes import EndSum
from datastreamer.storage.pages.page_states import PageRegister, VerifiedFile
from datastreamer.storage.read.file import StreamFile
from datastreamer.storage.read.open_file import open_file
from datastreamer.storage.read.page_scan import Chain, Damage, read_page
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.summaries.times import StreamTimes

# Attempts to read a header page that a writer is changing.
_TORN_READS: Final = 20


class Lost(NamedTuple):
    """Entries that cannot be read: from `first` (None: unknown) up to, not including, `next`
    (None: unknown)."""

    error: DamagedEntry
    first: int | None
    next: int | None


class PageEntries(NamedTuple):
    """Entries of a page, which begins at byte `start` of the file."""

    batch: EntryBatch
    start: int


@dataclass(frozen=True, slots=True)
class FileSnapshot:
    """A stream file at one moment: what was committed, and in which history.

    `recorded`: a program that keeps checksums wrote it last. `end_sum` is what its commit record
    knows of the entries up to the head.
    """

    location: FileLocation
    header: Header
    stream_id: bytes
    epoch: int
    recorded: bool = False
    end_sum: EndSum | None = None

    @property
    def head(self) -> Head:
        """The end of the committed data."""
        return Head(self.header.total_length, self.header.total_entries)

    @property
    def pages(self) -> int:
        """The number of pages that hold entries."""
        return pages_for(self.header.total_length)

    @property
    def sums_state(self) -> SumsState:
        return SumsState(self.stream_id, self.epoch, self.head, self.end_sum)


def open_location(location: FileLocation) -> Readable:
    """Open the file for reading. Raises `StreamFileError`."""
    if location.uri is not None:
        return location.open_remote()
    return open_file(OsDisk(), location.path, location.path, write=False)


def take_snapshot(
    location: FileLocation, stream_type: int, generation: int | None = None
) -> FileSnapshot:
    """Take a snapshot of what is committed and visible in the file; of an archive, what is in the
    newest manifest, or in the newest one of a generation.

    Raises what opening a stream file raises.
    """
    if location.uri is None:
        file = StreamFile.open(location.path, stream_type=stream_type)
        try:
            return snapshot_of(location, file)
        finally:
            file.close()
    location = location.pinned(generation)
    remote = location.open_remote()
    try:
        page = HeaderPage.of(remote)
        header = page.header(location.path, stream_type)
        if page.evicted is not None:
            raise EvictedEntry(
                location.path,
                f"its first {page.evicted.floor} pages are in an archive alone: load "
                f"{PREFIX}{page.evicted.url}",
            )
        judged = judge(remote, page, location.path, header)
        seen = page.visible
    finally:
        remote.close()
    head = judged.head if seen is None else min(judged.head, seen[0])
    header = header._replace(total_length=head.length, total_entries=head.entries)
    recorded, settled = page.record is not None, not page.changing
    known = page.record.sum_at(head) if page.record is not None and settled else None
    return FileSnapshot(location, header, judged.stream_id, judged.epoch, recorded, known)


def entry_at(location: FileLocation, stream_type: int, ms: int) -> int:
    """The first entry that was committed at or after a time, as `DataStream.entry_at`. Raises
    `TimeUnknown`, and `UsageError` for a remote file."""
    if location.uri is not None and location.archive is not None:
        return archives.entry_at(location.uri, location.pinned().archive or 0, ms)
    if location.uri is not None:
        raise UsageError(
            f"{location.path}: option startingTimestamp: times are looked up in local files and "
            "at servers: give startingOffset"
        )
    with contextlib.closing(StreamFile.open(location.path, stream_type=stream_type)) as file:
        return StreamTimes(file).entry_at(ms)


def snapshot_of(location: FileLocation, file: StreamFile) -> FileSnapshot:
    """What is committed and visible in an open file, as of its last `refresh`."""
    recorded = file.recorded_epoch is not None
    header, (head, known) = file.header, file.end_sum()
    known = known if head == Head(header.total_length, header.total_entries) else None
    return FileSnapshot(location, header, file.stream_id, file.epoch, recorded, known)


@contextlib.contextmanager
def open_reader(snapshot: FileSnapshot, *, verify: bool) -> Iterator[Reader]:
    """A reader of the entries of the snapshot; `verify`: of verified pages only.

    Raises `StreamFileError` in the place of `DamagedEntry` if the stream was truncated or changed
    since the snapshot.
    """
    file = open_location(snapshot.location)
    path, head = snapshot.location.path, snapshot.head
    with contextlib.ExitStack() as opened:
        opened.callback(file.close)
        data: Readable = file
        if verify and snapshot.recorded:
            records = open_records(snapshot.location, file, snapshot.sums_state)
            opened.callback(records.close)
            pages = PageRegister(file, path, records, lambda: head)
            pages.judge_end(head, snapshot.end_sum)
            data = VerifiedFile(file, pages)
        try:
            yield Reader(file, path, head, data=data)
        except DamagedEntry:
            ensure_same(file, snapshot)
            raise


def read_pages(
    snapshot: FileSnapshot, first: int, stop: int, *, verify: bool = True
) -> Iterator[PageEntries | Lost]:
    """The entries of the pages from `first` up to, not including, `stop`, a page at a time.

    What cannot be read is returned as `Lost`, in its place; the other pages are unaffected. With
    `verify`, a page that differs from its checksum is `Lost` as a whole. Raises `StreamFileError`
    if the stream was truncated or changed since the snapshot.
    """
    file = open_location(snapshot.location)
    with contextlib.ExitStack() as opened:
        opened.callback(file.close)
        if isinstance(file, RemoteFile):
            file.until = min(page_start(stop), snapshot.header.total_length)
        recorded = ensure_same(file, snapshot)
        sums = None
        if verify and recorded:
            records = open_records(snapshot.location, file, snapshot.sums_state)
            opened.callback(records.close)
            sums = PageComparison(snapshot.location.path, records, snapshot.sums_state, stop + 1)
        for found in _sweep(file, snapshot, first, stop, sums):
            if isinstance(found, Lost):
                # What looks like damage may be entries that were truncated or updated meanwhile.
                ensure_same(file, snapshot)
            yield found
        ensure_same(file, snapshot)


def _sweep(
    file: Readable, snapshot: FileSnapshot, first: int, stop: int, sums: PageComparison | None
) -> Iterator[PageEntries | Lost]:
    path, head = snapshot.location.path, snapshot.head
    chain = Chain(None if first else 0)
    held: PageEntries | None = None
    for page in range(first, min(stop + 1, snapshot.pages)):
        start = page_start(page)
        content = file.read(min(PAGE_SIZE, head.length - start), start)
        damage = (
            None if sums is None else sums.damage(page, content, partial(_first, file, page, chain))
        )
        if damage is not None:
            # Nothing of the page is used, also not to judge the page before it.
            yield from _settled(held, chain)
            held = None
            chain.damages += [it._replace(after=damage.first) for it in chain.missing]
            yield from _lost(path, chain.damages)
            if page < stop:
                yield Lost(damage, damage.first, damage.end)
            chain = Chain(damage.end)
            continue
        found = read_page(file, content, start, chain.due)
        if page == first and (found.broken or not found.batch):
            # The previous page decides whether the first entry number of this page is right.
            due = _due_at(file, page)
            found = read_page(file, content, start, due)
            # If entries before this page are missing, the part that ends there reports it.
            chain.due = found.batch.first_number if found.batch else due
        chain.goes_on(found)
        # The start of the next page confirms or refutes the last entry of this page.
        yield from _settled(held, chain)
        yield from _lost(path, chain.damages)
        if page < stop:
            held = PageEntries(chain.take(to_the_end=start + PAGE_SIZE <= head.length), start)
        else:
            held = None
    if stop >= snapshot.pages:
        _end(chain, head, held is not None and bool(held.batch))
    yield from _settled(held, chain)
    yield from _lost(path, chain.damages)
    yield from _lost(path, chain.missing)


def _end(chain: Chain, head: Head, held: bool) -> None:
    """Compare the end of the last page with the header, which counts the entries."""
    last = head.entries - 1
    # Bytes after the last entry are the remains of an entry that is missing.
    chain.missing = [
        it._replace(first=it.first and min(it.first, last), after=head.entries)
        for it in chain.missing
    ]
    if chain.due is None or not chain.intact:
        return
    if chain.due != head.entries:
        what = f"the data ends before entry {chain.due}, the header counts {head.entries}"
        chain.missing.append(Damage(head.length, what, min(chain.due, last), head.entries))
    elif held and not chain.padded and chain.whole.length != head.length:
        what = (
            f"entry {chain.due - 1} ends at byte {chain.whole.length}, the header says at byte "
            f"{head.length}"
        )
        chain.missing.append(Damage(chain.whole.length, what, chain.due - 1, head.entries))


def _settled(held: PageEntries | None, chain: Chain) -> Iterator[PageEntries]:
    """A page's entries, without those that the next page has put in doubt."""
    if held is None:
        return
    batch = held.batch
    for damage in (*chain.damages, *chain.missing):
        if batch and damage.first is not None and damage.first < batch.next_number:
            batch = batch[: max(0, damage.first - batch.first_number)]
    if batch:
        yield PageEntries(batch, held.start)


def _first(file: Readable, page: int, chain: Chain) -> int | None:
    """The number of the first entry in a damaged page, as far as it is known."""
    return _due_at(file, page) if chain.due is None else chain.due


def _due_at(file: Readable, page: int) -> int | None:
    """The number of the first entry in a page, computed from the previous page; None if that page
    is damaged."""
    if page == 0:
        return 0
    start = page_start(page - 1)
    before = read_page(file, file.read(PAGE_SIZE, start), start, None)
    return before.batch.next_number if before.batch and before.broken is None else None


def _lost(path: str, damages: list[Damage]) -> Iterator[Lost]:
    """Take the damages found so far out of the list."""
    for each in damages:
        yield Lost(DamagedEntry(path, each.offset, each.what), each.first, each.after)
    damages.clear()


def ensure_same(file: Readable, snapshot: FileSnapshot) -> bool:
    """Whether a program that keeps checksums wrote the file last, also at the snapshot.

    Raises `StreamFileError` if the file no longer holds the snapshot's entries, `BadFileSize` if it
    ends within them.

    A writer that keeps no records (the reference implementation) and replaces truncated entries
    with at least as many others is not detected.
    """
    path, planned = snapshot.location.path, snapshot.header
    recorded = snapshot.recorded or snapshot.stream_id != NO_ID
    for _ in range(_TORN_READS):
        page = HeaderPage.of(file)
        record = page.record
        if record is not None or not recorded:
            break
    header = page.header(path)
    same = Identity.of(header) == Identity.of(planned)
    if record is not None and recorded:
        same = same and (record.stream_id, record.epoch) == (snapshot.stream_id, snapshot.epoch)
    if not same or header.total_entries < planned.total_entries:
        raise StreamFileError(
            path,
            "the stream was truncated or changed since this query was planned: it held "
            f"{counted(planned.total_entries)} then and holds {header.total_entries} now; run the "
            "query again",
        )
    size = file.size()
    if size < planned.total_length:
        # An error in every mode: any number of entries may be missing.
        what = f"the file ends here, but its data ends at byte {planned.total_length}"
        raise BadFileSize(path, size, what)
    return snapshot.recorded and record is not None
