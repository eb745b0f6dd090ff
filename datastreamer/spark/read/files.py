"""Stream files: what a file holds when a query is planned, and a part of it read later.

Owns how a plan is kept to: what was committed then is read, and nothing else; a file that was
cut back or changed meanwhile is an error. Knows no table and no column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from datastreamer._codec import EntryBatch
from datastreamer.errors import BadFileSize, DamagedEntry, StreamFileError
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_start, pages_for
from datastreamer.position import Identity
from datastreamer.spark.read.paths import FileLocation
from datastreamer.spark.read.remote_file import RemoteFile
from datastreamer.storage.disk.file_ops import OsDisk, Readable
from datastreamer.storage.header.records import NO_ID, Head, get_record
from datastreamer.storage.header.recovery import judge, read_header, visible
from datastreamer.storage.read.file import StreamFile, open_file
from datastreamer.storage.read.page_scan import Chain, Damage, read_page
from datastreamer.storage.read.reader import Reader

# A header page that is read in the middle of a write is read again.
_TORN_READS: Final = 20


class Lost(NamedTuple):
    """Entries that cannot be read: from `first` (None: not known which) up to `next` (None:
    not known which comes next)."""

    error: DamagedEntry
    first: int | None
    next: int | None


@dataclass(frozen=True, slots=True)
class FileSnapshot:
    """A stream file as it was when it was looked at: what was committed, and of which history."""

    place: FileLocation
    header: Header
    stream_id: bytes
    epoch: int

    @property
    def head(self) -> Head:
        """How far it goes."""
        return Head(self.header.total_length, self.header.total_entries)

    @property
    def pages(self) -> int:
        """How many pages have entries."""
        return pages_for(self.header.total_length)


def open_place(place: FileLocation) -> Readable:
    """The file, for reading. Raises `StreamFileError`."""
    if place.uri is not None:
        return place.open_remote()
    return open_file(OsDisk(), place.path, place.path, write=False)


def look_at(place: FileLocation, stream_type: int) -> FileSnapshot:
    """What the file holds now: what is committed and may be seen.

    Raises what opening a stream file raises.
    """
    if place.uri is None:
        file = StreamFile.open(place.path, stream_type=stream_type)
        try:
            return FileSnapshot(place, file.header, file.stream_id, file.epoch)
        finally:
            file.close()
    remote = place.open_remote()
    try:
        page = remote.read(HEADER_PAGE_SIZE, 0)
        header = read_header(page, place.path, stream_type)
        judged = judge(remote, page, place.path, header)
        seen = visible(page)
    finally:
        remote.close()
    head = judged.head if seen is None else min(judged.head, seen[0])
    header = header._replace(total_length=head.length, total_entries=head.entries)
    return FileSnapshot(place, header, judged.stream_id, judged.epoch)


def reader_of(file: Readable, snapshot: FileSnapshot) -> Reader:
    """Where entries stand in an open file."""
    return Reader(file, snapshot.place.path, snapshot.head)


def read_pages(snapshot: FileSnapshot, first: int, stop: int) -> Iterator[EntryBatch | Lost]:
    """The entries of the pages from `first` up to, not including, `stop`, a page at a time.

    What cannot be read comes as `Lost`, in its place; the other pages are as good as before.
    Raises `StreamFileError` where the stream was cut back or changed since the snapshot.
    """
    file = open_place(snapshot.place)
    try:
        if isinstance(file, RemoteFile):
            file.until = min(page_start(stop), snapshot.header.total_length)
        ensure_same(file, snapshot)
        for found in _sweep(file, snapshot, first, stop):
            if isinstance(found, Lost):
                # It may look like damage, and be a history that was taken back.
                ensure_same(file, snapshot)
            yield found
        ensure_same(file, snapshot)
    finally:
        file.close()


def _sweep(
    file: Readable, snapshot: FileSnapshot, first: int, stop: int
) -> Iterator[EntryBatch | Lost]:
    path, head = snapshot.place.path, snapshot.head
    chain = Chain(None if first else 0)
    held: EntryBatch | None = None
    for page in range(first, min(stop + 1, snapshot.pages)):
        start = page_start(page)
        content = file.read(min(PAGE_SIZE, head.length - start), start)
        found = read_page(file, content, start, chain.due)
        if page == first and (found.broken or not found.batch):
            # Whether its first number is right, the page before tells.
            chain.due = _due_at(file, page)
            found = read_page(file, content, start, chain.due)
        chain.goes_on(found)
        # Only what the next page begins with tells that a page's last entry is what it seems.
        yield from _settled(held, chain)
        yield from _lost(path, chain.damages)
        if page < stop:
            held = chain.take(to_the_end=start + PAGE_SIZE <= head.length)
        else:
            held = None
    if stop >= snapshot.pages:
        _end(chain, head, held)
    yield from _settled(held, chain)
    yield from _lost(path, chain.damages)
    yield from _lost(path, chain.missing)


def _end(chain: Chain, head: Head, held: EntryBatch | None) -> None:
    """Hold the end of the last page to the header, which tells how many entries there are."""
    last = head.entries - 1
    # Bytes behind the last entry are what is missing of it.
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


def _settled(held: EntryBatch | None, chain: Chain) -> Iterator[EntryBatch]:
    """A page's entries, without those that what comes next has put in doubt."""
    if held is None or not held:
        return
    for damage in (*chain.damages, *chain.missing):
        if damage.first is not None and damage.first < held.next_number:
            held = held[: max(0, damage.first - held.first_number)]
    if held:
        yield held


def _due_at(file: Readable, page: int) -> int | None:
    """The entry that a page has to begin with, by the page before; None where that one does
    not tell."""
    if page == 0:
        return 0
    start = page_start(page - 1)
    before = read_page(file, file.read(PAGE_SIZE, start), start, None)
    return before.batch.next_number if before.batch and before.broken is None else None


def _lost(path: str, damages: list[Damage]) -> Iterator[Lost]:
    """What is known of the damages so far, each once."""
    for offset, what, first, after in damages:
        yield Lost(DamagedEntry(path, offset, what), first, after)
    damages.clear()


def ensure_same(file: Readable, snapshot: FileSnapshot) -> None:
    """Raise `StreamFileError` where the file does not hold the snapshot's entries any more,
    `BadFileSize` where it ends before them.

    A program that keeps no records and puts other entries in the place of those that it took
    back, as many or more, is not noticed here.
    """
    path, planned = snapshot.place.path, snapshot.header
    recorded = snapshot.stream_id != NO_ID
    for _ in range(_TORN_READS):
        page = file.read(HEADER_PAGE_SIZE, 0)
        record = get_record(page)
        if record is not None or not recorded:
            break
    header = read_header(page, path)
    same = Identity.of(header) == Identity.of(planned)
    if record is not None and recorded:
        same = same and (record.stream_id, record.epoch) == (snapshot.stream_id, snapshot.epoch)
    if not same or header.total_entries < planned.total_entries:
        raise StreamFileError(
            path,
            "the stream was cut back or changed since this query was planned: it held "
            f"{planned.total_entries} entries then, and {header.total_entries} now; run the query "
            "again",
        )
    size = file.size()
    if size < planned.total_length:
        # No mode makes a row of it, or leaves it out: so much may be missing.
        what = f"the file ends there, its data only at byte {planned.total_length}"
        raise BadFileSize(path, size, what)
