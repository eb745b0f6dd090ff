"""Compares pages with their checksums.

Owns the comparison and how its result is named. Knows page contents and records, and neither reads
them from files nor stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_128_digest

from datastreamer.format import PACKET_PADDING, PAGE_SIZE
from datastreamer.storage.pages.sidecar import PageSum

# The maximum number of pages that a message lists.
_MOST_LISTED: Final = 5


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
    if xxh3_128_digest(view[: known.end]) != known.digest:
        return "the entries do not match their checksum"
    if known.end < PAGE_SIZE and view[known.end] != PACKET_PADDING:
        return "the padding mark after the entries is damaged"
    return ""
