"""The chain over the pages of a stream, as its commit record has it.

Owns what the chain proves: pages whose hashes lead to it are those that were committed, all of
them, in their order. So it decides which records of `FILE.sums` are about this stream: a copy of
an older or another file beside it leads to another chain. Reads no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from datastreamer.storage.header.records import CommitRecord, Head
from datastreamer.storage.sums.hashes import NO_CHAIN, EndSum, chained, last_page
from datastreamer.storage.sums.sidecar import StoredSums


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


def known_chains(record: CommitRecord | None) -> list[KnownChain]:
    """The chains that a commit record has, the longest first."""
    if record is None:
        return []
    ends = dict.fromkeys((record.after, record.mid, record.base))
    found = (KnownChain.of(head, record.sum_at(head)) for head in ends)
    return [each for each in found if each is not None]


def contradicts(stored: StoredSums, stream_id: bytes, chains: Sequence[KnownChain]) -> bool:
    """Whether the records in a sidecar are those of another stream or state, as far as the last
    records say. They may end before the stream does."""
    for known in chains:
        last = stored.get(known.stop - 1, stream_id) if known.first == 0 else None
        if last is not None:
            return last.chain != known.chain
    return False


class ChainWalk:
    """Follows the hashes of pages, in order, to the end of a known chain."""

    def __init__(self, known: KnownChain | None) -> None:
        self._known = known
        self._next = None if known is None else known.first
        self._chain = NO_CHAIN

    def add(self, page: int, digest: bytes | None) -> None:
        """The hash of the next page; None: it is not known."""
        if self._known is None or page < self._known.first or page >= self._known.stop:
            return
        self._next = page + 1 if page == self._next and digest is not None else None
        if digest is not None:
            self._chain = chained(self._chain, digest)

    @property
    def fits(self) -> bool | None:
        """Whether the hashes lead to the chain; None if one of them is not known."""
        if self._known is None or self._next != self._known.stop:
            return None
        return self._chain == self._known.chain
