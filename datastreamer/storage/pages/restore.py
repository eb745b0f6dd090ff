"""Restores damaged pages from servers of the same stream.

Owns which answers are accepted, and the order of writes: the damaged pages are copied beside the
stream, then each page is written and synced, then its checksum. After a kill between any two steps,
the page is whole or damaged, and the call can be repeated. The entries are those that were
committed, so the epoch stays. Connects to nothing: a `Peer` is passed in.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from xxhash import xxh3_128_digest

from datastreamer._codec import EntryBatch, scan
from datastreamer.errors import CorruptEntries, DatastreamerError, PeerError, WriteFailed
from datastreamer.format import ENTRY_HEAD_SIZE, ENTRY_HEAD_STRUCT, PAGE_SIZE, Header, page_start
from datastreamer.printable import counted
from datastreamer.storage.disk.atomic_file import keep_beside
from datastreamer.storage.disk.file_ops import Disk, File
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.records import NO_ID
from datastreamer.storage.maintain.report import Examination
from datastreamer.storage.pages.compare import RecordSource
from datastreamer.storage.pages.hashes import last_page
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.peer_sums import SumsPeer, proven_sums
from datastreamer.storage.pages.proof import KnownChain, known_chains
from datastreamer.storage.pages.records import SidecarRecords
from datastreamer.storage.pages.survey import LostPages, Survey, find_lost_pages

_log = logging.getLogger(__name__)

# Pages without checksums that one question is about, of 1 MiB each.
_MOST_UNPROVEN = 256


class Peer(Protocol):
    """A server that may have the same stream, or an archive. Its methods raise
    `DatastreamerError`."""

    @property
    def name(self) -> str:
        """Its address, for messages."""

    @property
    def only_proven(self) -> bool:
        """Whether it is asked only for pages whose checksums are proven: it may be a copy of this
        very file, and does not confirm what another one sends."""

    def header(self) -> Header:
        """The header of its stream."""

    def stream_id(self) -> bytes:
        """The id of its stream; zeros if it has none or does not report it."""

    def entries(self, first: int, stop: int, most: int) -> bytes:
        """The entries from `first` up to, not including, `stop`, as a file has them. It is an error
        if they have more than `most` bytes."""

    def close(self) -> None:
        """End the connection; a later question makes another one."""


def packed_within(most: int, batches: Iterable[EntryBatch], what: str) -> bytes:
    """The entries of `batches`. Raises `PeerError` if they have more than `most` bytes."""
    parts, size = [], 0
    for batch in batches:
        parts.append(batch.packed())
        size += len(parts[-1])
        if size > most:
            raise PeerError(f"{what} have more than {most} bytes")
    return b"".join(parts)


class SourcePeer(Peer, SumsPeer, Protocol):
    """A server that may also have checksums of the pages."""


class HealedPages(NamedTuple):
    """What became of consecutive damaged pages, from `page` up to, not including, `end_page`.

    They held the entries from `first` up to, not including, `stop`. `source` names the servers
    whose bytes were written (empty: the pages are as they were); `why` says why others' were not.
    `kept` is the file that keeps the damaged bytes.
    """

    page: int
    end_page: int
    first: int
    stop: int
    source: str
    why: str
    kept: str = ""

    def described(self) -> str:
        """The pages and their entries, for messages."""
        several = self.end_page > self.page + 1
        pages = f"pages {self.page} to {self.end_page - 1}" if several else f"page {self.page}"
        last = self.stop - 1
        entries = f"entry {last}" if last == self.first else f"entries {self.first} to {last}"
        return f"{pages} ({entries})"


class RefusedError(Exception):
    """The entries of an answer are not accepted; ``str()`` says why."""


class KnownStream(NamedTuple):
    """What is known of the stream in the file."""

    header: Header
    stream_id: bytes
    read: Callable[[int, int], bytes]
    """Reads bytes of the file at an offset."""

    def last_entry(self, page: int) -> bytes:
        """The last entry of a page that is whole."""
        content = self.read(PAGE_SIZE, page_start(page))
        batch = scan(content, None, file_offset=page_start(page))
        return content[batch.offsets[-1] : batch.end]

    def first_entry(self, page: int) -> bytes:
        """The first entry of a page that is whole."""
        content = self.read(PAGE_SIZE, page_start(page))
        return content[: ENTRY_HEAD_STRUCT.unpack_from(content)[1]]


# Which answers are accepted.


def ask(lost: LostPages, stream: KnownStream, peers: Sequence[Peer], *, trust_peer: bool) -> Answer:
    """The entries of each of the lost pages, from `peers`.

    Bytes that match the checksums are accepted from any server. Without checksums, all servers
    that answer must send the same bytes, and they must be two, or with `trust_peer` at least one.
    """
    answers: list[tuple[str, list[bytes]]] = []
    refusals: list[str] = []
    for peer in peers:
        if peer.only_proven and not lost.proven:
            refusals.append(f"{peer.name} is an archive, and these pages have no checksum")
            continue
        try:
            pages = lay_out(lost, _entries_of(peer, lost, stream))
        except (RefusedError, DatastreamerError, OSError) as error:
            text = str(error)
            refusals.append(text if peer.name in text else f"{peer.name}: {text}")
            continue
        answers.append((peer.name, pages))
        if lost.proven:
            return Answer(peer.name, pages, "; ".join(refusals))
    names = " and ".join(name for name, _ in answers)
    if any(pages != answers[0][1] for _, pages in answers):
        refusals.append(f"{names} send different bytes, and no checksum says which are right")
    elif len(answers) > 1 or (answers and trust_peer):
        return Answer(names, answers[0][1], "; ".join(refusals))
    elif answers:
        refusals.append(
            f"only {names} sends these entries, and there is no checksum of them: name a second "
            "server, or trust this one with --trust-peer"
        )
    return Answer("", [], "; ".join(refusals))


class Answer(NamedTuple):
    """The names of the servers (empty: no answer was accepted), the entries of each page, and why
    others were refused."""

    source: str
    pages: list[bytes]
    why: str


def _entries_of(peer: Peer, lost: LostPages, stream: KnownStream) -> bytes:
    """The entries of lost pages as a peer has them. Raises `RefusedError` for another stream."""
    theirs = peer.header()
    if theirs[:3] != stream.header[:3]:
        names = ("version", "system id", "stream type")
        pairs = zip(names, theirs[:3], stream.header[:3], strict=True)
        what = ", ".join(f"{name} {their}, not {own}" for name, their, own in pairs if their != own)
        raise RefusedError(f"it serves another stream: {what}")
    total = theirs.total_entries
    if total < lost.stop:
        raise RefusedError(
            f"it has {counted(total, style=',')}, and entry {lost.stop - 1} is needed"
        )
    first = lost.first - 1 if lost.before else lost.first
    stop = lost.stop + 1 if lost.after and total > lost.stop else lost.stop
    same_id = stream.stream_id not in (NO_ID, b"") and peer.stream_id() == stream.stream_id
    if (first, stop) == (lost.first, lost.stop) and not (same_id or lost.proven):
        raise RefusedError("nothing shows that it serves the same stream: no other page is whole")
    # Those of the pages, and the two around them.
    content = peer.entries(first, stop, (lost.end_page - lost.page + 2) * PAGE_SIZE)
    start, end = 0, len(content)
    if first < lost.first:
        own = stream.last_entry(lost.page - 1)
        start = len(own)
        if content[:start] != own:
            raise RefusedError(f"it serves another stream: its entry {first} differs")
    if stop > lost.stop:
        own = stream.first_entry(lost.end_page)
        end -= len(own)
        if content[end:] != own:
            raise RefusedError(f"it serves another stream: its entry {lost.stop} differs")
    return content[start:end]


def lay_out(lost: LostPages, content: bytes) -> list[bytes]:
    """The entries of each of the lost pages. Raises `RefusedError` if they do not fit it."""
    try:
        batch = scan(content, lost.first)
    except CorruptEntries as error:
        raise RefusedError(f"its answer is damaged: {error}") from None
    if batch.more or batch.next_number != lost.stop or batch.end != len(content):
        raise RefusedError(f"its answer ends before entry {lost.stop}")
    pages: list[bytes] = []
    start = 0
    for offset, length in zip(batch.offsets, batch.lengths, strict=True):
        if offset + ENTRY_HEAD_SIZE + length - start > PAGE_SIZE:
            pages.append(content[start:offset])
            start = offset
    pages.append(content[start:])
    if len(pages) != len(lost.digests):
        raise RefusedError(
            f"its entries {lost.first} to {lost.stop - 1} need {len(pages)} pages, not "
            f"{len(lost.digests)}"
        )
    for page, (entries, digest) in enumerate(zip(pages, lost.digests, strict=True), lost.page):
        if digest is not None and xxh3_128_digest(entries) != digest:
            raise RefusedError(f"its entries of page {page} do not match the checksum")
    if lost.end is not None:
        end = page_start(lost.end_page - 1) + len(pages[-1])
        if end != lost.end != page_start(lost.end_page):
            raise RefusedError(f"its entries end at byte {end}, and the stream at byte {lost.end}")
    return pages


# A file that no process writes.


class FileHealer:
    """The damaged pages of a file whose lock the caller holds; or with `dry` of one on a `DryRun`:
    what is restored is not logged then, and no damaged bytes are kept."""

    def __init__(
        self,
        file: File,
        path: str,
        found: Examination,
        disk: Disk,
        *,
        dry: bool = False,
    ) -> None:
        self._dry = dry
        self._file = file
        self._path = path
        self._disk = disk
        self._page = found.page
        record = found.page.known_record
        self._end = found.heal_end
        # Another program may have changed pages, but no checksums.
        named = found.page.known_ends[:1] if record else found.page.known_ends
        self._confirmed = self._end in named and not (record is None and found.page.foreign)
        self._sidecar: SidecarRecords | None = None
        self._header = found.header
        if self._confirmed:
            self._sidecar = SidecarRecords(
                disk,
                journal.path_of(path),
                file,
                lambda: found.page.identity,
                lambda: known_chains(record),
                most_computed=None,
            )
        self._records: RecordSource | None = self._sidecar
        # Without a commit record nothing proves a checksum.
        self._loose = self._sidecar if found.page.lost_record else None
        self._end_sum = record.after_sum if record is not None and self._confirmed else None
        self._chains = known_chains(record, self._end) if self._confirmed else []
        self._survey = self._examine()
        self.doubtful_tail = False
        """Whether the checksum of the last page is lost and no server that was asked has the same
        entries."""

    def _examine(self) -> Survey:
        if self._end is None:
            return Survey([], [])
        known = self._end_sum, self._chains, self._records, self._loose
        return find_lost_pages(self._file, self._end, *known)

    def close(self) -> None:
        if self._sidecar is not None:
            self._sidecar.close()

    @property
    def padding(self) -> list[int]:
        """The pages whose entries are whole and whose padding is not."""
        return [page for page, _ in self._survey.padding]

    def heal(self, peers: Sequence[SourcePeer], *, trust_peer: bool) -> list[HealedPages]:
        """Restore pages from `peers`. Raises `WriteFailed`; the call can be repeated."""
        restored: list[HealedPages] = []
        results: list[HealedPages] = []
        refusals: list[str] = []
        chain = self._survey.unproven
        if chain is not None:
            for records in proven_sums(self._file, chain, self._sidecar, peers, refusals):
                self._records = records
                self._survey = self._examine()
                results = self._from(peers, trust_peer=False)
                restored += [each for each in results if each.source]
                results = [each for each in results if not each.source]
                if not results:
                    break  # else another server may number the entries otherwise
        if self._records is self._sidecar:
            results = self._from(peers, trust_peer=trust_peer)
            if chain is not None and self._survey.refuted:
                results.append(self._in_chain(chain, "; ".join(refusals)))
        results = restored + results
        servers = [peer for peer in peers if not peer.only_proven]
        if self._page.lost_record and servers:
            results += self._compared_tail(results, servers, trust_peer=trust_peer)
        return results

    def _from(self, peers: Sequence[Peer], *, trust_peer: bool) -> list[HealedPages]:
        return [self._healed(lost, peers, trust_peer=trust_peer) for lost in self._survey.lost]

    def _healed(self, lost: LostPages, peers: Sequence[Peer], *, trust_peer: bool) -> HealedPages:
        if not lost.first < lost.stop:
            answer = Answer("", [], "the numbers of the entries around it contradict each other")
        elif not lost.proven and len(lost.digests) > _MOST_UNPROVEN:
            why = (
                f"no checksums show where these {len(lost.digests):,} pages begin and end, and at "
                f"most {_MOST_UNPROVEN} such pages are restored: make a new copy of the stream "
                "with `datastreamer relay`"
            )
            answer = Answer("", [], why)
        else:
            answer = ask(lost, self._stream(), peers, trust_peer=trust_peer)
        kept = ""
        if answer.source:
            with naming_refusal(self._path), self._sums() as sums:
                kept = self._restore(lost, answer.pages, sums)
        healed = HealedPages(*lost.span, answer.source, answer.why, kept)
        if answer.source and not self._dry:
            _log.warning("%s: %s restored from %s", self._path, healed.described(), answer.source)
        return healed

    def _compared_tail(
        self, results: list[HealedPages], peers: Sequence[Peer], *, trust_peer: bool
    ) -> list[HealedPages]:
        """The last page, whose checksum was in the commit record, is compared with what servers
        send; empty if one of them sends the same."""
        end = self._end
        if end is None or not end.entries:
            return []
        page = last_page(end.length)
        if any(page < it.end_page for it in results):
            return []
        content = self._file.read(end.length - page_start(page), page_start(page))
        first = int(ENTRY_HEAD_STRUCT.unpack_from(content)[3])
        before = page > 0 and all(it.source or it.end_page < page for it in results)
        lost = LostPages(page, first, end.entries, [None], end.length, before, False)
        for peer in peers:
            with contextlib.suppress(RefusedError, DatastreamerError, OSError):
                if lay_out(lost, _entries_of(peer, lost, self._stream())) == [content]:
                    return []
        healed = self._healed(lost, peers, trust_peer=trust_peer)
        self.doubtful_tail = not healed.source
        why = "no server sends the entries that the file has"
        return [healed._replace(why=f"{why}; {healed.why}" if healed.why else why)]

    def _in_chain(self, chain: KnownChain, why: str) -> HealedPages:
        """The pages that `chain` covers, at least one of which is damaged."""
        first, stop = (
            int(ENTRY_HEAD_STRUCT.unpack(self._file.read(ENTRY_HEAD_SIZE, page_start(page)))[3])
            for page in (chain.first, chain.stop)
        )
        return HealedPages(chain.first, chain.stop, first, stop, "", why)

    def mend_padding(self) -> None:
        """Write the padding marks that are damaged, after whole entries."""
        with naming_refusal(self._path), self._sums() as sums:
            for page, end in self._survey.padding:
                start = page_start(page)
                self._keep(start, start + PAGE_SIZE)
                self._file.write(bytes(PAGE_SIZE - end), start + end)
                self._file.sync()
                sums.healed(page)

    def _stream(self) -> KnownStream:
        assert self._end is not None
        assert self._header is not None
        return KnownStream(self._header, self._page.identity[0], self._file.read)

    def _restore(self, lost: LostPages, pages: list[bytes], sums: SumsKeeper) -> str:
        """Write the pages; returns the path of the file that keeps the damaged bytes."""
        file, start = self._file, page_start(lost.page)
        stop = max(start, min(file.size(), page_start(lost.end_page)))
        kept = self._keep(start, stop)
        for page, entries in enumerate(pages, lost.page):
            start = page_start(page)
            content = entries.ljust(PAGE_SIZE, b"\0")
            if file.size() < start + PAGE_SIZE:
                file.resize(start + PAGE_SIZE)
            file.write(content, start)
            file.sync()
            sums.healed(page)
        return kept

    def _keep(self, start: int, stop: int) -> str:
        """Copy damaged bytes beside the stream; returns the path of the copy."""
        if self._dry:
            return ""
        return keep_beside(self._disk, self._path, "repair", self._page, self._file, start, stop)

    @contextlib.contextmanager
    def _sums(self) -> Iterator[SumsKeeper]:
        stream_id, epoch = self._page.identity
        sums = SumsKeeper(self._disk, journal.path_of(self._path), self._file, stream_id)
        try:
            if self._confirmed and self._end is not None:
                pages = last_page(self._end.length)
                chains = self._chains
                sums.take_over(pages, recorded=epoch, epoch=epoch, chains=chains, foreign=False)
            yield sums
        finally:
            sums.close()


@contextlib.contextmanager
def naming_refusal(path: str) -> Iterator[None]:
    """A block of a repair: raises `WriteFailed` if the system refuses."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(
            path,
            f"the repair failed, the system refused to write: {error.strerror or error}; run it "
            "again",
        ) from error
