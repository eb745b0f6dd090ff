"""Reads an archive and finds what is wrong in it, and deletes what nothing needs any more.

Owns what a whole archive is: objects that are what their manifests say, entries with consecutive
numbers, bookmarks that are those of the entries, manifests that follow each other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from datastreamer._codec import scan
from datastreamer.archive.archived_file import ArchivedFile, chains_at
from datastreamer.errors import CorruptEntries, DamagedArchive
from datastreamer.format import page_start
from datastreamer.storage.objects.manifest import ArchiveManifest, Row
from datastreamer.storage.objects.opened import SEGMENTS, OpenArchive, manifest_name
from datastreamer.storage.pages.hashes import NO_CHAIN

# Pages that are read at once.
_MANY = 16
KEEP_SECONDS: Final = 7 * 86400.0
_KEPT_MANIFESTS = 64
# A writer may be about to name an object that is younger.
_UNNAMED_SECONDS = 24 * 3600.0


class Checked(NamedTuple):
    """What was read of an archive: its newest manifest, and the problems."""

    newest: ArchiveManifest
    manifests: int
    objects: int
    pages: int
    problems: list[str]


def check(
    archive: OpenArchive,
    *,
    sample: int | None = None,
    against: ArchivedFile | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Checked:
    """Read all manifests, and all objects that they name, or `sample` random ones.

    `against`: compare the newest manifest with this file, too. `advance(done, total)` is called
    with bytes. Raises what is below `ArchiveError` if the archive cannot be read at all.
    """
    newest, _ = archive.newest()
    problems: list[str] = []
    # (They may be many, and large.)
    objects = {row.object: (row, row is newest.tail) for row in newest.rows}
    manifests, before = 0, (0, "")
    for each, digest in _manifests(archive, problems):
        if each.number == before[0] + 1 and manifests and each.previous != before[1]:
            problems.append(f"{manifest_name(each.number)} does not follow the one before it")
        for row in each.rows:
            objects.setdefault(row.object, (row, row is each.tail))
        manifests, before = manifests + 1, (each.number, digest)
    rows = list(objects.values())
    chain = NO_CHAIN.hex()
    for row in newest.segments:
        with _noted(problems):
            archive.ensure_chained(row, chain)
        chain = row.chain
    chosen = rows if sample is None else random.sample(rows, min(sample, len(rows)))
    pages, total, done = 0, sum(row.size for row, _ in chosen), 0
    for row, last in chosen:
        with _noted(problems):
            pages += _check_object(archive, row, last=last)
        done += row.size
        advance(done, total)
    if against is not None:
        problems += _differences(newest, against)
    return Checked(newest, manifests, len(chosen), pages, problems)


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Add damage that the block raises to the problems."""
    try:
        yield
    except DamagedArchive as error:
        problems.append(error.what)


def _manifests(archive: OpenArchive, problems: list[str]) -> Iterator[tuple[ArchiveManifest, str]]:
    """Those that can be read, from the oldest one on, each with its digest."""
    numbers = archive.numbers()
    for before, after in pairwise(numbers):
        if after != before + 1:
            problems.append(f"{manifest_name(before + 1)} is missing")
    for number in numbers:
        with _noted(problems):
            yield archive.manifest(number)


def _check_object(archive: OpenArchive, row: Row, *, last: bool) -> int:
    """Read all pages of a row's object; returns their number. Raises `DamagedArchive`."""
    footer = archive.footer(row)
    pages = len(footer.places)
    whole = row._replace(first_page=row.first_page - row.frame, pages=pages, frame=0)
    if whole.first_page != footer.first:
        raise archive.damaged(row, f"its footer names page {footer.first} as the first one")
    bookmarks: dict[bytes, int] = {}
    number = None
    for first in range(whole.first_page, whole.stop, _MANY):
        stop = min(first + _MANY, whole.stop)
        for page, content in enumerate(archive.pages(whole, first, stop, last=last), first):
            known = footer.pages[page - whole.first_page].sum
            try:
                batch = scan(content, number, file_offset=page_start(page))
            except CorruptEntries as error:
                raise archive.damaged(whole, str(error), page, page + 1) from None
            if batch.next_number != known.next_number or batch.end != known.end:
                what = "its entries are not those that the footer names"
                raise archive.damaged(whole, what, page, page + 1)
            number = batch.next_number
            bookmarks.update(batch.bookmarks())
    if dict(footer.bookmarks) != bookmarks:
        raise archive.damaged(whole, "its bookmarks are not those of its entries")
    return pages


def _differences(manifest: ArchiveManifest, source: ArchivedFile) -> Iterator[str]:
    """How the archived stream differs from a file, which may have more entries."""
    state = source.state()
    if state.head.entries < manifest.head.entries:
        yield (
            f"{source.path} has {state.head.entries} entries, and the archive "
            f"{manifest.head.entries}"
        )
    rows = [row for row in manifest.segments if row.stop <= state.pages]
    chains = chains_at(bytes(source.digests(state.pages)), [row.stop for row in rows])
    for row, chain in zip(rows, chains, strict=True):
        if row.chain != chain.hex():
            yield (
                f"{source.path} has other entries than the archive within pages "
                f"{row.first_page} to {row.stop - 1} (from entry {row.first_entry} on)"
            )
            return
    tail = manifest.tail
    if tail is not None and state.head.length >= manifest.head.length:
        end = manifest.head.length
        if not source.starts_with(tail.first_page, end, manifest.head.tail):
            yield (
                f"{source.path} has other entries than the archive in page {tail.first_page} "
                f"(from entry {tail.first_entry} on)"
            )


class Pruned(NamedTuple):
    """What a prune deletes: manifests and objects, with the objects' size in bytes."""

    manifests: list[str]
    objects: list[str]
    size: int


def prunable(archive: OpenArchive, keep_seconds: float = KEEP_SECONDS) -> Pruned:
    """What nothing needs any more: manifests older than that, except the newest 64, and objects of
    more than 24 h that no other manifest names.

    Raises what is below `ArchiveError`.
    """
    now = datetime.now(UTC)
    # Objects first: one that a later manifest names is not among them.
    objects = archive.store.list(SEGMENTS)
    manifests = archive.listed()
    if not manifests:
        return Pruned([], [], 0)
    ages = [(now - it.modified).total_seconds() for _, it in manifests[:-_KEPT_MANIFESTS]]
    old = next((at for at, age in enumerate(ages) if age < keep_seconds), len(ages))
    # An object that is older than a manifest, and not in it, is in no later one.
    number, listed = manifests[old]
    named = {
        row.object
        for each in (archive.manifest(number)[0], archive.newest()[0])
        for row in each.rows
    }
    gone = [
        each
        for each in objects
        if each.name not in named
        and each.modified < listed.modified
        and (now - each.modified).total_seconds() > _UNNAMED_SECONDS
    ]
    return Pruned(
        [each.name for _, each in manifests[:old]],
        [each.name for each in gone],
        sum(each.size for each in gone),
    )


def prune(
    archive: OpenArchive,
    found: Pruned,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Delete what `prunable` found, manifests first and the oldest first: what is left is an
    archive at each moment."""
    names = [*found.manifests, *found.objects]
    for done, name in enumerate(names, 1):
        archive.store.delete(name)
        advance(done, len(names))
    _remove_staged(archive.url)


def _remove_staged(url: str) -> None:
    """Remove what killed writers left in a folder."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return
    now = datetime.now(UTC).timestamp()
    for folder, _, names in os.walk(unquote(parts.path)):
        for name in names:
            path = os.path.join(folder, name)
            with suppress(OSError):
                if "#" in name and now - os.stat(path).st_mtime > _UNNAMED_SECONDS:
                    os.unlink(path)
