"""What is hashed of a stream's pages: the values of all checksums.

Owns what is hashed. Every whole page has a hash of its entries, without padding, so that it is
the same wherever they were copied to; a *chain* runs over the hashes of the pages, so that no page
can be exchanged for another one. Knows bytes and offsets; no files, and nothing of where hashes
are stored.

The *last page* of a stream is the one that its last byte is in; the pages before it are whole.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from datastreamer._codec import scan
from datastreamer.errors import CorruptEntries
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, page_of, page_start

HASH_SIZE: Final = 16
NO_CHAIN: Final = bytes(HASH_SIZE)
"""The chain before the first page that it covers."""

Sum = tuple[int, int, bytes]
"""The first entry of a range, the one after its last, and the xxh3 (128 bits) of its entries."""


class PageHash(NamedTuple):
    """A whole page: its number, where its entries end in it (in bytes), the number of the entry
    after them, and the xxh3 (128 bits) of the entries."""

    page: int
    end: int
    next_number: int
    digest: bytes


class EndSum(NamedTuple):
    """What is known of the entries up to an end: the chain over the pages before the last one,
    the first page that the chain covers, and the hash of the entries in the last page."""

    chain: bytes
    chained_from: int
    tail: bytes


EMPTY: Final = EndSum(NO_CHAIN, 0, xxh3_128_digest(b""))
"""Of a stream without entries."""


class SealedTail:
    """In the place of a running hash, the hash that a damaged page had when it was whole: nothing
    can be added to that page."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest

    def copy(self) -> SealedTail:
        return self

    def update(self, data: object) -> None:
        raise ValueError("nothing is added to a damaged page")


def last_page(length: int) -> int:
    """The last page of a stream of this total length; the number of pages before it."""
    return page_of(max(length, HEADER_PAGE_SIZE + 1) - 1)


def chained(chain: bytes, digest: bytes) -> bytes:
    """The chain over one more page, which has this hash."""
    return xxh3_128_digest(chain + digest)


def hash_page(content: bytes, page: int) -> PageHash | None:
    """The hash of a whole page with this content; None if it does not hold whole entries."""
    try:
        batch = scan(content, None, file_offset=page_start(page))
    except CorruptEntries:
        return None
    if not batch or batch.more or len(content) < PAGE_SIZE:
        return None
    digest = xxh3_128_digest(memoryview(content)[: batch.end])
    return PageHash(page, batch.end, batch.next_number, digest)
