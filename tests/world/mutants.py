"""Faults planted in the package, one change of one step each, that a world must find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from datastreamer import DataStream
from datastreamer.client.link import ServerLink
from datastreamer.protocol.history import Trail
from datastreamer.protocol.publish.messages import Receipt, encode_receipt
from datastreamer.protocol.publish.publisher import SourceConnection
from datastreamer.protocol.resume import Resumable
from datastreamer.relay import joining, truncation_point
from datastreamer.relay.apply_changes import ChangeApplier
from datastreamer.relay.joining import _Joining
from datastreamer.relay.upstreams import Download
from datastreamer.relay.writer import RelayWriter
from datastreamer.server import scrub
from datastreamer.server.healer import Healer
from datastreamer.server.publish import session
from datastreamer.server.publish.lease import PublishLease
from datastreamer.server.publish.session import PublishSession
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.server.streaming.catch_up import Sender
from datastreamer.server.streaming.change_reports import ChangeReports
from datastreamer.server.streaming.feed import Feed
from datastreamer.server.streaming.send_bounds import SendBounds
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages.page_states import PageRegister, VerifiedFile
from datastreamer.storage.parts import RelayPart, WriterPart
from datastreamer.storage.write.atomic_op import AtomicOp
from tests.world.faults import (
    KILL,
    LOSE,
    ONE_WAY,
    PARTITION,
    POWER,
    REFUSE,
    REST,
    ROT,
    ROT_RELAY,
    ROT_SERVED,
    SLOW,
    TAKE_OVER,
    TRUNCATE,
    UPDATE,
)
from tests.world.planting import Mutant, changed, nothing, replaced, together


def _resumes_late(rejoin: Any) -> Any:
    def mutant(self: Resumable, connection: Any, trail: Any, header: Any) -> Any:
        result = yield from rejoin(self, connection, trail, header)
        if self._ahead is not None and len(self._ahead) > 1:
            self._ahead = self._ahead[1:]
        return result

    return mutant


def _trusts_other_servers(rejoin: Any) -> Any:
    def mutant(self: Resumable, connection: Any, trail: Any, header: Any) -> Any:
        if self._holder in (None, connection.peer) or trail.where is not None:
            yield from rejoin(self, connection, trail, header)
        else:
            self._streaming = yield from self._begin(connection, trail.next_number)

    return mutant


def _rolls_back_too_little(rejoin: Any) -> Any:
    def mutant(self: Resumable, connection: Any, trail: Any, header: Any) -> Any:
        result = yield from rejoin(self, connection, trail, header)
        if self.rollback is not None:
            found = self.rollback
            self.rollback = replace(found, to_entry=min(found.to_entry + 1, found.from_entry))
        return result

    return mutant


def _drops_out_behind(drop_out: Any) -> Any:
    def mutant(self: Broadcast, sender: Any, place: Any, start: int, sent: int) -> None:
        drop_out(self, sender, place, start, 0)

    return mutant


def _announces_more(announce: Any) -> Any:
    def mutant(self: SendBounds, head: Head) -> None:
        announce(self, Head(head.length, max(0, head.entries - 1)))

    return mutant


def _announces_nothing(announce: Any) -> Any:
    def mutant(self: SendBounds, head: Head) -> None:
        announce(self, head)
        self.unannounced = b""

    return mutant


def _hold_without_cut(hold: Any) -> Any:
    return lambda self, head: hold(self, None)


def _commits_what_arrives(advance: Any) -> Any:
    def mutant(self: RelayWriter, batch: Any, most: int) -> None:
        advance(self, batch, most)
        self.commit()

    return mutant


def _commits_late(advance: Any) -> Any:
    def mutant(self: RelayWriter, batch: Any, most: int) -> None:
        ahead = self._batches.commit_ahead
        if ahead is not None and batch.next_number == ahead and ahead % 5 == 0:
            self._size += batch.nbytes
            self._next = batch.next_number
            return
        advance(self, batch, most)

    return mutant


async def _at_once(self: PublishSession, pending: Any) -> None:
    """Does not wait for the disk."""


def _acknowledges_at_once(encoded: Any) -> Any:
    def mutant(self: PublishSession, answer: Any) -> bytes:
        if answer.encoded or answer.first < 0 or answer.pending is None:
            return bytes(encoded(self, answer))
        end = answer.first + answer.entries
        return encode_receipt(Receipt(answer.first, answer.entries, end))

    return mutant


def _takes_refusals_for_receipts(refused: Any) -> Any:
    def mutant(self: SourceConnection, answer: Any, awaited: Any) -> None:
        refused(self, answer, awaited)
        operation = None if awaited is None else awaited.operation
        if operation is not None and self.failure is not None and not self.over:
            self.failure = None
            total = operation.first + operation.entries
            operation.receipt = Receipt(operation.first, operation.entries, total)
            self.underway.remove(operation)
            self.size -= operation.size

    return mutant


class _Together:
    """A publisher is not fenced, and may go on beside the new one."""

    @staticmethod
    def lend(op: AtomicOp, lease: object) -> None:
        op.appender.lease = lease

    @staticmethod
    def start(start: Any) -> Any:
        def mutant(self: DataStream, *, lease: object = None) -> None:
            start(self, lease=self._appender.lease)

        return mutant

    @staticmethod
    def fence(session: PublishSession, epoch: int, *, again: bool) -> None:
        session.left.set()

    @staticmethod
    def leave(leave: Any) -> Any:
        def mutant(self: PublishSession) -> None:
            if self._publish_lease.holder is self:
                leave(self)

        return mutant


def _same_epoch(next_record: Any) -> Any:
    def mutant(self: PublishLease, query: Any) -> Any:
        found = next_record(self, query)
        return found._replace(epoch=max(1, self.last.epoch))

    return mutant


def _no_updates_reported(reports: Any) -> Any:
    def mutant(self: ChangeReports, changes: Sequence[Any]) -> tuple[bytes, int]:
        return b"", changes[-1].epoch

    return mutant


def _takes_for_whole(self: PageRegister, pages: Iterable[int]) -> None:
    for page in pages:
        self._matches(page, True, self._changes, self._proofs)


def _spares_whole_pages(suspect: Any) -> Any:
    def mutant(self: PageRegister, pages: Iterable[int]) -> None:
        suspect(self, [page for page in pages if not self.is_whole(page)])

    return mutant


async def _heals_nothing(self: Healer, broadcast: Any, error: Any) -> None:
    """Asks no server."""


def _keep_one_more(truncate: Any) -> Any:
    def mutant(reader: Any, common: int, commits: Any) -> int:
        return min(int(truncate(reader, common, commits)) + 1, reader.head.entries)

    return mutant


def _loses_the_last(together: Any) -> Any:
    def mutant(stream: Any, lease: object, commits: Any) -> Any:
        return together(stream, lease, commits[:-1]) if len(commits) > 1 else None

    return mutant


_LOSSES = (LOSE, LOSE, KILL)
_CUTS = (TRUNCATE, TRUNCATE, LOSE)

MUTANTS = [
    # Clients.
    Mutant(
        "a client does not compare its last entries",
        replaced(Trail, "first_difference", lambda self, batch: None),
        (TRUNCATE, PARTITION, TRUNCATE, POWER),
    ),
    Mutant(
        "a client resumes one entry too late", changed(Resumable, "_rejoin", _resumes_late), _LOSSES
    ),
    Mutant(
        "a client does not compare its entries with those of another server",
        changed(Resumable, "_rejoin", _trusts_other_servers),
        (TRUNCATE, KILL, LOSE),
        relays=2,
        several=True,
        seed=10,
    ),
    Mutant(
        "a client is rewound one entry too little",
        changed(Resumable, "_rejoin", _rolls_back_too_little),
        _CUTS,
    ),
    Mutant(
        "a client takes a silent server for a quiet one",
        replaced(ServerLink, "_look_after", lambda self, work, seconds: iter(())),
        (POWER, ONE_WAY, PARTITION),
        seed=2,
    ),
    # The broadcast and the senders.
    Mutant(
        "a client that leaves the broadcast receives its last run again",
        changed(Broadcast, "_drop_out", _drops_out_behind),
        (SLOW, ONE_WAY),
        largest=60_000,
    ),
    Mutant(
        "a truncation leaves the view where it is",
        changed(Broadcast, "hold", _hold_without_cut),
        (TRUNCATE,),
    ),
    Mutant(
        "a truncation ends no session",
        replaced(Sender, "affected", lambda *_, **__: False),
        (TRUNCATE,),
        seed=14,
    ),
    Mutant(
        "the pass over followers ignores the turn",
        replaced(Feed, "_is_current", lambda *_: True),
        (TRUNCATE,),
        followers=12,
    ),
    Mutant(
        "the pass over followers ignores the cursor",
        replaced(Feed, "_due", lambda self, form, start: list(self._members[form])),
        (TRUNCATE,),
        relays=0,  # all of them follow one server
        followers=12,
    ),
    Mutant(
        "waiting clients are not woken",
        replaced(Broadcast, "_wake_parked", nothing),
        _LOSSES,
        seed=10,
    ),
    Mutant(
        "the view keeps the pages of before a truncation",
        replaced(Broadcast, "begin_anew", nothing),
        (TRUNCATE,),
    ),
    Mutant(
        "a commit is announced to end within it",
        changed(SendBounds, "announce", _announces_more),
        _LOSSES,
    ),
    Mutant(
        "more is sent than was announced",
        replaced(SendBounds, "cut_chunk", lambda self, chunk: chunk),
        (*_LOSSES, SLOW),
        largest=60_000,
    ),
    Mutant(
        "a commit is not announced",
        changed(SendBounds, "announce", _announces_nothing),
        _LOSSES,
    ),
    # Change reports and relays.
    Mutant(
        "a relay notes an update and does not make it",
        replaced(ChangeApplier, "_update", nothing),
        (UPDATE, LOSE),
        seed=1,
    ),
    Mutant(
        "updates are not reported",
        changed(ChangeReports, "_reports", _no_updates_reported),
        (UPDATE, LOSE),
    ),
    Mutant(
        "a report is due only once",
        replaced(ChangeReports, "due", property(lambda self: not self._begun)),
        (UPDATE,),
    ),
    Mutant(
        "a relay commits whatever has arrived",
        changed(RelayWriter, "_advance", _commits_what_arrives),
        (SLOW, LOSE),
        largest=60_000,
    ),
    Mutant(
        "a relay misses the end of a commit",
        changed(RelayWriter, "_advance", _commits_late),
        (LOSE,),
        seed=10,
    ),
    Mutant(
        "a relay does not compare an upstream's entries",
        replaced(_Joining, "compare", lambda self, batch: setattr(self, "at", batch.next_number)),
        (TRUNCATE, PARTITION, KILL, TRUNCATE),
        relays=2,
        seed=6,
    ),
    Mutant(
        "a relay compares nothing before its end",
        replaced(joining, "first_compared", lambda stream, end: end),
        (TRUNCATE, PARTITION, KILL, TRUNCATE),
        relays=2,
        seed=6,
    ),
    Mutant(
        "a relay keeps one entry too much",
        changed(truncation_point, "truncation_point", _keep_one_more),
        (TRUNCATE, PARTITION, KILL, TRUNCATE),
        relays=2,
        seed=6,
    ),
    Mutant(
        "a relay ignores a shorter upstream",
        replaced(Download, "_is_followed", lambda self, state, error: False),
        (TRUNCATE,),
    ),
    # Publishing.
    Mutant(
        "a publisher takes a refusal for a receipt",
        changed(SourceConnection, "_refused", _takes_refusals_for_receipts),
        (REFUSE,),
    ),
    Mutant(
        "a taken-over publisher goes on",
        together(
            replaced(AtomicOp, "lend", _Together.lend),
            changed(DataStream, "start_atomic_op", _Together.start),
            replaced(PublishSession, "fence", _Together.fence),
            changed(PublishSession, "_leave", _Together.leave),
        ),
        (TAKE_OVER,),
        seed=11,
    ),
    Mutant(
        "a lease is granted with the epoch of the one before",
        changed(PublishLease, "_next_record", _same_epoch),
        (TAKE_OVER, LOSE),
    ),
    Mutant(
        "the epoch of a lease is not on disk",
        replaced(WriterPart, "put_source", nothing),
        (TAKE_OVER, KILL, POWER, PARTITION),
        seed=2,
    ),
    Mutant(
        "an operation is acknowledged before it is on disk",
        together(
            replaced(PublishSession, "_on_disk", _at_once),
            changed(PublishSession, "_encoded", _acknowledges_at_once),
        ),
        (REFUSE, REFUSE, POWER),
        relays=0,
        clients=1,
    ),
    Mutant(
        "operations that arrive together lose the last",
        changed(session, "commit_together", _loses_the_last),
        (LOSE,),
    ),
    # Damaged pages.
    Mutant(
        "no page is compared before it is sent",
        together(
            replaced(PageRegister, "compare", _takes_for_whole),
            replaced(VerifiedFile, "_look_at", nothing),
        ),
        (ROT, KILL, LOSE),
        largest=60_000,
        clients=3,
        pace=14.0,
    ),
    Mutant(
        "a page that was verified once is not compared again",
        changed(PageRegister, "suspect", _spares_whole_pages),
        (ROT_SERVED, LOSE, LOSE),
        largest=60_000,
        clients=2,
        pace=14.0,
    ),
    Mutant(
        "a page that was written stays damaged on the disk",
        replaced(PageRegister, "written", lambda self, page: self.suspect([page])),
        (ROT_SERVED, LOSE, LOSE),
        largest=60_000,
        clients=2,
        pace=14.0,
    ),
    Mutant(
        "the scrub passes over all pages",
        replaced(scrub, "_examine", lambda broadcast, disk, page: scrub._Turn(1, False, None)),
        (ROT_SERVED, REST),
        largest=60_000,
        clients=1,
        pace=14.0,
    ),
    Mutant(
        "a relay restores no damaged page",
        replaced(Healer, "_heal", _heals_nothing),
        (ROT_SERVED, REST),
        largest=60_000,
        clients=1,
        pace=14.0,
    ),
    Mutant(
        "a relay restores no page that its upstream has updated",
        replaced(RelayPart, "replace_page", lambda self, page, entries: ""),
        (ROT_RELAY, UPDATE, UPDATE),
        largest=60_000,
        clients=1,
        pace=10.0,
        seed=1,
    ),
]
