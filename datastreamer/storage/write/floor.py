"""The floor of a file whose first pages are in an archive: the mark, and the space below it.

Owns the order of the writes: who sees a hole sees the floor above it. Proves nothing of the
archive; `archive/eviction.py` does.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

from xxhash import xxh3_128_digest

from datastreamer.errors import BadArgument, EvictedEntry, WriteFailed
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.header import records
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Evicted
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.write.owned_file import OwnedFile, refusal
from datastreamer.storage.write.sync_policy import Durability

MOST_BACK: Final = 1 << 30
"""An update of an evicted entry brings at most that many bytes back into the file."""

# The records that a mark changes, apart from that in the header's sector.
_RECORDS = (records.SLOT_OFFSETS[0], records.EVICTED_OFFSET + records.EVICTED.size)


class Floor:
    """The floor of the file that a writer has open."""

    def __init__(self, owned: OwnedFile, durability: Durability) -> None:
        self._owned = owned
        self._durability = durability
        self.still = threading.RLock()
        """Held while the floor moves, and while pages below it are written or return their space;
        acquired before the writer's lock."""
        self.falling: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around a fall of the floor that is no truncation's, with the writer's lock. (That of
        `settle` comes before the index is opened.)"""

    @property
    def page(self) -> int:
        """The first page that is in the file."""
        return HeaderPage(self._owned.page).floor

    def raise_to(self, evicted: Evicted, first: int = 0) -> None:
        """The pages below the new floor are in this archive, and were read back from page `first`
        on; durable on return. The file still has them, and no reader reads them there any more.
        Raises `WriteFailed`, and `BadArgument` if the floor fell below `first` meanwhile."""
        with self.still, self._owned.exclusive():
            self._owned.ensure_writable()
            self._durability.sync()
            self._ensure_evictable(evicted, first)
            mark = HeaderPage(self._owned.page).evicted
            self._write(evicted._replace(fall=_new_fall() if mark is None else mark.fall))

    def _ensure_evictable(self, evicted: Evicted, first: int) -> None:
        owned, floor = self._owned, evicted.floor
        if self.page < first:
            raise BadArgument(f"page {self.page} was brought back into the file meanwhile")
        record = HeaderPage(owned.page).record
        if floor <= self.page or len(evicted.url.encode()) > records.MOST_URL:
            raise BadArgument(f"the floor is page {self.page}, and cannot be raised to {floor}")
        if record is None or page_start(floor) > record.base.length:
            raise BadArgument(f"page {floor} is not on disk yet")
        if owned.sums.chain_before(floor) != (evicted.chain, 0):
            raise BadArgument(f"the pages before page {floor} are others in the archive")

    def punch(self, first: int, stop: int) -> None:
        """Return the space of these pages, which are below the floor. Raises `OSError`."""
        with self.still:
            if stop <= self.page:
                self._owned.file.punch(page_start(first), page_start(stop))

    # Changes of evicted entries.

    @contextmanager
    def bringing_back(self, page: int, most: int = MOST_BACK) -> Iterator[None]:
        """Have the pages from `page` on in the file, and until the end of the block; commits
        continue while those below the floor are fetched. Raises `EvictedEntry`, also for more than
        `most` bytes, with nothing changed, and `WriteFailed`."""
        owned = self._owned
        with self.still:
            floor = self.page
            if page < floor:
                if (floor - page) * PAGE_SIZE > most:
                    raise EvictedEntry(
                        owned.path,
                        f"page {page} is in the stream's archive alone, and a change of it would "
                        f"bring {floor - page} pages back into the file; `datastreamer archive "
                        "restore --in-place` brings all of them back",
                    )
                for each in range(page, floor):
                    self._put(each, self._read(each))
                with owned.exclusive(), self.falling():
                    owned.ensure_writable()
                    self._durability.sync()
                    self._lower(page)
            yield

    @contextmanager
    def truncating(self, page: int) -> Iterator[Callable[[], None]]:
        """For a truncation whose last page becomes `page`: call the function once it is on disk,
        with the lock; then the file has that page. Raises `EvictedEntry`, with nothing changed; the
        function raises `WriteFailed`."""
        with self.still:
            content = None
            if page < self.page:
                content = self._read(page)

            def settle() -> None:
                if content is not None:
                    self._put(page, content)
                    self._lower(page)

            yield settle

    def settle(self) -> None:
        """Complete a truncation that a crash left at an end below the floor. Raises `EvictedEntry`
        and `WriteFailed`."""
        with self.truncating(last_page(self._owned.written.length)) as settle:
            settle()

    def _read(self, page: int) -> bytes:
        """An evicted page, compared with its checksum. Raises `EvictedEntry`."""
        owned = self._owned
        content, known = owned.file.read(PAGE_SIZE, page_start(page)), owned.sums.get(page)
        # (The end in a page that a crash has left as the last one was compared by the open.)
        if known is not None and xxh3_128_digest(content[: known.end]) != known.digest:
            raise EvictedEntry(
                owned.path,
                f"page {page} is in the stream's archive alone, and that has other entries there",
            )
        return content

    def _put(self, page: int, content: bytes) -> None:
        owned = self._owned
        try:
            owned.file.write(content, page_start(page))
        except OSError as error:
            raise WriteFailed(owned.path, refusal(error)) from error

    def _lower(self, page: int) -> None:
        owned, mark = self._owned, HeaderPage(self._owned.page).evicted
        assert mark is not None
        try:
            owned.file.sync()
        except OSError as error:
            self._durability.fail(error)
            raise WriteFailed(owned.path, refusal(error)) from error
        chain, _ = owned.sums.chain_before(page)
        lower = mark._replace(floor=page, chain=chain, fall=_new_fall())
        if not page:
            # Between two writes a reader sees no mark, and a fall that it had not with the mark.
            self._write(lower._replace(floor=mark.floor, chain=mark.chain))
        self._write(lower)

    def _write(self, evicted: Evicted) -> None:
        """Write the mark, or with floor 0 take it away; durable on return. Requires the lock."""
        owned = self._owned
        marked, wanted = records.is_marked(owned.page), evicted.floor > 0
        spans = [records.put_evicted(owned.page, evicted)]
        if marked != wanted:
            records.put_magic(owned.page, marked=wanted)
            # Magic, header and commit record are in one sector. A program that does not know the
            # mark never takes the file for a whole one: the rest of the mark is there before it.
            spans = [_RECORDS, records.BEFORE_SYNC]
        try:
            for each in spans if wanted else reversed(spans):
                owned.write_span(each)
                owned.file.sync()
        except OSError as error:
            # Which of it is in the file is not known; the next header that is written has it all.
            self._durability.fail(error)
            raise WriteFailed(owned.path, refusal(error)) from error


def _new_fall() -> int:
    return secrets.randbits(32)
