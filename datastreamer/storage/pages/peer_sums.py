"""Finds the damaged pages that only the checksums of another copy of the stream show.

If the checksums beside a file were lost or exchanged, the commit record's chain still shows whether
all pages are those that were committed, but not which page differs. A server of the same stream has
checksums that lead to the same chain, which proves them, even if the server is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest

from datastreamer.errors import DatastreamerError
from datastreamer.format import ENTRY_HEAD_STRUCT, PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import NO_CHAIN, PageHash, Sum, hash_page
from datastreamer.storage.pages.proof import ChainWalk, KnownChain
from datastreamer.storage.pages.sidecar import PageSum


class SumsPeer(Protocol):
    """A server that may have checksums of the same pages."""

    @property
    def name(self) -> str:
        """Its address, for messages."""

    def page_sums(self, pages: int) -> list[Sum]:
        """The checksums of its first whole pages, at most that many and up to the first that has
        none. Raises `DatastreamerError`."""


class PeerSums(RecordSource):
    """The checksums that a server sent, as the records of a file's pages.

    The chain proves the checksums. The server's numbers of entries are used only where no whole
    page shows them.
    """

    def __init__(
        self, file: Readable, chain: KnownChain, sums: list[Sum], own: RecordSource | None
    ) -> None:
        """`own` are the file's records: they are used where they have the same checksums."""
        self.on_proven = lambda: None
        self._file = file
        self._chain = chain
        self._sums = sums
        self._own = own

    def get(self, page: int) -> PageSum | None:
        """The record of a page. That of a damaged page may not say where its entries end."""
        own = None if self._own is None else self._own.get(page)
        if not self._chain.first <= page < self._chain.stop:
            return own
        _, stop, digest = self._sums[page]
        if own is not None and own.digest == digest:
            return own
        content, found = self._whole(page)
        if found is not None:
            rest = xxh3_64_intdigest(content[found.end :])
            return PageSum(NO_CHAIN, digest, found.next_number, found.end, rest)
        if page + 1 < self._chain.stop:
            after, found = self._whole(page + 1)
            if found is not None:
                stop = int(ENTRY_HEAD_STRUCT.unpack_from(after)[3])
        return PageSum(NO_CHAIN, digest, stop, 0, xxh3_64_intdigest(content))

    def _whole(self, page: int) -> tuple[bytes, PageHash | None]:
        """A page, and its hash if that is the server's."""
        content = self._file.read(PAGE_SIZE, page_start(page))
        found = hash_page(content, page)
        same = found is not None and found.digest == self._sums[page][2]
        return content, found if same else None

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        return [self.get(page) for page in range(first, stop)]

    def first_number(self, page: int) -> int:
        return self._sums[page][0] if 0 <= page < len(self._sums) else 0


def proven_sums(
    file: Readable,
    chain: KnownChain,
    own: RecordSource | None,
    peers: Sequence[SumsPeer],
    refusals: list[str],
) -> Iterator[PeerSums]:
    """The checksums of each server that lead to `chain`; of others, `refusals` says why not."""
    for peer in peers:
        try:
            sums = peer.page_sums(chain.stop)
        except (DatastreamerError, OSError) as error:
            text = str(error)
            refusals.append(text if text.startswith(peer.name) else f"{peer.name}: {text}")
            continue
        walk = ChainWalk([chain])
        for page, (_, _, digest) in enumerate(sums):
            walk.add(page, digest)
        if walk.fits:
            yield PeerSums(file, chain, sums, own)
            continue
        if walk.fits is None:
            why = f"has checksums of {len(sums)} pages, and {chain.stop} are needed"
        else:
            why = "has other pages: its checksums do not match the commit record"
        refusals.append(f"{peer.name} {why}")
