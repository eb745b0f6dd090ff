"""The offset of a streaming query, which Spark keeps in the query's checkpoint.

Owns its format: the number of the next entry, a digest that shows whether the entries before
it are still those that the query has read, and for a feed of changes what it has delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_hexdigest

from datastreamer.errors import BadPosition
from datastreamer.format import U64_MAX
from datastreamer.position import Identity
from datastreamer.protocol.commands import KnownHistory


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a feed of changes has delivered: the entries from `first` up to the offset's, as they
    were in `history` (None: the stream reports none). `marks` are numbers of entries, ascending,
    and the digest before each: another history parts from this one after one of them."""

    first: int
    history: KnownHistory | None
    marks: tuple[tuple[int, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        history = self.history and [self.history.stream_id.hex(), self.history.epoch]
        return {"first": self.first, "history": history, "marks": [list(it) for it in self.marks]}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Delivered:
        """The inverse of `as_json`. Raises `KeyError`, `TypeError` and `ValueError`."""
        known, marks = stored["history"], tuple((int(at), str(it)) for at, it in stored["marks"])
        history = None if known is None else KnownHistory(bytes.fromhex(known[0]), int(known[1]))
        return cls(int(stored["first"]), history, marks)


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """All entries before `entry` have been processed.

    `digest` is of the last 256 of them, empty if unknown; `stream` identifies their stream;
    `delivered` is for a feed of changes.
    """

    entry: int
    digest: str = ""
    stream: Identity | None = None
    delivered: Delivered | None = None

    def as_json(self) -> dict[str, Any]:
        """The form that Spark stores: names, numbers and strings only."""
        stored: dict[str, Any] = {"entry": self.entry, "digest": self.digest}
        if self.stream is not None:
            stored["version"] = self.stream.version
            stored["systemId"] = self.stream.system_id
            stored["streamType"] = self.stream.stream_type
        if self.delivered is not None:
            stored["delivered"] = self.delivered.as_json()
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> StreamOffset:
        """The inverse of `as_json`. Raises `BadPosition`."""
        names = ("version", "systemId", "streamType")
        try:
            numbers = [stored["entry"], *(stored[name] for name in names if "version" in stored)]
            digest, known = stored["digest"], stored.get("delivered")
            delivered = None if known is None else Delivered.from_json(known)
        except (KeyError, TypeError, ValueError, AttributeError):
            numbers, digest, delivered = [None], None, None
        valid = all(type(number) is int and 0 <= number <= U64_MAX for number in numbers)
        if not valid or not isinstance(digest, str):
            raise BadPosition(
                f"{stored!r} is not an offset in a stream: the checkpoint is of another query"
            )
        entry, *parts = numbers
        return cls(entry, digest, Identity(*parts) if parts else None, delivered)


def digest_of(hashes: bytes) -> str:
    """The digest of the last entries, from their hashes; empty if there is no entry."""
    return xxh3_64_hexdigest(hashes) if hashes else ""
