"""What a repair does to a stream file, in words and numbers, and where `--cut` truncates.

Changes nothing: `repair.py` makes the plan from what `check.py` found, and carries it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from datastreamer._codec import scan
from datastreamer.format import (
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    PACKET_ENTRY,
    PAGE_SIZE,
    Header,
    page_start,
)
from datastreamer.printable import counted
from datastreamer.storage.disk.file_ops import File
from datastreamer.storage.header import records
from datastreamer.storage.header.judgement import sums_up_to
from datastreamer.storage.header.records import Head
from datastreamer.storage.maintain.report import Examination, Report
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.pages.restore import HealedPages


@dataclass(frozen=True)
class Plan:
    """What a repair does. `header` is the new header, None if the file stays as it is; `size` is
    its size afterwards; `steps` describes all of it.

    `shortened`: entries are truncated that were committed, though `--cut` does not ask for that.
    `healed` are the damaged pages, and whether servers restore them. `lost` are the ranges of
    entries that cannot be read then: the first one, and the one after the last. `claimed` is the
    number of entries in the present header (None: impossible). The header page and the bytes
    `keep_from` to `keep_to` are kept beside the file. `held` says why header, size and index stay
    as they are although they are wrong; empty if they do not.
    """

    report: Report
    header: Header | None
    claimed: int | None
    size: int
    keep_from: int
    keep_to: int
    shortened: bool
    epoch: int
    stream_id: bytes
    sequence: int
    healed: list[HealedPages]
    lost: list[tuple[int, int]]
    steps: list[str]
    held: str = ""

    @property
    def healthy(self) -> bool:
        """Whether the file needs no repair."""
        return not self.steps and self.report.ok

    @property
    def entries_lost(self) -> int:
        """How many entries cannot be read, apart from those that are truncated."""
        return sum(stop - first for first, stop in self.lost)

    @property
    def entries_cut(self) -> int:
        """How many of the entries in the header are truncated."""
        if self.header is None or self.claimed is None:
            return 0
        return max(0, self.claimed - self.header.total_entries)


def sum_at(found: Examination, end: Head) -> EndSum | None:
    """What the commit record knows of the entries up to `end`; None if another program may have
    written them."""
    record = found.page.known_record
    return None if record is None else record.sum_at(end)


def end_before_damage(file: File, found: Examination) -> Head | None:
    """Where `--cut` truncates: before the first damaged page. No entry of that page is known to be
    right, unless the commit record has the hash of its entries up to there."""
    end, page = found.end, found.first_damaged
    if end is None or page is None or page > last_page(end.length) + 1:
        return end
    known = sum_at(found, end)
    if known is not None and page >= last_page(end.length) and sums_up_to(file, end, known):
        return end
    before = _end_of_page(file, page - 1)
    full = before.length == page_start(page)
    if not (full or found.proven_before or _first_number(file, page) == before.entries):
        # Nothing says that this page ends there: zeros over its end look like padding.
        before = _end_of_page(file, page - 2)
    return before


def _end_of_page(file: File, page: int) -> Head:
    if page < 0:
        return Head()
    start = page_start(page)
    batch = scan(file.read(PAGE_SIZE, start), None, file_offset=start)
    return Head(start + batch.end, batch.next_number)


def _first_number(file: File, page: int) -> int | None:
    head = file.read(ENTRY_HEAD_SIZE, page_start(page))
    if len(head) < ENTRY_HEAD_SIZE or head[0] != PACKET_ENTRY:
        return None
    return int(ENTRY_HEAD_STRUCT.unpack(head)[3])


def held(made: Plan, found: Examination) -> str:
    """Why a repair that servers were named for ends before its other steps."""
    if made.shortened:
        assert made.header is not None
        missing = "is" if made.entries_cut == 1 else "are"
        return (
            f"{counted(made.entries_cut)} from entry {made.header.total_entries} on {missing} "
            "missing, and no server named restored them: the stream is not truncated; name another "
            "server, or run repair without --from to truncate it"
        )
    return (
        "nothing proves the entries of the last page, since the commit record is damaged, and no "
        "server named has the same: the header is not repaired; name a second server, accept one "
        "with --trust-peer, or run repair without --from to keep the entries as they are"
    )


def steps_of(made: Plan, found: Examination, half_updated: bool) -> Iterator[str]:
    """What is done, one sentence each."""
    header = made.header
    if half_updated:
        yield "restore the old bytes of an entry whose update a crash interrupted"
    if found.unproven is not None:
        yield (
            f"keep entry {found.unproven} as it is: its update was interrupted, and which of its "
            "bytes are old is not known"
        )
    if found.bad_journal:
        yield "keep the unusable journal of an update under another name"
    if header is not None:
        bytes_kept = made.keep_to - made.keep_from
        more = f" and {bytes_kept:,} bytes from byte {made.keep_from} on" if bytes_kept else ""
        yield f"keep the header page{more} in a file beside the stream"
        total = header.total_entries
        if made.entries_cut:
            lost = f"entry {total} is lost"
            if made.entries_cut > 1:
                lost = (
                    f"{counted(made.entries_cut, style=',')}, {total} to "
                    f"{total + made.entries_cut - 1}, are lost"
                )
            yield f"truncate the stream to {counted(total, style=',')}: {lost}"
        elif found.page.raw[3:] != header[3:]:
            yield f"write the totals: {counted(total, style=',')}, {header.total_length:,} bytes"
        if found.page.wrong or found.page.raw[:3] != header[:3]:
            yield (
                f"write the header: version {header.version}, system id {header.system_id}, "
                f"stream type {header.stream_type}"
            )
        if made.size != found.size:
            yield f"change the file's size from {found.size:,} to {made.size:,} bytes"
        yield "write the commit record, the synced headers and the mark again"
        if records.get_source(found.page, made.stream_id) is None:
            yield (
                "clear the record of the stream's source, whose epoch is lost: first end all "
                "sources of the stream, then start one with an epoch that no source had before"
            )
    if header is not None or found.reindex:
        yield "rebuild the bookmark index"
