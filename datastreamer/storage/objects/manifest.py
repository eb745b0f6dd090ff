"""Manifests: which objects are a stream, up to one commit.

Owns their text and what must hold between their rows. A reader needs one manifest, and nothing that
was written later. Knows no store.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, Final, NamedTuple

from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from datastreamer.format import Header, page_start
from datastreamer.storage.header.records import NO_ID, Head
from datastreamer.storage.objects.segment import BadSegment, compress, decompress
from datastreamer.storage.pages.hashes import EMPTY, NO_CHAIN, EndSum, last_page

FORMAT: Final = 1
MOST_ROWS: Final = 65_536
# In bytes, before compression: rows have up to 200.
_MOST_TEXT: Final = 64 << 20
# Of that, what one call parses, in some ms.
_PARSED_AT_ONCE: Final = 256 << 10
# The rows as `pack` writes them are between these.
_SEGMENTS, _AFTER_SEGMENTS = '"segments":[[', ']],"tail":'


class BadManifest(ValueError):
    """The bytes are no manifest of this format, or its parts do not fit each other."""


class Row(NamedTuple):
    """Consecutive pages, in one object of `size` bytes, from its frame `frame` on.

    `chain` is that over all pages up to the last one of these, `footer` the digest of the object's
    footer, `time` Unix ms of the newest commit.
    """

    first_page: int
    pages: int
    first_entry: int
    object: str
    frame: int
    size: int
    chain: str
    footer: str
    time: int

    @property
    def stop(self) -> int:
        """The page after the last one."""
        return self.first_page + self.pages


@dataclass(frozen=True)
class ManifestWriter:
    """Who published: a counter that each writer raises when it begins, and its random id."""

    term: int
    id: str
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class ArchivedStream:
    """The stream in an archive; of a relay its upstream's id and epoch, too."""

    version: int
    system_id: int
    stream_type: int
    stream_id: str
    epoch: int
    upstream_id: str = ""
    upstream_epoch: int = 0


@dataclass(frozen=True)
class ArchivedHead:
    """The end of the stream, and as in a commit record the chain over the pages before the last one
    and the hash of the entries in that."""

    length: int
    entries: int
    chain: str
    tail: str


@dataclass(frozen=True)
class ArchiveManifest:
    """A stream up to one commit."""

    number: int
    archive_id: str
    time: int
    previous: str
    writer: ManifestWriter
    generation: int
    reason: str
    stream: ArchivedStream
    head: ArchivedHead
    segments: tuple[Row, ...]
    tail: Row | None

    @property
    def end(self) -> Head:
        return Head(self.head.length, self.head.entries)

    @property
    def header(self) -> Header:
        stream = self.stream
        return Header(stream.version, stream.system_id, stream.stream_type, *self.end)

    @property
    def stream_id(self) -> bytes:
        """The stream's; one made of the archive's for a stream without one."""
        found = bytes.fromhex(self.stream.stream_id)
        return found if found != NO_ID else xxh3_128_digest(b"stream" + self.archive_id.encode())

    @property
    def end_sum(self) -> EndSum:
        """The same as in a commit record."""
        if self.tail is None:
            return EMPTY
        return EndSum(bytes.fromhex(self.head.chain), 0, bytes.fromhex(self.head.tail))

    @property
    def chain(self) -> str:
        """That over the pages of the rows."""
        return self.segments[-1].chain if self.segments else NO_CHAIN.hex()

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """With the tail's."""
        return self.segments if self.tail is None else (*self.segments, self.tail)

    @property
    def whole_pages(self) -> int:
        """How many pages it has whole."""
        return self.segments[-1].stop if self.segments else 0

    def row_of(self, page: int) -> Row:
        """The row that has a page."""
        rows, low, high = self.rows, 0, len(self.rows)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if rows[middle].first_page <= page else (low, middle)
        return rows[low]

    def pack(self) -> bytes:
        """The bytes of the object."""
        fields = {"format": FORMAT, **dataclasses.asdict(self)}
        return compress(json.dumps(fields, separators=(",", ":")).encode())

    @classmethod
    def unpack(cls, packed: bytes) -> ArchiveManifest:
        """Raises `BadManifest`."""
        try:
            fields, segments = _parsed(decompress(packed, _MOST_TEXT).decode())
            if fields.pop("format") != FORMAT:
                raise BadManifest("it is of a later format")
            found = cls(
                **{
                    **fields,
                    "writer": ManifestWriter(**fields["writer"]),
                    "stream": ArchivedStream(**fields["stream"]),
                    "head": ArchivedHead(**fields["head"]),
                    "segments": segments,
                    "tail": None if fields["tail"] is None else Row(*fields["tail"]),
                }
            )
            found.check()
        except BadSegment as error:
            raise BadManifest(str(error)) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, BadManifest):
                raise
            raise BadManifest(f"it is damaged ({error})") from None
        return found

    def check(self) -> None:
        """That the rows are all pages, in order. Raises `BadManifest`."""
        at, tail = 0, self.tail
        for row in self.segments:
            if row.first_page != at or row.pages < 1 or row.frame < 0:
                raise BadManifest(f"its rows have a gap at page {at}")
            at = row.stop
        last = None if self.head.length <= page_start(0) else (last_page(self.head.length), 1)
        if (None if tail is None else tail[:2]) != last or at != (0 if last is None else last[0]):
            raise BadManifest("its rows do not lead to its head")
        if any(a.first_entry > b.first_entry for a, b in pairwise(self.rows)):
            raise BadManifest("the entries of its rows are not in order")
        if self.chain != self.head.chain:
            raise BadManifest("its rows do not lead to the chain of its head")


def _parsed(text: str) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """The fields, and the rows. Rows are parsed some at a time: other threads run in between."""
    start, stop, rows = text.find(_SEGMENTS), text.find(_AFTER_SEGMENTS), list[Row]()
    if not 0 <= start < stop:
        fields = json.loads(text)
        return fields, tuple(starmap(Row, fields["segments"]))
    at = begin = start + len(_SEGMENTS) - 1
    while at < stop:
        # No text of a row has a bracket.
        end = text.find("],[", at + _PARSED_AT_ONCE, stop)
        end = (stop if end < 0 else end) + 1
        rows += starmap(Row, json.loads(f"[{text[at:end]}]"))
        at = end + 1
    return json.loads(text[:begin] + text[stop + 1 :]), tuple(rows)


def digest_of(packed: bytes) -> str:
    return xxh3_128_hexdigest(packed)


def stream_object(archive_id: str, header: Header) -> bytes:
    """The bytes of `stream.json`, the first object of an archive."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "archive_id": archive_id,
        "version": header.version,
        "system_id": header.system_id,
        "stream_type": header.stream_type,
    }
    fields["sum"] = _sum_of(fields)
    return json.dumps(fields, indent=1).encode() + b"\n"


def _sum_of(fields: dict[str, Any]) -> str:
    return digest_of(json.dumps(fields, sort_keys=True).encode())


def archive_id_of(packed: bytes) -> str:
    """The archive's id from `stream.json`. Raises `BadManifest`."""
    try:
        fields = json.loads(packed)
        if fields["format"] != FORMAT:
            raise BadManifest(f"the archive is of format {fields['format']}, a later one")
        if fields.pop("sum") != _sum_of(fields):
            raise BadManifest("stream.json does not match its sum")
        return str(fields["archive_id"])
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadManifest):
            raise
        raise BadManifest("stream.json is not that of an archive") from None
