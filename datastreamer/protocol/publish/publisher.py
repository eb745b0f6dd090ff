"""The publisher's side of a connection: sends operations, and resends them until acknowledged.

Owns the operations that are not acknowledged yet, and what each answer means for them. Must not
know sockets or clocks. ``docs/PUBLISHING.md`` is the contract.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from datastreamer._packer import EntryPacker
from datastreamer.errors import (
    ConnectionLost,
    DatastreamerError,
    HistoryChanged,
    LeaseLost,
    NotSupported,
    NotWritten,
    OperationTooSlow,
    ProtocolViolation,
    SourceBusy,
    UsageError,
    refusal,
)
from datastreamer.format import (
    COMMAND_PUBLISH_ADD,
    COMMAND_PUBLISH_COMMIT,
    FEATURE_PUBLISH,
    HEADER_PAGE_SIZE,
    RESULT_IN_DOUBT,
    RESULT_INVALID_COMMAND,
    RESULT_NO_LEASE,
    RESULT_NOT_WRITTEN,
    RESULT_OTHER_ENTRIES,
    RESULT_PAST_THE_END,
    RESULT_TOO_LARGE,
    RESULT_TOO_SLOW,
)
from datastreamer.protocol.commands import CapabilitiesQuery, encode_command
from datastreamer.protocol.messages import Capabilities
from datastreamer.protocol.publish.messages import (
    MOST_BYTES,
    AnswerParser,
    Kind,
    Lease,
    PublishQuery,
    Receipt,
    Refusal,
    encode_publish,
    encode_where,
)

_ADD: Final = struct.Struct(">QQQI")
_COMMIT: Final = struct.Struct(">QQQII")
_LENGTH: Final = struct.Struct(">I")
# Results that refuse an operation and leave the connection open.
_LEAVES_OPEN: Final = (
    RESULT_PAST_THE_END,
    RESULT_OTHER_ENTRIES,
    RESULT_TOO_LARGE,
    RESULT_NOT_WRITTEN,
    RESULT_IN_DOUBT,
)
# Requests are joined up to about this size.
_TOGETHER: Final = 256 << 10


class Outgoing(EntryPacker):
    """The entries of an operation in progress, with their future numbers."""

    def __init__(self, first: int) -> None:
        # Everything is kept, since it may have to be sent again.
        super().__init__(1 << 62)
        self.first = first
        # Only the numbers matter, not the place in the file.
        self.begin(HEADER_PAGE_SIZE, first)

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self.next_number - self.first

    def requests(self, stream_type: int, most_bytes: int = MOST_BYTES) -> list[bytes]:
        """The whole operation as requests: Adds, then a Commit."""
        spans = [part for _, part in self.entry_parts()]
        if sum(map(len, spans)) <= most_bytes:
            joined = [b"".join(spans)]
        else:
            joined = []
            for part in (piece for span in spans for piece in _cut(span, most_bytes)):
                if joined and len(joined[-1]) + len(part) <= most_bytes:
                    joined[-1] += part
                else:
                    joined.append(part)
        last = joined.pop()
        sent = [
            _ADD.pack(COMMAND_PUBLISH_ADD, stream_type, self.first, len(part)) + part
            for part in joined
        ]
        head = (COMMAND_PUBLISH_COMMIT, stream_type, self.first, self.entries, len(last))
        return [*sent, _COMMIT.pack(*head) + last]


def _cut(span: memoryview, most: int) -> list[bytes]:
    """Cut packed entries into pieces of whole entries, of at most `most` bytes each."""
    if len(span) <= most:
        return [bytes(span)]
    pieces, start, at = [], 0, 0
    while at < len(span):
        (size,) = _LENGTH.unpack_from(span, at + 1)
        if at + size - start > most:
            pieces.append(bytes(span[start:at]))
            start = at
        at += size
    pieces.append(bytes(span[start:]))
    return pieces


@dataclass(eq=False, slots=True)
class Underway:
    """A committed operation; acknowledged once it has a `receipt`."""

    first: int
    entries: int
    requests: list[bytes]
    size: int
    receipt: Receipt | None = None
    dropped: bool = False


@dataclass(eq=False, slots=True)
class _Awaited:
    """An expected answer; for an operation, with the `round` in which it was sent."""

    kind: Kind
    operation: Underway | None = None
    round: int = 0


@dataclass(frozen=True, slots=True)
class SourceTerms:
    """The source and its requests. `epoch` 0: the next epoch, if no source holds the lease;
    `ANY_EPOCH`: the next epoch, even if one does. `next_entry` None: continue at the end."""

    stream_type: int
    source_id: bytes
    token: bytes = b""
    epoch: int = 0
    lease_ms: int = 0
    next_entry: int | None = None


class SourceConnection:
    """A source of a stream, over any number of connections.

    For each connection call `begin`; pass on what is received, and send what `take` returns.
    Operations are acknowledged in order; or there is a `failure`, which stops them until `resend`
    or `drop`. If it is `over`, it has stopped permanently.
    """

    def __init__(self, terms: SourceTerms) -> None:
        self.lease: Lease | None = None
        """The last lease granted."""
        self.granted = False
        """Whether this connection holds it."""
        self.epoch = terms.epoch
        self.next_entry = terms.next_entry or 0
        """The first entry of the next operation, if all before it are committed."""
        self.total_entries = 0
        """The total on disk, by the last answer."""
        self.underway: deque[Underway] = deque()
        """Operations without a receipt, in order."""
        self.size = 0
        """The size of these in bytes."""
        self.failure: Exception | None = None
        self.over = False
        self._terms = terms
        self._peer = ""
        self._parser = AnswerParser("")
        self._awaited: deque[_Awaited] = deque()
        self._unsent: deque[Underway] = deque()
        self._ready: list[bytes] = []
        self._round = 0

    def begin(self, peer: str) -> None:
        """Start on a new connection; everything about the previous one is void."""
        self._peer = peer
        self._parser = AnswerParser(peer)
        self._awaited.clear()
        self.granted = False
        self._ready = [encode_command(CapabilitiesQuery(), self._terms.stream_type)]
        self._awaited.append(_Awaited(Capabilities))

    def take(self) -> bytes:
        """The bytes to send now; there may be more for another call."""
        ready, self._ready = self._ready, []
        size = sum(map(len, ready))
        if self.granted and self.failure is None:
            assert self.lease is not None
            while self._unsent and size < _TOGETHER and self._may_ask(self.lease):
                operation = self._unsent.popleft()
                self._awaited.append(_Awaited(Receipt, operation, self._round))
                ready.extend(operation.requests)
                size += operation.size
        return b"".join(ready)

    def _may_ask(self, lease: Lease) -> bool:
        return len(self._awaited) < lease.most_underway

    def ask_where(self) -> None:
        """Renew the lease when nothing else does, also while answers are outstanding."""
        if self.granted and self.lease is not None and self._may_ask(self.lease):
            self._ready.append(encode_where(self._terms.stream_type))
            self._awaited.append(_Awaited(Receipt))

    @property
    def asking(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._awaited)

    def receive(self, data: bytes | memoryview) -> None:
        """Process received bytes. Raises what ends the connection: `ConnectionLost` and its
        subclasses, `LeaseLost` or `OperationTooSlow`, after which another connection may be made,
        also `NotWritten` and `SourceBusy` if there was a lease before; any other error is final."""
        try:
            self._receive(data)
        except (ConnectionLost, LeaseLost, OperationTooSlow):
            raise
        except (NotWritten, SourceBusy) as error:
            if self.lease is None:
                self.end(error)
            raise
        except DatastreamerError as error:
            self.end(error)
            raise

    def end(self, error: Exception) -> None:
        """Stop permanently with this error; a second call does nothing."""
        if not self.over:
            self.over, self.failure = True, error

    def _receive(self, data: bytes | memoryview) -> None:
        if not data:
            raise ConnectionLost(f"{self._peer} closed the connection{self._why_ended()}")
        self._parser.receive(data)
        while True:
            # The last Result may arrive without a request.
            awaited = self._awaited[0] if self._awaited else None
            answer = self._parser.next_answer(awaited.kind if awaited else Receipt)
            if answer is None:
                return
            if isinstance(answer, Refusal):
                self._refused(answer, awaited)
            elif awaited is None:
                raise ProtocolViolation(f"{self._peer} sent an answer without a request")
            elif isinstance(answer, Capabilities):
                self._probed(answer)
            elif isinstance(answer, Lease):
                self._granted(answer)
            elif isinstance(answer, Receipt):
                self._acknowledged(answer, awaited)
            if self._awaited:
                self._awaited.popleft()

    def _why_ended(self) -> str:
        if self.lease is None and self._awaited and self._awaited[0].kind is Capabilities:
            return (
                " at the first request: servers that accept no publishers do that, and servers of "
                f"another stream type than {self._terms.stream_type}"
            )
        return "; connect again"

    def _probed(self, capabilities: Capabilities) -> None:
        if not capabilities.features & FEATURE_PUBLISH:
            raise self._not_supported()
        terms = self._terms
        query = PublishQuery(terms.source_id, self.epoch, terms.lease_ms, terms.token)
        self._ready.append(encode_publish(terms.stream_type, query))
        self._awaited.append(_Awaited(Lease))

    def _not_supported(self) -> NotSupported:
        return NotSupported(f"{self._peer} accepts no publishers (serve --publish-token-file)")

    def _granted(self, lease: Lease) -> None:
        before = self.lease
        if before is None:
            if self._terms.next_entry is None:
                self.next_entry = lease.total_entries
        elif lease.stream_id != before.stream_id:
            raise HistoryChanged(
                f"{self._peer} has another stream than before",
                next_entry=self.next_entry,
                total_entries=lease.total_entries,
                first_differing=None,
            )
        self.lease, self.granted = lease, True
        self.epoch, self.total_entries = lease.epoch, lease.total_entries
        self._round += 1
        self._unsent = deque(self.underway)

    def _acknowledged(self, receipt: Receipt, awaited: _Awaited) -> None:
        self.total_entries = receipt.total_entries
        operation = awaited.operation
        if operation is None or awaited.round != self._round:
            return
        if (receipt.first_entry, receipt.entries) != (operation.first, operation.entries):
            raise ProtocolViolation(
                f"{self._peer} acknowledged {receipt.entries} entries from {receipt.first_entry} "
                f"on, but {operation.entries} from {operation.first} on were sent"
            )
        if operation is not self.underway[0]:
            raise ProtocolViolation(f"{self._peer} acknowledged an operation after a refused one")
        # In this order: a blocking caller may be interrupted anywhere, and what was not removed is
        # sent again.
        operation.receipt = receipt
        self.underway.popleft()
        self.size -= operation.size
        operation.requests = []

    def _refused(self, answer: Refusal, awaited: _Awaited | None) -> None:
        number, text = answer
        kind = None if awaited is None else awaited.kind
        if kind is Capabilities and number == RESULT_INVALID_COMMAND:
            raise self._not_supported()
        # The server may be unable to write the lease, or its own process may hold it for now.
        refused_lease = kind is Lease and number == RESULT_NOT_WRITTEN
        if number not in _LEAVES_OPEN or refused_lease:
            error = refusal(number, text, "to publish")
            if number not in (RESULT_NO_LEASE, RESULT_TOO_SLOW):
                raise error
            self.granted = False
            raise error
        operation = None if awaited is None else awaited.operation
        if operation is None:
            raise ProtocolViolation(f"{self._peer} sent Result {number} for nothing: {text}")
        assert awaited is not None
        # Operations after a refused one are refused too, for that reason alone.
        if awaited.round != self._round or self.failure is not None:
            return
        if number in (RESULT_PAST_THE_END, RESULT_OTHER_ENTRIES):
            raise HistoryChanged(
                f"{self._peer} does not hold the entries that this source continues from: {text}",
                next_entry=operation.first,
                total_entries=self.total_entries,
                first_differing=None,
            )
        self.failure = refusal(number, text, "the operation")

    def put(self, operation: Outgoing) -> Underway:
        """Send it after the previous ones. Raises the `failure`, and `UsageError` unless it begins
        with the next entry."""
        if self.failure is not None:
            raise self.failure
        if operation.first != self.next_entry:
            raise UsageError(
                f"the operation begins with entry {operation.first}, but the next entry is "
                f"{self.next_entry}: begin it again"
            )
        requests = operation.requests(self._terms.stream_type)
        made = Underway(operation.first, operation.entries, requests, sum(map(len, requests)))
        self.underway.append(made)
        self._unsent.append(made)
        self.size += made.size
        self.next_entry += made.entries
        return made

    def resend(self) -> None:
        """After a temporary `failure`: send everything without a receipt again, in order.

        Raises the failure if it is `over`.
        """
        if self.failure is None:
            return
        if self.over:
            raise self.failure
        self.failure = None
        self._round += 1
        self._unsent = deque(self.underway)

    def drop(self) -> None:
        """Drop what has no receipt; the next operation begins where the first of these did.

        For operations that a `failure` has stopped. Raises it if it is `over`.
        """
        if self.over:
            assert self.failure is not None
            raise self.failure
        if self.failure is None and self.underway:
            raise UsageError("operations are in flight and will be acknowledged: wait for them")
        self.failure = None
        self._round += 1
        if self.underway:
            self.next_entry = self.underway[0].first
        for operation in self.underway:
            operation.dropped = True
        self.underway.clear()
        self._unsent.clear()
        self.size = 0
