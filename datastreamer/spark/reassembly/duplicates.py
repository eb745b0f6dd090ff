"""Hashes of the messages of delivered payloads, which late messages are compared with.

Owns the format of the hashes and the event for a late message. `state` decides where they are
kept, and for how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final

from datastreamer.reassembly import Conflict, Malformed
from datastreamer.reassembly.splitter import PREFIX_SIZE
from datastreamer.spark.reassembly.event_rows import SHOWN

_HASH: Final = 8
_COUNT: Final = 4


def _hash(text: bytes) -> bytes:
    # Cryptographic: a producer must not be able to construct a collision.
    return blake2b(text, digest_size=_HASH).digest()


def hash_messages(
    header: bytes,
    prefixes: Sequence[bytes],
    messages: Mapping[bytes, Iterable[tuple[bytes, bytes]]],
) -> bytes:
    """The hashes of a payload's header and of its messages, (key, value) by prefix: 8 bytes, 4 for
    each prefix, and 16 for each message."""
    kept = [_hash(header)]
    for prefix in prefixes:
        hashed = [_hash(key) + _hash(value) for key, value in messages.get(prefix, ())]
        kept.append(len(hashed).to_bytes(_COUNT, "big"))
        kept += hashed
    return b"".join(kept)


class MessageHashes:
    """The hashes of a payload's messages, to compare late messages with."""

    def __init__(self, own: bytes, prefixes: Sequence[bytes], kept: bytes) -> None:
        self._own = own
        self._header = kept[:_HASH]
        self._of: dict[bytes, dict[bytes, bytes]] = {}
        at = _HASH
        for prefix in prefixes:
            count = int.from_bytes(kept[at : at + _COUNT], "big")
            at += _COUNT
            end = at + count * 2 * _HASH
            self._of[prefix] = {
                kept[place : place + _HASH]: kept[place + _HASH : place + 2 * _HASH]
                for place in range(at, end, 2 * _HASH)
            }
            at = end

    def event(
        self, key: bytes, value: bytes, source: str, position: int | None
    ) -> Conflict | Malformed | None:
        """The event for a late message of this payload; None if it is a duplicate."""
        prefix = key[:PREFIX_SIZE]
        found: bytes | None
        if prefix[1:] == self._own and prefix[:1] == b"\x00":
            found = self._header
        else:
            there = self._of[prefix]
            found = there.get(_hash(key))
            if found is None:
                reason = f"one more than the {len(there)} messages announced for the prefix"
                return Malformed(key[:SHOWN], reason, source, position)
        if found != _hash(value):
            return Conflict("value", key[:SHOWN], prefix, self._own, source, position)
        return None
