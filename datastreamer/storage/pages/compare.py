"""Compares pages with their checksums.

Owns the comparison, how often a page is read for it, and how its result is named. Knows page
contents and records; `page_states.py` knows what follows.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from xxhash import xxh3_128_digest

from datastreamer.format import PACKET_PADDING, PAGE_SIZE, page_start
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.pages.hashes import hash_page
from datastreamer.storage.pages.sidecar import PageSum

# The maximum number of pages that a message lists.
_MOST_LISTED: Final = 5
# A page that is being changed differs for a moment: this often it is read again.
_TRIES = 20
PAUSE_SECONDS = 0.002
MOVED: Final = "the stream has changed since the state that the records are about"


def pages_in_words(pages: Sequence[int]) -> str:
    """The numbers of pages, for a message."""
    listed = ", ".join(map(str, pages[:_MOST_LISTED]))
    return f"page{'s' if len(pages) > 1 else ''} {listed}{', ...' * (len(pages) > _MOST_LISTED)}"


def differs(content: bytes | memoryview, known: PageSum) -> str:
    """How the content of a whole page differs from its record; empty if it does not.

    Nothing after the padding mark is compared: no sync promises what is there after a power cut.
    """
    view = memoryview(content)
    if len(view) < PAGE_SIZE:
        return "the file ends within the page"
    end = known.end
    if xxh3_128_digest(view[:end]) != known.digest:
        # The chain proves the hash alone; a record may name another end.
        found = hash_page(bytes(view), 0)
        if found is None or found.digest != known.digest:
            return "the entries do not match their checksum"
        end = found.end
    if end < PAGE_SIZE and view[end] != PACKET_PADDING:
        return "the padding mark after the entries is damaged"
    return ""


class RecordSource(Protocol):
    """Knows the checksums of whole pages."""

    on_proven: Callable[[], None]
    """Called when more of them are proven; from any thread."""

    def get(self, page: int) -> PageSum | None:
        """The record of a page, if it is proven."""
        return self.get_many(page, page + 1)[0]

    @abstractmethod
    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        """The same for the pages from `first` up to, not including, `stop`, with one read."""

    def first_number(self, page: int) -> int:
        """The first entry of a page, as far as records say; else 0."""
        before = self.get(page - 1) if page else None
        return 0 if before is None else before.next_number

    def renew(self) -> bool:
        """A page differs from its record: make sure that the record is not an outdated one. False
        if the stream has changed since the state that the records are about."""
        return True


def compare(
    file: Readable,
    records: RecordSource,
    page: int,
    content: bytes | None = None,
    *,
    still: bool = False,
) -> tuple[PageSum | None, str]:
    """The record of a whole page, and how the page differs from it; None without a proven record,
    or if entries were changed meanwhile (`MOVED`).

    `content` is that of the page if it was read. If it differs, the page is read again: another
    process may be changing it. Not if it is `still`: the caller keeps all from changing it.
    """
    record = records.get(page)
    why = ""
    for attempt in range(_TRIES):
        if record is None:
            break
        if content is None:
            content = file.read(PAGE_SIZE, page_start(page))
        why = differs(content, record)
        if not why or still:
            break
        if attempt == 1 and not records.renew():
            return None, MOVED
        before, record = record, records.get(page)
        if attempt > 1 and record == before:
            break
        time.sleep(PAUSE_SECONDS)
        content = None
    return record, why if record is not None else ""
