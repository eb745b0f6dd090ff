"""Messages of payloads that were given out, as hashes: whether one that comes late says the same.

Owns what is kept of them and what follows from one that comes again, in the core's words. Where
it is kept, and for how long, is the lane's business.
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
    # Not a quick one: a producer that lies must not be able to make it say the same.
    return blake2b(text, digest_size=_HASH).digest()


def kept_of(
    header: bytes,
    prefixes: Sequence[bytes],
    messages: Mapping[bytes, Iterable[tuple[bytes, bytes]]],
) -> bytes:
    """What is kept of a payload with this header, and these messages by prefix, as (key, value):
    8 bytes, 4 for each prefix, and 16 for each message."""
    kept = [_hash(header)]
    for prefix in prefixes:
        hashed = [_hash(key) + _hash(value) for key, value in messages.get(prefix, ())]
        kept.append(len(hashed).to_bytes(_COUNT, "big"))
        kept += hashed
    return b"".join(kept)


class Late:
    """What was kept of a payload, to hold against what comes late."""

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
        """What is said of a message of this payload; None: it is there already."""
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
