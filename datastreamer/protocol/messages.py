"""Answers as bytes, and what a server reports about itself.

Owns the layout of a server's messages that are no streamed entries, except those for relays and
publishers (`following`, `publish`). Must not know which of them is allowed when (`server`,
`client`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from datastreamer.format import (
    BATCH_HEAD_SIZE,
    BATCH_HEAD_STRUCT,
    CAPABILITIES_REVISION,
    CAPABILITIES_STRUCT,
    CHOSEN_HEAD_SIZE,
    CHOSEN_HEAD_STRUCT,
    COMMIT_STRUCT,
    ENTRY_HEAD_SIZE,
    ENTRY_HEAD_STRUCT,
    FEATURE_BATCH_READ,
    FEATURE_CHANGES,
    FEATURE_COMMITS,
    FEATURE_FILTERS,
    FEATURE_PAGE_SUMS,
    FEATURE_RANGE_BOOKMARK,
    FEATURE_SELECTIONS,
    FEATURE_TIMES,
    MAX_CLAUSES,
    PACKET_ANSWER,
    PACKET_BATCH,
    PACKET_CAPABILITIES,
    PACKET_CHOSEN,
    PACKET_COMMIT,
    PACKET_RESULT,
    RESULT_HEAD_SIZE,
    RESULT_HEAD_STRUCT,
    RESULT_OK,
    RESULT_TEXTS,
    STREAM_ID_SIZE,
    TYPE_NOT_FOUND,
)
from datastreamer.selection.clauses import Selection

_NUMBER = struct.Struct(">Q")


class Capabilities(NamedTuple):
    """The extensions that a server has, and what it reports about its stream.

    `stream_id` is 16 random bytes made with the stream, zeros for a file without records; `epoch`
    rises whenever entries are truncated or changed.
    """

    features: int = (
        FEATURE_RANGE_BOOKMARK
        | FEATURE_BATCH_READ
        | FEATURE_FILTERS
        | FEATURE_COMMITS
        | FEATURE_CHANGES
        | FEATURE_PAGE_SUMS
        | FEATURE_SELECTIONS
        | FEATURE_TIMES
    )
    stream_id: bytes = bytes(STREAM_ID_SIZE)
    epoch: int = 0
    max_batch_count: int = 0
    max_batch_bytes: int = 0
    revision: int = CAPABILITIES_REVISION

    def pack(self) -> bytes:
        """The packet that follows the Result."""
        head = (PACKET_CAPABILITIES, CAPABILITIES_STRUCT.size, self.revision)
        return CAPABILITIES_STRUCT.pack(*head, *self[:-1])

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Capabilities:
        """Decode a packet, ignoring what follows the known fields."""
        _, _, revision, *fields = CAPABILITIES_STRUCT.unpack_from(data)
        return cls(*fields)._replace(revision=revision)

    @property
    def ranges(self) -> bool:
        """Whether the server has ranges between bookmarks."""
        return bool(self.features & FEATURE_RANGE_BOOKMARK)

    @property
    def batch_reads(self) -> bool:
        """Whether the server has batch reads."""
        return bool(self.features & FEATURE_BATCH_READ)

    @property
    def filters(self) -> bool:
        """Whether the server can filter entries by type."""
        return bool(self.features & FEATURE_FILTERS)

    @property
    def selections(self) -> bool:
        """Whether the server can select entries by bytes at a fixed place in their data."""
        return bool(self.features & FEATURE_SELECTIONS)

    def selects(self, where: Selection) -> bool:
        """Whether the server can be asked for this selection."""
        typed = all(isinstance(clause, int) for clause in where)
        return len(where) <= MAX_CLAUSES and (self.filters if typed else self.selections)

    @property
    def commits(self) -> bool:
        """Whether the server reports where atomic operations end."""
        return bool(self.features & FEATURE_COMMITS)

    @property
    def changes(self) -> bool:
        """Whether the server reports changes of committed entries, and hashes of ranges."""
        return bool(self.features & FEATURE_CHANGES)

    @property
    def page_sums(self) -> bool:
        """Whether the server can send the checksums of its file's pages."""
        return bool(self.features & FEATURE_PAGE_SUMS)

    @property
    def times(self) -> bool:
        """Whether the server can be asked when entries were committed."""
        return bool(self.features & FEATURE_TIMES)


NO_EXTENSIONS: Final = Capabilities(features=0, revision=0)
"""The capabilities of a server that does not know the question."""


def _result(number: int, text: str) -> bytes:
    encoded = text.encode("ascii")
    return RESULT_HEAD_STRUCT.pack(PACKET_RESULT, RESULT_HEAD_SIZE + len(encoded), number) + encoded


_RESULTS: Final = {number: _result(number, text) for number, text in RESULT_TEXTS.items()}

OK: Final = _RESULTS[RESULT_OK]
"""The Result OK, with which every successful answer begins."""

NOT_FOUND: Final = ENTRY_HEAD_STRUCT.pack(PACKET_ANSWER, ENTRY_HEAD_SIZE, TYPE_NOT_FOUND, 0)
"""The answer, after `OK`, to an Entry or Bookmark query that found nothing."""


def encode_result(number: int, text: str | None = None) -> bytes:
    """A Result; known numbers have a default text."""
    if text is None:
        return _RESULTS[number]
    return _result(number, text)


def encode_batch_head(count: int, first_entry: int, total_entries: int, size: int) -> bytes:
    """The Result OK and the head of a batch; its entries, `size` bytes, follow."""
    return OK + BATCH_HEAD_STRUCT.pack(
        PACKET_BATCH, BATCH_HEAD_SIZE + size, count, first_entry, total_entries
    )


def encode_chosen_head(
    count: int, first_entry: int, next_entry: int, total_entries: int, epoch: int, size: int
) -> bytes:
    """The head of a frame of selected entries; these, `size` bytes, follow."""
    place = (first_entry, next_entry, total_entries, epoch)
    return CHOSEN_HEAD_STRUCT.pack(PACKET_CHOSEN, CHOSEN_HEAD_SIZE + size, count, *place)


def encode_range_head(last: int) -> bytes:
    """The Result OK and the number of a range's last entry; its entries follow."""
    return OK + _NUMBER.pack(last)


def encode_commit(total_entries: int) -> bytes:
    """The packet that precedes the entries of an operation, with the total at its end."""
    return COMMIT_STRUCT.pack(PACKET_COMMIT, COMMIT_STRUCT.size, total_entries)


def encode_answer(number: int, entry_type: int, data: bytes) -> bytes:
    """The answer, after `OK`, to an Entry or Bookmark query that found this entry."""
    length = ENTRY_HEAD_SIZE + len(data)
    return ENTRY_HEAD_STRUCT.pack(PACKET_ANSWER, length, entry_type, number) + data
