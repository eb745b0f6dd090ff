"""Keeps `FILE.sums` right while its stream is written.

Owns which records are in it, which of them are proven, and the order of its writes beside those of
the stream: a record is written after its page, and removed durably before its page changes. Needs
no sync for a commit. If the sidecar cannot be written, it is left incomplete; the stream does not
depend on it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from datastreamer.errors import UntrustedFile
from datastreamer.format import PAGE_SIZE, U64_MAX, page_start
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.pages._page_sums import (
    chain_over,
    chained_records,
    digests_of,
    missing_in,
)
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import HASH_SIZE, NO_CHAIN, PageHash, chained, hash_page
from datastreamer.storage.pages.proof import Digests, KnownChain, Link
from datastreamer.storage.pages.sidecar import (
    SUFFIX,
    PageSum,
    SumsFile,
    SumsHeader,
    discard,
    identity_of,
)

_log = logging.getLogger(__name__)

# Records whose chains are written again at once.
_MANY = 4096
# Commits do not sync the sidecar: a power cut takes at most this many records.
_UNSYNCED = 1024

ALL_TRUSTED = U64_MAX


class SumsKeeper(RecordSource):
    """The sidecar of one stream that is open for writing.

    `proven` are the hashes of pages that the commit record proved at the open, or that this process
    has computed from what it committed. For one thread at a time, apart from `get` and `get_many`:
    the caller holds the lock of the stream's file. A refusal of the system ends the use of the
    sidecar, and is logged; only what would leave a wrong record raises `OSError`.
    """

    def __init__(self, disk: Disk, path: str, file: File, stream_id: bytes) -> None:
        """`path` is that of the stream, symbolic links resolved; `file` is the stream's."""
        self._disk = disk
        self._stream = file
        self._path = path + SUFFIX
        self._stream_id = stream_id
        self._file: SumsFile | None = None
        self.usable = True
        self._header = SumsHeader(stream_id, identity_of(file, stream_id), 0, 0, ALL_TRUSTED)
        self.proven = Digests()
        # The chain before a page, to continue it.
        self._chain: tuple[int, bytes] = (0, NO_CHAIN)
        self.rechain_at: int | None = 0
        """The chains in the records from this page on may be others; None: they are right."""
        # Called if the completion has work.
        self.on_doubt: Callable[[], None] = lambda: None
        self.on_proven = lambda: None
        self._unsynced = 0
        self.begun = 0
        """How often the sidecar was begun anew because it was removed."""

    # Begin and end.

    def take_over(
        self,
        pages: int,
        *,
        recorded: int,
        epoch: int,
        chains: Sequence[KnownChain],
        foreign: bool,
    ) -> None:
        """Begin to keep the sidecar: durable on return, before the stream is written.

        The stream has that many whole pages, and its commit record `chains` over them. Its epoch is
        `recorded` in the file, and will be `epoch`. `foreign`: a program that keeps no checksums
        wrote it last. Raises `OSError`.
        """
        self._header = self._header._replace(epoch=epoch, next_epoch=epoch)
        try:
            self._file = SumsFile.open(self._disk, self._path, self._stream.access(), write=True)
            found = None if self._file is None else self._file.header()
        except (OSError, UntrustedFile) as error:
            self._give_up("read", error)
            return
        file = self._file
        if file is None:
            return

        def adopt() -> None:
            same = found is not None and (found.stream_id, found.file_id) == self._header[:2]
            if found is None or not same or recorded not in (found.epoch, found.next_epoch):
                _log.info("%s: checksums of another stream or state; begun anew", self._path)
                file.truncate(0)
                file.file.sync()
                self._put_header(self._header)
                return
            more = file.count() > pages
            file.truncate(pages)
            trusted = 0 if foreign else found.trusted
            header = found._replace(epoch=recorded, next_epoch=epoch, trusted=trusted)
            if more or header != found:
                self._put_header(header)
                file.file.sync()
            self._header = header
            if chains:
                Link(self.proven).extend(file, self._stream_id, chains, self._content)

        self._surely(adopt)

    def discard(self) -> None:
        discard(self._disk, self._path, self._stream.access())

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        self.usable = False
        if file is not None:
            file.close()

    # Records.

    def finished(self, pages: list[PageHash]) -> None:
        """Pages became whole, by a commit."""
        for page in pages:
            self.proven.put(page.page, page.digest)
        if not self.usable:
            return
        if self._file is not None and not self._disk.exists(self._path):
            self._begin_anew()
        with self._failing_softly("written"):
            records = [self._chained(page.page, self._record(page)) for page in pages]
            if records:
                self._opened().put(pages[0].page, records, self._stream_id)
            self._unsynced += len(records)
            if self._unsynced >= _UNSYNCED:
                self.on_doubt()

    def sync(self) -> None:
        """Bring records to disk if they are many: in a thread that holds no lock."""
        file = self._file
        if file is not None and self._unsynced >= _UNSYNCED:
            self._unsynced = 0
            with contextlib.suppress(OSError, ValueError):  # it may be closed meanwhile
                file.file.sync()

    def _begin_anew(self) -> None:
        """The sidecar was removed while the stream is open."""
        _log.warning("%s was removed; the checksums are made again", self._path)
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self.begun += 1
        self.on_doubt()

    def _record(self, page: PageHash | None) -> PageSum:
        """The record of a page with this hash (None: it has none), without a chain."""
        if page is None or page.digest == NO_CHAIN:
            return PageSum(NO_CHAIN, NO_CHAIN, 0, 0, 0, known=False)
        start = page_start(page.page) + page.end
        padding = xxh3_64_intdigest(self._stream.read(PAGE_SIZE - page.end, start))
        return PageSum(NO_CHAIN, page.digest, page.next_number, page.end, padding)

    def _chained(self, page: int, record: PageSum) -> PageSum:
        """The record with its chain, which programs of earlier versions use."""
        at, chain = self._chain
        if at != page:
            first = self.proven.known_from(page)
            chain = self.proven.chain(first, page)
        chain = chained(chain, record.digest) if record.known else NO_CHAIN
        self._chain = page + 1, chain
        return record._replace(chain=chain)

    def _opened(self) -> SumsFile:
        if self._file is None:
            access = self._stream.access()
            self._file = SumsFile(self._disk.create(self._path, access), self._path)
            self._put_header(self._header)
        return self._file

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        return self.proven.records(first, self.unproven(first, stop))

    def unproven(self, first: int, stop: int) -> list[PageSum | None]:
        file = self._file  # another thread may close it
        if file is not None:
            with self._failing_softly("read"):
                return file.get_many(first, stop, self._stream_id)
        return [None] * (stop - first)

    def chain_before(self, page: int) -> tuple[bytes, int]:
        """The chain over the pages before one, and the first page that it covers."""
        first = self.proven.known_from(page)
        return self.proven.chain(first, page), first

    def chain_with(self, page: int, digest: bytes, stop: int) -> tuple[bytes, int] | None:
        """As `chain_before(stop)`, if `page` had another hash; None if it is not covered."""
        first = self.proven.known_from(stop)
        if page < first:
            return None
        chain = chained(self.proven.chain(first, page), digest)
        return self.proven.chain(page + 1, stop, chain), first

    # Changes of what is committed.

    def before_truncation(self, pages: int, epoch: int) -> None:
        """The stream is about to be truncated to that many whole pages, at epoch `epoch`. Durable
        on return. Raises `OSError`."""

        def invalidate() -> None:
            if self._file is None:
                return
            self._file.truncate(pages)
            self._put_header(self._header._replace(next_epoch=epoch))
            self._file.file.sync()

        self._surely(invalidate)
        self.proven.truncate(pages)
        self._chain = (0, NO_CHAIN)

    def before_update(self, page: int, epoch: int) -> None:
        """An entry of a page is about to be updated, at epoch `epoch`. Durable on return. Raises
        `OSError`."""

        def invalidate() -> None:
            if self._file is None:
                return
            self._file.forget(page, self._stream_id)
            self._put_header(self._header._replace(next_epoch=epoch))
            self._file.file.sync()

        self._surely(invalidate)

    def changed(self, epoch: int, page: int | None = None) -> None:
        """A change is complete; an update changed `page`, which is whole."""
        self._header = self._header._replace(epoch=epoch, next_epoch=epoch)
        if page is not None:
            self._chain = (0, NO_CHAIN)
            found = hash_page(self._content(page), page)
            self.proven.put(page, NO_CHAIN if found is None else found.digest)
        with self._failing_softly("written"):
            if self._file is None:
                return
            if page is not None:
                self._replace(page, found)
            self._put_header(self._header)

    def healed(self, page: int) -> None:
        """A damaged page was restored: bring its record up to date. The record of another hash than
        the proven one is not made: the page is damaged elsewhere."""
        found, proven = hash_page(self._content(page), page), self.proven.get(page)
        if proven is not None and (found is None or found.digest != proven):
            return
        with self._failing_softly("written"):
            if self._file is not None:
                self._replace(page, found)

    def _replace(self, page: int, found: PageHash | None) -> None:
        """Write a record in the place of another one."""
        old, record = self._opened().get(page, self._stream_id), self._record(found)
        same = old is not None and old.known and old.digest == record.digest
        if old is not None and same:
            record = record._replace(chain=old.chain)
        if record != old:
            self._opened().put(page, [record], self._stream_id)
        if not same:
            self.rechain(page)
        if self.rechain_at is not None:
            self.write_chains(self._opened().count())
            if self.rechain_at is not None:
                self.on_doubt()

    def rechain(self, page: int) -> None:
        """The chains in the records from `page` on are of another digest."""
        self.rechain_at = page if self.rechain_at is None else min(page, self.rechain_at)

    def _content(self, page: int) -> bytes:
        """A page; empty if the disk cannot read it."""
        try:
            return self._stream.read(PAGE_SIZE, page_start(page))
        except OSError as error:
            _log.warning("%s: page %d cannot be read: %s", self._path, page, error.strerror)
            return b""

    # For the completion (`completer.py`).

    def first_missing(self, first: int, stop: int) -> int | None:
        """The first of these pages that has no record, or another one than is proven."""
        if self._file is None:
            return first
        with self._failing_softly("read"):
            records = self._file.packed(first, stop)
            missing, digests = missing_in(records, first, self._stream_id), digests_of(records)
            covered = bytearray(digests)
            self.proven.cover(covered, first)
            if covered != digests:
                at = next(at for at in range(len(digests)) if covered[at] != digests[at])
                missing.append(first + at // HASH_SIZE)
            return min(missing, default=None)
        return None

    def links(self, known: KnownChain) -> bool:
        """Whether the records of the pages that a chain covers lead to it: they are proven then."""
        with self._failing_softly("read"):
            assert self._file is not None
            link = Link(self.proven)
            if link.extend(self._file, self._stream_id, [known], self._content, most=0):
                self.on_proven()
                return True
            _log.warning(
                "%s: the commit record of the stream contradicts these checksums, which are those "
                "of another copy or state, or of damaged pages; all pages are read",
                self._path,
            )
        return False

    def is_led_to(self, known: KnownChain, fresh: Digests) -> bool:
        """Whether the pages, which have the hashes `fresh`, lead to the chain; these are proven
        then."""
        first, stop, chain = known
        packed = fresh.packed(first, stop)
        self.proven.cover(packed, first)
        if chain_over(packed, 0, stop - first, NO_CHAIN) != chain:
            _log.error("%s: %s; its pages are not verified", self._path, known.refuted())
            return False
        self.proven.put(first, packed)
        return True

    def accepts(self, page: int, digest: bytes) -> bool:
        """Whether a page that nothing proves is taken as it is: it has no other record, or another
        program wrote the stream. It counts as proven then."""
        record = None if self._file is None else self._file.get(page, self._stream_id)
        if record is not None and record.known and record.digest != digest:
            if page < self._header.trusted:
                return False
            _log.warning(
                "%s: the entries of page %d (from byte %d on, up to entry %d) do not match the "
                "checksum that they had before another program wrote the stream: it changed "
                "them, or they are damaged",
                *(self._path, page, page_start(page), record.next_number - 1),
            )
        self.proven.put(page, digest)
        return True

    def complete(self, page: int, found: PageHash | None) -> bool:
        """Make the record of a page that has this hash (None: it is damaged); False if another
        one is proven."""
        proven = self.proven.get(page)
        if proven is not None and (found is None or found.digest != proven):
            return False
        with self._failing_softly("written"):
            if found is None:
                what = "page %d (from byte %d on) is damaged; it has no checksum"
                _log.error("%s: " + what, self._path, page, page_start(page))
            self._opened().put(page, [self._chained(page, self._record(found))], self._stream_id)
            self.on_proven()
            return True
        return False

    def write_chains(self, pages: int) -> None:
        """Write the chains in the next records, of the first `pages` pages, that may have others:
        for programs of earlier versions."""
        at, file = self.rechain_at, self._file
        self.rechain_at = None
        if at is None or file is None:
            return
        first = self.proven.known_from(pages)
        at, stop = max(at, first), min(max(at, first) + _MANY, pages)
        with self._failing_softly("written"):
            records = file.packed(at, stop)
            if digests_of(records) == self.proven.packed(at, stop):
                chain = self.proven.chain(first, at)
                fresh, _ = chained_records(records, at, self._stream_id, chain)
                if fresh != records:
                    file.put_packed(at, fresh)
            if stop < pages:
                self.rechain_at = stop
            elif self._header.trusted != ALL_TRUSTED and first == 0:
                self._put_header(self._header._replace(trusted=ALL_TRUSTED))

    # The system.

    def _put_header(self, header: SumsHeader) -> None:
        assert self._file is not None
        self._file.write_header(header)
        self._header = header

    def _surely(self, work: Callable[[], None]) -> None:
        """Do `work`, which makes records invalid; if the system refuses that, remove the sidecar.
        Raises `OSError` if that is refused as well."""
        try:
            if self.usable:
                work()
                return
        except OSError as error:
            self._give_up("written", error)
        self.discard()

    @contextlib.contextmanager
    def _failing_softly(self, what: str) -> Iterator[None]:
        """A block in which a refusal of the system ends the use of the sidecar."""
        try:
            yield
        except (OSError, UntrustedFile) as error:
            self._give_up(what, error)

    def _give_up(self, what: str, error: Exception) -> None:
        self.close()
        why = error.what if isinstance(error, UntrustedFile) else str(error)
        _log.warning(
            "%s: checksums cannot be %s (%s); the pages of the stream are not verified",
            *(self._path, what, why),
        )
