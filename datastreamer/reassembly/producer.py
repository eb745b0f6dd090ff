"""A payload into a stream: one atomic operation, found again by its id.

Owns in which entries a payload travels. Knows of the stream only what `Publishable` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from datastreamer.errors import BadEntryType
from datastreamer.format import MAX_BOOKMARK_SIZE, MAX_DATA_SIZE, TYPE_BOOKMARK, U32_MAX
from datastreamer.reassembly._messages import pack_message
from datastreamer.reassembly.splitter import Part, Splitter

MESSAGE_TYPE: Final = 0x10
"""The type of the entries that hold messages, unless said otherwise."""


class PayloadOperation(Protocol):
    """What is asked of an atomic operation."""

    def add_bookmark(self, key: bytes) -> int: ...

    def add_entries(self, type: int, data: Sequence[bytes]) -> range: ...


class Publishable(Protocol):
    """What is asked of a stream: a `DataStream` does."""

    def atomic_op(self) -> AbstractContextManager[Any]: ...


class Producer:
    """Producer(stream, type=0x10, limit=1048557): publishes payloads as messages in a stream.

    `type` is the entries', `limit` the `Splitter`'s. Producers that publish the same payload
    with the same limit write the same entries.
    """

    def __init__(
        self, stream: Publishable, type: int = MESSAGE_TYPE, limit: int = MAX_DATA_SIZE - 2
    ) -> None:
        if not 0 <= type <= U32_MAX or type == TYPE_BOOKMARK:
            raise BadEntryType(f"messages travel in entries of a type that is free, not {type}")
        if limit > MAX_DATA_SIZE - 2:
            raise ValueError(
                f"an entry holds messages of {MAX_DATA_SIZE - 2:,} bytes, not {limit:,}"
            )
        self._stream = stream
        self._type = type
        self._splitter = Splitter(limit)

    def publish(self, id: bytes, parts: Mapping[bytes, Part]) -> range:
        """Commit a payload; gives the numbers of the entries that hold its messages.

        They are as `Splitter.split` has them, in one atomic operation behind a bookmark of the
        id's first 16 bytes. It is all there when this returns, or not at all where it raises:
        `BadPayload`, and what the stream's commit does.
        """
        # Everything that can be wrong with it shows before the operation begins.
        entries = [pack_message(*message) for message in self._splitter.split(id, parts)]
        operation: PayloadOperation
        with self._stream.atomic_op() as operation:
            operation.add_bookmark(id[:MAX_BOOKMARK_SIZE])
            return operation.add_entries(self._type, entries)
