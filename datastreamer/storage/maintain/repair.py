"""Repairs a stream file by what `check.py` found.

Damaged pages are restored from servers if any are named (`pages/restore.py`), and otherwise remain
in their place, or with `cut` the stream is truncated before the first one. `check.py` says where it
ends.
The order of steps: restore pages, copy what is removed to a file beside the stream, set the size,
write header and commit record in one write of their sector, write the other records, rebuild the
index. After each step, a second repair comes to the same result. Never changes a healthy file.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from datastreamer.errors import (
    DamagedFile,
    IndexFailed,
    NotAStream,
    StreamFileError,
)
from datastreamer.format import (
    EVICTED_MAGIC,
    HEADER_OFFSET,
    HEADER_PAGE_SIZE,
    MAGIC,
    MAGICS,
    PAGE_SIZE,
    Header,
    page_of,
    page_start,
)
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.registry import LMDB_ANEW
from datastreamer.storage.bookmarks.trust import TrustedIndex
from datastreamer.storage.disk.atomic_file import BEGUN, keep_beside, remove_left_overs
from datastreamer.storage.disk.dry_run import DryRun
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.judgement import hash_last_page
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import (
    NO_ID,
    Head,
    PublisherRecord,
    SyncedHeader,
    Writer,
)
from datastreamer.storage.maintain.check import PathLike, examine, opened
from datastreamer.storage.maintain.examiner import Progress
from datastreamer.storage.maintain.repair_plan import (
    Plan,
    end_before_damage,
    held,
    steps_of,
    sum_at,
)
from datastreamer.storage.maintain.report import NO_REPAIR, Examination, Report
from datastreamer.storage.pages.hashes import EndSum, last_page
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.page_states import PageRegister, VerifiedFile
from datastreamer.storage.pages.proof import KnownChain, known_chains
from datastreamer.storage.pages.records import SidecarRecords
from datastreamer.storage.pages.restore import FileHealer, HealedPages, SourcePeer, naming_refusal
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.skip_damage import lost_entries
from datastreamer.storage.write.opening import locked_by
from datastreamer.storage.write.undo_after_crash import keep_journal, undo_update

_log = logging.getLogger(__name__)

_SECTOR = 512


@dataclass(frozen=True)
class Repaired:
    """What was done: the plan, the file that keeps the truncated bytes (None: there are none), and
    the report of a check afterwards."""

    plan: Plan
    kept: str | None
    report: Report


@dataclass(frozen=True)
class Sources:
    """Where damaged pages are restored from. `trust_peer`: one server is enough for pages that have
    no checksum."""

    peers: Sequence[SourcePeer] = ()
    trust_peer: bool = False


NO_SOURCES = Sources()


def plan(
    path: PathLike,
    *,
    cut: bool = False,
    sources: Sources = NO_SOURCES,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> Plan:
    """What `repair` would do to the file. Writes nothing and needs no lock. Of a file that has a
    writer: what it would do without servers after the writer's end.

    Pages are restored in memory, where they need their size, so that the steps are those of a run.
    Raises `NotAStream` or `DamagedFile` if no repair helps, and what `verify` raises.
    """
    disk = disk or OsDisk()
    with opened(path, disk) as (file, name):
        found = examine(file, name, disk, progress)
        made = _plan(file, name, found, disk, cut=cut)
        if made.healthy or found.live:
            return made
        dry = DryRun(disk)
        return _prepare(dry.over(file, name), name, found, dry, sources, cut=cut, dry=True)[1]


def repair(
    path: PathLike,
    *,
    cut: bool = False,
    sources: Sources = NO_SOURCES,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> Repaired:
    """Repair the file, so that it opens and a check finds no problem but damaged pages; with `cut`
    none at all: the stream is truncated before the first of them.

    Raises `StreamLocked` beside a writer, `NotAStream` or `DamagedFile` if no repair helps,
    `WriteFailed` if the disk refuses (the call can be repeated), and what `verify` raises.
    """
    disk = disk or OsDisk()
    with opened(path, disk, write=True) as (file, name):
        place = journal.path_of(name)
        if not file.lock():
            raise locked_by(file.read(HEADER_PAGE_SIZE, 0).ljust(HEADER_PAGE_SIZE, b"\0"), name)
        remove_left_overs(disk, name, file.access(), BEGUN)
        first = examine(file, name, disk, progress)
        made = _plan(file, name, first, disk, cut=cut)
        if made.healthy:
            return Repaired(made, None, made.report)
        found, doing = _prepare(file, name, first, disk, sources, cut=cut)
        if first.bad_journal:
            keep_journal(disk, place, name)
        kept = _write(file, name, found, doing, disk, undone=first.half_updated)
        if doing.header is not None or found.reindex:
            _rebuild_index(file, name)
        after = examine(file, name, disk, progress)
        if doing.held:
            return Repaired(doing, kept, after.report)
        left = _plan(file, name, after, disk, cut=cut)
        problems = after.report.problems
        if left.steps or (cut and len(problems) > after.refuted):
            problem = problems[0]
            raise StreamFileError(
                name, f"is not whole after the repair: at {problem.where}: {problem.what}"
            )
        return Repaired(replace(doing, lost=left.lost), kept, after.report)


# The damaged pages.


def _prepare(
    file: File,
    path: str,
    first: Examination,
    disk: Disk,
    sources: Sources,
    *,
    cut: bool,
    dry: bool = False,
) -> tuple[Examination, Plan]:
    """The first steps of a repair: undo an update, restore pages. The file as it is then, and the
    plan for all steps. `dry`: on a `DryRun`."""
    found = first
    place = journal.path_of(path)
    if first.half_updated:
        undo = journal.find(disk, place, file.access()) if dry else None
        if undo is not None:
            file.write(undo.old, undo.offset)
        else:
            undo_update(disk, file, place, path)
        found = examine(file, path, disk)
    healed = _heal(file, path, found, disk, NO_SOURCES if cut else sources, cut=cut, dry=dry)
    if healed.steps:
        found = examine(file, path, disk)
    made = _plan(file, path, found, disk, cut=cut, undone=first.half_updated)
    if sources.peers and (made.shortened or healed.doubtful_tail):
        # Truncated, or with a new checksum of what no server has, no server could help any more.
        made = replace(made, header=None, size=found.size, steps=[], held=held(made, found))
    steps = [*healed.steps, *made.steps]
    return found, replace(made, report=first.report, healed=healed.results, steps=steps)


class Healed(NamedTuple):
    """What became of the damaged pages, and the steps."""

    results: list[HealedPages]
    steps: list[str]
    doubtful_tail: bool = False


NOTHING = Healed([], [])


def _heal(
    file: File,
    path: str,
    found: Examination,
    disk: Disk,
    sources: Sources,
    *,
    cut: bool,
    dry: bool,
) -> Healed:
    shorter = bool(sources.peers) and found.heal_end != found.kept_end
    unproven = bool(sources.peers) and found.page.lost_record
    if not (found.damaged or found.refuted or shorter or unproven) or found.unread or found.live:
        return NOTHING
    steps = []
    with contextlib.closing(FileHealer(file, path, found, disk, dry=dry)) as healer:
        results = [] if cut else healer.heal(sources.peers, trust_peer=sources.trust_peer)
        if healer.padding:
            healer.mend_padding()
        steps += [f"restore {it.described()} from {it.source}" for it in results if it.source]
        if healer.padding:
            pages = ", ".join(str(page) for page in healer.padding)
            steps.append(f"clear the padding after the entries of page {pages}")
        return Healed(results, steps, healer.doubtful_tail)


def _lost(file: File, path: str, found: Examination, disk: Disk) -> list[tuple[int, int]]:
    """The ranges of entries that cannot be read while the damaged pages remain."""
    end = found.kept_end
    if end is None or not found.damaged:
        return []
    records = SidecarRecords(
        disk,
        journal.path_of(path),
        file,
        lambda: found.page.identity,
        lambda: known_chains(found.page.known_record),
    )
    try:
        reader = Reader(file, path, end)
        known = sum_at(found, end)
        if known is not None or not found.page.foreign:
            pages = PageRegister(file, path, records, lambda: end)
            pages.judge_end(end, known)
            reader = Reader(file, path, end, data=VerifiedFile(file, pages))
        return list(lost_entries(reader))
    finally:
        records.close()


# The plan.


def _plan(
    file: File, path: str, found: Examination, disk: Disk, *, cut: bool, undone: bool = False
) -> Plan:
    page, end = found.page, found.kept_end
    if cut:
        end = end_before_damage(file, found)
    epochs = [slot.epoch for slot in page.synced]
    epochs += [] if page.known_record is None else [page.known_record.epoch]
    epochs += [] if page.mark is None else [page.mark.epoch]
    sequence = max((slot.sequence for slot in page.synced), default=0)
    stream_id = page.identity[0]
    if page.known_record is None and not page.synced:
        written = [source for source in records.get_sources(page) if source is not None]
        stream_id = max((named for named, _ in written), default=NO_ID)
    header, size, keep_from, keep_to, shortened = None, found.size, 0, 0, False
    if found.touch or (found.damaged and (cut or end is None or end != found.claimed)):
        if end is None or found.header is None or found.unread:
            if found.page[:HEADER_OFFSET] not in MAGICS:
                raise NotAStream(
                    path,
                    f"not a stream file: it does not begin with {MAGIC.decode()}; "
                    "it cannot be repaired: restore from a copy",
                )
            problems = found.report.problems
            first = next((p for p in problems if p.repair == NO_REPAIR), problems[0])
            offset = int(first.where.removeprefix("byte ")) if "byte" in first.where else 0
            raise DamagedFile(
                path, offset, f"{first.what}; it cannot be repaired: restore from a copy"
            )
        header = Header(*found.header[:3], *end)
        size = max(
            page_start(page_of(end.length) + 1), size + -(size - HEADER_PAGE_SIZE) % PAGE_SIZE
        )
        claimed = end if found.claimed is None else found.claimed
        keep_from, keep_to = end.length, min(found.size, max(claimed.length, found.reach))
        fewer = end.length < claimed.length and end.entries < claimed.entries
        shortened = fewer and not (cut or found.truncated_by_open)
    made = Plan(
        found.report,
        header,
        None if found.claimed is None else found.claimed.entries,
        size,
        keep_from,
        max(keep_from, keep_to),
        shortened,
        max(epochs, default=0) + 1,
        stream_id,
        sequence,
        [],
        [] if cut else _lost(file, path, found, disk),
        [],
    )
    made.steps.extend(steps_of(made, found, undone or found.half_updated))
    return made


# Its execution.


def _write(
    file: File, path: str, found: Examination, made: Plan, disk: Disk, *, undone: bool
) -> str | None:
    if made.header is None:
        return None
    page, end = found.page, Head(*made.header[3:])
    with naming_refusal(path):
        kept = keep_beside(disk, path, "repair", page, file, made.keep_from, made.keep_to)
        if made.size != file.size():
            file.resize(made.size)
        # What the new header covers may still be on its way to the disk.
        file.sync()
        known = None
        if not undone and found.unproven is None:
            # If the last page is damaged, the record keeps the hash that it had.
            known = sum_at(found, end)
        keeper = _take_over_sums(file, path, page, made, disk, known_chains(page.known_record, end))
        if known is None:
            sums = hash_last_page(file, end)
            if sums is None:
                raise DamagedFile(path, made.keep_from, "no entries end there after the repair")
            known = sums.sum()
        chain, chained_from = keeper.chain_before(last_page(end.length))
        if chained_from <= known.chained_from:
            known = EndSum(chain, chained_from, known.tail)
        fresh = _fresh_page(page, made, made.header, known)
        file.write(fresh[:_SECTOR], 0)
        file.sync()
        file.write(fresh[_SECTOR:], _SECTOR)
        file.sync()
        keeper.before_truncation(last_page(end.length), made.epoch)
        keeper.changed(made.epoch)
        keeper.close()
    _log.warning("%s: repaired; what was changed is kept in %s", path, kept)
    return kept


def _fresh_page(page: bytes, made: Plan, header: Header, end_sum: EndSum) -> bytearray:
    """The header page with `header` and records that confirm it; the rest as it was."""
    fresh, end, boot = bytearray(page), Head(*header[3:]), boot_id()
    fresh[:HEADER_OFFSET] = EVICTED_MAGIC if records.is_marked(page) else MAGIC
    if not records.is_marked(page):
        records.clear_evicted(fresh)
    records.put_settled(fresh, header, end_sum, made.stream_id, made.epoch, boot)
    for sequence in (made.sequence + 1, made.sequence + 2):
        records.put_synced(
            fresh, sequence & 1, SyncedHeader(sequence, made.stream_id, made.epoch, header)
        )
    records.put_mark(fresh, made.epoch, end)
    # The next open judges what an unclean end lost.
    writer = records.get_writer(page) or Writer(0, boot)
    records.put_writer(fresh, writer._replace(pid=os.getpid(), boot_id=boot))
    source = records.get_source(page, made.stream_id)
    fresh[records.SOURCE_OFFSETS[0] :] = bytes(HEADER_PAGE_SIZE - records.SOURCE_OFFSETS[0])
    second = records.SOURCE_OFFSETS[1]
    fresh[second : second + records.SOURCE.size] = bytes(records.SOURCE.size)
    claim = records.get_claim(page)
    if claim is not None:
        # The next open for writing returns the space of an interrupted operation.
        records.put_claim(fresh, claim._replace(epoch=made.epoch))
    if source is not None and source != PublisherRecord():
        for copy in range(len(records.SOURCE_OFFSETS)):
            records.put_source(fresh, copy, made.stream_id, source)
    return fresh


def _take_over_sums(
    file: File, path: str, page: HeaderPage, made: Plan, disk: Disk, chains: Sequence[KnownChain]
) -> SumsKeeper:
    """The checksums, also of what is about to be removed: they show the damage if this repair is
    interrupted."""
    keeper = SumsKeeper(disk, journal.path_of(path), file, made.stream_id)
    keeper.take_over(
        page_of(file.size()),
        recorded=page.identity[1],
        epoch=made.epoch,
        chains=chains,
        foreign=page.known_record is None and page.foreign,
    )
    return keeper


def _rebuild_index(file: File, path: str) -> None:
    """Rebuild the index as a writer does. Requires the writer's lock."""
    page = HeaderPage.of(file)
    stream_id, epoch = page.identity
    reader = Reader(file, path, Head(*page.raw[3:]))
    try:
        keeper = BookmarkKeeper(
            TrustedIndex(
                *(LMDB_ANEW, os.path.abspath(path), file, reader),
                write=True,
                stream_id=stream_id,
                epoch=lambda: epoch,
            )
        )
        try:
            keeper.rebuild()
        finally:
            keeper.close()
    except IndexFailed as error:
        raise IndexFailed(error.path, f"the stream itself is whole; {error.what}") from error
