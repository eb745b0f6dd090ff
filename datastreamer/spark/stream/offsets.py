"""Where a streaming query stands: what Spark keeps in its checkpoint between two batches.

Owns the form of an offset: the number of the next entry, and what tells that the entries before
it are still those that the query has read. Knows no file and no server.
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
    """All entries before `entry` are done with.

    `digest` is of the last 256 of them, and empty where it is not known; `stream` says whose
    they are.
    """

    entry: int
    digest: str = ""
    stream: Identity | None = None

    def told(self) -> dict[str, Any]:
        """As Spark keeps it: names, numbers and texts alone."""
        told: dict[str, Any] = {"entry": self.entry, "digest": self.digest}
        if self.stream is not None:
            told["version"] = self.stream.version
            told["systemId"] = self.stream.system_id
            told["streamType"] = self.stream.stream_type
        return told

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> StreamOffset:
        """What `told` gave. Raises `BadPosition`."""
        names = ("version", "systemId", "streamType")
        try:
            numbers = [told["entry"], *(told[name] for name in names if "version" in told)]
            digest = told["digest"]
        except (KeyError, TypeError):
            numbers, digest = [None], None
        whole = all(type(number) is int and 0 <= number <= U64_MAX for number in numbers)
        if not whole or not isinstance(digest, str):
            raise BadPosition(f"no place in a stream: {told!r}; was the checkpoint of this query?")
        entry, *parts = numbers
        return cls(entry, digest, Identity(*parts) if parts else None)


def digest_of(hashes: bytes) -> str:
    """The digest of the last entries, by the hashes of each; none of no entries."""
    return xxh3_64_hexdigest(hashes) if hashes else ""
