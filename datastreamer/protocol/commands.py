"""Commands: as values, and as bytes for both sides.

Owns the layout of every command of a client, except a publisher's. Must not know which of them is
allowed when (`server`, `client`).

A selection of types alone has the older of two forms, which older servers know.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

from datastreamer import format as wire
from datastreamer.errors import UsageError
from datastreamer.format import MAX_BOOKMARK_SIZE, MAX_CLAUSES, STREAM_ID_SIZE, U64_MAX
from datastreamer.protocol.arguments import check_key
from datastreamer.selection.clauses import Clause, Selection, Where, checked, normal

MOST_TOKEN: Final = 1024
MOST_CLIENT_NAME: Final = 64

_HEAD: Final = struct.Struct(">QQ")
_ENTRY: Final = struct.Struct(">QQQ")
_LENGTH: Final = struct.Struct(">I")
_CLAUSE: Final = struct.Struct(">IHB")


class KnownHistory(NamedTuple):
    """A state of a stream, by stream id and epoch; all entries of a copy are of this state."""

    stream_id: bytes
    epoch: int


NOTHING_KNOWN: Final = KnownHistory(bytes(STREAM_ID_SIZE), 0)


@dataclass(frozen=True, slots=True)
class Command:
    """A command. Messages say of it what `says` has, with its values, bytes in hex."""

    says: ClassVar[str]

    def __str__(self) -> str:
        return self.says.format_map(
            {each.name: _text_of(getattr(self, each.name)) for each in fields(self)}
        )


def _text_of(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return ", ".join(map(str, value)) if type(value) is tuple else value


@dataclass(frozen=True, slots=True)
class FollowStart(Command):
    """A `CommitStart` that also reports each change of committed entries since `known`."""

    from_entry: int
    known: KnownHistory = NOTHING_KNOWN
    says: ClassVar = "Start from entry {from_entry}, with changes since epoch {known.epoch}"


@dataclass(frozen=True, slots=True)
class HashQuery(Command):
    """Request a hash of the entries from `first` up to, not including, `end`, or of as many of
    them as `max_bytes` allow (0: the server's limit)."""

    first: int
    end: int
    max_bytes: int = 0
    says: ClassVar = "a hash of entries {first} to before {end}"


@dataclass(frozen=True, slots=True)
class SumsQuery(Command):
    """Request the checksums of at most `max_pages` whole pages (0: the server's limit), from the
    one on that holds entry `from_entry`, and that of the last page."""

    from_entry: int
    max_pages: int = 0
    says: ClassVar = "checksums from entry {from_entry} on"


@dataclass(frozen=True, slots=True)
class TimeQuery(Command):
    """Request the first entry that was committed at or after `ms`, Unix milliseconds."""

    ms: int
    says: ClassVar = "the first entry since {ms} ms"


@dataclass(frozen=True, slots=True)
class MarksQuery(Command):
    """Request when entry `from_entry` and those after it were committed."""

    from_entry: int
    says: ClassVar = "times from entry {from_entry} on"


@dataclass(frozen=True, slots=True)
class Start(Command):
    """Stream from entry `from_entry` on; the stream's total means the next entry."""

    from_entry: int
    says: ClassVar = "Start from entry {from_entry}"


@dataclass(frozen=True, slots=True)
class CommitStart(Command):
    """A `Start` that also reports where atomic operations end."""

    from_entry: int
    says: ClassVar = "Start from entry {from_entry}, with commits"


@dataclass(frozen=True, slots=True)
class Stop(Command):
    """End the streaming; the connection stays open."""

    says: ClassVar = "Stop"


@dataclass(frozen=True, slots=True)
class HeaderQuery(Command):
    """Request the header entry."""

    says: ClassVar = "Header"


@dataclass(frozen=True, slots=True)
class StartBookmark(Command):
    """Stream from a bookmark's entry on. `key` has 1 to 16 bytes."""

    key: bytes
    says: ClassVar = "Start from bookmark 0x{key}"


@dataclass(frozen=True, slots=True)
class EntryQuery(Command):
    """Request one entry by its number."""

    number: int
    says: ClassVar = "Entry {number}"


@dataclass(frozen=True, slots=True)
class BookmarkQuery(Command):
    """Request the first event at or after a bookmark. `key` has 1 to 16 bytes."""

    key: bytes
    says: ClassVar = "Bookmark 0x{key}"


@dataclass(frozen=True, slots=True)
class RangeQuery(Command):
    """Request the entries between two bookmarks, both included."""

    first: bytes
    last: bytes
    says: ClassVar = "the range from bookmark 0x{first} to 0x{last}"


@dataclass(frozen=True, slots=True)
class CapabilitiesQuery(Command):
    """Ask which extensions the server has."""

    says: ClassVar = "Capabilities"


@dataclass(frozen=True, slots=True)
class BatchQuery(Command):
    """Request entries from `from_entry` on, as many as the limits allow, or fewer.

    With `max_count` 0 only `max_bytes` limits, with `max_bytes` 0 only the server's limit. If
    there is no entry yet, the server waits up to `wait_ms` milliseconds for a commit.
    """

    from_entry: int
    max_count: int = 0
    max_bytes: int = 0
    wait_ms: int = 0
    says: ClassVar = "a batch from entry {from_entry}"


@dataclass(frozen=True, slots=True)
class FilteredRead(Command):
    """Request the entries that `where` selects from `from_entry` up to `stop`, as many as the
    limits allow, or fewer; the limits are those of a `BatchQuery`.

    If there are none up to the end of the stream, the server waits up to `wait_ms` milliseconds.
    """

    from_entry: int
    where: Selection
    stop: int = U64_MAX
    max_count: int = 0
    max_bytes: int = 0
    wait_ms: int = 0
    says: ClassVar = "entries of types {where} from entry {from_entry}"


@dataclass(frozen=True, slots=True)
class FilteredStart(Command):
    """Stream the entries that `where` selects from `from_entry` on."""

    from_entry: int
    where: Selection
    says: ClassVar = "Start from entry {from_entry}, types {where}"


@dataclass(frozen=True, slots=True)
class FilteredStartBookmark(Command):
    """Stream the entries that `where` selects from a bookmark's entry on."""

    key: bytes
    where: Selection
    says: ClassVar = "Start from bookmark 0x{key}, types {where}"


@dataclass(frozen=True, slots=True)
class Authenticate(Command):
    """Authenticate with a token of 1 to 1,024 bytes."""

    token: bytes
    says: ClassVar = "Authenticate"

    def __repr__(self) -> str:  # the token is secret
        return "<Authenticate>"


@dataclass(frozen=True, slots=True)
class ClientName(Command):
    """Name this client in the server's lists and logs: a text of 1 to 64 bytes of UTF-8."""

    name: bytes
    says: ClassVar = "ClientName {name}"


def check_client_name(name: bytes) -> None:
    """Raise `UsageError` for a name that cannot be sent."""
    if not 1 <= len(name) <= MOST_CLIENT_NAME:
        raise UsageError(
            f"a client's name must have 1 to {MOST_CLIENT_NAME} bytes, not {len(name)}"
        )


def check_token(token: bytes) -> None:
    """Raise `UsageError` for a token that cannot be sent."""
    if not 1 <= len(token) <= MOST_TOKEN:
        raise UsageError(f"a token must have 1 to {MOST_TOKEN} bytes, not {len(token)}")


# The parts that follow the head of a command.

Read: TypeAlias = tuple[Iterable[Any], int] | None


class _Part(Protocol):
    def write(self, values: Iterator[Any]) -> bytes:
        """The next of the values. Raises `UsageError` or `struct.error` if they cannot be sent."""

    def read(self, data: bytes, at: int) -> Read:
        """The values that begin at `at`, and where they end; None until complete. Raises
        `ValueError` for invalid ones, as soon as they have arrived."""


class _Numbers:
    """Numbers, and ids of a fixed size."""

    def __init__(self, layout: str) -> None:
        self._struct = struct.Struct(f">{layout}")
        self._count = len(self._struct.unpack(bytes(self._struct.size)))

    def write(self, values: Iterator[Any]) -> bytes:
        return self._struct.pack(*islice(values, self._count))

    def read(self, data: bytes, at: int) -> Read:
        end = at + self._struct.size
        return None if len(data) < end else (self._struct.unpack_from(data, at), end)


class _Known(_Numbers):
    def write(self, values: Iterator[Any]) -> bytes:
        return super().write(iter(next(values)))

    def read(self, data: bytes, at: int) -> Read:
        found = super().read(data, at)
        return None if found is None else ([KnownHistory(*found[0])], found[1])


class _Sized:
    """At least one byte, after their number."""

    def __init__(self, name: str, most: int, check: Callable[[bytes], None]) -> None:
        self._name = name
        self._most = most
        self._check = check

    def write(self, values: Iterator[Any]) -> bytes:
        value: bytes = next(values)
        self._check(value)
        return _LENGTH.pack(len(value)) + value

    def read(self, data: bytes, at: int) -> Read:
        start = at + _LENGTH.size
        if len(data) < start:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        if not 1 <= length <= self._most:
            raise ValueError(f"{self._name} of {length} bytes, not 1 to {self._most}")
        end = start + length
        return None if len(data) < end else ([data[start:end]], end)


class _Clauses:
    """A selection. `typed`: each clause is a type."""

    def __init__(self, *, typed: bool) -> None:
        self._typed = typed

    def write(self, values: Iterator[Any]) -> bytes:
        where: Selection = next(values)
        if not 1 <= len(where) <= MAX_CLAUSES:
            raise UsageError(f"a selection must have 1 to {MAX_CLAUSES} clauses, not {len(where)}")
        parts = map(_LENGTH.pack if self._typed else _packed, map(checked, where))
        return b"".join([_LENGTH.pack(len(where)), *parts])

    def read(self, data: bytes, at: int) -> Read:
        form = _LENGTH if self._typed else _CLAUSE
        begin = at + _LENGTH.size
        if len(data) < begin:
            return None
        (count,) = _LENGTH.unpack_from(data, at)
        if not 1 <= count <= MAX_CLAUSES:
            raise ValueError(f"a selection of {count} clauses, not of 1 to {MAX_CLAUSES}")
        clauses: list[Clause] = []
        for _ in range(count):
            at = begin + form.size
            if len(data) < at:
                return None
            kind, offset, size = (*form.unpack_from(data, begin), 0, 0)[:3]
            begin = at + size
            if len(data) < begin:
                return None
            clauses.append(Where(kind, offset, data[at:begin]) if size else kind)
        return [normal(clauses)], begin


def _packed(clause: Clause) -> bytes:
    kind, offset, prefix = Where(clause) if isinstance(clause, int) else clause
    return _CLAUSE.pack(kind, offset, len(prefix)) + prefix


_NUMBER: Final = _Numbers("Q")
_READ: Final = _Numbers("QQIII")
_KEY: Final = _Sized("a bookmark", MAX_BOOKMARK_SIZE, check_key)
_TOKEN: Final = _Sized("a token", MOST_TOKEN, check_token)
_CLIENT_NAME: Final = _Sized("a client's name", MOST_CLIENT_NAME, check_client_name)
_TYPES: Final = _Clauses(typed=True)
_WHERE: Final = _Clauses(typed=False)

LAYOUTS: Final[dict[int, tuple[type[Command], tuple[_Part, ...]]]] = {
    wire.COMMAND_START: (Start, (_NUMBER,)),
    wire.COMMAND_STOP: (Stop, ()),
    wire.COMMAND_HEADER: (HeaderQuery, ()),
    wire.COMMAND_START_BOOKMARK: (StartBookmark, (_KEY,)),
    wire.COMMAND_ENTRY: (EntryQuery, (_NUMBER,)),
    wire.COMMAND_BOOKMARK: (BookmarkQuery, (_KEY,)),
    wire.COMMAND_RANGE_BOOKMARK: (RangeQuery, (_KEY, _KEY)),
    wire.COMMAND_CAPABILITIES: (CapabilitiesQuery, ()),
    wire.COMMAND_BATCH_READ: (BatchQuery, (_Numbers("QIII"),)),
    # Of two forms a command has the last one, unless a clause is no type.
    wire.COMMAND_SELECTED_READ: (FilteredRead, (_READ, _WHERE)),
    wire.COMMAND_SELECTED_START: (FilteredStart, (_NUMBER, _WHERE)),
    wire.COMMAND_SELECTED_START_BOOKMARK: (FilteredStartBookmark, (_KEY, _WHERE)),
    wire.COMMAND_FILTERED_READ: (FilteredRead, (_READ, _TYPES)),
    wire.COMMAND_FILTERED_START: (FilteredStart, (_NUMBER, _TYPES)),
    wire.COMMAND_FILTERED_START_BOOKMARK: (FilteredStartBookmark, (_KEY, _TYPES)),
    wire.COMMAND_COMMIT_START: (CommitStart, (_NUMBER,)),
    wire.COMMAND_FOLLOW_START: (FollowStart, (_NUMBER, _Known("16sQ"))),
    wire.COMMAND_RANGE_HASH: (HashQuery, (_Numbers("QQI"),)),
    wire.COMMAND_PAGE_SUMS: (SumsQuery, (_Numbers("QI"),)),
    wire.COMMAND_ENTRY_AT_TIME: (TimeQuery, (_NUMBER,)),
    wire.COMMAND_TIME_MARKS: (MarksQuery, (_NUMBER,)),
    wire.COMMAND_AUTHENTICATE: (Authenticate, (_TOKEN,)),
    wire.COMMAND_CLIENT_NAME: (ClientName, (_CLIENT_NAME,)),
}
"""Each command and its parts, by its number."""

_FORMS: Final[dict[type, list[int]]] = {}
for _number, (_kind, _) in LAYOUTS.items():
    _FORMS.setdefault(_kind, []).append(_number)
# In the order of the parts: a selection comes last.
_NAMES: Final = {
    kind: sorted((field.name for field in fields(kind)), key="where".__eq__) for kind in _FORMS
}


def encode_command(command: Command, stream_type: int) -> bytes:
    """The request for `command`.

    Raises `UsageError` for a value that does not fit, `BadBookmark` for a key that is not 1 to 16
    bytes, and `BadEntryType`.
    """
    kind = type(command)
    try:
        if isinstance(command, EntryQuery):
            # Many are sent one after the other: the short way.
            return _ENTRY.pack(wire.COMMAND_ENTRY, stream_type, command.number)
        where = getattr(command, "where", ())
        typed = all(isinstance(checked(clause), int) for clause in where)
        number = _FORMS[kind][-1 if typed else 0]
        values = iter([getattr(command, name) for name in _NAMES[kind]])
        parts = [part.write(values) for part in LAYOUTS[number][1]]
    except struct.error:
        raise UsageError(
            "entry numbers must be 0 to 2**64 - 1, limits 0 to 2**32 - 1, not "
            + ", ".join(f"{name} {getattr(command, name)!r}" for name in _NAMES[kind])
        ) from None
    return b"".join([_HEAD.pack(number, stream_type), *parts])


def decode_command(number: int, data: bytes, at: int) -> tuple[Command, int] | None:
    """The command of this number whose parts begin at `at`, and where they end; None until
    complete. Raises `ValueError` for invalid ones, as soon as they have arrived."""
    kind, parts = LAYOUTS[number]
    values: list[Any] = []
    for part in parts:
        found = part.read(data, at)
        if found is None:
            return None
        values += found[0]
        at = found[1]
    return kind(**dict(zip(_NAMES[kind], values, strict=True))), at
