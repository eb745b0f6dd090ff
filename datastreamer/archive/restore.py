"""Makes a stream file from an archive.

Owns the unfinished file, ``FILE.restoring``, which a later restore continues, and what the header
page of the result says: the file may lack entries that the stream had, so its epoch is a later one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

from xxhash import xxh3_128_digest

from datastreamer._codec import scan
from datastreamer.errors import (
    BadArgument,
    DatastreamerError,
    FileExists,
    FileMissing,
    IndexFailed,
    StreamLocked,
    UnknownEntry,
    WriteFailed,
)
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE, Header, page_of, page_start
from datastreamer.storage.bookmarks._pairs import Pairs
from datastreamer.storage.bookmarks.interface import Watermark
from datastreamer.storage.bookmarks.registry import LMDB_ANEW, index_opener
from datastreamer.storage.bookmarks.trust import fingerprint
from datastreamer.storage.disk.atomic_file import new_file
from datastreamer.storage.disk.file_ops import File, OsDisk, boot_id
from datastreamer.storage.header.records import (
    NO_ID,
    Agreement,
    Change,
    Evicted,
    Head,
    put_agreement,
    put_change,
    put_evicted,
    put_magic,
    settled_page,
)
from datastreamer.storage.objects.manifest import ArchiveManifest, Row
from datastreamer.storage.objects.opened import RESTORED_EPOCHS, OpenArchive
from datastreamer.storage.objects.segment import SegmentPage
from datastreamer.storage.pages.hashes import EMPTY, NO_CHAIN, EndSum, chained
from datastreamer.storage.pages.keeper import ALL_TRUSTED
from datastreamer.storage.pages.sidecar import SUFFIX, PageSum, SumsFile, SumsHeader, identity_of
from datastreamer.storage.stream import DataStream

STAGING: Final = ".restoring"

# Pages that are fetched at once, and in how many threads.
_RUN = 8
_THREADS = 8


class Restored(NamedTuple):
    """The header of the file, and how many pages came from the archive: the others were there from
    a restore that was interrupted."""

    header: Header
    fetched: int


class _Identity(NamedTuple):
    """Which stream the file is."""

    stream_id: bytes
    epoch: int
    agreement: Agreement | None


class _Target(NamedTuple):
    """What is restored: the whole pages, the content of the last one, and the end."""

    sums: list[PageSum]
    last: bytes
    head: Head

    @property
    def end_sum(self) -> EndSum:
        if not self.head.entries:
            return EMPTY
        chain = self.sums[-1].chain if self.sums else NO_CHAIN
        return EndSum(chain, 0, xxh3_128_digest(self.last))


def restore(
    archive: OpenArchive,
    path: str | os.PathLike[str],
    manifest: ArchiveManifest,
    *,
    to_entry: int | None = None,
    from_page: int = 0,
    relay: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Restored:
    """Make the stream file `path`, with its checksums and bookmark index; durable on return.

    The file holds the entries of the manifest's stream; with `to_entry`, those before that one. It
    has the pages from `from_page` on; those before it stay in the archive alone, and the file's
    writer makes the bookmark index. It keeps the stream's id, and gets an epoch that is later than
    all in the archive. For a `relay` it gets an id of its own, and records with which upstream and
    epoch its entries agree. `path` appears when it is complete. `advance(done, total)` is called
    with bytes, from several threads.

    Raises `FileExists`, `WriteFailed`, `UnknownEntry`, `BadArgument`, `StreamLocked` for a restore
    that runs, and what is below `ArchiveError`.
    """
    disk, target = OsDisk(), os.fspath(path)
    if disk.exists(target):
        raise FileExists(target, "exists already; choose another path")
    wanted = _wanted(archive, manifest, to_entry)
    mark = _mark(archive, manifest, wanted, from_page)
    staging = target + STAGING
    identity = _identity(archive, manifest, relay=relay)
    with (
        _explained(target),
        closing(
            disk.open(staging, write=True) if disk.exists(staging) else disk.create(staging)
        ) as file,
    ):
        if not file.lock():
            raise StreamLocked(staging, 0)
        file.resize(max(file.size(), HEADER_PAGE_SIZE))
        fetched: set[int] = set()
        write = partial(
            _write_pages, archive, manifest, wanted, file, target, advance, from_page, fetched
        )
        if not _indexed(write(), target, file, wanted.head, identity, whole=mark is None):
            for _ in write():
                pass
        _finish(file, manifest, wanted, identity, mark)
        with suppress(FileNotFoundError):
            os.unlink(target + SUFFIX)
        with new_file(disk, target + SUFFIX, file.access()) as sums:
            _write_sums(sums, file, wanted, identity)
        disk.publish(staging, target)
        file.unlock()
    with DataStream.open(target) as stream:
        if mark is None:
            stream.bookmarks.wait()
        return Restored(stream.header, len(fetched) + bool(wanted.last))


@contextmanager
def _explained(target: str) -> Iterator[None]:
    """Raises what an error of the disk means for the file `target`."""
    try:
        yield
    except DatastreamerError:
        raise
    except FileExistsError:
        raise FileExists(target, "exists already; choose another path") from None
    except FileNotFoundError:
        raise FileMissing(target, "no such folder") from None
    except OSError as error:
        raise WriteFailed(target, f"it cannot be restored: {error.strerror or error}") from error


def _wanted(archive: OpenArchive, manifest: ArchiveManifest, to_entry: int | None) -> _Target:
    """Raises `UnknownEntry`."""
    head, tail = manifest.end, manifest.tail
    sums = _sums(archive, manifest)
    if to_entry is not None and to_entry != head.entries:
        if not 0 <= to_entry < head.entries:
            raise UnknownEntry(to_entry, head.entries)
        if not to_entry:
            return _Target([], b"", Head())
        page = archive.page_with(manifest, to_entry - 1)
        row = manifest.row_of(page)
        (content,) = archive.pages(row, page, page + 1, last=row is tail)
        last = content[: scan(content, None).before(to_entry).end]
        return _Target(sums[:page], last, Head(page_start(page) + len(last), to_entry))
    if tail is None:
        return _Target([], b"", Head())
    (last,) = archive.pages(tail, tail.first_page, tail.stop, last=True)
    return _Target(sums, last, head)


def _mark(
    archive: OpenArchive, manifest: ArchiveManifest, wanted: _Target, from_page: int
) -> Evicted | None:
    """The mark of a file without its first pages. Raises `BadArgument`."""
    if not from_page:
        return None
    if not 0 < from_page <= len(wanted.sums):
        raise BadArgument(
            f"the file has {len(wanted.sums)} whole pages and the last one: it cannot begin with "
            f"page {from_page}"
        )
    chain, archive_id = wanted.sums[from_page - 1].chain, bytes.fromhex(archive.id)
    return Evicted(from_page, manifest.generation, archive_id, chain, archive.url)


def _sums(archive: OpenArchive, manifest: ArchiveManifest) -> list[PageSum]:
    """The records of the whole pages, with their chains, which lead to the manifest's."""

    def pages_of(row: Row) -> list[SegmentPage]:
        return archive.footer(row).pages[row.frame : row.frame + row.pages]

    sums, chain = [], NO_CHAIN
    with closing(archive.store.in_threads(_THREADS, pages_of, manifest.segments)) as found:
        for row, pages in zip(manifest.segments, found, strict=True):
            for page in pages:
                chain = chained(chain, page.sum.digest)
                sums.append(page.sum._replace(chain=chain))
            if chain.hex() != row.chain:
                raise archive.damaged(
                    row, "the hashes of its pages do not lead to the manifest's chain"
                )
    return sums


def _write_pages(
    archive: OpenArchive,
    manifest: ArchiveManifest,
    wanted: _Target,
    file: File,
    target: str,
    advance: Callable[[int, int], None],
    from_page: int,
    fetched: set[int],
) -> Generator[Pairs, None, None]:
    """Write the pages from `from_page` on that are not there, and add the whole ones to `fetched`;
    yields the bookmarks of all on the way."""
    pages, done = len(wanted.sums), from_page * PAGE_SIZE

    def fill(run: tuple[Row, int, int]) -> Pairs:
        nonlocal done
        row, first, stop = run
        found = Pairs()
        held = _held(file, first, wanted.sums[first:stop])
        for content in held or ():
            found.take(scan(content))
        if held is None:
            for page, decode in enumerate(archive.fetched(row, first, stop), first):
                content = decode().data
                file.write(content, page_start(page))
                found.take(scan(content))
            fetched.update(range(first, stop))
        done += (stop - first) * PAGE_SIZE
        advance(done, pages * PAGE_SIZE)
        return found

    runs = [
        (row, first, min(first + _RUN, row.stop, pages))
        for row in manifest.segments
        for first in range(max(row.first_page, from_page), min(row.stop, pages), _RUN)
    ]
    with _explained(target):
        yield from archive.store.in_threads(_THREADS, fill, runs)
        file.resize(wanted.head.length)
        file.write(wanted.last, page_start(pages))
        file.resize(page_start(page_of(wanted.head.length) + 1))
    last = Pairs()
    last.take(scan(wanted.last))
    yield last


def _held(file: File, first: int, known: list[PageSum]) -> list[bytes] | None:
    """The pages from `first` on, if the file has them all."""
    found = []
    for page, each in enumerate(known, first):
        content = file.read(PAGE_SIZE, page_start(page))
        if xxh3_128_digest(content[: each.end]) != each.digest or (
            content[each.end :] != bytes(PAGE_SIZE - each.end)
        ):
            return None
        found.append(content)
    return found


def _indexed(
    parts: Generator[Pairs, None, None],
    target: str,
    file: File,
    head: Head,
    identity: _Identity,
    *,
    whole: bool,
) -> bool:
    """Empty the bookmark index of the file that gets the name `target`, and if the file is to be
    `whole`, fill it while the pages are written. False if they were not: the file has its first
    pages elsewhere, or there is no place for the index; who opens the file says why."""

    def mark() -> Watermark:
        known = fingerprint(file, identity.stream_id, identity.epoch, head.length)
        return Watermark(*head, known)

    try:
        with closing(index_opener(LMDB_ANEW)(target, True, file.access())) as index, closing(parts):
            if whole:
                index.fill(parts, mark)
            return whole
    except IndexFailed:
        return False


def _identity(archive: OpenArchive, manifest: ArchiveManifest, *, relay: bool) -> _Identity:
    stream = manifest.stream
    if not relay:
        newest = archive.newest()[0].stream.epoch
        return _Identity(manifest.stream_id, max(newest, stream.epoch) + RESTORED_EPOCHS, None)
    upstream, epoch = bytes.fromhex(stream.upstream_id), stream.upstream_epoch
    if not upstream:
        upstream, epoch = bytes.fromhex(stream.stream_id), stream.epoch
    known = None if upstream == NO_ID else Agreement(upstream, epoch, 0)
    return _Identity(secrets.token_bytes(len(NO_ID)), 0, known)


def _finish(
    file: File,
    manifest: ArchiveManifest,
    wanted: _Target,
    identity: _Identity,
    mark: Evicted | None,
) -> None:
    """Write the header page. All is on disk on return."""
    head, stream = wanted.head, manifest.stream
    file.sync()
    header = Header(stream.version, stream.system_id, stream.stream_type, *head)
    page = settled_page(header, wanted.end_sum, identity.stream_id, identity.epoch, boot_id())
    if identity.epoch:
        # Entries after these may have been committed, and others will have their numbers.
        put_change(page, Change(identity.epoch, head.entries, None))
    put_agreement(page, identity.agreement)
    if mark is not None:
        put_magic(page, marked=True)
        put_evicted(page, mark)
    file.write(page, 0)
    file.sync()


def _write_sums(sums: File, file: File, wanted: _Target, identity: _Identity) -> None:
    stream_id, epoch = identity.stream_id, identity.epoch
    written = SumsFile(sums, "")
    written.put(0, wanted.sums, stream_id)
    known = identity_of(file, stream_id)
    written.write_header(SumsHeader(stream_id, known, epoch, epoch, ALL_TRUSTED))
