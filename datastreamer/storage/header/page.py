"""The header page of a stream file, parsed: the only place where its bytes become values.

The commit record's sum covers magic and header. If these were damaged (or written by a program
that keeps no records), the header that the record was made with can be found again: it is one of
the ends that the synced headers and the mark name. Decides nothing: `judgement.py` does.
"""

from __future__ import annotations

from functools import cached_property

from datastreamer.errors import DamagedHeader, NotAStream, WrongStreamType
from datastreamer.format import (
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    HEADER_SIZE,
    HEADER_STRUCT,
    MAGIC,
    MAGICS,
    Header,
)
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.header import records
from datastreamer.storage.header.records import (
    NO_ID,
    Change,
    CommitRecord,
    Evicted,
    Head,
    SyncedHeader,
    VisibleMark,
)

# The records whose damage is reported, beside the commit record.
_SUMMED = [
    *(("synced header", records.SYNCED, offset) for offset in records.SLOT_OFFSETS),
    ("visible mark", records.MARK, records.MARK_OFFSET),
    ("evicted pages", records.EVICTED, records.EVICTED_OFFSET),
    ("writer", records.WRITER, records.WRITER_OFFSET),
    *(("source", records.SOURCE, offset) for offset in records.SOURCE_OFFSETS),
]


class HeaderPage(bytes):
    """The first 4096 bytes of a stream file, or fewer if the file is shorter.

    Its values are parsed when they are first used, and parsing raises nothing; a record is None
    unless it is whole.
    """

    @classmethod
    def of(cls, file: Readable) -> HeaderPage:
        return cls(file.read(HEADER_PAGE_SIZE, 0))

    @cached_property
    def _padded(self) -> bytes:
        return self.ljust(HEADER_PAGE_SIZE, b"\0")

    # The header.

    @cached_property
    def raw(self) -> Header:
        """The header as it is stored, whatever its fixed fields say."""
        return Header(*HEADER_STRUCT.unpack_from(self._padded, HEADER_OFFSET)[2:])

    @cached_property
    def wrong(self) -> list[tuple[int, str]]:
        """What is not possible in magic and header: byte and sentence."""
        found = []
        if self[:HEADER_OFFSET] not in MAGICS:
            found.append((0, f"the file begins with {self[:HEADER_OFFSET]!r}, not with {MAGIC!r}"))
        try:
            Header.unpack(self._padded[HEADER_OFFSET:])
        except ValueError as error:
            found.append((HEADER_OFFSET, str(error)))
        return found

    @property
    def header_bytes(self) -> bytes:
        return self[HEADER_OFFSET : HEADER_OFFSET + HEADER_SIZE]

    def header(self, path: str, stream_type: int | None = None) -> Header:
        """The header. Raises `NotAStream`, `DamagedHeader`, `WrongStreamType`."""
        if self[:HEADER_OFFSET] not in MAGICS:
            what = "is empty" if not self else f"does not begin with {MAGIC.decode()}"
            raise NotAStream(path, f"not a stream file: it {what}")
        if len(self) < HEADER_PAGE_SIZE:
            raise NotAStream(path, f"not a stream file: the header page is cut at byte {len(self)}")
        for offset, what in self.wrong:
            raise DamagedHeader(path, offset, what)
        if stream_type is not None and self.raw.stream_type != stream_type:
            raise WrongStreamType(
                path, f"the stream is of type {self.raw.stream_type}, not {stream_type}"
            )
        if self.marked and self.evicted is None:
            raise DamagedHeader(
                path,
                records.EVICTED_OFFSET,
                "the record that says which pages are in an archive is damaged: restore the file "
                "from its archive (`datastreamer archive restore`)",
            )
        return self.raw

    # The records.

    @cached_property
    def record(self) -> CommitRecord | None:
        """The commit record if it fits the header as it is stored."""
        return records.get_record(self) if len(self) == HEADER_PAGE_SIZE else None

    @property
    def confirmed(self) -> bool:
        """Whether a record says that a program that keeps records wrote the header as it is stored:
        the commit record, or if that is damaged a synced header."""
        return self.record is not None or any(slot.header == self.raw for slot in self.synced)

    @property
    def foreign(self) -> bool:
        """Whether a program that keeps no records wrote the header as it is stored: it is possible,
        and no record confirms it."""
        return not (self.confirmed or self.wrong)

    @property
    def lost_record(self) -> bool:
        """Whether there was a commit record, which is damaged."""
        return self.known_record is None and not self.foreign

    @property
    def marked(self) -> bool:
        """Whether the file has evicted pages, or is about to have some."""
        return records.is_marked(self)

    @cached_property
    def evicted(self) -> Evicted | None:
        """Which pages are in an archive alone; None if the file is not marked."""
        return records.get_evicted(self._padded) if self.marked else None

    @property
    def floor(self) -> int:
        """The first page that is in the file."""
        return 0 if self.evicted is None else self.evicted.floor

    @cached_property
    def mark(self) -> VisibleMark | None:
        return records.get_mark(self._padded)

    @cached_property
    def synced(self) -> list[SyncedHeader]:
        return records.get_synced(self._padded)

    @cached_property
    def changes(self) -> list[Change]:
        """The newest changes, the newest last; perhaps of an older epoch than the stream's."""
        return records.get_changes(self._padded)

    def changes_between(self, before: int, epoch: int) -> list[Change] | None:
        """What changed after epoch `before`, up to `epoch`; None if the page does not name all."""
        found = [change for change in self.changes if before < change.epoch <= epoch]
        if not found or len(found) != epoch - before:
            return None
        epochs = [change.epoch for change in found]
        return found if epochs == list(range(before + 1, epoch + 1)) else None

    # What they say together.

    @property
    def changing(self) -> bool:
        """Whether entries were being truncated or changed when the page was read."""
        record, mark = self.record, self.mark
        return record is not None and mark is not None and mark.epoch < record.epoch

    @property
    def updating(self) -> int | None:
        """The entry that was being updated when the page was read, or whose update a crash
        interrupted.

        While the page says so, the journal is there: it is made before, and removed when what
        follows on disk says otherwise.
        """
        if self.record is None or not self.changing:
            return None
        epoch = self.record.epoch
        begun = (it for it in self.changes if it.epoch == epoch and it.stop is not None)
        return next((it.start for it in begun), None)

    @property
    def visible(self) -> tuple[Head, int] | None:
        """How far a reader beside a living writer may go, and the epoch.

        None if the page was read in the middle of a change and must be read again, or was written
        by a program that keeps no records: then it stays None.
        """
        record, mark = self.record, self.mark
        if record is None or mark is None or mark.epoch > record.epoch:
            return None
        if mark.epoch < record.epoch:
            # A truncation or update is under way; what the header says was on disk before.
            return record.after, record.epoch
        if mark.head.length > record.after.length:
            return None
        return mark.head, record.epoch

    # A damaged page.

    @cached_property
    def _proof(self) -> tuple[CommitRecord | None, Header | None]:
        if self.record is not None:
            return self.record, None
        ends = [Head(*slot.header[3:]) for slot in self.synced]
        ends += [Head(*self.raw[3:])] + ([] if self.mark is None else [self.mark.head])
        kinds = [slot.header[:3] for slot in self.synced] + [self.raw[:3]]
        for magic in MAGICS:
            for candidate in [Header(*kind, *end) for kind in kinds for end in ends]:
                copy = bytearray(self._padded)
                copy[:HEADER_OFFSET] = magic
                records.put_header(copy, candidate)
                record = records.get_record(copy)
                if record is not None:
                    return record, candidate
        return None, None

    @property
    def known_record(self) -> CommitRecord | None:
        """The commit record; also if it does not fit the header as it is stored, but `proven`."""
        return self._proof[0]

    @property
    def identity(self) -> tuple[bytes, int]:
        """The stream id and the epoch; zeros if no record is whole."""
        known = self.known_record or next(iter(self.synced), None)
        return (NO_ID, 0) if known is None else (known.stream_id, known.epoch)

    @property
    def proven(self) -> Header | None:
        """The header that the commit record was made with, if another one is stored now."""
        return self._proof[1]

    @property
    def known_header(self) -> Header | None:
        """A header that the records confirm, at least what the stream is."""
        if self.proven is not None:
            return self.proven
        return self.synced[0].header if self.synced else None

    @property
    def known_ends(self) -> list[Head]:
        """Ends that the records name, the best first."""
        heads = [] if self.known_record is None else [self.known_record.after]
        others = [Head(*slot.header[3:]) for slot in self.synced]
        if self.mark is not None:
            others.append(self.mark.head)
        return heads + sorted(others, reverse=True)

    @cached_property
    def broken(self) -> list[tuple[str, int]]:
        """Records whose sums do not match: name and byte."""
        page, start = self._padded, records.RECORD_OFFSET
        found = []
        if self.known_record is None and any(page[start : start + records.COMMIT.size]):
            found.append(("commit record", start))
        for name, kind, start in _SUMMED:
            if any(page[start : start + kind.size]) and kind.get(page, start) is None:
                found.append((name, start))
        return found
