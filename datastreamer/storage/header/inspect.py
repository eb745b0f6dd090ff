"""The values in a stream file, damaged or not, for `datastreamer info`.

Decides nothing (`judgement.py` does), writes nothing, and also reads a file that an open rejects.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import CorruptEntries
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_of, page_start
from datastreamer.storage.disk.file_ops import OsDisk, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import (
    CommitRecord,
    Evicted,
    PublisherRecord,
    SyncedHeader,
    VisibleMark,
    Writer,
)
from datastreamer.storage.read.open_file import open_file


class Condition(NamedTuple):
    """The header page of a file in values, and what the system says about the file.

    `size` and `allocated` (its space on the disk) are in bytes. `record` is the commit record if
    it fits the header; `this_boot`: it was written since the machine started. `synced` is newest
    first. `writer_alive`: the process that opened the stream for writing last still runs;
    `locked`: a process writes it now. `undo`: the journal of an update is beside the file.
    `source` is the last source that was granted a lease to publish, None if its record is damaged;
    `evicted` says which pages are in an archive alone.
    """

    size: int
    allocated: int
    header: Header
    record: CommitRecord | None
    this_boot: bool
    synced: list[SyncedHeader]
    mark: VisibleMark | None
    writer: Writer | None
    writer_alive: bool
    locked: bool
    undo: bool
    source: PublisherRecord | None
    evicted: Evicted | None


def examine(path: str) -> Condition:
    """The condition of the file at `path`. Raises `OSError`, `NotAStream`, `DamagedHeader`."""
    with contextlib.closing(OsDisk().open(path, write=False)) as file:
        page = HeaderPage.of(file)
        header, boot = page.header(path), boot_id()
        record, writer = page.record, records.get_writer(page)
        return Condition(
            size=file.size(),
            allocated=512 * os.fstat(file.fileno()).st_blocks,
            header=header,
            record=record,
            this_boot=record is not None and record.boot_id == boot,
            synced=page.synced,
            mark=page.mark,
            writer=writer,
            writer_alive=is_running(writer),
            locked=file.locked_elsewhere(),
            undo=os.path.lexists(journal.path_of(path) + journal.SUFFIX),
            source=records.get_source(page, page.identity[0]),
            evicted=page.evicted,
        )


def readable(path: str, length: int) -> Iterator[EntryBatch]:
    """Runs of whole, consecutive entries from the first on, up to file offset `length` or the first
    damage, regardless of the header's count."""
    offset, number = HEADER_PAGE_SIZE, 0
    with contextlib.closing(open_file(OsDisk(), path, path, write=False)) as file:
        while offset < length:
            near = file.read(min(PAGE_SIZE, length - offset), offset)
            try:
                batch, whole = scan(near, number, file_offset=offset), True
            except CorruptEntries as error:
                batch, whole = scan(near, number, file_offset=offset, end=error.offset), False
            if batch:
                yield batch
            if not batch or batch.more or not whole:
                return
            number, offset = batch.next_number, page_start(page_of(offset) + 1)


def is_running(writer: Writer | None) -> bool:
    """Whether the process in a writer record still runs."""
    if writer is None or writer.boot_id != boot_id():
        return False
    try:
        os.kill(writer.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # another user's
    return True
