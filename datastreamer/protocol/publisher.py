"""A publisher's side of publishing: what it sends, and sends again until it is acknowledged.

Owns the operations that are not acknowledged yet, and what each answer means for them. Bytes in,
bytes out; knows no sockets or clocks. ``docs/PUBLISHING.md`` is the contract.
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
from datastreamer.protocol.messages import Capabilities, encode_capabilities
from datastreamer.protocol.publishing import (
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
# Results of single operations, after which the connection stands.
_STANDING: Final = (
    RESULT_PAST_THE_END,
    RESULT_OTHER_ENTRIES,
    RESULT_TOO_LARGE,
    RESULT_NOT_WRITTEN,
    RESULT_IN_DOUBT,
)
# Requests are sent together up to about so much.
_TOGETHER: Final = 256 << 10


class Outgoing(EntryPacker):
    """The entries of an operation that is being made, numbered as they will be."""

    def __init__(self, first: int) -> None:
        # All of it stays here: it may have to be sent again.
        super().__init__(1 << 62)
        self.first = first
        # Numbers count; where it will stand in the file does not.
        self.begin(HEADER_PAGE_SIZE, first)

    @property
    def entries(self) -> int:
        """How many entries it has."""
        return self.next_number - self.first

    def requests(self, stream_type: int, most_bytes: int = MOST_BYTES) -> list[bytes]:
        """All of it as requests: Adds, and a Commit behind them."""
        spans = self.entry_spans()
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
    """A run of entries in pieces of whole entries, each of `most` bytes at the most."""
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
    """An operation that was committed; acknowledged when it has a `receipt`."""

    first: int
    entries: int
    requests: list[bytes]
    size: int
    receipt: Receipt | None = None
    dropped: bool = False


@dataclass(eq=False, slots=True)
class _Asked:
    """What is to be answered next on this connection; of an operation, in which `round`."""

    kind: Kind
    operation: Underway | None = None
    round: int = 0


@dataclass(frozen=True, slots=True)
class SourceTerms:
    """Who the source is and what it asks for. `epoch` 0: the next one, where nobody holds the
    lease; `ANY_EPOCH`: the next one, whoever does. `next_entry` None: go on at the end."""

    stream_type: int
    source_id: bytes
    token: bytes = b""
    epoch: int = 0
    lease_ms: int = 0
    next_entry: int | None = None


class SourceConnection:
    """A stream's source, over as many connections as it takes.

    `begin` each of them, pass on what is received, and send what `take` gives. Then operations
    are acknowledged, in order, or there is a `failure`: why nothing goes on before `resend` or
    `drop`. Where it is `over` nothing ever will.
    """

    def __init__(self, terms: SourceTerms) -> None:
        self.lease: Lease | None = None
        """The last one granted."""
        self.granted = False
        """Whether this connection has it."""
        self.epoch = terms.epoch
        self.next_entry = terms.next_entry or 0
        """Where the next operation begins, if all before it arrive."""
        self.total_entries = 0
        """How many are on disk, as the last answer says."""
        self.underway: deque[Underway] = deque()
        """Operations without a receipt, in order."""
        self.size = 0
        """Bytes of these."""
        self.failure: DatastreamerError | None = None
        self.over = False
        self._terms = terms
        self._peer = ""
        self._parser = AnswerParser("")
        self._asked: deque[_Asked] = deque()
        self._unsent: deque[Underway] = deque()
        self._ready: list[bytes] = []
        self._round = 0

    # A connection.

    def begin(self, peer: str) -> None:
        """A new connection is there; whatever was said on another is void."""
        self._peer = peer
        self._parser = AnswerParser(peer)
        self._asked.clear()
        self.granted = False
        self._ready = [encode_capabilities(self._terms.stream_type)]
        self._asked.append(_Asked(Capabilities))

    def take(self) -> bytes:
        """What is to be sent now; may be more than one call's."""
        ready, self._ready = self._ready, []
        size = sum(map(len, ready))
        if self.granted and self.failure is None:
            assert self.lease is not None
            while self._unsent and size < _TOGETHER and self._may_ask(self.lease):
                operation = self._unsent.popleft()
                self._asked.append(_Asked(Receipt, operation, self._round))
                ready.extend(operation.requests)
                size += operation.size
        return b"".join(ready)

    def _may_ask(self, lease: Lease) -> bool:
        return len(self._asked) < lease.most_underway

    def ask_where(self) -> None:
        """Have the lease renewed, where nothing else does: also while answers are due, for
        waiting is silence."""
        if self.granted and self.lease is not None and self._may_ask(self.lease):
            self._ready.append(encode_where(self._terms.stream_type))
            self._asked.append(_Asked(Receipt))

    @property
    def asking(self) -> bool:
        """Whether an answer is due."""
        return bool(self._asked)

    def receive(self, data: bytes | memoryview) -> None:
        """Take what the server said. Raises what ends the connection: `ConnectionLost` and
        below it, `LeaseLost` or `OperationTooSlow` where another is to be made, also `NotWritten`
        and `SourceBusy` where there was a lease before; and else what ends it all."""
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

    def end(self, error: DatastreamerError) -> None:
        """Nothing goes on any more, for this reason, unless there was one before."""
        if not self.over:
            self.over, self.failure = True, error

    def _receive(self, data: bytes | memoryview) -> None:
        if not data:
            raise ConnectionLost(f"{self._peer} ended the connection{self._why_ended()}")
        self._parser.receive(data)
        while True:
            # A Result may come unasked: the last one.
            asked = self._asked[0] if self._asked else None
            answer = self._parser.next_answer(asked.kind if asked else Receipt)
            if answer is None:
                return
            if isinstance(answer, Refusal):
                self._refused(answer, asked)
            elif asked is None:
                raise ProtocolViolation(f"{self._peer} sent an answer that nobody asked for")
            elif isinstance(answer, Capabilities):
                self._probed(answer)
            elif isinstance(answer, Lease):
                self._granted(answer)
            elif isinstance(answer, Receipt):
                self._acknowledged(answer, asked)
            if self._asked:
                self._asked.popleft()

    def _why_ended(self) -> str:
        if self.lease is None and self._asked and self._asked[0].kind is Capabilities:
            return (
                " on the first question; servers that take no sources do that, and those of "
                f"another stream type: is it {self._terms.stream_type}?"
            )
        return "; connect again"

    def _probed(self, capabilities: Capabilities) -> None:
        if not capabilities.features & FEATURE_PUBLISH:
            raise self._not_supported()
        terms = self._terms
        query = PublishQuery(terms.source_id, self.epoch, terms.lease_ms, terms.token)
        self._ready.append(encode_publish(terms.stream_type, query))
        self._asked.append(_Asked(Lease))

    def _not_supported(self) -> NotSupported:
        return NotSupported(f"{self._peer} takes no operations from sources elsewhere")

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

    def _acknowledged(self, receipt: Receipt, asked: _Asked) -> None:
        self.total_entries = receipt.total_entries
        operation = asked.operation
        if operation is None or asked.round != self._round:
            return
        if (receipt.first_entry, receipt.entries) != (operation.first, operation.entries):
            raise ProtocolViolation(
                f"{self._peer} acknowledged {receipt.entries} entries from {receipt.first_entry} "
                f"on, where {operation.entries} from {operation.first} on were sent"
            )
        if operation is not self.underway[0]:
            raise ProtocolViolation(f"{self._peer} acknowledged an operation behind a refused one")
        # In this order: a caller without Trio may be interrupted anywhere, and what was not
        # taken out is sent again.
        operation.receipt = receipt
        self.underway.popleft()
        self.size -= operation.size
        operation.requests = []

    def _refused(self, answer: Refusal, asked: _Asked | None) -> None:
        number, text = answer
        if asked is not None and asked.kind is Capabilities and number == RESULT_INVALID_COMMAND:
            raise self._not_supported()
        # The lease itself may not be kept on disk, or be the server's own process's just now.
        refused_lease = asked is not None and asked.kind is Lease and number == RESULT_NOT_WRITTEN
        if number not in _STANDING or refused_lease:
            error = refusal(number, text, "to publish")
            if number not in (RESULT_NO_LEASE, RESULT_TOO_SLOW):
                raise error
            self.granted = False
            raise error
        operation = None if asked is None else asked.operation
        if operation is None:
            raise ProtocolViolation(f"{self._peer} sent Result {number} for no operation: {text}")
        assert asked is not None
        # Those behind one that was refused are refused as well, for that reason alone.
        if asked.round != self._round or self.failure is not None:
            return
        if number in (RESULT_PAST_THE_END, RESULT_OTHER_ENTRIES):
            raise HistoryChanged(
                f"{self._peer} does not hold the entries that this source goes on from: {text}",
                next_entry=operation.first,
                total_entries=self.total_entries,
                first_differing=None,
            )
        self.failure = refusal(number, text, "the operation")

    # Operations.

    def put(self, operation: Outgoing) -> Underway:
        """Send it, behind those before it. Raises the `failure`, and `UsageError` where it does
        not begin with the next entry."""
        if self.failure is not None:
            raise self.failure
        if operation.first != self.next_entry:
            raise UsageError(
                f"the operation begins with entry {operation.first}, and entry {self.next_entry} "
                "is due now; begin it again"
            )
        requests = operation.requests(self._terms.stream_type)
        made = Underway(operation.first, operation.entries, requests, sum(map(len, requests)))
        self.underway.append(made)
        self._unsent.append(made)
        self.size += made.size
        self.next_entry += made.entries
        return made

    def resend(self) -> None:
        """After a `failure` that passes: everything without a receipt goes out again, in order.

        Raises the failure where it is `over`.
        """
        if self.failure is None:
            return
        if self.over:
            raise self.failure
        self.failure = None
        self._round += 1
        self._unsent = deque(self.underway)

    def drop(self) -> None:
        """Forget what has no receipt; the next operation begins where the first of these did.

        For operations that a `failure` has kept out. Raises it where it is `over`.
        """
        if self.over:
            assert self.failure is not None
            raise self.failure
        if self.failure is None and self.underway:
            raise UsageError("operations are underway and will be acknowledged; wait for them")
        self.failure = None
        self._round += 1
        if self.underway:
            self.next_entry = self.underway[0].first
        for operation in self.underway:
            operation.dropped = True
        self.underway.clear()
        self._unsent.clear()
        self.size = 0
