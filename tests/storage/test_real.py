"""The stream of a production node: every entry and bookmark, against an independent scan."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream
from tests.storage.made import Scanned, bookmarks_of, scan_file


@pytest.fixture(scope="module")
def scanned(real_stream: Path) -> list[Scanned]:
    return scan_file(real_stream)


@pytest.fixture
def stream(real_stream: Path) -> Iterator[DataStream]:
    with DataStream.open(real_stream, read_only=True) as opened:
        yield opened


def test_every_entry(stream: DataStream, scanned: list[Scanned]) -> None:
    assert stream.total_entries == len(scanned) == 34_723
    for entry, (number, kind, data, _) in zip(stream.entries(), scanned, strict=True):
        assert (entry.number, entry.type, entry.data) == (number, kind, data)


@pytest.mark.parametrize("max_bytes", [1, 1000, 100_000])
def test_in_runs_of_any_size(stream: DataStream, scanned: list[Scanned], max_bytes: int) -> None:
    stop = 3000 if max_bytes == 1 else None
    entries = [e.data for b in stream.batches(0, stop, max_bytes=max_bytes) for e in b]
    assert entries == [e.data for e in scanned[:stop]]


def test_entries_by_number_in_any_order(stream: DataStream, scanned: list[Scanned]) -> None:
    for at in [*range(0, len(scanned), 7)][::-1]:
        number, kind, data, offset = scanned[at]
        entry = stream.entry(number)
        assert (entry.number, entry.type, entry.data) == (number, kind, data)
        assert stream.reader.cursor(number) == (offset, number)


def test_ranges(stream: DataStream, scanned: list[Scanned]) -> None:
    for start, stop in [(0, 1), (5, 5), (1234, 20_000), (34_722, 34_723), (34_723, None)]:
        found = [entry.number for entry in stream.entries(start, stop)]
        assert found == [entry.number for entry in scanned[start:stop]]


def test_spans_cover_all_and_nothing_else(stream: DataStream, scanned: list[Scanned]) -> None:
    reader, content = stream.reader, b""
    cursor = reader.cursor(0)
    file = Path(stream.path).read_bytes()
    while (span := reader.span(cursor)).end > span.start:
        content += file[span.start : span.end]
        cursor = span.next
    assert cursor == (stream.header.total_length, stream.total_entries)
    packed = b"".join(file[e.offset : e.offset + 17 + len(e.data)] for e in scanned)
    assert content == packed


@pytest.mark.parametrize("index", ["lmdb", "memory"])
def test_every_bookmark(
    real_stream: Path, scanned: list[Scanned], tmp_path: Path, index: str
) -> None:
    copy = tmp_path / "stream.bin"
    shutil.copyfile(real_stream, copy)
    known = bookmarks_of(scanned)
    assert len(known) > 1000
    with DataStream.open(copy, index=index) as stream:
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        assert len(stream.bookmarks) == len(known)
        assert {key: stream.bookmark(key) for key in known} == known


def test_bookmarks_without_an_index(stream: DataStream, scanned: list[Scanned]) -> None:
    known = sorted(bookmarks_of(scanned).items())[::97]
    assert [(key, stream.bookmark(key)) for key, _ in known] == known


def test_appended_to(real_stream: Path, scanned: list[Scanned], tmp_path: Path) -> None:
    copy = tmp_path / "stream.bin"
    shutil.copyfile(real_stream, copy)
    with DataStream.open(copy) as stream, stream.atomic_op() as op:
        op.add_bookmark(b"after")
        op.add_entry(3, b"entry")
    after = scan_file(copy)
    assert after[:-2] == scanned
    assert [(e.type, e.data) for e in after[-2:]] == [(0xB0, b"after"), (3, b"entry")]
