"""Mends a stream file: what `check.py` found, undone as far as anybody knows how.

The end is chosen there; its docstring says how. Here it is made so: what is given up is
copied beside the file first, then the size, then header and commit record in one write of
their sector, then our other records, then the index. Each step leaves a file that a second
repair takes to the same end. Never touches a healthy file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from datastreamer.errors import (
    DamagedFile,
    IndexFailed,
    StreamFileError,
    WriteFailed,
)
from datastreamer.format import (
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    MAGIC,
    PAGE_SIZE,
    Header,
    page_of,
    page_start,
)
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.registry import LMDB_ANEW
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk, boot_id
from datastreamer.storage.disk.salvage import keep_beside, remove_begun
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import (
    NO_ID,
    CommitRecord,
    Head,
    PublisherRecord,
    SyncedHeader,
    Writer,
)
from datastreamer.storage.header.recovery import NO_HASH
from datastreamer.storage.maintain.check import PathLike, Progress, examine
from datastreamer.storage.maintain.report import Examination, Report
from datastreamer.storage.read.file import open_file, os_error
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.write.changes import keep_journal, undo_update
from datastreamer.storage.write.opening import locked_by

_log = logging.getLogger(__name__)

_SECTOR = 512


@dataclass(frozen=True)
class Plan:
    """What a repair does. `header` is the one that will stand in the file, None where the file
    stays as it is; `size` the file's size afterwards; `steps` says all of it in words.

    `claimed` is how many entries the header counts now (None: an impossible number), and bytes
    `keep_from` to `keep_to` are kept beside the file, with the header page.
    """

    report: Report
    header: Header | None
    claimed: int | None
    size: int
    keep_from: int
    keep_to: int
    epoch: int
    stream_id: bytes
    sequence: int
    undo: bool
    unproven: int | None
    bad_journal: bool
    reindex: bool
    steps: list[str]

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps

    @property
    def entries_cut(self) -> int:
        """How many of the entries that the header counts are given up."""
        if self.header is None or self.claimed is None:
            return 0
        return max(0, self.claimed - self.header.total_entries)


@dataclass(frozen=True)
class Repaired:
    """What was done: the plan, the file that keeps the bytes given up (None: none were), and
    what a check says afterwards."""

    plan: Plan
    kept: str | None
    report: Report


def plan(path: PathLike, *, progress: Progress | None = None, disk: Disk | None = None) -> Plan:
    """What `repair` would do to the file. Writes nothing and needs no lock.

    Raises `DamagedFile` where nothing helps, and what `verify` raises.
    """
    name = os.fspath(path)
    file = open_file(disk or OsDisk(), name, name, write=False)
    try:
        return _plan(examine(file, name, progress), name)
    except OSError as error:
        raise os_error(name, error, "cannot be read") from error
    finally:
        file.close()


def repair(
    path: PathLike, *, progress: Progress | None = None, disk: Disk | None = None
) -> Repaired:
    """Mend the file, so that it opens and a check finds nothing.

    Raises `StreamLocked` beside a writer, `DamagedFile` where nothing helps, `WriteFailed`
    where the disk refuses (run it again once it does not), and what `verify` raises.
    """
    name, disk = os.fspath(path), disk or OsDisk()
    place = journal.path_of(name)
    file = open_file(disk, name, name, write=True)
    try:
        if not file.lock():
            raise locked_by(file.read(HEADER_PAGE_SIZE, 0).ljust(HEADER_PAGE_SIZE, b"\0"), name)
        remove_begun(disk, name, file)
        found = examine(file, name, progress)
        made = _plan(found, name)
        if made.healthy:
            return Repaired(made, None, made.report)
        if made.undo:
            undo_update(disk, file, place, name)
            found = examine(file, name)
        if made.bad_journal:
            keep_journal(disk, place, name)
        kept = _mend(file, name, found.page, _plan(found, name), disk)
        if made.reindex:
            _rebuild_index(file, name)
        after = examine(file, name, progress).report
        if not after.ok:
            first = after.problems[0]
            raise StreamFileError(
                name, f"is not whole after the repair: at {first.where}: {first.what}"
            )
        return Repaired(made, kept, after)
    except OSError as error:
        raise os_error(name, error, "cannot be read") from error
    finally:
        file.close()


# The plan.


def _plan(found: Examination, path: str) -> Plan:
    page, end = found.page, found.end
    epochs = [slot.epoch for slot in page.synced]
    epochs += [] if page.known_record is None else [page.known_record.epoch]
    epochs += [] if page.mark is None else [page.mark.epoch]
    sequence = max((slot.sequence for slot in page.synced), default=0)
    stream_id = NO_ID
    if page.known_record is not None:
        stream_id = page.known_record.stream_id
    elif page.synced:
        stream_id = page.synced[0].stream_id
    else:
        written = [found for found in records.get_sources(found.page) if found is not None]
        stream_id = max((named for named, _ in written), default=NO_ID)
    header, size, keep_from, keep_to = None, found.size, 0, 0
    if found.touch:
        if end is None or found.header is None or found.unread:
            first = next(p for p in found.report.problems if p.repair.startswith("none"))
            offset = int(first.where.removeprefix("byte ")) if "byte" in first.where else 0
            raise DamagedFile(
                path, offset, f"{first.what}; nothing tells how to mend it: restore from a copy"
            )
        header = Header(*found.header[:3], *end)
        size = max(
            page_start(page_of(end.length) + 1), size + -(size - HEADER_PAGE_SIZE) % PAGE_SIZE
        )
        claimed = end if found.claimed is None else found.claimed
        keep_from, keep_to = end.length, min(found.size, max(claimed.length, found.reach))
    made = Plan(
        found.report,
        header,
        None if found.claimed is None else found.claimed.entries,
        size,
        keep_from,
        max(keep_from, keep_to),
        max(epochs, default=0) + 1,
        stream_id,
        sequence,
        found.half_updated,
        found.unproven,
        found.bad_journal,
        found.touch or found.reindex,
        [],
    )
    made.steps.extend(_steps(made, found))
    return made


def _steps(made: Plan, found: Examination) -> Iterator[str]:
    header = made.header
    if made.undo:
        yield "put the old bytes of an entry back, whose update a crash cut off"
    if made.unproven is not None:
        yield (
            f"keep entry {made.unproven} as it is: its update was cut off, and nothing tells which "
            "of its bytes are old"
        )
    if made.bad_journal:
        yield "keep the journal of an update, which is of no use, under another name"
    if header is not None:
        bytes_kept = made.keep_to - made.keep_from
        behind = f" and {bytes_kept:,} bytes from byte {made.keep_from} on" if bytes_kept else ""
        yield f"keep the header page{behind} in a file beside"
        total = header.total_entries
        if made.entries_cut:
            gone = f"entry {total} goes"
            if made.entries_cut > 1:
                gone = (
                    f"entries {total} to {total + made.entries_cut - 1} go, {made.entries_cut:,} "
                    "of them"
                )
            yield f"cut the stream back to {total:,} entries: {gone}"
        elif found.page.raw[3:] != header[3:]:
            yield f"write the totals: {total:,} entries, {header.total_length:,} bytes"
        if found.page.wrong or found.page.raw[:3] != header[:3]:
            yield (
                f"write the header: version {header.version}, system id {header.system_id}, "
                f"stream type {header.stream_type}"
            )
        if made.size != found.size:
            yield f"bring the file's size from {found.size:,} to {made.size:,} bytes"
        yield "write the commit record, the synced headers and the mark anew"
        if records.get_source(found.page, made.stream_id) is None:
            yield (
                "clear the record of the stream's source, whose epoch is lost: first end all "
                "sources of the stream, then start one with an epoch that none had before"
            )
    if made.reindex:
        yield "build the bookmark index again"


# Its execution.


def _mend(file: File, path: str, page: bytes, made: Plan, disk: Disk) -> str | None:
    if made.header is None:
        return None
    try:
        kept = keep_beside(disk, path, "repair", page, file, made.keep_from, made.keep_to)
        if made.size != file.size():
            file.resize(made.size)
        # What the header is about to vouch for may still be on its way to the disk.
        file.sync()
        fresh = _fresh_page(page, made, made.header)
        file.write(fresh[:_SECTOR], 0)
        file.sync()
        file.write(fresh[_SECTOR:], _SECTOR)
        file.sync()
    except OSError as error:
        raise WriteFailed(
            path,
            f"the repair is not done, the system refused to write: {error.strerror or error}; "
            "run it again",
        ) from error
    _log.warning("%s: repaired; what was changed is kept in %s", path, kept)
    return kept


def _fresh_page(page: bytes, made: Plan, header: Header) -> bytearray:
    """The header page with `header` and records that vouch for it; the rest as it was."""
    fresh, end, boot = bytearray(page), Head(*header[3:]), boot_id()
    fresh[:HEADER_OFFSET] = MAGIC
    records.put_header(fresh, header)
    records.put_record(
        fresh, CommitRecord(made.stream_id, made.epoch, boot, end, end, end, NO_HASH, NO_HASH)
    )
    for sequence in (made.sequence + 1, made.sequence + 2):
        records.put_synced(
            fresh, sequence & 1, SyncedHeader(sequence, made.stream_id, made.epoch, header)
        )
    records.put_mark(fresh, made.epoch, end)
    records.put_writer(fresh, Writer(os.getpid(), boot))
    source = records.get_source(page, made.stream_id)
    fresh[records.SOURCE_OFFSETS[0] :] = bytes(HEADER_PAGE_SIZE - records.SOURCE_OFFSETS[0])
    second = records.SOURCE_OFFSETS[1]
    fresh[second : second + records.SOURCE_SIZE] = bytes(records.SOURCE_SIZE)
    claim = records.get_claim(page)
    if claim is not None:
        # The next open for writing returns the space of an operation that was cut off.
        records.put_claim(fresh, claim._replace(epoch=made.epoch))
    if source is not None and source != PublisherRecord():
        for copy in range(len(records.SOURCE_OFFSETS)):
            records.put_source(fresh, copy, made.stream_id, source)
    return fresh


def _rebuild_index(file: File, path: str) -> None:
    """The index anew, as a writer would make it. Holds the writer's lock."""
    page = HeaderPage.of(file)
    record, head = page.record, Head(*page.raw[3:])
    stream_id, epoch = (NO_ID, 0) if record is None else (record.stream_id, record.epoch)
    try:
        keeper = BookmarkKeeper(
            LMDB_ANEW,
            os.path.abspath(path),
            file,
            Reader(file, path, head),
            write=True,
            stream_id=stream_id,
            epoch=lambda: epoch,
        )
        try:
            keeper.rebuild()
        finally:
            keeper.close()
    except IndexFailed as error:
        raise IndexFailed(error.path, f"the stream itself is whole; {error.what}") from error
