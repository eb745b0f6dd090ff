"""Splits a payload into messages, in the same way for every producer.

Owns the messages and their order. `pack_message` makes the data of an entry from a message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from datastreamer.errors import BadArgument, BadPayload
from datastreamer.format import MAX_DATA_SIZE, U32_MAX
from datastreamer.reassembly._messages import pack_records

PREFIX_SIZE: Final = 33
ID_SIZE: Final = 32
RECORD_SIZE: Final = 37
_SUFFIX: Final = struct.Struct(">I")
SMALLEST_LIMIT: Final = PREFIX_SIZE + _SUFFIX.size + 2 * RECORD_SIZE
"""Space for two records, without which nesting would not reduce headers; and for a blob."""
_RESERVED: Final = (0x00, 0xFF)

Blob = bytes | bytearray | memoryview
Part = Blob | Iterable[tuple[bytes, Blob]]


class Splitter:
    """Splitter(limit=1048557): splits payloads into messages of at most `limit` bytes.

    The size of a message is that of its key and its value; the default is what an entry holds.
    Producers with equal limits make equal messages.
    """

    def __init__(self, limit: int = MAX_DATA_SIZE - 2) -> None:
        if limit < SMALLEST_LIMIT:
            raise BadArgument(f"the limit must be at least {SMALLEST_LIMIT} bytes, not {limit}")
        self.limit = limit

    def split(self, id: bytes, parts: Mapping[bytes, Part]) -> list[tuple[bytes, bytes]]:
        """The messages of a payload, as (key, value): the header, nested headers, the parts.

        `parts` has for each prefix (33 bytes, the first of them neither 0x00 nor 0xff) either
        (suffix, value) pairs in any order without duplicates, or one blob, which is split into
        messages with a u32 from 0 on as suffix; an empty blob is one empty message. If the header
        would exceed the limit, its records move to nested headers, whose keys are 0xff, the id and
        a u32.

        Raises `BadPayload` for an invalid id or prefix, a pair above the limit, or a duplicate
        suffix.
        """
        if len(id) != ID_SIZE:
            raise BadPayload(f"a payload's id must have {ID_SIZE} bytes, not {len(id)}")
        records: list[tuple[bytes, int]] = []
        messages: list[tuple[bytes, bytes]] = []
        for prefix in sorted(parts):
            if len(prefix) != PREFIX_SIZE or prefix[0] in _RESERVED:
                raise BadPayload(
                    f"invalid prefix 0x{prefix[:64].hex()}: it must have {PREFIX_SIZE} bytes, the "
                    "first of them neither 0x00 nor 0xff"
                )
            found = self._messages(prefix, parts[prefix])
            records.append((prefix, len(found)))
            messages += found
        return self._headers(id, records) + messages

    def _messages(self, prefix: bytes, part: Part) -> list[tuple[bytes, bytes]]:
        if isinstance(part, bytes | bytearray | memoryview):
            blob = memoryview(part).cast("B")
            step = self.limit - PREFIX_SIZE - _SUFFIX.size
            count = max(1, -(-len(blob) // step))
            if count > U32_MAX:
                raise BadPayload(
                    f"a blob of {len(blob):,} bytes needs more than {U32_MAX:,} messages of "
                    f"{self.limit:,} bytes"
                )
            return [
                (prefix + _SUFFIX.pack(i), bytes(blob[i * step : (i + 1) * step]))
                for i in range(count)
            ]
        found = sorted((prefix + suffix, bytes(value)) for suffix, value in part)
        for i, (key, value) in enumerate(found):
            if len(key) + len(value) > self.limit:
                raise BadPayload(
                    f"the message 0x{key[:64].hex()} has {len(key) + len(value):,} bytes, above "
                    f"the limit of {self.limit:,}: pass its value as a blob with its own prefix"
                )
            if i and key == found[i - 1][0]:
                raise BadPayload(f"the message 0x{key[:64].hex()} is duplicated")
        return found

    def _headers(self, id: bytes, records: list[tuple[bytes, int]]) -> list[tuple[bytes, bytes]]:
        head = b"\x00" + id
        if PREFIX_SIZE + RECORD_SIZE * len(records) <= self.limit:
            return [(head, pack_records(records))]
        step = (self.limit - PREFIX_SIZE - _SUFFIX.size) // RECORD_SIZE
        nested = [
            (b"\xff" + id + _SUFFIX.pack(at // step), pack_records(records[at : at + step]))
            for at in range(0, len(records), step)
        ]
        return [(head, pack_records([(b"\xff" + id, len(nested))])), *nested]
