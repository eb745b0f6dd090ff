"""Makes stream files, and opens them for writing.

Acquires the writer's lock, and recovers from a crash that interrupted an update, an operation, or a
sync. ``docs/FILE.md`` has the reasons.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import secrets
from collections.abc import Callable, Sequence

from datastreamer._codec import scan
from datastreamer.errors import (
    BadArgument,
    CorruptEntries,
    FileExists,
    FileReplaced,
    StreamLocked,
)
from datastreamer.format import (
    HEADER_PAGE_SIZE,
    PACKET_PADDING,
    PAGE_SIZE,
    U64_MAX,
    Header,
    page_start,
)
from datastreamer.storage.disk.atomic_file import (
    BEGUN,
    keep_beside,
    new_file,
    remove_left_overs,
)
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk, boot_id, read_ahead
from datastreamer.storage.disk.identity import OpenPath
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.inspect import is_running
from datastreamer.storage.header.judgement import Judgement, judge, sums_up_to
from datastreamer.storage.header.page import HeaderPage
from datastreamer.storage.header.records import Change, CommitRecord, Head
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.completer import MadeSums
from datastreamer.storage.pages.hashes import EMPTY, NO_CHAIN, EndSum, SealedTail, last_page
from datastreamer.storage.pages.proof import KnownChain, known_chains
from datastreamer.storage.read.open_file import open_file, os_error
from datastreamer.storage.write.owned_file import OwnedFile
from datastreamer.storage.write.sync_policy import SyncPolicy, write_again
from datastreamer.storage.write.undo_after_crash import undo_update
from datastreamer.storage.write.writer import StreamWriter

_log = logging.getLogger(__name__)


def create_stream(
    path: str | os.PathLike[str],
    header: Header,
    *,
    sync: SyncPolicy = "commit",
    disk: Disk | None = None,
) -> StreamWriter:
    """Make an empty stream, durably, and open it for writing.

    Raises `BadArgument` for a header whose fields have other values than theirs, and `FileExists`
    if there is anything at `path`.
    """
    _check_number("stream version is a byte", header.version, 255)
    _check_number("system id is a u64", header.system_id, U64_MAX)
    _check_number("stream type is a u64", header.stream_type, U64_MAX)
    disk = disk or OsDisk()
    name = os.fspath(path)
    if disk.exists(name):
        raise FileExists(name, "exists already; open it, or choose another path")
    page = records.new_page(header)
    records.put_settled(page, header, EMPTY, secrets.token_bytes(16), 0, boot_id())
    try:
        with new_file(disk, name) as file:
            file.resize(HEADER_PAGE_SIZE + PAGE_SIZE)
            file.write(page, 0)
    except FileExistsError:
        raise FileExists(name, "exists already; open it, or choose another path") from None
    except OSError as error:
        raise os_error(name, error, "cannot be created", "no such folder") from error
    return open_to_write(name, sync=sync, disk=disk)


def _check_number(what: str, number: int, most: int) -> None:
    try:
        if 0 <= operator.index(number) <= most:
            return
    except TypeError:
        pass
    raise BadArgument(f"the {what}, not {number!r}")


def open_to_write(
    path: str | os.PathLike[str],
    *,
    stream_type: int | None = None,
    sync: SyncPolicy = "commit",
    disk: Disk | None = None,
    accept: bool = False,
) -> StreamWriter:
    """Open an existing stream file for writing, and acquire its lock.

    `accept`: discard all checksums; the bytes that the file has now are the stream. Raises the
    subclasses of `errors.StreamFileError`.
    """
    disk = disk or OsDisk()
    shown = os.fspath(path)
    file = open_file(disk, path, shown, write=True)
    read_ahead(file, False)
    try:
        page = HeaderPage.of(file)
        page.header(shown, stream_type)
        if not file.lock():
            raise locked_by(page, shown)
        why = OpenPath(disk, shown, file).difference()
        if why:
            raise FileReplaced(shown, f"{why}, before it was open; nothing was written")
        journal_path = journal.path_of(path)
        for left in (shown, journal_path + journal.SUFFIX):
            remove_left_overs(disk, left, file.access())
        remove_left_overs(disk, shown, file.access(), BEGUN)
        updating = disk.exists(journal_path + journal.SUFFIX)
        undone = undo_update(disk, file, journal_path, shown)
        page = HeaderPage.of(file)
        header = page.header(shown, stream_type)
        judged = judge(file, page, shown, header)
        chains = [] if accept else known_chains(judged.record, judged.head)
        if updating or accept:
            # The record may have the hash from before the update or the one after it.
            judged = judged._replace(end_sum=None)
        sealed, sums = _sums_or_seal(file, shown, judged)
        writer = StreamWriter(OwnedFile(file, shown, page, sealed, disk, sums), sync)
        _take_over(writer, judged, chains, undone, accept=accept)
        writer.floor.settle()
        writer.sums_completer.start()
        return writer
    except OSError as error:
        file.close()
        raise os_error(shown, error, "cannot be opened for writing") from error
    except BaseException:
        file.close()
        raise


def make_sums(
    path: str | os.PathLike[str],
    *,
    accept: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MadeSums:
    """Complete the sidecar of the stream at `path`: take the file over, then read the pages that
    lack a record.

    `accept`: discard it first, and take the bytes that the file has now for the stream. Raises what
    `open_to_write` raises, and `WriteFailed` if the sidecar cannot be written.
    """
    with contextlib.closing(open_to_write(path, accept=accept)) as writer:
        return writer.sums_completer.complete(progress)


def _sums_or_seal(file: File, path: str, judged: Judgement) -> tuple[Judgement, PageSums]:
    """The hashes of the entries up to the end.

    If those in the last page are not those that were written, the page is sealed: the stream
    continues in the next page, and the damaged one keeps the checksum that it had.
    """
    head, known = judged.head, judged.end_sum
    sums = sums_up_to(file, head, known)
    if sums is not None:
        return judged, sums
    page = last_page(head.length)
    start, stop = page_start(page), page_start(page + 1)
    _log.error(
        "%s: the entries in bytes %d to %d, the last page, do not match their checksum, they are "
        "damaged; new entries go to the next page (`datastreamer verify` lists all damage)",
        *(path, start, head.length),
    )
    chain, chained_from, tail = known or EndSum(NO_CHAIN, page, NO_CHAIN)
    sums = PageSums(
        page,
        chain=chain,
        chained_from=chained_from,
        end=head.length if head.length < stop else _entries_end(file, start),
        tail=SealedTail(tail),
    )
    header = judged.header._replace(total_length=stop)
    return judged._replace(head=Head(stop, head.entries), header=header), sums


def _entries_end(file: File, start: int) -> int:
    """The offset at which the entries of a damaged page seem to end; `start` is the page's."""
    content = file.read(PAGE_SIZE, start)
    try:
        return start + scan(content, None, file_offset=start).end
    except CorruptEntries:
        return start + PAGE_SIZE


def _take_over(
    writer: StreamWriter,
    judged: Judgement,
    chains: Sequence[KnownChain],
    undone: bool,
    *,
    accept: bool,
) -> None:
    """Make the file this writer's: truncate what is not whole, sync, write a new record. `chains`
    are what the commit record had, perhaps from before an update that was interrupted."""
    owned, space, record = writer.owned, writer.uncommitted, judged.record
    sealed = owned.head != judged.head
    head, page = owned.head, HeaderPage(owned.page)
    owned.end.sequence = page.synced[0].sequence if page.synced else 0
    before = records.get_writer(page)
    unfinished = before is not None and before.open and before.may_lose
    cut = record is not None and record.after != judged.head
    # A truncation with no commit after it.
    truncated = any(change[1:] == (head.entries, None) for change in page.changes)
    if cut:
        assert record is not None
        keep_cut_bytes(owned, record, judged.head)
    if undone or (record is None and page.synced) or page.changing:
        # Another program may have truncated entries; or a change was interrupted, and readers that
        # saw it begin have to learn of its end.
        owned.epoch += 1
        owned.clear_changes()
    elif cut or unfinished:
        # Readers may have seen entries after this end, which others are about to replace. Whether
        # there were any is unknown if the header page, too, is as it was before them.
        owned.epoch += 1
        _note_loss(owned, judged.epoch, head)
    if accept:
        owned.sums.discard()
    owned.sums.take_over(
        last_page(head.length),
        recorded=judged.epoch,
        epoch=owned.epoch,
        chains=chains,
        foreign=page.foreign,
    )
    owned.continue_chain()
    if sealed:
        owned.file.write(bytes([PACKET_PADDING]), judged.head.length)
    space.room.round_up()
    if record is not None:
        space.release_left_over(record)
    if cut or truncated or unfinished:
        owned.note_truncated(space.room.size)
    space.room.grow(head.length)
    if record is not None:
        # What was not synced may still be on its way to the disk; and if a sync failed, the
        # system may have marked it clean without having written it.
        write_again(owned.file, record.base, judged.head)
    owned.file.sync()
    # Until the new epoch is on disk, the next open has to find that a power cut took something.
    owned.may_lose = unfinished or writer.durability.policy != "commit"
    owned.write_writer(open=True, may_lose=owned.may_lose)
    owned.write_clean()
    owned.clear_doubt()
    owned.file.sync()
    owned.sums.changed(owned.epoch)
    owned.summaries.take_over()


def _note_loss(owned: OwnedFile, before: int, head: Head) -> None:
    """Write that the stream was truncated to `head` after the epoch `before`. A relay's entries up
    to there agree with the upstream as before."""
    owned.write_span(records.put_change(owned.page, Change(owned.epoch, head.entries, None)))
    agreement = records.get_agreement(owned.page)
    if agreement is not None and agreement.own_epoch == before:
        agreement = agreement._replace(own_epoch=owned.epoch)
        owned.write_span(records.put_agreement(owned.page, agreement))


def keep_cut_bytes(owned: OwnedFile, record: CommitRecord, cut: Head) -> None:
    """Copy what is about to be truncated to `cut` to a file beside the stream, and log that."""
    kept = record.after
    side = keep_beside(
        owned.disk, owned.path, "cut", owned.page, owned.file, cut.length, kept.length
    )
    if record != HeaderPage(owned.page).record:
        why = "did not reach the disk after a sync that failed"
    elif record.boot_id != owned.boot:
        why = "did not reach the disk before the power cut"
    else:
        why = (
            "are not what was written, though the machine has not restarted since (its disk "
            "was detached or failed, or the file is damaged)"
        )
    _log.warning(
        "%s: entries %d to %d (bytes %d to %d) %s; the stream is truncated to %d entries; "
        "the header page and those bytes are kept in %s",
        owned.path,
        cut.entries,
        kept.entries - 1,
        cut.length,
        kept.length,
        why,
        cut.entries,
        side,
    )


def locked_by(page: bytes, path: str) -> StreamLocked:
    """The error for a lock that another process holds. The header page names the process that
    opened the stream last; while another opens or repairs the file, that process has ended."""
    writer = records.get_writer(page)
    return StreamLocked(path, writer.pid if writer and is_running(writer) else 0)
