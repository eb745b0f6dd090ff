"""Publishes payloads to a stream: one atomic operation each, with the id as a bookmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from datastreamer.errors import BadArgument, BadEntryType
from datastreamer.format import MAX_BOOKMARK_SIZE, MAX_DATA_SIZE, TYPE_BOOKMARK, U32_MAX
from datastreamer.reassembly._messages import pack_message
from datastreamer.reassembly.splitter import Part, Splitter

MESSAGE_TYPE: Final = 0x10
"""The default type of the entries that hold messages."""


class PayloadOperation(Protocol):
    """The methods of an atomic operation that are used here."""

    def add_bookmark(self, key: bytes) -> int: ...

    def add_entries(self, type: int, data: Sequence[bytes]) -> range: ...


class Publishable(Protocol):
    """The methods of a stream that are used here; a `DataStream` has them."""

    def atomic_op(self) -> AbstractContextManager[Any]: ...


class AsyncPublishable(Protocol):
    """The methods of a publisher of tasks that are used here; those of `connect_publisher`, for
    Trio and for asyncio, have them."""

    def atomic_op(self) -> Any: ...


class _Cutting:
    """What producers have in common: the entries of a payload."""

    def __init__(self, type: int, limit: int) -> None:
        if not 0 <= type <= U32_MAX or type == TYPE_BOOKMARK:
            raise BadEntryType(f"messages need a u32 entry type that is not 0xb0, not {type}")
        if limit > MAX_DATA_SIZE - 2:
            raise BadArgument(
                f"the limit must be at most {MAX_DATA_SIZE - 2:,} bytes, not {limit:,}"
            )
        self._type = type
        self._splitter = Splitter(limit)

    def _entries(self, id: bytes, parts: Mapping[bytes, Part]) -> list[bytes]:
        return [pack_message(*message) for message in self._splitter.split(id, parts)]

    def _add(self, op: PayloadOperation, id: bytes, entries: list[bytes]) -> range:
        op.add_bookmark(id[:MAX_BOOKMARK_SIZE])
        return op.add_entries(self._type, entries)


class Producer(_Cutting):
    """Producer(stream, type=0x10, limit=1048557): publishes payloads as messages in a stream, a
    `DataStream` or that of a `BlockingPublisher`.

    `type` is the entry type, `limit` that of `Splitter`. Producers that publish the same payload
    with the same limit write the same entries.
    """

    def __init__(
        self, stream: Publishable, type: int = MESSAGE_TYPE, limit: int = MAX_DATA_SIZE - 2
    ) -> None:
        super().__init__(type, limit)
        self._stream = stream

    def publish(self, id: bytes, parts: Mapping[bytes, Part]) -> range:
        """Commit a payload; returns the numbers of the entries that hold its messages.

        The messages are those of `Splitter.split`, in one atomic operation that begins with a
        bookmark of the id's first 16 bytes. Raises `BadPayload`, and what the stream's commit
        raises; then nothing is committed, unless a server was lost: see
        `BlockingPublisher.first_unacknowledged`.
        """
        # Errors of the payload are raised before the operation begins.
        entries = self._entries(id, parts)
        with self._stream.atomic_op() as op:
            return self._add(op, id, entries)


class AsyncProducer(_Cutting):
    """AsyncProducer(publisher, type=0x10, limit=1048557): the same for Trio and asyncio, through a
    publisher of `connect_publisher`. One task at a time publishes."""

    def __init__(
        self,
        publisher: AsyncPublishable,
        type: int = MESSAGE_TYPE,
        limit: int = MAX_DATA_SIZE - 2,
    ) -> None:
        super().__init__(type, limit)
        self._publisher = publisher

    async def publish(self, id: bytes, parts: Mapping[bytes, Part], wait: bool = True) -> range:
        """Commit a payload, as `Producer.publish`. With `wait` it is on disk when this returns;
        without, when the publisher's `flush` returns. Raises `BadPayload`, and what the operation's
        commit raises. After a cancellation, or if the server was lost, the payload may be in the
        stream: the publisher's `first_unacknowledged` says from which entry on that is open."""
        entries = self._entries(id, parts)
        op = self._publisher.atomic_op()
        try:
            numbers = self._add(op, id, entries)
            await op.commit(wait=wait)
        finally:
            op.roll_back()
        return numbers
