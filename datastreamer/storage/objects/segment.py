"""Segments: consecutive pages of a stream as one object.

Owns the bytes of an object. Its frames are those of zstd's seekable format, one for each page, so
that ``zstd -d`` gives the pages; a footer in a skippable frame has the pages' checksums and
bookmarks. Knows no store, and not which pages belong to a stream: a manifest says that.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from datastreamer._lazy import zstd
from datastreamer.errors import ExtraMissing
from datastreamer.format import PAGE_SIZE
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.objects import LEVEL
from datastreamer.storage.pages.hashes import HASH_SIZE
from datastreamer.storage.pages.sidecar import RECORD_SIZE, PageSum

_FOOTER_MAGIC: Final = 0x184D2A5D
_SEEK_MAGIC: Final = 0x184D2A5E
_SEEKABLE: Final = 0x8F92EAB1
# Of zstd: little-endian. A skippable frame's head; a frame in the seek table; the table's end.
_SKIPPABLE: Final = struct.Struct("<II")
_SEEK: Final = struct.Struct("<II")
_SEEK_END: Final = struct.Struct("<IBI")
_LETTERS: Final = b"DSsegmnt"
_HEAD: Final = struct.Struct(">8sIQI")
_TIME: Final = struct.Struct(">Q")
_COUNT: Final = struct.Struct(">I")
# The first key of a block of bookmarks and its length, and the block's compressed size.
_BLOCK: Final = struct.Struct(">16sBI")
_BOOKMARK: Final = struct.Struct(">B16sQ")
# Up to 64 KiB before compression; a look-up decompresses one.
_PER_BLOCK: Final = (64 << 10) // _BOOKMARK.size
_PAGE_RECORD: Final = RECORD_SIZE + _TIME.size
END_SIZE: Final = 32 << 10
"""The bytes at the end of an object that have seek table and footer of most."""


class BadSegment(ValueError):
    """The bytes are not those of the segment."""


class SegmentPage(NamedTuple):
    """A page in a segment: its checksum, and Unix ms of the newest commit in it (0: unknown)."""

    sum: PageSum
    time: int


class Bookmarks:
    """The bookmarks in a segment: of each key the newest entry."""

    def __init__(self, packed: bytes) -> None:
        (count,) = _COUNT.unpack_from(packed)
        blocks = [_BLOCK.unpack_from(packed, 4 + at * _BLOCK.size) for at in range(count)]
        self._first = [key[:size] for key, size, _ in blocks]
        at = 4 + count * _BLOCK.size
        self._blocks = []
        for _, _, size in blocks:
            self._blocks.append(packed[at : at + size])
            at += size

    def get(self, key: bytes) -> int | None:
        at = bisect_right(self._first, key) - 1
        if at < 0:
            return None
        return next((entry for each, entry in _opened(self._blocks[at]) if each == key), None)

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        for block in self._blocks:
            yield from _opened(block)


class Footer(NamedTuple):
    """What a segment says of itself. `digest` is that of the footer's bytes; frame n of the object
    is at `places[n]`, with its size."""

    first: int
    pages: list[SegmentPage]
    bookmarks: Bookmarks
    digest: bytes
    places: list[tuple[int, int]]


def _zstd() -> Any:
    found = zstd()
    if found is None:
        raise ExtraMissing("archives need zstd, which is not installed", "archive")
    return found


class _Compressors(threading.local):
    """Those of a thread: the memory of each is used again."""

    def __init__(self) -> None:
        self.by_level: dict[int, Any] = {}


_compressors: Final = _Compressors()


def compress(content: bytes, level: int = LEVEL) -> bytes:
    """One frame, with a checksum of its content."""
    made = _compressors.by_level.get(level)
    if made is None:
        module = _zstd()
        parameters = module.CompressionParameter
        options = {parameters.compression_level: level, parameters.checksum_flag: 1}
        made = _compressors.by_level[level] = module.ZstdCompressor(options=options)
    packed: bytes = made.compress(content, made.FLUSH_FRAME)
    return packed


def decompress(frame: bytes | memoryview, most: int) -> bytes:
    """The content of one frame, at most `most` bytes. Raises `BadSegment`."""
    module = _zstd()
    opened = module.ZstdDecompressor()
    try:
        content: bytes = opened.decompress(frame, max_length=most)
        if not opened.eof and len(content) == most:
            # The frame's checksum is behind its last block.
            content += opened.decompress(b"", max_length=1)
    except module.ZstdError as error:
        raise BadSegment(f"a frame cannot be decompressed: {error}") from None
    if not opened.eof or opened.unused_data or len(content) > most:
        raise BadSegment("a frame is not whole")
    return content


def page_content(entries: bytes | memoryview, *, last: bool = False) -> bytes:
    """What is archived of a page with these entries: the page with zeros as padding, and of a
    stream's last page its entries alone."""
    return bytes(entries) if last else bytes(entries).ljust(PAGE_SIZE, b"\0")


def zero_padding(end: int) -> int:
    """The hash of a padding of zeros, in the record of a page whose entries end there."""
    return xxh3_64_intdigest(bytes(PAGE_SIZE - end))


def pack(
    first: int,
    frames: Sequence[bytes],
    pages: Sequence[SegmentPage],
    bookmarks: Iterable[tuple[bytes, int]],
    stream_id: bytes,
    *,
    last: bool = False,
) -> tuple[bytes, bytes]:
    """An object of the pages from `first` on, whose compressed `frames` these are, and the digest
    of its footer. Of several `bookmarks` with one key the last one counts. `last`: it has a
    stream's last page alone."""
    footer = bytearray(_HEAD.pack(_LETTERS, 1, first, len(pages)))
    for page, (known, time) in enumerate(pages, first):
        footer += known.pack(page, stream_id) + _TIME.pack(time)
    footer += _packed_bookmarks(Pairs(bookmarks).newest())
    digest = xxh3_128_digest(bytes(footer))
    skippable = _SKIPPABLE.pack(_FOOTER_MAGIC, len(footer) + HASH_SIZE) + footer + digest
    size = pages[0].sum.end if last else PAGE_SIZE
    table = b"".join(_SEEK.pack(len(frame), size) for frame in frames)
    table += _SEEK.pack(len(skippable), 0) + _SEEK_END.pack(len(frames) + 1, 0, _SEEKABLE)
    seek = _SKIPPABLE.pack(_SEEK_MAGIC, len(table)) + table
    return b"".join([*frames, skippable, seek]), digest


def _packed_bookmarks(packed: bytes) -> bytes:
    table, blocks = bytearray(), []
    for at in range(0, len(packed), _PER_BLOCK * _BOOKMARK.size):
        part = packed[at : at + _PER_BLOCK * _BOOKMARK.size]
        block = compress(part)
        table += _BLOCK.pack(part[1:17], part[0], len(block))
        blocks.append(block)
    return _COUNT.pack(len(blocks)) + table + b"".join(blocks)


def _opened(block: bytes) -> Iterator[tuple[bytes, int]]:
    for size, key, entry in _BOOKMARK.iter_unpack(decompress(block, _PER_BLOCK * _BOOKMARK.size)):
        yield key[:size], entry


def footer_size(end: bytes) -> int:
    """How many of the last bytes of an object have its footer, by `end`, which are some of them.
    Raises `BadSegment`."""
    return _table(end)[1]


def _table(end: bytes) -> tuple[list[tuple[int, int]], int]:
    """The sizes of the frames, compressed and not, and how many bytes footer and table have."""
    if len(end) < _SEEK_END.size:
        raise BadSegment("it ends too early")
    count, flags, magic = _SEEK_END.unpack_from(end, len(end) - _SEEK_END.size)
    size = count * _SEEK.size + _SEEK_END.size
    if magic != _SEEKABLE or flags or not count or len(end) < size + _SKIPPABLE.size:
        raise BadSegment("it has no seek table")
    start = len(end) - size
    if _SKIPPABLE.unpack_from(end, start - _SKIPPABLE.size) != (_SEEK_MAGIC, size):
        raise BadSegment("its seek table is damaged")
    table = [_SEEK.unpack_from(end, start + at * _SEEK.size) for at in range(count)]
    return table, table[-1][0] + _SKIPPABLE.size + size


def read_footer(end: bytes) -> Footer:
    """The footer of the object that ends with these bytes, at least `footer_size` of them.
    Raises `BadSegment`."""
    table, size = _table(end)
    start, length = len(end) - size, table[-1][0] - _SKIPPABLE.size
    if start < 0 or _SKIPPABLE.unpack_from(end, start) != (_FOOTER_MAGIC, length):
        raise BadSegment("it has no footer")
    packed = end[start + _SKIPPABLE.size : start + _SKIPPABLE.size + length]
    footer, digest = packed[:-HASH_SIZE], packed[-HASH_SIZE:]
    if xxh3_128_digest(footer) != digest:
        raise BadSegment("its footer is damaged")
    letters, version, first, count = _HEAD.unpack_from(footer)
    if (letters, version) != (_LETTERS, 1) or count != len(table) - 1:
        raise BadSegment("its footer is of another format")
    sizes = [size for _, size in table[:-1]]
    pages = []
    for at in range(_HEAD.size, _HEAD.size + count * _PAGE_RECORD, _PAGE_RECORD):
        known = PageSum.fields(footer[at : at + RECORD_SIZE])
        pages.append(SegmentPage(known, *_TIME.unpack_from(footer, at + RECORD_SIZE)))
    if sizes not in ([PAGE_SIZE] * count, [page.sum.end for page in pages[:1]]):
        raise BadSegment("its seek table is damaged")
    places, offset = [], 0
    for compressed, _ in table[:-1]:
        places.append((offset, compressed))
        offset += compressed
    bookmarks = Bookmarks(footer[_HEAD.size + count * _PAGE_RECORD :])
    return Footer(first, pages, bookmarks, digest, places)


def read_page(frame: bytes | memoryview, known: PageSum, *, last: bool = False) -> bytes:
    """The content of a page from its frame, compared with its checksum. Raises `BadSegment`."""
    content = decompress(frame, known.end if last else PAGE_SIZE)
    if xxh3_128_digest(memoryview(content)[: known.end]) != known.digest:
        raise BadSegment("the entries do not match their checksum")
    if content[known.end :].strip(b"\0") or len(content) != (known.end if last else PAGE_SIZE):
        raise BadSegment("the padding is not zeros")
    return content
