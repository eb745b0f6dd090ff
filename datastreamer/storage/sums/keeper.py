"""Keeps `FILE.sums` right while its stream is written.

Owns which records are in it, and the order of its writes beside those of the stream: a record is
written after its page, and removed durably before its page changes. Needs no sync for a commit. If
the sidecar cannot be written, it is left incomplete; the stream does not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from datastreamer.errors import UntrustedFile
from datastreamer.format import PAGE_SIZE, U64_MAX, page_start
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.sums.chain import ChainWalk, KnownChain, contradicts
from datastreamer.storage.sums.hashes import NO_CHAIN, PageHash, chained
from datastreamer.storage.sums.page_check import hash_page
from datastreamer.storage.sums.sidecar import (
    SUFFIX,
    PageSum,
    SumsFile,
    SumsHeader,
    discard,
    identity_of,
)

_log = logging.getLogger(__name__)

# Records that are read and checked at once, while commits wait for the lock.
_MANY = 512

ALL_TRUSTED = U64_MAX


class SumsKeeper:
    """The sidecar of one stream that is open for writing.

    Has records of the first `count` pages; `chain` is the chain over them. For one thread at a
    time: the caller holds the lock of the stream's file. A refusal of the system ends the use of
    the sidecar, and is logged; only what would leave a wrong record raises `OSError`.
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
        self.count = 0
        self.chain = NO_CHAIN
        # The first page that the chain covers: the page before it has no hash.
        self._chained_from = 0
        # The number of records that were made in the background, and of those among them whose
        # pages cannot be read as entries.
        self.made = self.damaged = 0
        # Called if records have to be checked again.
        self.on_doubt: Callable[[], None] = lambda: None
        # Whether the chain over all records was compared with that of the commit record, as far as
        # it has one; and whether they differed: then the records prove nothing.
        self._compared = True
        self.refuted = False
        # The records before this one were checked against each other since it was opened; None if
        # there is no need.
        self._walked: int | None = None
        self._walked_chain = NO_CHAIN

    # Begin and end.

    def take_over(
        self,
        pages: int,
        *,
        recorded: int,
        epoch: int,
        known: KnownChain | None,
        foreign: bool,
        restarted: bool,
    ) -> None:
        """Begin to keep the sidecar: durable on return, before the stream is written.

        The stream has that many whole pages, and its commit record `known`. Its epoch is `recorded`
        in the file, and will be `epoch`. `foreign`: a program that keeps no checksums wrote it
        last. `restarted`: the machine restarted since it was written. Raises `OSError`.
        """
        self._header = self._header._replace(epoch=epoch, next_epoch=epoch)
        self._compared = pages == 0
        try:
            self._file = SumsFile.open(self._disk, self._path, self._stream.access(), write=True)
            found = None if self._file is None else self._file.header()
        except (OSError, UntrustedFile) as error:
            self._give_up("read", error)
            return
        if self._file is None:
            return
        file = self._file

        def adopt(found: SumsHeader | None) -> None:
            chains = [] if known is None else [known]
            if found is None or not self._is_ours(found, recorded):
                _log.info("%s: checksums of another stream or state; begun anew", self._path)
                found = None
            elif contradicts(file, self._stream_id, chains):
                _log.warning(
                    "%s: the commit record of the stream contradicts these checksums, which are "
                    "those of another copy or state; they are made again",
                    self._path,
                )
                found = None
            if found is None:
                file.truncate(0)
                file.file.sync()
                self._put_header(self._header)
                return
            more = file.count() > pages
            file.truncate(pages)
            trusted = 0 if foreign else found.trusted
            covered = known is not None and known.first == 0
            if restarted or not covered or trusted < pages or found.epoch != found.next_epoch:
                self._walk_from_start()
            header = found._replace(epoch=recorded, next_epoch=epoch, trusted=trusted)
            if more or header != found:
                self._put_header(header)
                file.file.sync()
            self._count_records()
            self._compared = self.count == pages and (self._walked is None or pages == 0)

        self._surely(lambda: adopt(found))

    def discard(self) -> None:
        """Remove the sidecar as `sidecar.discard` does. Raises `OSError`."""
        discard(self._disk, self._path, self._stream.access())

    def _is_ours(self, found: SumsHeader, recorded: int) -> bool:
        same = (found.stream_id, found.file_id) == self._header[:2]
        return same and recorded in (found.epoch, found.next_epoch)

    def _count_records(self) -> None:
        assert self._file is not None
        self.count, self.chain = self._file.count(), NO_CHAIN
        while self.count:
            last = self._file.get(self.count - 1, self._stream_id)
            if last is not None:
                self.chain = last.chain
                return
            self.count -= 1

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        self.usable = False
        if file is not None:
            file.close()

    # Records.

    def finished(self, pages: list[PageHash]) -> None:
        """Pages became whole, by a commit."""
        if not self.usable:
            return
        if self._file is not None and not self._disk.exists(self._path):
            self._begin_anew()
        with self._failing_softly("written"):
            new: list[PageSum] = []
            chain = self.chain
            for page in pages:
                if page.page == self.count + len(new):
                    new.append(self._chained(self._record(page), chain, page.page))
                    chain = new[-1].chain
            self._append(new)

    def _begin_anew(self) -> None:
        """The sidecar was removed while the stream is open."""
        _log.warning("%s was removed; the checksums are made again", self._path)
        file, self._file = self._file, None
        self.count, self.chain, self._chained_from = 0, NO_CHAIN, 0
        self._walked, self._compared = None, False
        if file is not None:
            file.close()
        self.on_doubt()

    def _record(self, page: PageHash | None) -> PageSum:
        """The record of a page with this hash (None: it has none), without a chain."""
        if page is None or page.digest == NO_CHAIN:
            return PageSum(NO_CHAIN, NO_CHAIN, 0, 0, 0, known=False)
        start = page_start(page.page) + page.end
        padding = xxh3_64_intdigest(self._stream.read(PAGE_SIZE - page.end, start))
        return PageSum(NO_CHAIN, page.digest, page.next_number, page.end, padding)

    def _chained(self, record: PageSum, chain: bytes, page: int) -> PageSum:
        """The record with the chain that continues `chain`; after a page without a hash another
        chain begins."""
        if record.known:
            return record._replace(chain=chained(chain, record.digest))
        self._chained_from = page + 1
        return record._replace(chain=NO_CHAIN, digest=NO_CHAIN)

    def _append(self, new: list[PageSum]) -> None:
        if new:
            self._opened().put(self.count, new, self._stream_id)
            self.count += len(new)
            self.chain = new[-1].chain

    def _opened(self) -> SumsFile:
        if self._file is None:
            access = self._stream.access()
            self._file = SumsFile(self._disk.create(self._path, access), self._path)
            self._put_header(self._header)
        return self._file

    def renew(self) -> None:
        """No other process writes the records."""

    def get(self, page: int) -> PageSum | None:
        """The record of a page, if it can be relied on."""
        return self.get_many(page, page + 1)[0]

    def get_many(self, first: int, stop: int) -> list[PageSum | None]:
        """The same for the pages from `first` up to, not including, `stop`, with one read."""
        found: list[PageSum | None] = []
        file, kept = self._file, min(stop, self.count)  # another thread may close it
        if file is not None and first < kept:
            with self._failing_softly("read"):
                found = [
                    record if record and record.known and self._trusts(page) else None
                    for page, record in enumerate(
                        file.get_many(first, kept, self._stream_id), first
                    )
                ]
        return found + [None] * (stop - first - len(found))

    def first_number(self, page: int) -> int:
        """The first entry of a page, as far as records say; else 0."""
        before = self.get(page - 1) if page else None
        return 0 if before is None else before.next_number

    def _trusts(self, page: int) -> bool:
        return page < self._header.trusted and not self.refuted

    def chain_before(self, page: int) -> tuple[bytes, int]:
        """The chain over the pages before one, and the first page that it covers."""
        if page == 0:
            return NO_CHAIN, 0
        before = self.get(page - 1) if self._walked is None and self._compared else None
        if before is None or page <= self._chained_from:
            return NO_CHAIN, page
        return before.chain, self._chained_from

    # Changes of what is committed.

    def before_truncation(self, pages: int, epoch: int) -> None:
        """The stream is about to be truncated to that many whole pages, at epoch `epoch`. Durable
        on return. Raises `OSError`."""

        def invalidate() -> None:
            if self._file is None:
                return
            self._file.truncate(pages)
            if self.count > pages:
                self._count_records()
            self._put_header(self._header._replace(next_epoch=epoch))
            self._file.file.sync()

        self._surely(invalidate)

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
        """A change is complete; an update changed `page`."""
        self._header = self._header._replace(epoch=epoch, next_epoch=epoch)
        with self._failing_softly("written"):
            if self._file is None:
                return
            if page is not None and page < self.count:
                self._hash_again(page)
            self._put_header(self._header)

    def healed(self, page: int) -> None:
        """A damaged page was restored: bring its record up to date, if there is one."""
        with self._failing_softly("written"):
            if self._file is None or page >= self.count:
                return
            old, fresh = self._file.get(page, self._stream_id), self._hashed(page)
            if old is None or not old.known or old.digest != fresh.digest:
                self._hash_again(page)
            elif fresh._replace(chain=old.chain) != old:
                self._file.put(page, [fresh._replace(chain=old.chain)], self._stream_id)

    def _hash_again(self, page: int) -> None:
        """Replace the record of a page, and the chains from there on: later, if they are many."""
        assert self._file is not None
        before = self._file.get(page - 1, self._stream_id) if page else None
        if self._walked is None and before is not None and page > self._chained_from:
            self._walked, self._walked_chain = page, before.chain
        elif self._walked is None or page < self._walked:
            self._walk_from_start()
        self._file.put(page, [self._hashed(page)], self._stream_id)
        self._next_doubtful()
        if self._walked is not None:
            self.on_doubt()

    def _walk_from_start(self) -> None:
        self._walked, self._walked_chain, self._chained_from = 0, NO_CHAIN, 0

    def _hashed(self, page: int) -> PageSum:
        """The record of a page as it is in the file now, without a chain."""
        return self._record(hash_page(self._stream.read(PAGE_SIZE, page_start(page)), page))

    # Completion: records that are missing or doubtful are made again, a page at a time.

    def incomplete(self, pages: int) -> bool:
        """Whether a record of the first `pages` pages is missing or was not checked."""
        return self.count < pages or self._walked is not None or not self._compared

    def compare_chain(self, page: int, known: KnownChain | None) -> None:
        """All records of the pages before `page` are made: compare them with the chain that the
        commit record has. If they differ, nothing shows which pages are those that were
        committed."""
        if not self.usable or self._compared or self.count < page:
            return
        self._compared = True
        if known is not None and self._differs(known):
            self.refuted = True
            _log.error("%s: %s; its pages are not verified", self._path, known.refuted())

    def _differs(self, known: KnownChain) -> bool:
        if known.first == self._chained_from:
            return self.chain != known.chain
        walk = ChainWalk(known)
        with self._failing_softly("read"):
            assert self._file is not None
            for page in range(known.first, known.stop):
                record = self._file.get(page, self._stream_id)
                walk.add(page, record.digest if record is not None and record.known else None)
        return walk.fits is False

    def next_to_hash(self, pages: int) -> int | None:
        """The next page whose record has to be made; None if there is none among the first
        `pages`. Mends chains on the way."""
        page: int | None = None
        with self._failing_softly("written"):
            page = self._next_doubtful()
            if page is None and self._walked is None and self.count < pages:
                page = self.count
        return page if self.usable else None

    @property
    def walking(self) -> bool:
        """Whether records are still to be checked: call `next_to_hash` again."""
        return self._walked is not None

    def _next_doubtful(self) -> int | None:
        """Check the next records; returns the first page whose record has to be made again."""
        if self._walked is not None and self._walked < self.count and self._file is not None:
            first, stop = self._walked, min(self._walked + _MANY, self.count)
            for at, each in enumerate(self._file.get_many(first, stop, self._stream_id), first):
                if each is None or not each.known or not self._trusts(at):
                    return at
                self._walk_on(at, each)
        if self._walked is not None and self._walked >= self.count:
            self.chain = self._walked_chain if self.count else NO_CHAIN
            self._walked, self._walked_chain = None, NO_CHAIN
            if self._file is not None:
                self._put_header(self._header._replace(trusted=ALL_TRUSTED))
        return None

    def _walk_on(self, page: int, record: PageSum) -> None:
        assert self._file is not None
        now = self._chained(record, self._walked_chain, page)
        if record != now:
            self._file.put(page, [now], self._stream_id)
        self._walked, self._walked_chain = page + 1, now.chain

    def hashed(self, page: int, found: PageHash | None) -> None:
        """The page that `next_to_hash` returned has this hash; None: it is damaged."""
        with self._failing_softly("written"):
            if found is None:
                self.damaged += 1
                what = "page %d (from byte %d on) is damaged; it has no checksum"
                _log.error("%s: " + what, self._path, page, page_start(page))
            record = self._record(found)
            self.made += 1
            if page == self.count and self._walked is None:
                self._append([self._chained(record, self.chain, page)])
            elif page == self._walked:
                self._replace(page, record)

    def _replace(self, page: int, record: PageSum) -> None:
        file = self._opened()
        old = file.get(page, self._stream_id)
        if old is not None and old.known and old.digest != record.digest:
            _log.warning(
                "%s: the entries of page %d (from byte %d on, up to entry %d) do not match the "
                "checksum that they had before another program wrote the stream: it changed "
                "them, or they are damaged",
                *(self._path, page, page_start(page), old.next_number - 1),
            )
        record = self._chained(record, self._walked_chain, page)
        file.put(page, [record], self._stream_id)
        self._walked, self._walked_chain = page + 1, record.chain

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

    def _failing_softly(self, what: str) -> _FailingSoftly:
        return _FailingSoftly(self, what)

    def _give_up(self, what: str, error: Exception) -> None:
        self.close()
        self.count, self.chain, self._walked = 0, NO_CHAIN, None
        why = error.what if isinstance(error, UntrustedFile) else str(error)
        _log.warning(
            "%s: checksums cannot be %s (%s); the pages of the stream are not verified",
            *(self._path, what, why),
        )


class _FailingSoftly:
    """A block in which a refusal of the system ends the use of the sidecar."""

    __slots__ = ("_keeper", "_what")

    def __init__(self, keeper: SumsKeeper, what: str) -> None:
        self._keeper = keeper
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OSError | UntrustedFile):
            self._keeper._give_up(self._what, error)
            return True
        return False
