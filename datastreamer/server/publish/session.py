"""One connection of a publisher, from its request for the lease to its end.

Owns the order of its operations and of their answers, and its time limits. The event loop never
waits for the disk: a thread does. `lease.py` decides who may publish, `apply.py` writes an
operation to the file.
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
from datastreamer.protocol.publish.messages import (
    ADDS,
    Add,
    Commit,
    PublishQuery,
    PublishRollback,
    Receipt,
    Request,
    RequestParser,
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
from datastreamer.storage.write.background import PendingCommit
from datastreamer.transport.server_stream import Transport

_log = logging.getLogger(__name__)

# An operation up to this size is committed in the event loop: starting a thread takes longer.
_AT_ONCE: Final = 64 << 10
# With this many bytes not yet on disk, no further operation is read.
_UNSYNCED_BYTES: Final = 64 << 20
# Maximum number of operations that arrived together and share one commit.
_TOGETHER: Final = 256
# Operations after which this task yields.
_OPERATIONS_A_TURN: Final = 64


class _Answer(NamedTuple):
    """An answer that waits to be sent: bytes, or a receipt to send when `pending` is on disk."""

    encoded: bytes
    first: int = 0
    entries: int = 0
    pending: PendingCommit | None = None
    size: int = 0


class PublishSession:
    """One publisher's session. `receive` returns the bytes that follow `received`; empty at the
    end."""

    def __init__(
        self,
        publish_lease: PublishLease,
        transport: Transport,
        receive: Callable[[], Awaitable[bytes]],
        received: bytes,
    ) -> None:
        self.source_id = b""
        self.left = trio.Event()
        """Set when it has done all that it will do to the stream."""
        self._publish_lease = publish_lease
        self._stream = publish_lease.stream
        # Entries on disk when the stream's path was last known to lead to the open file.
        self._synced = 0
        self._terms = publish_lease.terms
        self._counts = publish_lease.counts
        self._transport = transport
        self._receive = receive
        self._parser = RequestParser(publish_lease.stream.header.stream_type, received)
        self._lease = 0.0
        self._operation: PublishedOperation | None = None
        # The refusal of an operation whose Commit has not arrived yet; the Commit is answered with
        # it.
        self._refused = b""
        self._refused_first = 0
        # When bytes last arrived, and since when an operation or an incomplete request is open.
        self._heard_at = 0.0
        self._open_since = math.inf
        self._answers: deque[_Answer] = deque()
        self._unsynced = 0
        self._news = trio.Event()
        self._taken = trio.Event()
        self._reading = trio.CancelScope()
        self._ended = False
        self._last = b""
        # The reason that was last logged for a failed write.
        self._logged_why = ""
        rate = publish_lease.terms.max_operations_per_second
        self._pace = None if rate is None else Pace(rate, trio.current_time())

    # The lease.

    async def run(self, query: PublishQuery) -> bytes:
        """Serve the publisher until it is done; returns the last Result to send to it."""
        peer = self._transport.peer
        self.source_id = query.source_id
        try:
            lease = await self._publish_lease.grant(query, self)
        except OperationRefused as refused:
            _log.info("%s: publishing refused: %s", peer, refused, extra={"peer": peer})
            return self._counted(refused)
        try:
            encoded = {"peer": peer, "epoch": lease.epoch, "entry": lease.total_entries}
            words = "%s: publishes from entry %d on, epoch %d"
            _log.info(words, peer, lease.total_entries, lease.epoch, extra=encoded)
            self._lease, self._synced = lease.lease_ms / 1000, lease.total_entries
            self._queue(_Answer(encode_lease(lease)))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._acknowledge)
                await self._handle_requests()
                await self._forget_in_thread()
                self._leave()
                self._ended = True
                self._news.set()
        finally:
            self._leave()
        _log.info("%s: stopped publishing", peer, extra={"peer": peer})
        return self._last

    def fence(self, epoch: int, *, again: bool) -> None:
        """Another publisher, or the same one on another connection, has the lease: stop."""
        who = "this publisher, on another connection," if again else "another publisher"
        if not self._last:
            self._last = self._refusal(RESULT_FENCED, f"{who} has the lease, with epoch {epoch}")
        self._reading.cancel()

    def finish(self) -> None:
        """The server shuts down: answer what was committed, read no further requests."""
        self._reading.cancel()

    def _leave(self) -> None:
        if not self.left.is_set():
            self._publish_lease.release(self)
            self.left.set()

    # Requests.

    async def _handle_requests(self) -> None:
        """Until the publisher is done, or has to stop."""
        parser, asked = self._parser, 0
        ahead: Request | None = None
        self._heard_at = trio.current_time()
        with self._reading:
            while not self._reading.cancel_called:
                request = parser.next_request() if ahead is None else ahead
                ahead = None
                if request is None:
                    if self._operation is None and not parser.pending:
                        self._open_since = math.inf
                    if not await self._read_more():
                        return
                    continue
                if type(request) is Commit and self._operation is None and not self._refused:
                    commits, ahead = self._gather(request)
                    if len(commits) > 1 and self._commit_together(commits):
                        await self._wait_for_room()
                        await trio.lowlevel.checkpoint()
                        continue
                    for request in commits[:-1]:
                        encoded = await self._execute(request)
                        if encoded or self._reading.cancel_called:
                            self._last = self._last or encoded
                            return
                    request = commits[-1]
                encoded = await self._execute(request)
                if encoded:
                    # If it was fenced meanwhile, that is the last Result.
                    self._last = self._last or encoded
                    return
                asked += 1
                if asked % _OPERATIONS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()

    def _gather(self, first: Commit) -> tuple[list[Commit], Request | None]:
        """This Commit and those after it that may share one commit of the file; and the request
        after them, if it has arrived."""
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

    def _commit_together(self, commits: list[Commit]) -> bool:
        """Whether all of them are in the stream now; if not, none of them is."""
        size = sum([len(commit.payload) for commit in commits])
        most = self._terms.max_operation_bytes
        if any(len(commit.payload) > most for commit in commits):
            return False
        if commits[
            0
        ].first != self._stream.parts.writer.next_entry or not self._stream.parts.writer.fits(size):
            return False
        pending = commit_together(self._stream, self, commits)
        if pending is None:
            return False
        self._open_since = math.inf
        counts = self._counts
        counts.published_operations += len(commits)
        counts.published_bytes += size
        self._unsynced += size
        for commit in commits:
            counts.published_entries += commit.entries
            encoded = _Answer(b"", commit.first, commit.entries, pending, len(commit.payload))
            self._answers.append(encoded)
        self._news.set()
        return True

    async def _read_more(self) -> bool:
        """Receive bytes; False after a time limit or at the end of the connection."""
        now = trio.current_time()
        if self._operation is not None or self._parser.pending:
            self._open_since = min(self._open_since, now)
        lease, operation = (
            self._heard_at + self._lease,
            self._open_since + self._terms.operation_timeout,
        )
        with trio.move_on_at(min(lease, operation)):
            try:
                data = await self._receive()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            self._heard_at = trio.current_time()
            self._parser.receive(data)
            return bool(data)
        if self._reading.cancel_called:
            return False
        if operation < lease:
            self._last = self._too_slow()
        else:
            why = f"nothing was received for {self._lease:g} s"
            self._last = self._refusal(RESULT_NO_LEASE, why)
        return False

    def _too_slow(self) -> bytes:
        seconds = self._terms.operation_timeout
        return self._refusal(RESULT_TOO_SLOW, f"the operation was open for {seconds:g} s")

    async def _execute(self, request: Request) -> bytes:
        """Execute one request; returns the Result that ends the connection, or b""."""
        if isinstance(request, Wrong):
            return self._refusal(request.number, request.why)
        if isinstance(request, ADDS):
            if trio.current_time() > self._open_since + self._terms.operation_timeout:
                return self._too_slow()
            return await self._take_entries(request)
        if isinstance(request, PublishRollback):
            self._queue(_Answer(await self._forget_in_thread()))
        else:
            self._queue(_Answer(b"", -1))
        await self._wait_for_room()
        return b""

    async def _take_entries(self, request: Add | Commit) -> bytes:
        operation = self._operation
        first = request.first
        under = self._refused_first if self._refused else operation.first if operation else first
        if first != under:
            why = (
                f"the request is for an operation from entry {first}; the open one is from {under}"
            )
            return self._refusal(RESULT_BAD_OPERATION, why)
        if operation is None and not self._refused and self._pace is not None:
            seconds = self._pace.step(trio.current_time())
            await trio.sleep(seconds)
            self._spent(seconds)
        size = len(request.payload)
        try:
            if not self._refused:
                at_once = (
                    operation is None
                    and isinstance(request, Commit)
                    and size <= _AT_ONCE
                    and first == self._stream.parts.writer.next_entry
                    and self._stream.parts.writer.fits(size)
                )
                if at_once:
                    pending = self._apply(request)
                else:
                    pending = await trio.to_thread.run_sync(self._apply, request)
                if isinstance(request, Commit):
                    self._committed(request, pending)
            elif isinstance(request, Commit):
                answer, self._refused, self._open_since = self._refused, b"", math.inf
                self._queue(_Answer(answer))
        except OperationRefused as refused:
            self._operation = None
            encoded = self._counted(refused)
            if refused.number in CLOSING:
                return encoded
            if isinstance(request, Commit):
                self._open_since = math.inf
                self._queue(_Answer(encoded))
            else:
                self._refused, self._refused_first = encoded, first
        await self._wait_for_room()
        return b""

    def _apply(self, request: Add | Commit) -> PendingCommit | None:
        """Write the entries to the file; with a Commit, commit the operation."""
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
        self._open_since = math.inf
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
        """Roll back; returns the Result."""
        operation, self._operation = self._operation, None
        self._refused, self._open_since = b"", math.inf
        try:
            if operation is not None:
                operation.roll_back()
        except OperationRefused as refused:
            return self._counted(refused)
        return messages.OK

    async def _forget_in_thread(self) -> bytes:
        """As `_forget`, in a thread for a large operation: freeing its bytes takes the system some
        30 ms per GB."""
        if self._operation is not None and self._operation.size > _AT_ONCE:
            return await trio.to_thread.run_sync(self._forget)
        return self._forget()

    async def _wait_for_room(self) -> None:
        """Wait until few enough operations wait for the disk and few enough answers to be sent."""
        before = trio.current_time()
        while len(self._answers) >= self._terms.max_underway or self._unsynced >= _UNSYNCED_BYTES:
            self._taken = trio.Event()
            await self._taken.wait()
        self._spent(trio.current_time() - before)

    def _spent(self, seconds: float) -> None:
        """Do not count this time against the publisher."""
        if seconds:
            self._open_since += seconds
            self._heard_at = trio.current_time()

    # Answers.

    def _queue(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._news.set()

    async def _acknowledge(self) -> None:
        """Send answers in order: all that one sync has made durable, at once."""
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
            encoded = b"".join(map(self._encoded, taken))
            try:
                with trio.fail_after(max(self._lease, 1.0)):
                    await self._transport.send(encoded)
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                # The connection is lost: the publisher asks again on another one.
                self._reading.cancel()
                answers.clear()
                self._ended = True
                return
            self._counts.bytes_sent += len(encoded)
            for each in taken:
                self._unsynced -= each.size
                answers.popleft()
            self._taken.set()

    async def _on_disk(self, pending: PendingCommit) -> None:
        """Return when `pending`, and all commits before it, are on disk or have failed."""
        try:
            if not pending.done():
                await trio.to_thread.run_sync(pending.wait)
        except DatastreamerError:
            pass  # each answer checks for itself

    def _encoded(self, answer: _Answer) -> bytes:
        if answer.encoded:
            return answer.encoded
        synced = self._stream.parts.writer.durable_entries
        try:
            self._stream.parts.writer.ensure_in_place()
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
        # A failing disk is for the operator to fix, who does not see what publishers are sent.
        if number in (RESULT_NOT_WRITTEN, RESULT_IN_DOUBT) and why != self._logged_why:
            self._logged_why = why
            peer = self._transport.peer
            _log.error("%s: its operations are refused: %s", peer, why, extra={"peer": peer})
