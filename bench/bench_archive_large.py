"""Archives and files of the size that production has: what grows with it is measured.

Nearly all bytes are zeros, which take no space in a file and compress to nothing. What takes
minutes or gigabytes is measured if ``ARCHIVE_BENCH_LARGE`` is set.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from bench.readers import catch_up
from datastreamer import DataStream
from datastreamer.archive.beside import restored
from datastreamer.archive.options import ArchiveOptions
from datastreamer.format import PAGE_SIZE, Header, page_start
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.disk.file_ops import OsDisk, boot_id
from datastreamer.storage.header.records import (
    Evicted,
    put_evicted,
    put_magic,
    settled_page,
)
from datastreamer.storage.objects.manifest import (
    MOST_ROWS,
    ArchivedHead,
    ArchivedStream,
    ArchiveManifest,
    ManifestWriter,
    Row,
    digest_of,
    stream_object,
)
from datastreamer.storage.objects.opened import STREAM, manifest_name, segment_name
from datastreamer.storage.objects.segment import SegmentPage, compress, decompress, pack
from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum, chained
from datastreamer.storage.pages.keeper import ALL_TRUSTED
from datastreamer.storage.pages.sidecar import SUFFIX, PageSum, SumsFile, SumsHeader

Record = Callable[..., None]

PER_SEGMENT = 64
ID = bytes(range(1, 17))
ARCHIVE = bytes(range(2, 18)).hex()
HEAD = Header(1, 0, 1)
# Each page has one entry, which leaves some padding.
END = PAGE_SIZE - 1000

large = pytest.mark.skipif(
    not os.environ.get("ARCHIVE_BENCH_LARGE"), reason="ARCHIVE_BENCH_LARGE is not set"
)


def head_of(page: int) -> bytes:
    """The first bytes of a page; the others are zeros."""
    return struct.pack(">BIIQ", 2, END, 2, page)


class Large:
    """A stream of `pages` whole pages and a last one, and its archive."""

    def __init__(self, folder: Path, pages: int, stored: int) -> None:
        """`stored`: only the first segments are in the archive."""
        self.folder, self.pages = folder, pages
        self.url = folder.as_uri()
        self.sums: list[PageSum] = []
        self.rows: list[Row] = []
        for kind in "sm":
            (folder / kind).mkdir(parents=True)
        padding = xxh3_64_intdigest(bytes(PAGE_SIZE - END))
        content, chain = bytearray(PAGE_SIZE), NO_CHAIN
        for first in range(0, pages, PER_SEGMENT):
            records, frames = [], []
            for page in range(first, min(first + PER_SEGMENT, pages)):
                content[:17] = head_of(page)
                digest = xxh3_128_digest(memoryview(content)[:END])
                chain = chained(chain, digest)
                self.sums.append(PageSum(chain, digest, page + 1, END, padding))
                records.append(SegmentPage(self.sums[-1], 1))
                if first < stored:
                    frames.append(compress(content))
            name = segment_name(first, len(records), f"{first:016x}")
            size, footer = 1, NO_CHAIN
            if first < stored:
                packed, footer = pack(first, frames, records, [], ID)
                size = len(packed)
                (folder / name).write_bytes(packed)
            row = first, len(records), first, name, 0, size, chain.hex(), footer.hex(), 1
            self.rows.append(Row(*row))
        self.chain = chain
        self._publish()

    @property
    def length(self) -> int:
        return page_start(self.pages) + END

    def _publish(self) -> None:
        page, folder = self.pages, self.folder
        last = head_of(page).ljust(END, b"\0")
        self.tail = xxh3_128_digest(last)
        chain = chained(self.chain, self.tail)
        known = PageSum(chain, self.tail, page + 1, END, 0)
        frames = [compress(last)]
        packed, footer = pack(page, frames, [SegmentPage(known, 1)], [], ID, last=True)
        name = segment_name(page, 1, "f" * 16)
        (folder / name).write_bytes(packed)
        manifest = ArchiveManifest(
            number=1,
            archive_id=ARCHIVE,
            time=1,
            previous="",
            writer=ManifestWriter(1, "00" * 16),
            generation=1,
            reason="begun",
            stream=ArchivedStream(*HEAD[:3], ID.hex(), 0),
            head=ArchivedHead(self.length, page + 1, self.chain.hex(), self.tail.hex()),
            segments=tuple(self.rows),
            tail=Row(page, 1, page, name, 0, len(packed), chain.hex(), footer.hex(), 1),
        )
        (folder / manifest_name(1)).write_bytes(manifest.pack())
        (folder / STREAM).write_bytes(stream_object(ARCHIVE, HEAD))

    def file(self, path: Path, local: int, *, marked: bool) -> Path:
        """The stream's file. It has the pages from `local` on; `marked` says that the others are in
        the archive alone, else they are not read."""
        header = HEAD._replace(total_length=self.length, total_entries=self.pages + 1)
        page = settled_page(header, EndSum(self.chain, 0, self.tail), ID, 0, boot_id())
        if marked:
            chain = self.sums[local - 1].chain
            put_magic(page, marked=True)
            put_evicted(page, Evicted(local, 1, bytes.fromhex(ARCHIVE), chain, self.url))
        with open(path, "wb") as file:
            file.truncate(page_start(self.pages + 1))
            file.write(page)
            for each in range(local, self.pages + 1):
                os.pwrite(file.fileno(), head_of(each), page_start(each))
            os.fsync(file.fileno())
        sums = SumsFile(OsDisk().create(f"{path}{SUFFIX}"), "")
        sums.put(0, self.sums, ID)
        sums.write_header(SumsHeader(ID, 0, 0, 0, ALL_TRUSTED))
        sums.close()
        return path


def test_a_manifest_with_all_rows(record: Record, smoke: bool) -> None:
    """How long it keeps other threads from running."""
    count = 100 if smoke else MOST_ROWS - 1
    chain = "5a" * 16
    rows = tuple(
        Row(64 * at, 64, 6400 * at, segment_name(64 * at, 64, f"{at:016x}"), 0, 30_000_000, chain,
            digest_of(b"%d" % at), at)
        for at in range(count)
    )  # fmt: skip
    tail = rows[-1]._replace(first_page=64 * count, pages=1)
    manifest = ArchiveManifest(
        *(1, ARCHIVE, 1, "", ManifestWriter(1, "00" * 16), 1, "begun"),
        ArchivedStream(*HEAD[:3], ID.hex(), 0),
        ArchivedHead(page_start(64 * count) + 5, 6400 * count + 1, chain, chain),
        *(rows, tail),
    )
    packed = manifest.pack()
    text = decompress(packed, 1 << 30)

    def longest_wait(call: Callable[[], object]) -> float:
        """Of another thread while this one is at work, in ms."""
        done, gaps = threading.Event(), [0.0]

        def watch() -> None:
            before = time.perf_counter()
            while not done.is_set():
                time.sleep(0.0002)
                gaps.append(-before + (before := time.perf_counter()))

        watching = threading.Thread(target=watch)
        watching.start()
        call()
        done.set()
        watching.join()
        return 1e3 * max(gaps)

    ours, at_once = [], []
    for _ in range(5):
        ours.append(longest_wait(lambda: ArchiveManifest.unpack(packed)))
        at_once.append(longest_wait(lambda: json.loads(text)))
    record(
        f"{count:,} rows of a manifest: the longest wait of another thread while they are read",
        sorted(ours)[2],
        {"while one call parses the text": sorted(at_once)[2]},
        unit="ms",
        at_least=1.0,
        less_is_better=True,
    )


@large
def test_a_relay_from_a_large_archive(record: Record, smoke: bool, tmp_path: Path) -> None:
    pages = 700 if smoke else 100_000_000_000 // PAGE_SIZE
    made = Large(tmp_path / "archive", pages, pages)
    options = ArchiveOptions(made.url, mode="read", local_retention=1_000_000_000)
    begin = time.perf_counter()
    assert restored(options, str(tmp_path / "r.bin"))
    with StreamServer(tmp_path / "r.bin", host="127.0.0.1", port=0, create=False) as server:
        catch_up(("127.0.0.1", server.port), entries=1, size=END - 17)
        seconds = time.perf_counter() - begin
        assert server.stream.total_entries == pages + 1
    record(
        f"a relay is ready from an archive of {pages * PAGE_SIZE / 1e9:.0f} GB, and has sent entry "
        "0; it keeps 1 GB",
        seconds,
        {"the goal": 60.0},
        unit="s",
        at_least=1.0,
        less_is_better=True,
    )


@large
def test_a_large_file(record: Record, smoke: bool, tmp_path: Path) -> None:
    pages = 700 if smoke else 1 << 20
    local = 100 if smoke else 20_000_000_000 // PAGE_SIZE
    floor = (pages - local) // PER_SEGMENT * PER_SEGMENT
    made = Large(tmp_path / "archive", pages, 2 * PER_SEGMENT)
    evicted = made.file(tmp_path / "evicted.bin", floor, marked=True)
    whole = made.file(tmp_path / "whole.bin", floor, marked=False)

    def opened(path: Path, **how: bool) -> float:
        begin = time.perf_counter()
        with DataStream.open(path, **how) as stream:
            assert stream.entry(pages).number == pages
            # (The other file has no pages below the floor that a search could read.)
            assert path is whole or stream.entry(floor + 1).number == floor + 1
            return 1e3 * (time.perf_counter() - begin)

    away = made.folder.with_name("away")
    for how, words in (({"read_only": True}, "reading"), ({}, "writing")):
        made.folder.rename(away)
        ours = sorted(opened(evicted, **how) for _ in range(5))[2]
        away.rename(made.folder)
        record(
            f"a file of {pages * PAGE_SIZE / 1e12:.2f} TB that has its last "
            f"{(pages - floor) * PAGE_SIZE / 1e9:.0f} GB is opened for {words}, the store is away",
            ours,
            {
                "100 ms more than the whole file": 100
                + sorted(opened(whole, **how) for _ in "12345")[2]
            },
            unit="ms",
            at_least=1.0,
            less_is_better=True,
        )
    with StreamServer(evicted, host="127.0.0.1", port=0, create=False) as server:
        begin = time.perf_counter()
        catch_up(("127.0.0.1", server.port), entries=100, size=END - 17)
        seconds = time.perf_counter() - begin
    record("its first 100 pages from the archive", 100 * PAGE_SIZE / 1e6 / seconds, {}, unit="MB/s")
