"""Publishing: its commands and answers as bytes, and the parsers of both sides.

Owns the layout of the messages. Must not know streams, sockets or clocks. ``docs/PUBLISHING.md``
is the contract.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from datastreamer.errors import ProtocolViolation, UsageError
from datastreamer.format import (
    CAPABILITIES_STRUCT,
    COMMAND_HEAD_SIZE,
    COMMAND_PUBLISH,
    COMMAND_PUBLISH_ADD,
    COMMAND_PUBLISH_COMMIT,
    COMMAND_PUBLISH_ROLLBACK,
    COMMAND_PUBLISH_WHERE,
    PACKET_CAPABILITIES,
    PACKET_LEASE,
    PACKET_RECEIPT,
    PACKET_RESULT,
    PAGE_SIZE,
    RESULT_BAD_OPERATION,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
    RESULT_OK,
    RESULT_TEXTS,
    RESULT_TOO_LARGE,
    U32_MAX,
    U64_MAX,
)
from datastreamer.protocol.commands import MOST_TOKEN
from datastreamer.protocol.messages import OK, Capabilities, encode_result

REVISION: Final = 1
ANY_EPOCH: Final = U64_MAX
"""In a lease request: the next epoch, even if another source holds the lease."""
MOST_BYTES: Final = PAGE_SIZE
"""Maximum size of the entries of one request; the largest entry fills it."""
SOURCE_ID_SIZE: Final = 16

_HEAD: Final = struct.Struct(">QQ")
_PUBLISH: Final = struct.Struct(">IQ16sII")
_ADD: Final = struct.Struct(">QI")
_COMMIT: Final = struct.Struct(">QII")
_LEASE: Final = struct.Struct(">BIQQ16sIIIQ")
_RECEIPT: Final = struct.Struct(">BIQIQ")
# Maximum length of a Result's text.
_MOST_TEXT: Final = 4096


# Requests.


@dataclass(frozen=True, slots=True)
class PublishQuery:
    """Request the lease. `epoch` 0: the next one, if no source holds the lease; `ANY_EPOCH`: the
    next one, even if one does."""

    source_id: bytes
    epoch: int = 0
    lease_ms: int = 0
    token: bytes = b""
    revision: int = REVISION

    def __repr__(self) -> str:  # the token is secret
        return f"<PublishQuery epoch={self.epoch} source={self.source_id.hex()}>"


class Add(NamedTuple):
    """Entries of an operation that begins with entry `first`."""

    first: int
    payload: bytes


class Commit(NamedTuple):
    """The last entries of an operation of `entries` entries; commit it."""

    first: int
    entries: int
    payload: bytes


class PublishRollback(NamedTuple):
    """Discard the open operation."""


class WhereAmI(NamedTuple):
    """Ask for the total on disk, which also renews the lease."""


class Wrong(NamedTuple):
    """An invalid request: send this Result and close the connection."""

    number: int
    why: str


Request: TypeAlias = Add | Commit | PublishRollback | WhereAmI | Wrong

ADDS: Final = (Add, Commit)


def encode_publish(stream_type: int, query: PublishQuery) -> bytes:
    """Encode a request for the lease. Raises `UsageError`."""
    if len(query.source_id) != SOURCE_ID_SIZE or not any(query.source_id):
        raise UsageError(f"a source id must have {SOURCE_ID_SIZE} bytes, not all of them zero")
    if len(query.token) > MOST_TOKEN:
        raise UsageError(f"a token must have at most {MOST_TOKEN} bytes, not {len(query.token)}")
    if not 0 <= query.epoch <= U64_MAX or not 0 <= query.lease_ms <= U32_MAX:
        raise UsageError(f"an epoch must be a u64, a lease u32 milliseconds, not {query!r}")
    return (
        _HEAD.pack(COMMAND_PUBLISH, stream_type)
        + _PUBLISH.pack(
            query.revision, query.epoch, query.source_id, query.lease_ms, len(query.token)
        )
        + query.token
    )


def decode_publish(buffer: bytes, at: int) -> tuple[PublishQuery, int] | Wrong | None:
    """The request whose parameters begin at `at`, and where they end; None until complete."""
    start = at + _PUBLISH.size
    if len(buffer) < start:
        return None
    revision, epoch, source_id, lease_ms, length = _PUBLISH.unpack_from(buffer, at)
    if revision != REVISION:
        return Wrong(RESULT_BAD_OPERATION, f"revision {revision} is not supported, only 1")
    if length > MOST_TOKEN:
        return Wrong(RESULT_BAD_OPERATION, f"a token of {length} bytes, not 0 to {MOST_TOKEN}")
    if not any(source_id):
        return Wrong(RESULT_BAD_OPERATION, "a source id of zeros")
    if len(buffer) < start + length:
        return None
    token = buffer[start : start + length]
    return PublishQuery(source_id, epoch, lease_ms, token, revision), start + length


def encode_where(stream_type: int) -> bytes:
    return _HEAD.pack(COMMAND_PUBLISH_WHERE, stream_type)


class RequestParser:
    """Parses the requests on a connection that holds the lease. Nothing follows a `Wrong`."""

    def __init__(self, stream_type: int, received: bytes = b"") -> None:
        self._stream_type = stream_type
        self._buffer = bytearray(received)
        self._at = 0
        self._over = False

    @property
    def pending(self) -> int:
        """Bytes received and not yet parsed."""
        return len(self._buffer) - self._at

    def receive(self, data: bytes) -> None:
        if not self._over:
            if self._at:
                del self._buffer[: self._at]
                self._at = 0
            self._buffer += data

    def next_request(self) -> Request | None:
        """The next complete request; None until more bytes arrive."""
        at, have = self._at, len(self._buffer) - self._at
        if self._over or have < COMMAND_HEAD_SIZE:
            return None
        command, stream_type = _HEAD.unpack_from(self._buffer, at)
        if stream_type != self._stream_type:
            return self._wrong(f"stream type {stream_type}, but {self._stream_type} is published")
        at += COMMAND_HEAD_SIZE
        if command in (COMMAND_PUBLISH_ROLLBACK, COMMAND_PUBLISH_WHERE):
            self._at = at
            return WhereAmI() if command == COMMAND_PUBLISH_WHERE else PublishRollback()
        if command not in (COMMAND_PUBLISH_ADD, COMMAND_PUBLISH_COMMIT):
            return self._wrong(f"command {command} on a connection that publishes")
        form = _COMMIT if command == COMMAND_PUBLISH_COMMIT else _ADD
        if len(self._buffer) < at + form.size:
            return None
        *fields, length = form.unpack_from(self._buffer, at)
        if length > MOST_BYTES:
            return self._wrong(
                f"{length} bytes of entries in one request, above the limit of {MOST_BYTES}",
                RESULT_TOO_LARGE,
            )
        at += form.size
        if len(self._buffer) < at + length:
            return None
        # Copied: a view of the buffer would keep it from growing.
        payload = bytes(memoryview(self._buffer)[at : at + length])
        self._at = at + length
        if form is _COMMIT:
            first, entries = fields
            return Commit(first, entries, payload)
        return Add(fields[0], payload)

    def _wrong(self, why: str, number: int = RESULT_BAD_OPERATION) -> Wrong:
        self._over = True
        self._buffer.clear()
        self._at = 0
        return Wrong(number, why)


# Answers.


class Lease(NamedTuple):
    """A granted lease."""

    epoch: int
    total_entries: int
    stream_id: bytes
    lease_ms: int
    most_bytes: int
    most_underway: int
    largest_operation: int


class Receipt(NamedTuple):
    """An operation is on disk: its first entry, its number of entries, and the stream's total."""

    first_entry: int
    entries: int
    total_entries: int


class Refusal(NamedTuple):
    """A Result other than OK."""

    number: int
    text: str


class Done(NamedTuple):
    """A Result OK without a packet."""


Answer: TypeAlias = Capabilities | Lease | Receipt | Refusal | Done
Kind: TypeAlias = type[Capabilities] | type[Lease] | type[Receipt] | type[Done]

_PACKETS: Final[dict[Kind, tuple[struct.Struct, int]]] = {
    Capabilities: (CAPABILITIES_STRUCT, PACKET_CAPABILITIES),
    Lease: (_LEASE, PACKET_LEASE),
    Receipt: (_RECEIPT, PACKET_RECEIPT),
}


def encode_lease(lease: Lease) -> bytes:
    return OK + _LEASE.pack(PACKET_LEASE, _LEASE.size, *lease)


def encode_receipt(receipt: Receipt) -> bytes:
    return OK + _RECEIPT.pack(PACKET_RECEIPT, _RECEIPT.size, *receipt)


def encode_refusal(number: int, why: str) -> bytes:
    """A Result whose text also says why."""
    reason = f"{RESULT_TEXTS[number]}: {why}".encode("ascii", "replace").decode()
    return encode_result(number, reason[:_MOST_TEXT])


class AnswerParser:
    """Parses a server's answers, each of an expected kind. Raises `ProtocolViolation`."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._buffer = bytearray()
        self._at = 0

    def receive(self, data: bytes | memoryview) -> None:
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next_answer(self, kind: Kind) -> Answer | None:
        """The answer to the oldest request, which expects a `kind`."""
        buffer, at = self._buffer, self._at
        if len(buffer) - at < RESULT_HEAD_SIZE:
            if len(buffer) > at and buffer[at] != PACKET_RESULT:
                raise self._violation(f"packet type {buffer[at]} instead of a Result")
            return None
        packet, size, number = RESULT_HEAD_STRUCT.unpack_from(buffer, at)
        if packet != PACKET_RESULT or not 0 <= size - RESULT_HEAD_SIZE <= _MOST_TEXT:
            raise self._violation(f"packet type {packet} of {size} bytes instead of a Result")
        if len(buffer) - at < size:
            return None
        end = at + size
        if number != RESULT_OK:
            self._at = end
            text = bytes(buffer[at + RESULT_HEAD_SIZE : end]).decode("ascii", "replace")
            return Refusal(number, text)
        if kind is Done:
            self._at = end
            return Done()
        form, due = _PACKETS[kind]
        if len(buffer) < end + form.size:
            return None
        packet, size, *fields = form.unpack_from(buffer, end)
        if packet != due or not form.size <= size <= _MOST_TEXT:
            raise self._violation(f"packet type {packet} of {size} bytes instead of {due}")
        if len(buffer) < end + size:
            return None
        self._at = end + size
        if kind is Capabilities:
            return Capabilities.unpack(buffer[end : end + size])
        return Lease(*fields) if kind is Lease else Receipt(*fields)

    def _violation(self, what: str) -> ProtocolViolation:
        return ProtocolViolation(f"{self._peer} sent {what}")
