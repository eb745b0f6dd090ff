"""Records in the header page that others keep there: the publisher's, and a relay's upstream."""

from __future__ import annotations

from datastreamer.errors import WriteFailed
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Agreement, PublisherRecord
from datastreamer.storage.write.owned_file import OwnedFile, refusal
from datastreamer.storage.write.sync_policy import Durability


class SourceRecords:
    """Writes these records. Every method raises `StreamClosed`, `CommitInDoubt`, `WriteFailed`."""

    def __init__(self, owned: OwnedFile, durability: Durability) -> None:
        self._owned = owned
        self._durability = durability

    def put_publisher(self, source: PublisherRecord) -> None:
        """Write `source`; both copies are on disk on return.

        After `WriteFailed` the file has `source` or the record before, and the call can be
        repeated.
        """
        owned = self._owned
        with owned.syncing:
            for copy in range(len(records.SOURCE_OFFSETS)):
                with owned.lock:
                    owned.ensure_writable()
                    page = bytearray(owned.page)
                    self._write(page, records.put_source(page, copy, owned.stream_id, source))
                try:
                    self._durability.timed_sync()
                except OSError as error:
                    with owned.lock:
                        # The same sync was to bring data of operations to disk.
                        self._durability.fail(error)
                    raise WriteFailed(owned.path, refusal(error)) from error

    @property
    def agreement(self) -> Agreement | None:
        return records.get_agreement(self._owned.page)

    def put_agreement(self, agreement: Agreement | None) -> None:
        """Write it to the file. It is on disk with the next sync: after a power cut that leaves
        an older one, changes are applied again."""
        with self._owned.exclusive():
            self._owned.ensure_writable()
            page = bytearray(self._owned.page)
            self._write(page, records.put_agreement(page, agreement))

    def _write(self, page: bytearray, span: tuple[int, int]) -> None:
        """Write this part of `page`, a changed copy of the header page."""
        owned, (start, end) = self._owned, span
        try:
            owned.file.write(memoryview(page)[start:end], start)
        except OSError as error:
            owned.end.refused()
            raise WriteFailed(owned.path, refusal(error)) from error
        owned.page[start:end] = page[start:end]
