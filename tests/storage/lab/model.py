"""What a machine compares a stream with, and looks at it with: readers, plain scans, images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from datastreamer import DataStream
from datastreamer._codec import EntryBatch, pack_entry, scan
from datastreamer.errors import UnknownBookmark
from datastreamer.storage.header import records
from datastreamer.storage.pages.compare import differs
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.records import SidecarRecords
from datastreamer.storage.read import file as file_module
from datastreamer.storage.write import opening
from datastreamer.storage.write import owned_file as owned_module
from datastreamer.storage.write.owned_file import OwnedFile
from tests import oracle
from tests.storage.lab.disk import SimDisk
from tests.storage.lab.image import Image
from tests.storage.made import BOOKMARK, FIRST, HEADER, PAGE, Item, sum_at

KEYS = (b"k", b"l", b"m" * 16, b"\0")


class Observer:
    """A reader beside the writer, that keeps all it was served."""

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        self.epoch = stream.epoch
        self.served: list[Item] = []
        # How many of them no power cut may take: they were served under "commit".
        self.safe = 0
        # How many changes of what was committed there were, as it last looked.
        self.changes = -1

    def look(self) -> bool:
        """Take what is new; True if the entries served before are no longer there."""
        stream = self.stream
        stream.refresh()
        again = stream.epoch != self.epoch
        if again:
            self.served, self.safe, self.epoch = [], 0, stream.epoch
        assert stream.total_entries >= len(self.served), "entries are lost and no epoch shows it"
        if not stream.changing:
            self.served += [(e.type, e.data) for e in stream.entries(len(self.served))]
        return again


@contextlib.contextmanager
def booted(boot: Callable[[], bytes]) -> Iterator[None]:
    """The core takes `boot()` for the running system's id."""
    with contextlib.ExitStack() as patches:
        for module in (file_module, owned_module, opening):
            patches.enter_context(mock.patch.object(module, "boot_id", boot))
        yield


def put(stream: DataStream, item: Item) -> None:
    kind, data = item
    if kind == BOOKMARK:
        stream.add_bookmark(data)
    else:
        stream.add_entry(kind, data)


def batch_of(entries: list[Item], first: int) -> EntryBatch:
    """These entries as they come over the wire."""
    numbered = enumerate(entries, first)
    return scan(b"".join([pack_entry(number, *item) for number, item in numbered]), first)


def abandon(stream: DataStream) -> None:
    """Let go of a stream whose process has ended, threads and all, without a word to its file."""
    keeper = stream._keeper
    if keeper is not None:
        keeper.trusted.write = False
        keeper.close()
    stream._abandon()


def check_bookmarks(stream: DataStream, entries: list[Item]) -> None:
    """Each key is found where a scan finds it last, or not at all."""
    last = {data: number for number, (kind, data) in enumerate(entries) if kind == BOOKMARK}
    for key in KEYS:
        try:
            found = stream.bookmark(key)
        except UnknownBookmark:
            found = None
        assert found == last.get(key), f"bookmark {key!r}"


def check_sums(stream: DataStream) -> None:
    """No checksum says that a page is damaged, also as programs of earlier versions read them,
    which believe each record; a writer knows the hashes of all entries."""
    file = stream._file
    known = file.records()
    assert isinstance(known, SidecarRecords | SumsKeeper)
    for page in range(last_page(file.head.length)):
        content = file.file.read(PAGE, FIRST + page * PAGE)
        for record in (known.get(page), *known.unproven(page, page + 1)):
            if record is not None:
                assert not differs(content, record), f"the checksum of page {page}"
    if isinstance(file, OwnedFile):
        now = sum_at(
            file.file.read(file.written.length, 0),
            file.written,
            chained_from=file.end.sums.chained_from,
        )
        assert file.end.sums.sum() == now


def said_by(image: Image) -> int:
    """How many entries the header page counts, before a failed sync where one was got over."""
    page = image.read(FIRST, 0)
    record = records.get_record(page)
    doubt = None if record is None else records.get_doubt(page, record)
    return HEADER.unpack(page[16:54])[-1] if doubt is None else doubt.after.entries


def plain(image: Image) -> list[Item]:
    """The file read by what the format says alone."""
    *_, total_length, total_entries = HEADER.unpack(image.read(HEADER.size, 16))
    data = image.read(total_length - FIRST, FIRST)
    found = oracle.scan(data, 0, FIRST)
    assert len(found.entries) == total_entries
    # Truncated to a page's start: the padding before it counts.
    assert found.end == len(data) or (not data[found.end] and len(data) % PAGE == 0)
    assert image.size > total_length
    assert (image.size - FIRST) % PAGE == 0
    return [(kind, data[at + 17 : at + 17 + size]) for at, size, kind, _ in found.entries]


def offset_behind(entries: list[Item]) -> int:
    """Where the last of a stream's first entries ends, as the format places them."""
    at = FIRST
    for _, data in entries:
        size = 17 + len(data)
        if (at - FIRST) % PAGE + size > PAGE:
            at += -(at - FIRST) % PAGE
        at += size
    return at


def essence(image: Image) -> tuple[object, ...]:
    """A stream file without the records that each open writes anew (slots and writer)."""
    page = image.read(FIRST, 0)
    rest = {at: block for at, block in image.blocks.items() if at}
    return page[:512], page[1536:2048], image.size, rest


def cut_files(disk: SimDisk) -> list[str]:
    return [name for name in disk.names() if name.endswith(".cut")]
