"""Restores one page of a stream that is open for writing.

Owns what may happen between the question to a server and the write: other operations are committed
meanwhile. The epoch stays: the bytes are those that were committed, and a reader that met the
damage reads the page again. Only pages with a checksum are restored, since nothing else proves that
a page of a live stream is damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_128_digest

from datastreamer._codec import scan
from datastreamer.errors import WriteFailed
from datastreamer.format import PAGE_SIZE, page_start
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.disk.atomic_file import keep_beside, remove_older
from datastreamer.storage.disk.bad_sectors import read_around
from datastreamer.storage.pages.hashes import NO_CHAIN
from datastreamer.storage.pages.restore import HealedPages, KnownStream, Peer, ask
from datastreamer.storage.pages.survey import LostPages
from datastreamer.storage.write.owned_file import OwnedFile, refusal

_log = logging.getLogger(__name__)

# The maximum number of copies of damaged bytes beside a stream that is served.
_MOST_KEPT: Final = 64


def heal_page(
    owned: OwnedFile, bookmarks: BookmarkKeeper, page: int, peers: Sequence[Peer]
) -> HealedPages | None:
    """Restore a page from `peers`, or from the page cache; None if it is whole or has no checksum.

    Waits for servers without the stream's lock. Raises `WriteFailed` if the disk refuses: the page
    may be damaged in another way then, and the call can be repeated. Raises as `ensure_writable`.
    """
    with owned.exclusive():
        owned.ensure_writable()
        lost, epoch = _damaged(owned, page), owned.epoch
        header = owned.header_at(owned.written)
        if page < owned.pages.floor:
            return None  # it is not in the file
        if lost is None:
            return _brought_to_disk(owned, page)
        entries = _entries(owned, lost)
        if entries is not None:
            return _written(owned, lost, entries, "its own entries")
    answer = ask(
        lost, KnownStream(header, owned.stream_id, owned.file.read), peers, trust_peer=False
    )
    if not answer.source:
        return HealedPages(*lost.span, "", answer.why)
    (entries,) = answer.pages
    with owned.exclusive():
        owned.ensure_writable()
        if not _is_at(owned, epoch):
            return HealedPages(*lost.span, "", "the stream was truncated or updated meanwhile")
        healed = _written(owned, lost, entries, answer.source, answer.why)
    bookmarks.restored(scan(entries, None).bookmarks())
    return healed


def _brought_to_disk(owned: OwnedFile, page: int) -> HealedPages | None:
    """Write a page again that is whole in memory, and damaged on the disk; None if it is not
    damaged there. Requires the lock."""
    record = owned.sums.get(page)
    if record is None or not owned.pages.is_bad_on_disk(page):
        return None
    start = page_start(page)
    try:
        owned.file.write(owned.file.read(PAGE_SIZE, start), start)
        owned.file.sync()
    except OSError as error:
        raise WriteFailed(owned.path, refusal(error)) from error
    owned.pages.written(page)
    first = owned.end_before(page).entries
    healed = HealedPages(page, page + 1, first, record.next_number, "the page cache", "")
    _log.warning("%s: %s written again from the page cache", owned.path, healed.described())
    return healed


def _is_at(owned: OwnedFile, epoch: int) -> bool:
    """Whether the answer still is about the stream's entries. Requires the lock."""
    return owned.epoch == epoch


def _entries(owned: OwnedFile, lost: LostPages) -> bytes | None:
    """The entries of a whole page of which only the padding mark is damaged. Requires the lock."""
    record = owned.sums.get(lost.page) if lost.end is None else None
    if record is None:
        return None
    file = read_around(owned.file, owned.path)
    content = file.read(record.end, page_start(lost.page))
    return content if xxh3_128_digest(content) == record.digest else None


def _written(
    owned: OwnedFile, lost: LostPages, entries: bytes, source: str, why: str = ""
) -> HealedPages:
    """Write the entries of a page. Requires the lock."""
    # Make room for one more copy of damaged bytes.
    for name in remove_older(owned.disk, owned.path, "repair", owned.file.access(), _MOST_KEPT - 1):
        _log.warning(
            "%s: removed %s: of the copies of damaged bytes the newest %d are kept",
            *(owned.path, name, _MOST_KEPT),
        )
    try:
        kept = _restore(owned, lost, entries)
    except OSError as error:
        raise WriteFailed(owned.path, refusal(error)) from error
    healed = HealedPages(*lost.span, source, why, kept)
    _log.warning(
        "%s: %s restored from %s; the damaged bytes are kept in %s",
        *(owned.path, healed.described(), source, kept),
    )
    return healed


def _damaged(owned: OwnedFile, page: int) -> LostPages | None:
    """What a page held, if it does not match its checksum. Requires the lock."""
    end = owned.end
    damage = owned.damage_of(page) if 0 <= page <= end.sums.page else None
    if damage is None:
        return None
    last = page == end.sums.page
    record = None if last else owned.sums.get(page)
    digest = end.sums.sum().tail if record is None else record.digest
    before = owned.end_before(page)
    if digest == NO_CHAIN or before.length != page_start(page):
        return None
    within = end.written.length if last else None
    return LostPages(page, before.entries, damage.end, [digest], within, False, False)


def _restore(owned: OwnedFile, lost: LostPages, entries: bytes) -> str:
    """Write the entries; returns the path of the copy of the damaged bytes. Requires the lock."""
    file, start = read_around(owned.file, owned.path), page_start(lost.page)
    old = file.read(PAGE_SIZE, start)
    stop = start + len(old)
    kept = keep_beside(owned.disk, owned.path, "repair", owned.page, file, start, stop)
    content = entries  # what follows in the last page may belong to later operations
    if lost.end is None or lost.end == page_start(lost.page + 1):
        content = entries.ljust(PAGE_SIZE, b"\0")
    file.write(content, start)
    file.sync()
    owned.sums.healed(lost.page)
    owned.summaries.look_at(lost.page)
    owned.reader.look_again()
    owned.pages.written(lost.page)
    return kept
