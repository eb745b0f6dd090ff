"""Brings an archive up to the durable end of a stream file: new segments, then one manifest.

Owns which rows of the newest manifest still hold, who may publish after whom, and the order of the
puts: a manifest names only what is there, and is itself the only object that readers look for.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, NoReturn

from datastreamer.archive.archived_file import (
    ArchivedFile,
    ArchivedPage,
    DurableState,
    chains_at,
    now_ms,
)
from datastreamer.archive.options import INTERVAL, SEGMENT_PAGES
from datastreamer.errors import (
    ArchiveBusy,
    ArchiveDiverged,
    ArchiveFenced,
    ArchiveMissing,
    DamagedArchive,
    DamagedEntry,
    StreamBusy,
    UsageError,
)
from datastreamer.format import PAGE_SIZE, U64_MAX, page_start
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.objects import LEVEL
from datastreamer.storage.objects.manifest import (
    MOST_ROWS,
    ArchivedHead,
    ArchivedStream,
    ArchiveManifest,
    ManifestWriter,
    Row,
    digest_of,
    stream_object,
)
from datastreamer.storage.objects.opened import (
    RESTORED_EPOCHS,
    STREAM,
    OpenArchive,
    manifest_name,
    segment_name,
)
from datastreamer.storage.objects.segment import compress, pack, page_content
from datastreamer.storage.objects.store import Store
from datastreamer.storage.pages._page_sums import chain_over
from datastreamer.storage.pages.hashes import HASH_SIZE, NO_CHAIN
from datastreamer.storage.pages.proof import KnownChain

THREADS: Final = 4
# Another file's archive counts as in use for this many intervals.
_BUSY_INTERVALS = 10
# A pruner deletes objects that no manifest names after 24 h.
_MOST_SECONDS = 12 * 3600.0


class _KeptRows(NamedTuple):
    """The rows that stay, whose chains may be old ones; and why the generation is another one."""

    rows: list[Row]
    reason: str


class ArchiveWriter:
    """One writer of one archive, from one open file. One thread at a time.

    Each method raises `StreamBusy`, `DamagedPage`, and what is below `ArchiveError`; after
    `ArchiveFenced` it publishes nothing more.
    """

    def __init__(
        self,
        source: ArchivedFile,
        store: Store,
        *,
        segment_pages: int = SEGMENT_PAGES,
        level: int = LEVEL,
        interval: float = INTERVAL,
        takeover: bool = False,
        threads: int = THREADS,
    ) -> None:
        """`takeover`: also from a writer that was at work a short time ago, or had other
        entries. `threads` make and put segments, each in memory."""
        self.source = source
        self._store = store
        self._segment_pages = segment_pages
        self._level = level
        self._busy_ms = _BUSY_INTERVALS * interval * 1000
        self._takeover = takeover
        self._threads = threads
        self._archive: OpenArchive | None = None
        self._id = secrets.token_hex(16)
        self.term = 0
        self._fenced: ArchiveFenced | None = None
        self.newest: ArchiveManifest | None = None
        self._newest_digest = self._tail = ""
        # The segments that no manifest names yet, by first page and hashes, and when they were put.
        self._made: dict[tuple[int, bytes], tuple[Row | None, float]] = {}
        self.uploaded = 0
        """Bytes of the objects that were put."""

    # Attaching.

    def _attach(self) -> OpenArchive:
        """The archive, which the first one to use its URL begins."""
        if self._archive is None:
            try:
                archive = OpenArchive(self._store)
            except ArchiveMissing:
                self._store.ensure_safe()
                begun = stream_object(secrets.token_hex(16), self.source.header)
                self._store.create(STREAM, begun)
                archive = OpenArchive(self._store)
            numbers = archive.numbers()
            if numbers:
                self.newest, self._newest_digest = archive.manifest(numbers[-1])
            self.term = 1 if self.newest is None else self.newest.writer.term + 1
            self._archive = archive
        return self._archive

    def _ensure_free(self, state: DurableState, before: ArchiveManifest) -> None:
        """Raises `ArchiveBusy`, and `ArchiveDiverged` for another kind of stream."""
        header, stream = self.source.header, before.stream
        if header[:3] != (stream.version, stream.system_id, stream.stream_type):
            raise ArchiveDiverged(
                self._store.url,
                f"it has a stream of system {stream.system_id} and type {stream.stream_type}, and "
                f"{self.source.path} is of system {header.system_id} and type "
                f"{header.stream_type}; use another URL",
            )
        ago, writer = now_ms() - before.time, before.writer
        other = stream.stream_id != state.stream_id.hex() or writer.host != socket.gethostname()
        if other and ago < self._busy_ms and not self._takeover:
            raise ArchiveBusy(
                self._store.url,
                f"another stream file was archived there {ago / 1000:.0f} s ago, by process "
                f"{writer.pid} on {writer.host}; end that one and wait for "
                f"{self._busy_ms / 1000:.0f} s, or take the archive over (`--archive-takeover`)",
            )

    def ensure_newest(self) -> tuple[OpenArchive, ArchiveManifest]:
        """The archive and its newest manifest, which is this writer's, as it was put. Raises
        `ArchiveFenced`."""
        archive, newest = self._archive, self.newest
        if self._fenced is not None:
            raise self._fenced
        if archive is None or newest is None or newest.writer.id != self._id:
            raise StreamBusy(self.source.path, "busy: this writer has published no manifest yet")
        if later := archive.numbers(after=newest.number):
            self._fence(archive.manifest(later[-1])[0])
        found, digest = archive.manifest(newest.number)
        if digest != self._newest_digest:
            self._fence(found)
        return archive, newest

    # Publishing.

    def publish(
        self,
        advance: Callable[[int, int], None] = lambda done, total: None,
        *,
        anew: bool = False,
    ) -> bool:
        """Archive what is durable now; False if there is nothing new, and with `anew` if the newest
        manifest is this writer's, too.

        `advance(done, total)` is called with the bytes of pages, from several threads.
        """
        if self._fenced is not None:
            raise self._fenced
        archive = self._attach()
        state = self.source.state()
        try:
            return self._publish(archive, state, advance, anew=anew)
        except (ArchiveBusy, ArchiveDiverged):
            # The next attempt looks what is there then.
            self._archive = None
            raise
        except DamagedEntry:
            if self.source.state().epoch != state.epoch:
                raise StreamBusy(self.source.path, "busy: entries were changed") from None
            raise

    def _publish(
        self,
        archive: OpenArchive,
        state: DurableState,
        advance: Callable[[int, int], None],
        *,
        anew: bool,
    ) -> bool:
        before = self.newest
        mine = before is not None and before.writer.id == self._id
        if before is not None and not mine:
            self._ensure_free(state, before)
        digests = bytes(self.source.digests(state.pages))
        self._ensure_proven(state, digests)
        plan = self._plan(archive, state, digests, mine=mine)
        same = before is not None and not plan.reason and before.end == state.head
        if same and (mine or not anew):
            return False
        rows, tail = self._put_pages(state, digests, plan.rows, advance)
        self._put_manifest(archive, state, rows, tail, plan.reason)
        return True

    def _ensure_proven(self, state: DurableState, digests: bytes) -> None:
        """That the pages are those of the commit. Raises `DamagedEntry`."""
        known = KnownChain.of(state.head, state.known)
        if known is None:
            return
        if chain_over(digests, known.first, known.stop, NO_CHAIN) != known.chain:
            raise DamagedEntry(self.source.path, page_start(0), known.refuted())

    def _plan(
        self, archive: OpenArchive, state: DurableState, digests: bytes, *, mine: bool
    ) -> _KeptRows:
        before = self.newest
        if before is None:
            return _KeptRows([], "")
        same = [row for row in before.segments if row.stop <= state.pages]
        chains = chains_at(digests, [row.stop for row in same])
        fits = [row.chain == chain.hex() for row, chain in zip(same, chains, strict=True)]
        kept = [*fits, False].index(False)
        rows = list(before.segments[:kept])
        if kept == len(before.segments) and self._continues(before, state):
            return _KeptRows(rows, "")
        stop = before.head.entries
        if kept < len(before.segments):
            stop = min(stop, _end_of_difference(archive, before.segments[kept], digests))
        reason = self._reason(before, state, stop, mine=mine)
        for row in before.segments[kept:]:
            rows += _equal_parts(archive, row, digests)
        return _KeptRows(rows, reason)

    def _continues(self, before: ArchiveManifest, state: DurableState) -> bool:
        """Whether the file begins with the entries of the archive's last page."""
        if state.head.entries < before.head.entries or state.head.length < before.head.length:
            return False
        if before.tail is None:
            return True
        page, end = before.tail.first_page, before.head.length
        return self.source.starts_with(page, end, before.head.tail)

    def _reason(
        self, before: ArchiveManifest, state: DurableState, stop: int, *, mine: bool
    ) -> str:
        """Why the archive may get another history: `stop` is the entry after the first page that
        differs. Raises `ArchiveDiverged`."""
        if mine or before.stream.stream_id == state.stream_id.hex():
            changes = self.source.changes_since(before.stream.epoch)
            first = min(changes or (), key=lambda change: change.start, default=None)
            if first is not None and first.start < stop:
                kind = "truncation" if first.stop is None else "update"
                return f"{kind} at entry {first.start}"
            if mine or state.epoch - before.stream.epoch >= RESTORED_EPOCHS:
                return "changes" if mine else "restore"
        if self._takeover:
            return "takeover"
        has = f"{before.head.entries} entries, {self.source.path} {state.head.entries}"
        raise ArchiveDiverged(
            self._store.url,
            f"the archive has other entries than the file (the archive has {has}), and the file "
            "does not say that they were truncated or updated; nothing was archived. Restore the "
            "file from the archive (`datastreamer archive restore`), use another URL, or replace "
            "the archive's entries by the file's (`--archive-takeover`)",
        )

    # Puts.

    def _put_pages(
        self,
        state: DurableState,
        digests: bytes,
        kept: list[Row],
        advance: Callable[[int, int], None],
    ) -> tuple[list[Row], Row | None]:
        """Put what the kept rows do not have; returns all rows, and the tail's."""
        kept = self._without_pieces(kept, state.pages)
        ranges = list(_gaps(kept, state.pages, self._segment_pages))
        if len(kept) + len(ranges) >= MOST_ROWS:
            raise UsageError(
                f"the archive would have {len(kept) + len(ranges)} segments, and at most "
                f"{MOST_ROWS} are possible: choose larger ones (`--archive-segment`), and push to "
                "a new URL"
            )
        before = chains_at(digests, [first for first, _ in ranges])
        total = sum(stop - first for first, stop in ranges) * PAGE_SIZE
        done = 0

        def advanced() -> None:
            nonlocal done
            done += PAGE_SIZE
            advance(done, total)

        def put(bounds: tuple[int, int], chain: bytes) -> Row:
            # What was put before a publication that failed, and is not so old that a prune deletes
            # it before a manifest names it.
            made = bounds[0], digests[bounds[0] * HASH_SIZE : bounds[1] * HASH_SIZE]
            row, put_at = self._made.get(made, (None, 0.0))
            if row is None or time.time() - put_at > _MOST_SECONDS:
                row, put_at = (
                    self._put_segment(state, digests, bounds, chain, advanced),
                    time.time(),
                )
                self._made[made] = row, put_at
            return row

        made = self._store.in_threads(self._threads, put, ranges, before)
        rows = sorted([*kept, *made])
        chains = chains_at(digests, [row.stop for row in rows])
        rows = [row._replace(chain=chain.hex()) for row, chain in zip(rows, chains, strict=True)]
        newest, risen = 0, []
        for row in rows:
            newest = max(newest, row.time)
            risen.append(row._replace(time=newest))
        return risen, self._put_tail(state, digests, newest)

    def _without_pieces(self, rows: list[Row], pages: int) -> list[Row]:
        """Without the last rows, if their pages and those after them fill a segment: a page is put
        at most twice."""
        at, most = len(rows), self._segment_pages
        while at and rows[at - 1].pages < most >= rows[-1].stop - rows[at - 1].first_page:
            at -= 1
        first = rows[at].first_page if at < len(rows) else pages
        return rows[:at] if pages - first >= most else rows

    def _put_segment(
        self,
        state: DurableState,
        digests: bytes,
        bounds: tuple[int, int],
        chain: bytes,
        advanced: Callable[[], None],
    ) -> Row:
        first, stop = bounds
        pages, frames = [], []
        now = now_ms()
        for page in range(first, stop):
            digest = digests[page * HASH_SIZE : (page + 1) * HASH_SIZE]
            found = self.source.page(page, digest, now)
            frames.append(compress(page_content(found.entries), self._level))
            pages.append(found._replace(entries=b""))
            advanced()
        return self._put(state, first, pages, frames, chain)

    def _put_tail(self, state: DurableState, digests: bytes, after: int) -> Row | None:
        self._tail = ""
        if not state.head.entries:
            return None
        found = self.source.last_page(state, max(now_ms(), after))
        frame = compress(page_content(found.entries, last=True), self._level)
        pages = [found._replace(entries=b"")]
        (chain,) = chains_at(digests, [state.pages])
        row = self._put(state, state.pages, pages, [frame], chain, last=True)
        self._tail = found.record.sum.digest.hex()
        return row._replace(time=max(row.time, after))

    def _put(
        self,
        state: DurableState,
        first: int,
        pages: list[ArchivedPage],
        frames: list[bytes],
        chain: bytes,
        *,
        last: bool = False,
    ) -> Row:
        """Put a segment of these pages, after those with this chain."""
        records = []
        for page in pages:
            chain = chain_over(page.record.sum.digest, 0, 1, chain)
            records.append(page.record._replace(sum=page.record.sum._replace(chain=chain)))
        bookmarks = Pairs()
        for page in pages:
            bookmarks.extend(page.bookmarks)
        packed, footer = pack(first, frames, records, bookmarks, state.stream_id, last=last)
        name = segment_name(first, len(pages), secrets.token_hex(8))
        if not self._store.create(name, packed):
            raise DamagedArchive(self._store.url, f"{name} has other bytes than were put there")
        self.uploaded += len(packed)
        newest = max(page.record.time for page in pages)
        entry = pages[0].first_entry
        return Row(
            first, len(pages), entry, name, 0, len(packed), chain.hex(), footer.hex(), newest
        )

    def _put_manifest(
        self,
        archive: OpenArchive,
        state: DurableState,
        rows: list[Row],
        tail: Row | None,
        reason: str,
    ) -> None:
        before, header, upstream = self.newest, self.source.header, state.agreement
        ends = ArchivedHead(*state.head, rows[-1].chain if rows else NO_CHAIN.hex(), self._tail)
        manifest = ArchiveManifest(
            number=1 if before is None else before.number + 1,
            archive_id=archive.id,
            time=now_ms(),
            previous=self._newest_digest,
            writer=ManifestWriter(self.term, self._id, socket.gethostname(), os.getpid()),
            generation=1 if before is None else before.generation + bool(reason),
            reason=reason or ("begun" if before is None else before.reason),
            stream=ArchivedStream(
                *header[:3],
                state.stream_id.hex(),
                state.epoch,
                "" if upstream is None else upstream.stream_id.hex(),
                0 if upstream is None else upstream.epoch,
            ),
            head=ends,
            segments=tuple(rows),
            tail=tail,
        )
        manifest.check()
        packed, number = manifest.pack(), manifest.number
        if (later := archive.numbers(after=number - 1)) and later[0] != number:
            # The manifest that fenced this writer was pruned since.
            self._fence(archive.manifest(later[-1])[0])
        ours = self._store.create(manifest_name(number), packed)
        found, digest = archive.manifest(number)[:2] if not ours else (manifest, digest_of(packed))
        if found.writer.id != self._id:
            self._fence(found)
        # It may be an earlier one of ours, whose answer was lost.
        self.uploaded += len(packed) * ours
        self.newest, self._newest_digest = found, digest
        self._made.clear()
        if not ours:
            raise StreamBusy(self.source.path, f"busy: manifest {number} was published before")

    def _fence(self, found: ArchiveManifest) -> NoReturn:
        self._fenced = ArchiveFenced(
            self._store.url,
            f"process {found.writer.pid} on {found.writer.host} has published manifest "
            f"{found.number} of the archive; this writer archives nothing more",
        )
        raise self._fenced


def _gaps(rows: list[Row], pages: int, most: int) -> Iterator[tuple[int, int]]:
    """The pages that no row has, in ranges of at most `most`."""
    at = 0
    for start, stop in [*((row.first_page, row.stop) for row in sorted(rows)), (pages, pages)]:
        for first in range(at, start, most):
            yield first, min(first + most, start)
        at = stop


def _end_of_difference(archive: OpenArchive, row: Row, digests: bytes) -> int:
    """The entry after the first page of a row that is not the file's; of a page that is not among
    the file's whole ones, all that follow may be missing."""
    pages = archive.footer(row).pages[row.frame : row.frame + row.pages]
    for at, page in enumerate(pages, row.first_page):
        found = digests[at * HASH_SIZE : (at + 1) * HASH_SIZE]
        if found and page.sum.digest != found:
            return page.sum.next_number
    return U64_MAX


def _equal_parts(archive: OpenArchive, row: Row, digests: bytes) -> Iterator[Row]:
    """The parts of a row whose pages are still the file's."""
    footer, stop = archive.footer(row), min(row.stop, len(digests) // HASH_SIZE)
    first = None
    for page in range(row.first_page, stop + 1):
        frame = row.frame + page - row.first_page
        equal = page < stop and (
            footer.pages[frame].sum.digest == digests[page * HASH_SIZE : (page + 1) * HASH_SIZE]
        )
        if equal and first is None:
            first = page
        elif not equal and first is not None:
            start = row.frame + first - row.first_page
            entry = footer.pages[start - 1].sum.next_number if start else row.first_entry
            time = max(each.time for each in footer.pages[start:frame])
            yield row._replace(
                first_page=first, pages=page - first, first_entry=entry, frame=start, time=time
            )
            first = None
