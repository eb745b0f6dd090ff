"""The lease to publish into a stream: who may have it, and who has it.

Owns the check of a publisher's credentials, and that one publisher at a time has the lease, with
an epoch that is on disk before the lease is granted. `session.py` executes what the holder sends.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import trio

from datastreamer.errors import (
    CommitInDoubt,
    DatastreamerError,
    LeaseHeld,
    OperationOpen,
    StreamFileError,
    StreamReadOnly,
    UsageError,
)
from datastreamer.format import (
    RESULT_BAD_OPERATION,
    RESULT_FENCED,
    RESULT_NOT_WRITTEN,
    RESULT_SOURCE_BUSY,
    U32_MAX,
)
from datastreamer.metrics.counters import Counts
from datastreamer.protocol.publish.messages import ANY_EPOCH, MOST_BYTES, Lease, PublishQuery
from datastreamer.server.publish.apply import OperationRefused
from datastreamer.server.publish.policy import Publishing, is_token
from datastreamer.storage.header.records import PublisherRecord
from datastreamer.storage.stream import DataStream
from datastreamer.transport.server_stream import Transport
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

# No operator raises an epoch this far by hand, and higher ones remain.
_MOST_EPOCH: Final = (1 << 63) - 1


class LeaseHolder(Protocol):
    """A publisher's session, as the lease knows it."""

    source_id: bytes
    left: trio.Event
    """Set when it has done all that it will do to the stream."""

    def fence(self, epoch: int, *, again: bool) -> None: ...


class PublishLease:
    """Grants the lease of one stream and knows its holder.

    Raises `UsageError` and `StreamReadOnly` if `terms` do not fit the stream or `tls`, and
    `DamagedHeader` if the record of the last epoch is damaged.
    """

    def __init__(
        self, terms: Publishing, stream: DataStream, tls: ServerTLS | None, counts: Counts
    ) -> None:
        if not stream.writable:
            raise StreamReadOnly(
                f"{stream.path}: publishing needs the stream open for writing, in the process "
                "that serves"
            )
        if terms.client_certs and (tls is None or not tls.asks_clients):
            raise UsageError("client certificates of publishers need TLS with a client CA")
        terms.tokens()
        self.terms = terms
        self.stream = stream
        self.counts = counts
        self.last = stream.source
        # The record that is in both copies on disk, not one from an interrupted write.
        self._stored: PublisherRecord | None = None
        self.holder: LeaseHolder | None = None
        self._granting = trio.Lock()

    def allows(self, query: PublishQuery, transport: Transport) -> bool:
        """Whether the publisher's token and certificate are accepted. Takes the same time for every
        token."""
        terms, allowed = self.terms, True
        if terms.token_file is not None:
            try:
                allowed = is_token(query.token, terms.tokens())
            except UsageError as error:
                _log.error("tokens cannot be checked, every publisher is refused: %s", error)
                allowed = False
        if terms.client_certs:
            names = set(getattr(transport, "peer_names", tuple)())
            allowed &= not names.isdisjoint(name.lower() for name in terms.client_certs)
        return allowed

    async def grant(self, query: PublishQuery, source: LeaseHolder) -> Lease:
        """Make `source` the holder, on disk. The previous holder has stopped when this returns.

        Raises `OperationRefused`.
        """
        async with self._granting:
            wanted = self._next_record(query)
            try:
                # Receipts are for the file at the path.
                self.stream.parts.writer.ensure_in_place(always=True)
            except DatastreamerError as error:
                raise OperationRefused(RESULT_NOT_WRITTEN, str(error)) from error
            if wanted != self._stored:
                try:
                    await trio.to_thread.run_sync(self.stream.parts.writer.put_source, wanted)
                except DatastreamerError as error:
                    what = error.what if isinstance(error, StreamFileError) else error
                    why = f"the lease cannot be written to disk: {what}"
                    raise OperationRefused(RESULT_NOT_WRITTEN, why) from error
                self.last = self._stored = wanted
            if self.holder is not None:
                again = wanted.source_id == self.holder.source_id
                self.holder.fence(wanted.epoch, again=again)
                await self.holder.left.wait()
            return await self._hand_over(wanted, query, source)

    def _next_record(self, query: PublishQuery) -> PublisherRecord:
        last, holder = self.last, self.holder
        if query.epoch == ANY_EPOCH:
            return PublisherRecord(last.epoch + 1, query.source_id)
        same = query.source_id == last.source_id
        if same and query.epoch == last.epoch:
            return last
        if query.epoch > last.epoch:
            if query.epoch > _MOST_EPOCH:
                raise OperationRefused(RESULT_BAD_OPERATION, f"epochs run to {_MOST_EPOCH}")
            return PublisherRecord(query.epoch, query.source_id)
        if query.epoch:
            raise OperationRefused(
                RESULT_FENCED,
                f"epoch {query.epoch} has ended; the last publisher has epoch {last.epoch}",
            )
        if holder is not None and not same:
            raise OperationRefused(RESULT_SOURCE_BUSY, f"its epoch is {last.epoch}")
        return PublisherRecord(last.epoch + 1, query.source_id)

    async def _hand_over(
        self, source: PublisherRecord, query: PublishQuery, holder: LeaseHolder
    ) -> Lease:
        stream, terms = self.stream, self.terms
        try:
            stream.parts.writer.lend(holder)
        except (OperationOpen, LeaseHeld) as error:
            raise OperationRefused(
                RESULT_SOURCE_BUSY, f"the server's own process: {error}"
            ) from None
        except DatastreamerError as error:
            raise OperationRefused(RESULT_NOT_WRITTEN, str(error)) from error
        try:
            await trio.to_thread.run_sync(stream.sync)
        except BaseException as error:
            stream.parts.writer.end_lease(holder)
            if isinstance(error, DatastreamerError):
                raise OperationRefused(RESULT_NOT_WRITTEN, str(error)) from error
            raise
        self.holder = holder
        own = round(terms.lease * 1000)
        return Lease(
            source.epoch,
            stream.total_entries,
            stream.stream_id,
            min(query.lease_ms or own, own),
            MOST_BYTES,
            min(terms.max_underway, U32_MAX),
            terms.max_operation_bytes,
        )

    def release(self, source: LeaseHolder) -> None:
        """`source` gives up the lease; its open operation is rolled back."""
        if self.holder is source:
            self.holder = None
            try:
                self.stream.parts.writer.end_lease(source)
            except CommitInDoubt as error:
                _log.error("the open operation of a publisher that has left: %s", error)
