"""Which hashes of pages are proven: nothing else makes a page damaged, or is written over one.

Owns the proof. The commit record has the chain over the pages of its stream. Hashes that lead to
it, in order from the first page that it covers, are those of the pages that were committed; the
records beside a stream may be of another copy or state, whatever their header says. Reads pages
only if a few of their hashes are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from datastreamer.storage.header.records import CommitRecord, Head
from datastreamer.storage.pages._page_sums import (
    chain_over,
    digests_of,
    known_from,
    missing_in,
    put_known,
)
from datastreamer.storage.pages.hashes import (
    HASH_SIZE,
    NO_CHAIN,
    EndSum,
    chained,
    hash_page,
    last_page,
)
from datastreamer.storage.pages.sidecar import PageSum, StoredSums

MOST_COMPUTED: Final = 16
"""The maximum number of missing hashes that are computed from the pages while others wait."""

# Records that are read at once.
_MANY: Final = 4096


class KnownChain(NamedTuple):
    """The chain over the pages from `first` up to, not including, `stop`."""

    first: int
    stop: int
    chain: bytes

    @classmethod
    def of(cls, head: Head, known: EndSum | None) -> KnownChain | None:
        """What is known of the pages before the last one of a stream that ends at `head`; None if
        it covers no page."""
        stop = last_page(head.length)
        if known is None or known.chained_from >= stop:
            return None
        return cls(known.chained_from, stop, known.chain)

    def described(self) -> str:
        """The pages, for messages."""
        last = self.stop - 1
        return f"page {last}" if self.first == last else f"pages {self.first} to {last}"

    def refuted(self) -> str:
        """That the pages do not lead to it, for messages."""
        return (
            f"{self.described()} together do not match the commit record: at least one of them is "
            "damaged or an older one, and no checksum shows which"
        )


def known_chains(record: CommitRecord | None, head: Head | None = None) -> list[KnownChain]:
    """The chains that a commit record has, the shortest first; with `head`, those up to there: two,
    if a page was about to be replaced."""
    if record is None:
        return []
    sums = (
        (record.base, record.base_sum),
        (record.mid, record.mid_sum),
        (record.after, record.after_sum),
    )
    found = {KnownChain.of(end, known) for end, known in sums if head in (None, end)}
    return sorted(each for each in found if each is not None)


class Digests:
    """The hashes of pages, as far as they are known: 16 bytes a page in memory.

    Several threads may read it; one at a time changes it.
    """

    def __init__(self) -> None:
        self._packed = bytearray()

    def get(self, page: int) -> bytes | None:
        """The hash of a page, if it is known."""
        found = bytes(self._packed[page * HASH_SIZE : (page + 1) * HASH_SIZE])
        return None if found in (b"", NO_CHAIN) else found

    def put(self, page: int, digests: bytes | bytearray) -> None:
        """The hashes of the pages from `page` on."""
        start = page * HASH_SIZE
        if start > len(self._packed):
            self._packed.extend(bytes(start - len(self._packed)))
        self._packed[start : start + len(digests)] = digests

    def packed(self, first: int, stop: int) -> bytearray:
        """The hashes of these pages; zeros for those that are not known."""
        found = self._packed[first * HASH_SIZE : stop * HASH_SIZE]
        return found.ljust((stop - first) * HASH_SIZE, b"\0")

    def truncate(self, pages: int) -> None:
        """Forget the hashes of the pages from `pages` on."""
        del self._packed[pages * HASH_SIZE :]

    def known_from(self, stop: int) -> int:
        """The first of the consecutive pages before `stop` whose hashes are known."""
        return known_from(self._packed, stop)

    def chain(self, first: int, stop: int, chain: bytes = NO_CHAIN) -> bytes:
        """The chain over pages whose hashes are known."""
        return chain if first == stop else chain_over(self._packed, first, stop, chain)

    def records(self, first: int, found: Sequence[PageSum | None]) -> list[PageSum | None]:
        """Those of the records of the pages from `first` on that have these hashes."""
        return [
            each if each is not None and each.digest == self.get(page) else None
            for page, each in enumerate(found, first)
        ]

    def cover(self, packed: bytearray, first: int) -> None:
        """Put the known ones of the hashes from page `first` on over those in `packed`."""
        put_known(packed, self._packed, first)


class Link:
    """Links the records of a sidecar with the chains of a commit record. One thread at a time.

    `proven` are the hashes that lead to one of the chains; it grows with the stream.
    """

    def __init__(self, proven: Digests) -> None:
        self.proven = proven
        # What was linked, from the first page of the chain on.
        self._reached: KnownChain | None = None

    @property
    def reached(self) -> KnownChain | None:
        """What was linked; None if nothing is proven."""
        return self._reached

    def extend(
        self,
        stored: StoredSums,
        stream_id: bytes,
        chains: Sequence[KnownChain],
        content: Callable[[int], bytes],
        *,
        most: int | None = MOST_COMPUTED,
    ) -> bool:
        """Prove what the records and `chains`, the shortest first, prove; whether they lead to the
        longest one.

        Hashes that are proven count before those of records. Of pages that have neither, at most
        `most` (None: all) are hashed; `content(page)` reads one. Raises `OSError`.
        """
        reached, first = self._reached, chains[0].first
        if reached is None or reached.first != first:
            reached = KnownChain(first, first, NO_CHAIN)
        beyond = [each for each in chains if each.stop > reached.stop]
        if not beyond:
            return True
        start, stop = reached.stop, beyond[-1].stop
        packed, missing = self._read(stored, stream_id, start, stop)
        found = _longest(packed, reached, beyond)
        if found is None and missing and (most is None or len(missing) <= most):
            for page in missing:
                hashed = hash_page(content(page), page)
                digest = NO_CHAIN if hashed is None else hashed.digest
                packed[(page - start) * HASH_SIZE : (page - start + 1) * HASH_SIZE] = digest
            found = _longest(packed, reached, beyond)
        if found is None:
            return False
        self.proven.put(start, packed[: (found.stop - start) * HASH_SIZE])
        self._reached = found
        return found.stop == stop

    def _read(
        self, stored: StoredSums, stream_id: bytes, start: int, stop: int
    ) -> tuple[bytearray, list[int]]:
        """The hashes of these pages, and the pages that have none."""
        packed, missing = bytearray(), []
        for page in range(start, stop, _MANY):
            records = stored.packed(page, min(page + _MANY, stop))
            packed += digests_of(records)
            missing += missing_in(records, page, stream_id)
        self.proven.cover(packed, start)
        return packed, [page for page in missing if self.proven.get(page) is None]


def _longest(
    packed: bytearray, reached: KnownChain, chains: Sequence[KnownChain]
) -> KnownChain | None:
    """The last of the chains to which these hashes, of the pages after `reached`, lead."""
    found, chain, at = None, reached.chain, 0
    for known in chains:
        chain = chain_over(packed, at, known.stop - reached.stop, chain)
        at = known.stop - reached.stop
        if chain == known.chain:
            found = known
    return found


class ChainWalk:
    """Follows the hashes of pages, in order, to the end of a known chain."""

    def __init__(self, chains: Sequence[KnownChain]) -> None:
        """`chains` are over the same pages."""
        self.known = known = chains[-1] if chains else None
        self._chains = chains
        self._next = None if known is None else known.first
        self._chain = NO_CHAIN

    def add(self, page: int, digest: bytes | None) -> None:
        """The hash of the next page; None: it is not known."""
        if self.known is None or not self.known.first <= page < self.known.stop:
            return
        self._next = page + 1 if page == self._next and digest is not None else None
        if digest is not None:
            self._chain = chained(self._chain, digest)

    @property
    def fits(self) -> bool | None:
        """Whether the hashes lead to the chain; None if one of them is not known."""
        if self.known is None or self._next != self.known.stop:
            return None
        return any(self._chain == each.chain for each in self._chains)
