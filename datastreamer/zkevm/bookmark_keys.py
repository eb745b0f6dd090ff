"""Bookmark keys of zkEVM streams, by the stream's version.

Owns the two encodings of a key. Version 1: u8 kind (0 block, 1 batch), u64 number. From version 2
on, the protobuf message ``BookMark { BookmarkType type = 1; uint64 value = 2; }`` with the types
0 unspecified, 1 batch, 2 block; a field that is zero is omitted.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, NamedTuple

from datastreamer.errors import BadBookmark
from datastreamer.format import MAX_BOOKMARK_SIZE, U64_MAX
from datastreamer.zkevm.decoding import CODECS
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION, TYPE_BOOK_MARK

Kind = Literal["block", "batch"]

_FIXED: Final = struct.Struct(">BQ")
_MESSAGE: Final = CODECS[TYPE_BOOK_MARK]
_FIXED_KINDS: Final[dict[Kind, int]] = {"block": 0, "batch": 1}
_PROTOBUF_KINDS: Final[dict[Kind, int]] = {"block": 2, "batch": 1}


class BookmarkName(NamedTuple):
    """The block or batch that a key identifies."""

    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


def key_of(version: int, name: BookmarkName) -> bytes:
    """The key of the bookmark of a block or batch in a stream of this version."""
    return raw_key(version, _kinds(version)[name.kind], name.number)


def parse_key(text: str) -> BookmarkName | bytes:
    """The key that a person writes: ``0x...`` in hex, ``block:N``, ``batch:N``, or text.

    Raises `BadBookmark`.
    """
    kind, colon, number = text.partition(":")
    if text[:2].lower() == "0x":
        try:
            key = bytes.fromhex(text[2:])
        except ValueError:
            raise BadBookmark(f"{text!r:.60} is not hex: 0x and two digits per byte") from None
    elif colon and kind in ("block", "batch"):
        digits = number.lstrip("0") or number[-1:]
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20) or (
            int(digits) > U64_MAX
        ):
            raise BadBookmark(
                f"the part after {kind}: is a number from 0 to {U64_MAX}, not {number!r:.60}"
            )
        return BookmarkName("block" if kind == "block" else "batch", int(digits))
    else:
        key = text.encode("utf-8", "surrogateescape")
    if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
        raise BadBookmark(
            f"the key of a bookmark has 1 to {MAX_BOOKMARK_SIZE} bytes, {text!r:.60} has {len(key)}"
        )
    return key


def raw_key(version: int, kind: int, number: int) -> bytes:
    """The key of bookmark `number` of the type with the number `kind` in this version.

    Raises `BadBookmark` if `kind` is not a u8, `number` not a u64, or the key would be empty.
    """
    if not 0 <= kind <= 255:
        raise BadBookmark(f"a bookmark's type must be 0 to 255, not {kind}")
    if not 0 <= number <= U64_MAX:
        raise BadBookmark(f"a bookmark's number must be 0 to {U64_MAX}, not {number}")
    if version < FIRST_PROTOBUF_VERSION:
        return _FIXED.pack(kind, number)
    key = _MESSAGE.write((kind, number))
    if not key:
        raise BadBookmark(
            f"a bookmark of type 0 and number 0 has no key in a stream of version {version}: "
            "batches are type 1, blocks type 2"
        )
    return key


def name_of_key(version: int, key: bytes) -> BookmarkName | None:
    """The block or batch that `key` identifies in a stream of this version; None if neither."""
    if version < FIRST_PROTOBUF_VERSION:
        if len(key) != _FIXED.size:
            return None
        found, number = _FIXED.unpack(key)
    else:
        try:
            found, number = mark = _MESSAGE.read(key)
        except ValueError:
            return None
        # Protobuf has several encodings of a message; a key has one.
        if _MESSAGE.write(mark) != key:
            return None
    for kind, value in _kinds(version).items():
        if value == found:
            return BookmarkName(kind, number)
    return None


def _kinds(version: int) -> dict[Kind, int]:
    return _FIXED_KINDS if version < FIRST_PROTOBUF_VERSION else _PROTOBUF_KINDS
