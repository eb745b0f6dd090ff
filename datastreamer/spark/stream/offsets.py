"""The offset of a streaming query, which Spark keeps in the query's checkpoint.

Owns its format: the number of the next entry, and a digest that shows whether the entries before
it are still those that the query has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_hexdigest

from datastreamer.errors import BadPosition
from datastreamer.format import U64_MAX
from datastreamer.position import Identity


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """All entries before `entry` have been processed.

    `digest` is of the last 256 of them, empty if unknown; `stream` identifies their stream.
    """

    entry: int
    digest: str = ""
    stream: Identity | None = None

    def as_json(self) -> dict[str, Any]:
        """The form that Spark stores: names, numbers and strings only."""
        stored: dict[str, Any] = {"entry": self.entry, "digest": self.digest}
        if self.stream is not None:
            stored["version"] = self.stream.version
            stored["systemId"] = self.stream.system_id
            stored["streamType"] = self.stream.stream_type
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> StreamOffset:
        """The inverse of `as_json`. Raises `BadPosition`."""
        names = ("version", "systemId", "streamType")
        try:
            numbers = [stored["entry"], *(stored[name] for name in names if "version" in stored)]
            digest = stored["digest"]
        except (KeyError, TypeError):
            numbers, digest = [None], None
        valid = all(type(number) is int and 0 <= number <= U64_MAX for number in numbers)
        if not valid or not isinstance(digest, str):
            raise BadPosition(
                f"{stored!r} is not an offset in a stream: the checkpoint is of another query"
            )
        entry, *parts = numbers
        return cls(entry, digest, Identity(*parts) if parts else None)


def digest_of(hashes: bytes) -> str:
    """The digest of the last entries, from their hashes; empty if there is no entry."""
    return xxh3_64_hexdigest(hashes) if hashes else ""
