"""The events of a `Reassembler`.

`source` and `position` are those that the message arrived with; None if they are no longer known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PayloadComplete:
    """A payload is complete: every message that is subscribed to has arrived. Reported once.

    `parts` are (key, value) in order of the keys, without headers; `prefixes` are all that were
    announced and subscribed to, in no order. `since` is the arrival time of its first message by
    the caller's clock (0.0 without one); `source` and `position` are of the message that completed
    it.
    """

    id: bytes
    parts: list[tuple[bytes, bytes]]
    prefixes: tuple[bytes, ...]
    since: float
    source: str
    position: int | None


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two messages contradict each other. The first one counts; the other was not accepted.

    `what` is "value": the same key with another value; "prefix": a header, rejected as a whole,
    that announces a prefix of another payload; "count": a payload announces `prefix` with two
    counts, of which the larger one counts. `payload` is the id of the message's payload (with
    "prefix": of the payload that has the prefix), None if no header has named it.
    """

    what: Literal["value", "prefix", "count"]
    key: bytes
    prefix: bytes
    payload: bytes | None
    source: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class Malformed:
    """An invalid message, which was not accepted. `key` may be truncated or empty."""

    key: bytes
    reason: str
    source: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Something incomplete was dropped: its messages are forgotten, and may arrive again.

    `payload` is its id, or None for messages whose prefix, `prefix`, no header has announced.
    `missing` is the number of messages that it lacks, None without a header. `positions` is where
    each source must be read again to receive its messages again.
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
