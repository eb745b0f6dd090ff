"""Segments: their bytes, pinned; and that other readers of zstd's formats read them."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from datastreamer._codec import scan
from datastreamer._lazy import zstd
from datastreamer.format import PAGE_SIZE, TYPE_BOOKMARK
from datastreamer.storage.objects.segment import (
    BadSegment,
    SegmentPage,
    compress,
    decompress,
    footer_size,
    pack,
    page_content,
    read_footer,
    read_page,
    zero_padding,
)
from datastreamer.storage.pages.hashes import NO_CHAIN, chained
from datastreamer.storage.pages.sidecar import PageSum

STREAM_ID = bytes(range(16))


def entries_of(first: int, count: int) -> bytes:
    """Entries as they are in a file; every third one is a bookmark."""
    packed = b""
    for number in range(first, first + count):
        kind, data = (TYPE_BOOKMARK, b"key %d" % number) if number % 3 == 0 else (2, b"x" * 9000)
        packed += struct.pack(">BIIQ", 2, 17 + len(data), kind, number) + data
    return packed


def segment(pages: int, *, last: bool = False) -> tuple[bytes, bytes, list[bytes]]:
    """The bytes of a segment whose first page is 3, the digest of its footer, and its entries."""
    chain, number = NO_CHAIN, 7
    records, frames, bookmarks, contents = [], [], [], []
    for page in range(pages):
        entries = entries_of(number, 150)
        batch = scan(entries, number)
        digest = xxh3_128_digest(entries)
        chain = chained(chain, digest)
        number = batch.next_number
        known = PageSum(chain, digest, number, len(entries), zero_padding(len(entries)))
        records.append(SegmentPage(known, 1_700_000_000_000 + page))
        frames.append(compress(page_content(entries, last=last)))
        bookmarks += batch.bookmarks()
        contents.append(entries)
    return *pack(3, frames, records, bookmarks, STREAM_ID, last=last), contents


def test_the_layout() -> None:
    """As docs/ARCHIVE.md has it, without the code that reads it."""
    packed, digest, contents = segment(2)
    count, flags, magic = struct.unpack("<IBI", packed[-9:])
    assert (count, flags, magic) == (3, 0, 0x8F92EAB1)
    assert struct.unpack("<II", packed[-9 - 24 - 8 : -9 - 24]) == (0x184D2A5E, 33)
    table = list(struct.iter_unpack("<II", packed[-9 - 24 : -9]))
    assert [size for _, size in table] == [PAGE_SIZE, PAGE_SIZE, 0]
    assert sum(size for size, _ in table) + 8 + 33 == len(packed)
    start = table[0][0] + table[1][0]
    assert struct.unpack("<II", packed[start : start + 8]) == (0x184D2A5D, table[2][0] - 8)
    footer = packed[start + 8 : start + table[2][0]]
    assert struct.unpack(">8sIQI", footer[:24]) == (b"DSsegmnt", 1, 3, 2)
    assert footer[-16:] == digest == xxh3_128_digest(footer[:-16])
    first = footer[24 : 24 + 72]
    assert first[16:32] == xxh3_128_digest(contents[0])
    assert struct.unpack(">QI", first[32:44]) == (157, len(contents[0]))
    assert PageSum.unpack(first[:64], 3, STREAM_ID) is not None
    assert struct.unpack(">Q", first[64:]) == (1_700_000_000_000,)
    blocks = footer[24 + 144 : -16]
    assert struct.unpack(">I", blocks[:4]) == (1,)
    key, size, compressed = struct.unpack(">16sBI", blocks[4:25])
    assert (key[:size], len(blocks)) == (b"key 102", 25 + compressed)
    pairs = list(struct.iter_unpack(">B16sQ", zstd().decompress(blocks[25:])))
    found = [(key[:size], number) for size, key, number in pairs]
    assert found == sorted((b"key %d" % number, number) for number in range(9, 307, 3))


def test_zstd_reads_it(tmp_path: Path) -> None:
    if shutil.which("zstd") is None:
        pytest.skip("the zstd program is not installed")
    packed, _, contents = segment(3)
    (tmp_path / "it.zst").write_bytes(packed)
    done = subprocess.run(
        ["zstd", "-d", "-c", str(tmp_path / "it.zst")], capture_output=True, check=True
    )
    assert done.stdout == b"".join(each.ljust(PAGE_SIZE, b"\0") for each in contents)


def test_another_reader_finds_a_page(tmp_path: Path) -> None:
    """By the seek table, without the frames before it."""
    seekable = pytest.importorskip("pyzstd")
    packed, _, contents = segment(3)
    place = len(compress(page_content(contents[0]))) // 2
    (tmp_path / "it.zst").write_bytes(packed[:place] + b"??" + packed[place + 2 :])
    with seekable.SeekableZstdFile(tmp_path / "it.zst", "r") as file:
        assert file.seek(0, 2) == 3 * PAGE_SIZE
        for page in (2, 1):
            file.seek(page * PAGE_SIZE + 5)
            assert file.read(PAGE_SIZE - 5) == contents[page].ljust(PAGE_SIZE, b"\0")[5:]
        file.seek(0)
        with pytest.raises(seekable.ZstdError):
            file.read(PAGE_SIZE)


@pytest.mark.parametrize("last", [False, True])
def test_pages_come_back(last: bool) -> None:
    packed, digest, contents = segment(1 if last else 3, last=last)
    footer = read_footer(packed)
    assert (footer.first, footer.digest) == (3, digest)
    assert read_footer(packed[-footer_size(packed[-200:]) :]).digest == digest
    for (start, size), page, entries in zip(footer.places, footer.pages, contents, strict=True):
        content = read_page(packed[start : start + size], page.sum, last=last)
        assert content == (entries if last else entries.ljust(PAGE_SIZE, b"\0"))
    assert footer.bookmarks.get(b"key 9") == 9
    assert footer.bookmarks.get(b"key 10") is None
    assert footer.bookmarks.get(b"") is None
    assert footer.bookmarks.get(b"zz") is None


def test_the_last_bookmark_of_a_key() -> None:
    keys = [b"b", b"a", b"b\0", b"b", b"a" * 16, b"a" * 15, b"\xff" * 16, b"a", b"b"]
    frame, record = b"frame", SegmentPage(PageSum(bytes(16), bytes(16), 1, 9, 0), 0)
    packed, _ = pack(0, [frame], [record], [(key, at) for at, key in enumerate(keys)], STREAM_ID)
    found = read_footer(packed).bookmarks
    assert list(found) == sorted({key: at for at, key in enumerate(keys)}.items())
    assert found.get(b"b") == 8
    assert found.get(b"b\0\0") is None


def test_many_bookmarks_have_many_blocks() -> None:
    entries = entries_of(0, 3)
    known = PageSum(NO_CHAIN, xxh3_128_digest(entries), 3, len(entries), 0)
    pairs = [(b"%d" % number, number) for number in range(10_000)] + [(b"5", 10_000)]
    frames = [compress(page_content(entries))]
    packed, _ = pack(0, frames, [SegmentPage(known, 0)], pairs, STREAM_ID)
    found = read_footer(packed).bookmarks
    assert dict(found) == dict(pairs)
    assert all(found.get(key) == number for key, number in list(dict(pairs).items())[::97])


def test_no_changed_byte_is_accepted() -> None:
    """Whatever byte of an object changes: a page is either right or an error."""
    packed, digest, contents = segment(2)
    for at in [*range(0, len(packed), 41), *range(len(packed) - 60, len(packed))]:
        changed = bytearray(packed)
        changed[at] ^= 0x10
        try:
            footer = read_footer(bytes(changed))
            found = [
                read_page(bytes(changed[start : start + size]), page.sum)
                for (start, size), page in zip(footer.places, footer.pages, strict=True)
            ]
        except BadSegment:
            continue
        assert footer.digest == digest
        assert found == [each.ljust(PAGE_SIZE, b"\0") for each in contents], at


def test_shortened_objects_are_refused() -> None:
    packed, _, _ = segment(1)
    for size in (0, 5, 9, 20, 40, 60):
        with pytest.raises(BadSegment):
            read_footer(packed[len(packed) - size :])
        with pytest.raises(BadSegment):
            read_footer(packed[: -1 - size])


@pytest.mark.parametrize("what", [b"", b"no zstd", compress(bytes(100)) + b"x", compress(b"")[:-1]])
def test_a_frame_is_whole_or_an_error(what: bytes) -> None:
    with pytest.raises(BadSegment):
        decompress(what, 1000)
    assert decompress(compress(bytes(1000)), 1000) == bytes(1000)
    with pytest.raises(BadSegment):
        decompress(compress(bytes(1001)), 1000)
