"""One connection of the stream's source, from its request for the lease to its end.

Owns the order of its operations and of their answers, and how long it may be silent or slow. The
loop never waits for the disk: what may have to is done in a thread. Who may publish stands in
`publishing.py`, what an operation does to the file in `published.py`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import trio

from datastreamer.errors import CommitInDoubt, DatastreamerError
from datastreamer.format import (
    RESULT_BAD_OPERATION,
    RESULT_FENCED,
    RESULT_IN_DOUBT,
    RESULT_NO_LEASE,
    RESULT_NOT_WRITTEN,
    RESULT_TOO_SLOW,
)
from datastreamer.metrics.counters import kind_of
from datastreamer.protocol import messages
from datastreamer.protocol.publishing import (
    ADDS,
    Add,
    Commit,
    PublishQuery,
    Receipt,
    Request,
    RequestParser,
    Rollback,
    Wrong,
    encode_lease,
    encode_receipt,
    encode_refusal,
)
from datastreamer.server.admission.gate import Pace
from datastreamer.server.publish.apply import (
    CLOSING,
    OperationRefused,
    PublishedOperation,
    commit_together,
)
from datastreamer.server.publish.lease import PublishLease
from datastreamer.storage.write.writer import PendingCommit
from datastreamer.transport.server_stream import Transport

_log = logging.getLogger(__name__)

# An operation up to this is committed in the loop's own turn: in less time than a thread begins.
_AT_ONCE: Final = 64 << 10
# Of operations that are not on disk nothing more is read behind so much.
_UNSYNCED_BYTES: Final = 64 << 20
# Of those that come together so many become part of the stream together, at the most.
_TOGETHER: Final = 256
# The others have their turn after so many operations.
_OPERATIONS_A_TURN: Final = 64


class _Answer(NamedTuple):
    """An answer that waits for its turn: bytes, or a receipt for what is on disk then."""

    told: bytes
    first: int = 0
    entries: int = 0
    pending: PendingCommit | None = None
    size: int = 0


class PublishSession:
    """What one source does. `receive` gives what comes behind `received`, none at the end."""

    def __init__(
        self,
        desk: PublishLease,
        transport: Transport,
        receive: Callable[[], Awaitable[bytes]],
        received: bytes,
    ) -> None:
        self.source_id = b""
        self.left = trio.Event()
        """It has done all that it will do to the stream."""
        self._desk = desk
        self._stream = desk.stream
        # How many entries were on disk when the path of the stream was last known to lead there.
        self._synced = 0
        self._terms = desk.terms
        self._counts = desk.counts
        self._transport = transport
        self._receive = receive
        self._parser = RequestParser(desk.stream.header.stream_type, received)
        self._lease = 0.0
        self._operation: PublishedOperation | None = None
        # What was refused before the operation's commit came; the commit is told.
        self._refused = b""
        self._refused_first = 0
        # When it was last heard, and since when an operation, or half a request, is there.
        self._heard = 0.0
        self._begun = math.inf
        self._answers: deque[_Answer] = deque()
        self._unsynced = 0
        self._news = trio.Event()
        self._taken = trio.Event()
        self._reading = trio.CancelScope()
        self._ended = False
        self._last = b""
        # Why the server could not write, as it was last logged.
        self._said = ""
        rate = desk.terms.max_operations_per_second
        self._pace = None if rate is None else Pace(rate, trio.current_time())

    # The lease.

    async def run(self, query: PublishQuery) -> bytes:
        """Serve the source, which may publish, until it is done; gives the last Result that it is
        to be told."""
        peer = self._transport.peer
        self.source_id = query.source_id
        try:
            lease = await self._desk.grant(query, self)
        except OperationRefused as refused:
            _log.info("%s: may not publish now: %s", peer, refused, extra={"peer": peer})
            return self._counted(refused)
        try:
            told = {"peer": peer, "epoch": lease.epoch, "entry": lease.total_entries}
            words = "%s: publishes with epoch %d from entry %d on"
            _log.info(words, peer, lease.epoch, lease.total_entries, extra=told)
            self._lease, self._synced = lease.lease_ms / 1000, lease.total_entries
            self._queue(_Answer(encode_lease(lease)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._acknowledge)
                await self._take_requests()
                await self._forget_aside()
                self._leave()
                self._ended = True
                self._news.set()
        finally:
            self._leave()
        _log.info("%s: publishes no more", peer, extra={"peer": peer})
        return self._last

    def fence(self, epoch: int, *, again: bool) -> None:
        """Another has the lease, or the same source on another connection: do nothing more."""
        who = "this source, on another connection," if again else "another source"
        if not self._last:
            self._last = self._refusal(RESULT_FENCED, f"{who} has the lease, with epoch {epoch}")
        self._reading.cancel()

    def finish(self) -> None:
        """The server ends: answer what was committed, take nothing more."""
        self._reading.cancel()

    def _leave(self) -> None:
        if not self.left.is_set():
            self._desk.release(self)
            self.left.set()

    # Requests.

    async def _take_requests(self) -> None:
        """Until the source is done, or has to be."""
        parser, asked = self._parser, 0
        ahead: Request | None = None
        self._heard = trio.current_time()
        with self._reading:
            while not self._reading.cancel_called:
                request = parser.next_request() if ahead is None else ahead
                ahead = None
                if request is None:
                    if self._operation is None and not parser.pending:
                        self._begun = math.inf
                    if not await self._hear():
                        return
                    continue
                if type(request) is Commit and self._operation is None and not self._refused:
                    commits, ahead = self._gather(request)
                    if len(commits) > 1 and self._take_together(commits):
                        await self._make_room()
                        await trio.lowlevel.checkpoint()
                        continue
                    for request in commits[:-1]:
                        told = await self._obey(request)
                        if told or self._reading.cancel_called:
                            self._last = self._last or told
                            return
                    request = commits[-1]
                told = await self._obey(request)
                if told:
                    # (Of one that was fenced meanwhile, that is the last word.)
                    self._last = self._last or told
                    return
                asked += 1
                if asked % _OPERATIONS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()

    def _gather(self, first: Commit) -> tuple[list[Commit], Request | None]:
        """This and those behind it that may go into the file together; and the request behind
        these, if it is there."""
        gathered, size = [first], len(first.payload)
        if self._pace is not None:
            return gathered, None
        most = min(_TOGETHER, self._terms.max_underway - len(self._answers))
        due = first.first + first.entries
        while len(gathered) < most:
            request = self._parser.next_request()
            if type(request) is not Commit or request.first != due:
                return gathered, request
            size += len(request.payload)
            if size > _AT_ONCE:
                return gathered, request
            gathered.append(request)
            due += request.entries
        return gathered, None

    def _take_together(self, commits: list[Commit]) -> bool:
        """Whether all of them are part of the stream now; else nothing has happened."""
        size = sum([len(commit.payload) for commit in commits])
        most = self._terms.max_operation_bytes
        if any(len(commit.payload) > most for commit in commits):
            return False
        if commits[0].first != self._stream.next_entry or not self._stream.takes_at_once(size):
            return False
        pending = commit_together(self._stream, self, commits)
        if pending is None:
            return False
        self._begun = math.inf
        counts = self._counts
        counts.published_operations += len(commits)
        counts.published_bytes += size
        self._unsynced += size
        for commit in commits:
            counts.published_entries += commit.entries
            told = _Answer(b"", commit.first, commit.entries, pending, len(commit.payload))
            self._answers.append(told)
        self._news.set()
        return True

    async def _hear(self) -> bool:
        """Receive something; False where nothing more comes in time, or at all."""
        now = trio.current_time()
        if self._operation is not None or self._parser.pending:
            self._begun = min(self._begun, now)
        lease, operation = self._heard + self._lease, self._begun + self._terms.operation_timeout
        with trio.move_on_at(min(lease, operation)):
            try:
                data = await self._receive()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            self._heard = trio.current_time()
            self._parser.receive(data)
            return bool(data)
        if self._reading.cancel_called:
            return False
        self._last = self._too_slow() if operation < lease else self._silent()
        return False

    def _too_slow(self) -> bytes:
        seconds = self._terms.operation_timeout
        return self._refusal(RESULT_TOO_SLOW, f"an operation was open for {seconds:g} s")

    def _silent(self) -> bytes:
        return self._refusal(RESULT_NO_LEASE, f"nothing came for {self._lease:g} s")

    async def _obey(self, request: Request) -> bytes:
        """Do what was asked; gives the Result that ends the connection, if one does."""
        if isinstance(request, Wrong):
            return self._refusal(request.number, request.why)
        if isinstance(request, ADDS):
            if trio.current_time() > self._begun + self._terms.operation_timeout:
                return self._too_slow()
            return await self._take_entries(request)
        if isinstance(request, Rollback):
            self._queue(_Answer(await self._forget_aside()))
        else:
            self._queue(_Answer(b"", -1))
        await self._make_room()
        return b""

    async def _take_entries(self, request: Add | Commit) -> bytes:
        operation = self._operation
        first = request.first
        under = self._refused_first if self._refused else operation.first if operation else first
        if first != under:
            why = f"a request for an operation from entry {first} on, where {under} is open"
            return self._refusal(RESULT_BAD_OPERATION, why)
        if operation is None and not self._refused and self._pace is not None:
            await self._wait(self._pace.step(trio.current_time()))
        size = len(request.payload)
        try:
            if not self._refused:
                at_once = (
                    operation is None
                    and isinstance(request, Commit)
                    and size <= _AT_ONCE
                    and first == self._stream.next_entry
                    and self._stream.takes_at_once(size)
                )
                if at_once:
                    pending = self._apply(request)
                else:
                    pending = await trio.to_thread.run_sync(self._apply, request)
                if isinstance(request, Commit):
                    self._committed(request, pending)
            elif isinstance(request, Commit):
                answer, self._refused, self._begun = self._refused, b"", math.inf
                self._queue(_Answer(answer))
        except OperationRefused as refused:
            self._operation = None
            told = self._counted(refused)
            if refused.number in CLOSING:
                return told
            if isinstance(request, Commit):
                self._begun = math.inf
                self._queue(_Answer(told))
            else:
                self._refused, self._refused_first = told, first
        await self._make_room()
        return b""

    def _apply(self, request: Add | Commit) -> PendingCommit | None:
        """The entries into the file, and all of the operation with a Commit."""
        operation = self._operation
        if operation is None:
            most = self._terms.max_operation_bytes
            operation = PublishedOperation(self._stream, self, request.first, most)
            self._operation = operation
        if request.payload:
            operation.add(request.payload)
        return operation.commit(request.entries) if isinstance(request, Commit) else None

    def _committed(self, request: Commit, pending: PendingCommit | None) -> None:
        operation, self._operation = self._operation, None
        assert operation is not None
        self._begun = math.inf
        counts = self._counts
        if operation.compared:
            counts.published_again += 1
        else:
            counts.published_operations += 1
            counts.published_entries += request.entries
            counts.published_bytes += operation.size
        self._unsynced += operation.size
        self._queue(_Answer(b"", request.first, request.entries, pending, operation.size))

    def _forget(self) -> bytes:
        """Roll back; gives the Result."""
        operation, self._operation = self._operation, None
        self._refused, self._begun = b"", math.inf
        try:
            if operation is not None:
                operation.roll_back()
        except OperationRefused as refused:
            return self._counted(refused)
        return messages.OK

    async def _forget_aside(self) -> bytes:
        """As `_forget`; where the operation has bytes in the file, the system takes some 30 ms
        a GB to free them."""
        if self._operation is not None and self._operation.size > _AT_ONCE:
            return await trio.to_thread.run_sync(self._forget)
        return self._forget()

    async def _make_room(self) -> None:
        """Wait until so little waits for the disk, or for the source, that more may come."""
        before = trio.current_time()
        while len(self._answers) >= self._terms.max_underway or self._unsynced >= _UNSYNCED_BYTES:
            self._taken = trio.Event()
            await self._taken.wait()
        self._spent(trio.current_time() - before)

    async def _wait(self, seconds: float) -> None:
        if seconds:
            await trio.sleep(seconds)
            self._spent(seconds)

    def _spent(self, seconds: float) -> None:
        """That was our time, not the source's."""
        if seconds:
            self._begun += seconds
            self._heard = trio.current_time()

    # Answers.

    def _queue(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._news.set()

    async def _acknowledge(self) -> None:
        """Answer in order, each when it is true: whatever is on disk with one sync, at once."""
        answers = self._answers
        while True:
            if not answers:
                if self._ended:
                    return
                self._news = trio.Event()
                await self._news.wait()
                continue
            taken = list(answers)
            last = next((each.pending for each in reversed(taken) if each.pending), None)
            if last is not None:
                await self._on_disk(last)
            told = b"".join(map(self._told, taken))
            try:
                with trio.fail_after(max(self._lease, 1.0)):
                    await self._transport.send(told)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                # Nobody listens: the source asks again on another connection.
                self._reading.cancel()
                answers.clear()
                self._ended = True
                return
            self._counts.bytes_sent += len(told)
            for each in taken:
                self._unsynced -= each.size
                answers.popleft()
            self._taken.set()

    async def _on_disk(self, pending: PendingCommit) -> None:
        """Return when it is known of `pending`, and so of all before it, whether it is on disk."""
        try:
            if not pending.done():
                await trio.to_thread.run_sync(pending.wait)
        except DatastreamerError:
            pass  # each answer looks for itself

    def _told(self, answer: _Answer) -> bytes:
        if answer.told:
            return answer.told
        synced = self._stream.synced_entries
        try:
            self._stream.ensure_in_place()
            self._synced = synced
            if answer.pending is not None and not answer.pending.done():
                raise CommitInDoubt(self._stream.path, "it is not on disk yet")
        except DatastreamerError as error:
            if answer.first >= 0:
                return self._refusal(RESULT_IN_DOUBT, str(error))
        if answer.first < 0:
            return encode_receipt(Receipt(self._synced, 0, self._synced))
        return encode_receipt(Receipt(answer.first, answer.entries, synced))

    def _refusal(self, number: int, why: str) -> bytes:
        self._count(number, why)
        return encode_refusal(number, why)

    def _counted(self, refused: OperationRefused) -> bytes:
        self._count(refused.number, str(refused))
        return refused.answer

    def _count(self, number: int, why: str) -> None:
        self._counts.errors[kind_of(number)] += 1
        # The disk is the server's, and whoever looks after it does not see what sources are told.
        if number in (RESULT_NOT_WRITTEN, RESULT_IN_DOUBT) and why != self._said:
            self._said = why
            peer = self._transport.peer
            _log.error("%s: what it publishes is refused: %s", peer, why, extra={"peer": peer})
