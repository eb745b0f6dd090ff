"""Entries in Arrow's IPC stream format, piece by piece.

Owns the messages of the format: the schema, a record batch each, the end.
"""

from __future__ import annotations

from typing import Final

from datastreamer._codec import EntryBatch
from datastreamer.arrow.record_batches import Converter
from datastreamer.arrow.tables import ENTRIES

KIND: Final = "application/vnd.apache.arrow.stream"
END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""Continuation, and a message of no bytes."""


class IpcEntries:
    """Writes batches of entries. Safe to use from several threads."""

    def __init__(self) -> None:
        self._converter = Converter(ENTRIES, version=None)
        self.begin = self._converter.schema.serialize().to_pybytes()
        """The message with the schema."""

    def piece(self, batch: EntryBatch) -> bytes:
        """The message with these entries. Raises `UsageError` for a number above 2**63 - 1."""
        return bytes(self._converter.convert(batch).batch.serialize())
