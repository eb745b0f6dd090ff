"""Bookmark keys of zkEVM streams, by the stream's version.

Owns the two encodings of a key. Version 1: u8 kind (0 block, 1 batch), u64 number. From version 2
on, the protobuf message ``BookMark { BookmarkType type = 1; uint64 value = 2; }`` with the types
0 unspecified, 1 batch, 2 block; a field that is zero is omitted.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, NamedTuple

from datastreamer.errors import BadBookmark
from datastreamer.format import U64_MAX

Kind = Literal["block", "batch"]

_FIXED: Final = struct.Struct(">BQ")
_FIRST_PROTOBUF: Final = 2
_TYPE_TAG: Final = 0x08
_VALUE_TAG: Final = 0x10
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


def raw_key(version: int, kind: int, number: int) -> bytes:
    """The key of bookmark `number` of the type with the number `kind` in this version.

    Raises `BadBookmark` if `kind` is not a u8, `number` not a u64, or the key would be empty.
    """
    if not 0 <= kind <= 255:
        raise BadBookmark(f"a bookmark's type must be 0 to 255, not {kind}")
    if not 0 <= number <= U64_MAX:
        raise BadBookmark(f"a bookmark's number must be 0 to {U64_MAX}, not {number}")
    if version < _FIRST_PROTOBUF:
        return _FIXED.pack(kind, number)
    key = b""
    if kind:
        key += bytes([_TYPE_TAG]) + _varint(kind)
    if number:
        key += bytes([_VALUE_TAG]) + _varint(number)
    if not key:
        raise BadBookmark(
            f"a bookmark of type 0 and number 0 has no key in a stream of version {version}: "
            "batches are type 1, blocks type 2"
        )
    return key


def name_of_key(version: int, key: bytes) -> BookmarkName | None:
    """The block or batch that `key` identifies in a stream of this version; None if neither."""
    if version < _FIRST_PROTOBUF:
        if len(key) != _FIXED.size:
            return None
        found, number = _FIXED.unpack(key)
    else:
        fields = _read_message(key)
        if fields is None:
            return None
        found, number = fields
    for kind, value in _kinds(version).items():
        if value == found:
            return BookmarkName(kind, number)
    return None


def _kinds(version: int) -> dict[Kind, int]:
    return _FIXED_KINDS if version < _FIRST_PROTOBUF else _PROTOBUF_KINDS


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_message(key: bytes) -> tuple[int, int] | None:
    """Type and value of a BookMark message with its fields in order and none repeated."""
    found = {_TYPE_TAG: 0, _VALUE_TAG: 0}
    at, last = 0, 0
    while at < len(key):
        tag = key[at]
        if tag not in found or tag <= last:
            return None
        at, last, shift, value = at + 1, tag, 0, 0
        while True:
            if at == len(key) or shift > 63:
                return None
            value |= (key[at] & 0x7F) << shift
            shift += 7
            at += 1
            if key[at - 1] < 0x80:
                break
        if value > U64_MAX:
            return None
        found[tag] = value
    return found[_TYPE_TAG], found[_VALUE_TAG]
