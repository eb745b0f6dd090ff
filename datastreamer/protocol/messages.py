"""Commands and answers: as values, and as bytes.

Owns the layout of every message that is not a streamed entry. Must not know sockets, or which
message is allowed when (`server`, `client`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from datastreamer.errors import UsageError
from datastreamer.format import (
    BATCH_HEAD_SIZE,
    BATCH_HEAD_STRUCT,
    CAPABILITIES_REVISION,
    CAPABILITIES_STRUCT,
    COMMAND_BATCH_READ,
    COMMAND_BOOKMARK,
    COMMAND_CAPABILITIES,
    COMMAND_COMMIT_START,
    COMMAND_ENTRY,
    COMMAND_HEADER,
    COMMAND_RANGE_BOOKMARK,
    COMMAND_START,
    COMMAND_START_BOOKMARK,
    COMMAND_STOP,
    COMMIT_STRUCT,
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    FEATURE_BATCH_READ,
    FEATURE_CHANGES,
    FEATURE_COMMITS,
    FEATURE_FILTERS,
    FEATURE_PAGE_SUMS,
    FEATURE_RANGE_BOOKMARK,
    FEATURE_SELECTIONS,
    MAX_CLAUSES,
    PACKET_ANSWER,
    PACKET_BATCH,
    PACKET_CAPABILITIES,
    PACKET_COMMIT,
    PACKET_RESULT,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
    RESULT_OK,
    RESULT_TEXTS,
    STREAM_ID_SIZE,
    TYPE_NOT_FOUND,
    U32_MAX,
    U64_MAX,
)
from datastreamer.protocol import following
from datastreamer.protocol.arguments import check_key
from datastreamer.protocol.filter import messages as filtering
from datastreamer.protocol.filter.messages import FilteredRead, FilteredStart, FilteredStartBookmark
from datastreamer.protocol.following import FollowStart, HashQuery, SumsQuery
from datastreamer.selection.clauses import Selection

_PLAIN = struct.Struct(">QQ")
_NUMBERED = struct.Struct(">QQQ")
_KEYED = struct.Struct(">QQI")
_BATCH = struct.Struct(">QQQIII")
_NUMBER = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Start:
    """Stream from entry `from_entry` on; the stream's total means the next entry."""

    from_entry: int

    def __str__(self) -> str:
        return f"Start from entry {self.from_entry}"


@dataclass(frozen=True, slots=True)
class CommitStart:
    """A `Start` that also reports where atomic operations end."""

    from_entry: int

    def __str__(self) -> str:
        return f"Start from entry {self.from_entry}, with commits"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the streaming; the connection stays open."""

    def __str__(self) -> str:
        return "Stop"


@dataclass(frozen=True, slots=True)
class HeaderQuery:
    """Request the header entry."""

    def __str__(self) -> str:
        return "Header"


@dataclass(frozen=True, slots=True)
class StartBookmark:
    """Stream from a bookmark's entry on. `key` has 1 to 16 bytes."""

    key: bytes

    def __str__(self) -> str:
        return f"Start from bookmark 0x{self.key.hex()}"


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """Request one entry by its number."""

    number: int

    def __str__(self) -> str:
        return f"Entry {self.number}"


@dataclass(frozen=True, slots=True)
class BookmarkQuery:
    """Request the first event at or after a bookmark. `key` has 1 to 16 bytes."""

    key: bytes

    def __str__(self) -> str:
        return f"Bookmark 0x{self.key.hex()}"


@dataclass(frozen=True, slots=True)
class RangeQuery:
    """Request the entries between two bookmarks, both included."""

    first: bytes
    last: bytes

    def __str__(self) -> str:
        return f"the range from bookmark 0x{self.first.hex()} to 0x{self.last.hex()}"


@dataclass(frozen=True, slots=True)
class CapabilitiesQuery:
    """Ask which extensions the server has."""

    def __str__(self) -> str:
        return "Capabilities"


@dataclass(frozen=True, slots=True)
class BatchQuery:
    """Request entries from `from_entry` on, as many as the limits allow, or fewer.

    With `max_count` 0 only `max_bytes` limits, with `max_bytes` 0 only the server's limit. If
    there is no entry yet, the server waits up to `wait_ms` milliseconds for a commit.
    """

    from_entry: int
    max_count: int = 0
    max_bytes: int = 0
    wait_ms: int = 0

    def __str__(self) -> str:
        return f"a batch from entry {self.from_entry}"


Command: TypeAlias = (
    Start
    | CommitStart
    | Stop
    | HeaderQuery
    | StartBookmark
    | EntryQuery
    | BookmarkQuery
    | RangeQuery
    | CapabilitiesQuery
    | BatchQuery
    | FilteredRead
    | FilteredStart
    | FilteredStartBookmark
    | FollowStart
    | HashQuery
    | SumsQuery
)


class Capabilities(NamedTuple):
    """The extensions that a server has, and what it reports about its stream.

    `stream_id` is 16 random bytes made with the stream, zeros for a file without records; `epoch`
    rises whenever entries are truncated or changed.
    """

    features: int = (
        FEATURE_RANGE_BOOKMARK
        | FEATURE_BATCH_READ
        | FEATURE_FILTERS
        | FEATURE_COMMITS
        | FEATURE_CHANGES
        | FEATURE_PAGE_SUMS
        | FEATURE_SELECTIONS
    )
    stream_id: bytes = bytes(STREAM_ID_SIZE)
    epoch: int = 0
    max_batch_count: int = 0
    max_batch_bytes: int = 0
    revision: int = CAPABILITIES_REVISION

    def pack(self) -> bytes:
        """The packet that follows the Result."""
        return CAPABILITIES_STRUCT.pack(
            PACKET_CAPABILITIES,
            CAPABILITIES_STRUCT.size,
            self.revision,
            self.features,
            self.stream_id,
            self.epoch,
            self.max_batch_count,
            self.max_batch_bytes,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Capabilities:
        """Decode a packet, ignoring what follows the known fields."""
        _, _, revision, *fields = CAPABILITIES_STRUCT.unpack_from(data)
        features, stream_id, epoch, max_count, max_bytes = fields
        return cls(features, stream_id, epoch, max_count, max_bytes, revision)

    @property
    def ranges(self) -> bool:
        """Whether the server has ranges between bookmarks."""
        return bool(self.features & FEATURE_RANGE_BOOKMARK)

    @property
    def batch_reads(self) -> bool:
        """Whether the server has batch reads."""
        return bool(self.features & FEATURE_BATCH_READ)

    @property
    def filters(self) -> bool:
        """Whether the server can filter entries by type."""
        return bool(self.features & FEATURE_FILTERS)

    @property
    def selections(self) -> bool:
        """Whether the server can select entries by bytes at a fixed place in their data."""
        return bool(self.features & FEATURE_SELECTIONS)

    def selects(self, where: Selection) -> bool:
        """Whether the server can be asked for this selection."""
        typed = all(isinstance(clause, int) for clause in where)
        return len(where) <= MAX_CLAUSES and (self.filters if typed else self.selections)

    @property
    def commits(self) -> bool:
        """Whether the server reports where atomic operations end."""
        return bool(self.features & FEATURE_COMMITS)

    @property
    def changes(self) -> bool:
        """Whether the server reports changes of committed entries, and hashes of ranges."""
        return bool(self.features & FEATURE_CHANGES)

    @property
    def page_sums(self) -> bool:
        """Whether the server can send the checksums of its file's pages."""
        return bool(self.features & FEATURE_PAGE_SUMS)


NO_EXTENSIONS: Final = Capabilities(features=0, revision=0)
"""The capabilities of a server that does not know the question."""


def encode_command(command: Command, stream_type: int) -> bytes:
    """The request for `command`.

    Raises `UsageError` for a number that does not fit, and `BadBookmark` for a key that is not 1
    to 16 bytes.
    """
    match command:
        case EntryQuery(number):
            return _numbered(COMMAND_ENTRY, stream_type, number)
        case BookmarkQuery(key):
            return _keyed(COMMAND_BOOKMARK, stream_type, key)
        case HeaderQuery():
            return _PLAIN.pack(COMMAND_HEADER, stream_type)
        case Start(from_entry):
            return _numbered(COMMAND_START, stream_type, from_entry)
        case CommitStart(from_entry):
            return _numbered(COMMAND_COMMIT_START, stream_type, from_entry)
        case StartBookmark(key):
            return _keyed(COMMAND_START_BOOKMARK, stream_type, key)
        case Stop():
            return _PLAIN.pack(COMMAND_STOP, stream_type)
        case BatchQuery():
            return _batch_read(command, stream_type)
        case RangeQuery(first, last):
            second = _keyed(0, 0, last)[_PLAIN.size :]
            return _keyed(COMMAND_RANGE_BOOKMARK, stream_type, first) + second
        case CapabilitiesQuery():
            return _PLAIN.pack(COMMAND_CAPABILITIES, stream_type)
        case FilteredRead() | FilteredStart() | FilteredStartBookmark():
            return filtering.encode(command, stream_type)
        case FollowStart() | HashQuery() | SumsQuery():
            return following.encode(command, stream_type)


def _numbered(command: int, stream_type: int, number: int) -> bytes:
    try:
        return _NUMBERED.pack(command, stream_type, number)
    except struct.error:
        raise UsageError(f"entry numbers must be 0 to 2**64 - 1, not {number!r}") from None


def _keyed(command: int, stream_type: int, key: bytes) -> bytes:
    check_key(key)
    return _KEYED.pack(command, stream_type, len(key)) + key


def _batch_read(query: BatchQuery, stream_type: int) -> bytes:
    number, limits = query.from_entry, (query.max_count, query.max_bytes, query.wait_ms)
    if not 0 <= number <= U64_MAX:
        raise UsageError(f"entry numbers must be 0 to 2**64 - 1, not {number}")
    for what, value in zip(("count", "bytes", "milliseconds"), limits, strict=True):
        if not 0 <= value <= U32_MAX:
            raise UsageError(f"a batch's limit of {what} must be 0 to 2**32 - 1, not {value}")
    return _BATCH.pack(COMMAND_BATCH_READ, stream_type, number, *limits)


def _result(number: int, text: str) -> bytes:
    encoded = text.encode("ascii")
    return RESULT_HEAD_STRUCT.pack(PACKET_RESULT, RESULT_HEAD_SIZE + len(encoded), number) + encoded


_RESULTS: Final = {number: _result(number, text) for number, text in RESULT_TEXTS.items()}

OK: Final = _RESULTS[RESULT_OK]
"""The Result OK, with which every successful answer begins."""

NOT_FOUND: Final = ENTRY_HEAD_STRUCT.pack(PACKET_ANSWER, ENTRY_HEAD_SIZE, TYPE_NOT_FOUND, 0)
"""The answer, after `OK`, to an Entry or Bookmark query that found nothing."""


def encode_result(number: int, text: str | None = None) -> bytes:
    """A Result; known numbers have a default text."""
    if text is None:
        return _RESULTS[number]
    return _result(number, text)


def encode_batch_head(count: int, first_entry: int, total_entries: int, size: int) -> bytes:
    """The Result OK and the head of a batch; its entries, `size` bytes, follow."""
    return OK + BATCH_HEAD_STRUCT.pack(
        PACKET_BATCH, BATCH_HEAD_SIZE + size, count, first_entry, total_entries
    )


def encode_range_head(last: int) -> bytes:
    """The Result OK and the number of a range's last entry; its entries follow."""
    return OK + _NUMBER.pack(last)


def encode_commit(total_entries: int) -> bytes:
    """The packet that precedes the entries of an operation, with the total at its end."""
    return COMMIT_STRUCT.pack(PACKET_COMMIT, COMMIT_STRUCT.size, total_entries)


def encode_answer(number: int, entry_type: int, data: bytes) -> bytes:
    """The answer, after `OK`, to an Entry or Bookmark query that found this entry."""
    length = ENTRY_HEAD_SIZE + len(data)
    return ENTRY_HEAD_STRUCT.pack(PACKET_ANSWER, length, entry_type, number) + data
