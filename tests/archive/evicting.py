"""Stream files whose first pages are in their archive alone, and what they hold."""

from __future__ import annotations

from pathlib import Path

from datastreamer import DataStream, Entry
from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.options import SEGMENT_PAGES
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.storage.header.records import Evicted
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.objects.store import Store
from tests.archive.stores import fill

Fields = tuple[int, int, bytes]


def made(path: Path, pages: float = 9) -> Path:
    """A stream of that many pages."""
    path.parent.mkdir(exist_ok=True)
    with DataStream.create(path, sync="os") as stream:
        fill(stream, pages)
    return path


def pushed(
    path: Path, url: str, *, segment_pages: int = SEGMENT_PAGES, takeover: bool = False
) -> None:
    """Archive a file once."""
    source = ArchivedFile(path)
    try:
        ArchiveWriter(source, Store(url), segment_pages=segment_pages, takeover=takeover).publish()
    finally:
        source.close()


def marked_copy(twin: Path, path: Path, url: str, *floors: int) -> Path:
    """A copy of a stream, archived at `url`, whose floor was raised to these pages in turn. Its
    index is complete: nothing asks the archive by itself."""
    path.parent.mkdir(exist_ok=True)
    with DataStream.open(twin, read_only=True) as stream:
        stream.snapshot(path)
    pushed(path, url)
    with DataStream.open(path, sync="os") as stream:
        stream.bookmarks.wait()
        for floor in floors:
            evict(stream, url, floor)
    return path


def evict(stream: DataStream, url: str, floor: int) -> None:
    """Raise the floor to a page, and punch a hole below it."""
    archive = OpenArchive.open(url)
    manifest, _ = archive.newest()
    chain = archive.chain_before(manifest, floor)
    assert chain is not None
    pages = stream.parts.pages
    before = pages.floor_page
    archive_id = bytes.fromhex(archive.id)
    pages.raise_floor(Evicted(floor, manifest.generation, archive_id, chain, url))
    pages.punch(before, floor)


def fields(entry: Entry) -> Fields:
    return entry.number, entry.type, entry.data


def everything(stream: DataStream) -> list[Fields]:
    return [fields(each) for batch in stream.batches(0) for each in batch]


def entries(path: Path) -> list[Fields]:
    with DataStream.open(path, read_only=True) as stream:
        return everything(stream)
