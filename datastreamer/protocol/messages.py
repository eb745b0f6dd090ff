"""Commands and answers as bytes: encoding, and the commands as values.

Owns the layout of every message that is not a streamed entry. Knows neither
which message is allowed when (`server`, `client`) nor sockets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

from datastreamer.errors import BadBookmark, UsageError
from datastreamer.format import (
    COMMAND_BOOKMARK,
    COMMAND_ENTRY,
    COMMAND_HEADER,
    COMMAND_START,
    COMMAND_START_BOOKMARK,
    COMMAND_STOP,
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    MAX_BOOKMARK_SIZE,
    PACKET_ANSWER,
    PACKET_RESULT,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
    RESULT_OK,
    RESULT_TEXTS,
    TYPE_NOT_FOUND,
    U64_MAX,
)

_PLAIN = struct.Struct(">QQ")
_NUMBERED = struct.Struct(">QQQ")
_KEYED = struct.Struct(">QQI")


@dataclass(frozen=True, slots=True)
class Start:
    """Stream from entry `from_entry` on; the total asks for the next to come."""

    from_entry: int

    def __str__(self) -> str:
        return f"Start from entry {self.from_entry}"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the streaming; the connection stays."""

    def __str__(self) -> str:
        return "Stop"


@dataclass(frozen=True, slots=True)
class HeaderQuery:
    """Ask for the header entry."""

    def __str__(self) -> str:
        return "Header"


@dataclass(frozen=True, slots=True)
class StartBookmark:
    """Stream from the entry that the bookmark names on. `key` is 1 to 16 bytes."""

    key: bytes

    def __str__(self) -> str:
        return f"Start from bookmark 0x{self.key.hex()}"


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """Ask for one entry by its number."""

    number: int

    def __str__(self) -> str:
        return f"Entry {self.number}"


@dataclass(frozen=True, slots=True)
class BookmarkQuery:
    """Ask for the first event at or after a bookmark. `key` is 1 to 16 bytes."""

    key: bytes

    def __str__(self) -> str:
        return f"Bookmark 0x{self.key.hex()}"


Command: TypeAlias = Start | Stop | HeaderQuery | StartBookmark | EntryQuery | BookmarkQuery


def _numbered(command: int, stream_type: int, number: int) -> bytes:
    if not 0 <= number <= U64_MAX:
        raise UsageError(f"entry numbers run from 0 to 2**64 - 1, not {number}")
    return _NUMBERED.pack(command, stream_type, number)


def _keyed(command: int, stream_type: int, key: bytes) -> bytes:
    if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
        raise BadBookmark(f"a bookmark key is 1 to {MAX_BOOKMARK_SIZE} bytes, not {len(key)}")
    return _KEYED.pack(command, stream_type, len(key)) + key


def encode_start(stream_type: int, from_entry: int) -> bytes:
    """The request to stream from an entry number (u64, else `UsageError`)."""
    return _numbered(COMMAND_START, stream_type, from_entry)


def encode_stop(stream_type: int) -> bytes:
    """The request to end the streaming."""
    return _PLAIN.pack(COMMAND_STOP, stream_type)


def encode_header(stream_type: int) -> bytes:
    """The request for the header entry."""
    return _PLAIN.pack(COMMAND_HEADER, stream_type)


def encode_start_bookmark(stream_type: int, key: bytes) -> bytes:
    """The request to stream from a bookmark (1 to 16 bytes, else `BadBookmark`)."""
    return _keyed(COMMAND_START_BOOKMARK, stream_type, key)


def encode_entry(stream_type: int, number: int) -> bytes:
    """The request for one entry (u64, else `UsageError`)."""
    return _numbered(COMMAND_ENTRY, stream_type, number)


def encode_bookmark(stream_type: int, key: bytes) -> bytes:
    """The request for a bookmark's event (1 to 16 bytes, else `BadBookmark`)."""
    return _keyed(COMMAND_BOOKMARK, stream_type, key)


def encode_command(command: Command, stream_type: int) -> bytes:
    """The bytes of any command; errors as those of the functions above."""
    match command:
        case EntryQuery(number):
            return encode_entry(stream_type, number)
        case BookmarkQuery(key):
            return encode_bookmark(stream_type, key)
        case HeaderQuery():
            return encode_header(stream_type)
        case Start(from_entry):
            return encode_start(stream_type, from_entry)
        case StartBookmark(key):
            return encode_start_bookmark(stream_type, key)
        case Stop():
            return encode_stop(stream_type)


def _result(number: int, text: str) -> bytes:
    told = text.encode("ascii")
    return RESULT_HEAD_STRUCT.pack(PACKET_RESULT, RESULT_HEAD_SIZE + len(told), number) + told


_RESULTS: Final = {number: _result(number, text) for number, text in RESULT_TEXTS.items()}

OK: Final = _RESULTS[RESULT_OK]
"""The Result that says yes: the first 11 bytes of every good answer."""

NOT_FOUND: Final = ENTRY_HEAD_STRUCT.pack(PACKET_ANSWER, ENTRY_HEAD_SIZE, TYPE_NOT_FOUND, 0)
"""The answer, after an `OK`, to an Entry or Bookmark that finds nothing."""


def encode_result(number: int, text: str | None = None) -> bytes:
    """A Result; the texts of the known numbers need not be given."""
    if text is None:
        return _RESULTS[number]
    return _result(number, text)


def encode_answer(number: int, entry_type: int, data: bytes) -> bytes:
    """The answer, after an `OK`, to an Entry or Bookmark that found this entry."""
    length = ENTRY_HEAD_SIZE + len(data)
    return ENTRY_HEAD_STRUCT.pack(PACKET_ANSWER, length, entry_type, number) + data
