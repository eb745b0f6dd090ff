"""What a `Reassembler` tells: small values, made to be kept, compared and printed.

Owns their fields and nothing else. `source` and `position` are those that the message came
with; None where they are not known (any more).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PayloadComplete:
    """Every message that the subscription asks for is there; told once for each payload.

    `parts` are (key, value) in the order of the keys, headers left out; `prefixes` all that
    were announced and asked for, in no order. `since` is when its first message came, by the
    caller's clock (0.0 where it has none), `last` the message that made it whole.
    """

    id: bytes
    parts: list[tuple[bytes, bytes]]
    prefixes: tuple[bytes, ...]
    since: float
    source: str
    position: int | None


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two messages cannot both be right. What came first stands; the other was not taken.

    `what` is "value": the same key with another value; "prefix": a header, not taken at all,
    that announces a prefix of another payload; "count": a payload announces `prefix` with
    two counts, of which the larger one stands. `payload` is the id of the payload that the
    message is of (with "prefix": that holds the prefix), None where no header has told.
    """

    what: Literal["value", "prefix", "count"]
    key: bytes
    prefix: bytes
    payload: bytes | None
    source: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that nothing can be made of; it was not taken. `key` may be cut short or empty."""

    key: bytes
    reason: str
    source: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something unfinished was given up: what came of it is forgotten, and may come again.

    `payload` is its id, or None for messages whose prefix, `prefix`, nobody has announced;
    `missing` is how many messages it still lacks, None without a header. `positions`
    says from where each source would have to be read again to have what was there.
    """

    why: Literal["age", "budget"]
    payload: bytes | None
    prefix: bytes | None
    messages: int
    bytes: int
    missing: int | None
    since: float
    positions: Mapping[str, int]


Event = PayloadComplete | Conflict | Malformed | Dropped
