"""Finds the damaged pages that only the checksums of another copy of the stream show.

If the checksums beside a file were lost or exchanged, the commit record's chain still shows whether
all pages are those that were committed, but not which page differs. A server of the same stream has
checksums that lead to the same chain, which proves them, even if the server is not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from datastreamer.errors import DatastreamerError
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.read.range_sums import Sum
from datastreamer.storage.sums.chain import ChainWalk, KnownChain
from datastreamer.storage.sums.hashes import NO_CHAIN
from datastreamer.storage.sums.page_check import hash_page
from datastreamer.storage.sums.sidecar import PageSum


class SumsPeer(Protocol):
    """A server that may have checksums of the same pages."""

    @property
    def name(self) -> str:
        """Its address, for messages."""

    def page_sums(self, pages: int) -> list[Sum]:
        """The checksums of its first whole pages, at most that many and up to the first that has
        none. Raises `DatastreamerError`."""


class PeerSums:
    """The checksums that a server sent, as the records of a file's pages; a `RecordSource`."""

    def __init__(self, file: Readable, chain: KnownChain, sums: list[Sum]) -> None:
        self._file = file
        self._chain = chain
        self._sums = sums

    def get(self, page: int) -> PageSum | None:
        """The record of a page. That of a damaged page does not say where its entries end."""
        if not self._chain.first <= page < self._chain.stop:
            return None
        _, stop, digest = self._sums[page]
        content = self._file.read(PAGE_SIZE, page_start(page))
        found = hash_page(content, page)
        end = found.end if found is not None and found.digest == digest else 0
        return PageSum(NO_CHAIN, digest, stop, end, xxh3_64_intdigest(content[end:]))

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        """The records of the pages from `first` up to, not including, `stop`."""
        return [self.get(page) for page in range(first, stop)]

    def first_number(self, page: int) -> int:
        """The first entry of a page, as far as records say; else 0."""
        return self._sums[page][0] if 0 <= page < len(self._sums) else 0

    def renew(self) -> None:
        """They do not change."""


def proven_sums(
    file: Readable, chain: KnownChain, peers: Sequence[SumsPeer]
) -> tuple[PeerSums | None, str]:
    """The checksums of a server that lead to `chain`; None, and why, if no server has them."""
    refusals = []
    for peer in peers:
        try:
            sums = peer.page_sums(chain.stop)
        except (DatastreamerError, OSError) as error:
            text = str(error)
            refusals.append(text if text.startswith(peer.name) else f"{peer.name}: {text}")
            continue
        walk = ChainWalk(chain)
        for page, (_, _, digest) in enumerate(sums):
            walk.add(page, digest)
        if walk.fits:
            return PeerSums(file, chain, sums), ""
        if walk.fits is None:
            why = f"has checksums of {len(sums)} pages, and {chain.stop} are needed"
        else:
            why = "has other pages: its checksums do not match the commit record"
        refusals.append(f"{peer.name} {why}")
    return None, "; ".join(refusals)
