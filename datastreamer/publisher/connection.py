"""What both publishers have in common: who a source says it is, and what another connection mends.

Must not import trio.
"""

from __future__ import annotations

import os
from typing import Final

from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    LeaseLost,
    NotWritten,
    OperationTooSlow,
    SourceBusy,
    UsageError,
)
from datastreamer.format import U32_MAX
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.publisher import SourceConnection, SourceTerms
from datastreamer.protocol.publishing import ANY_EPOCH, SOURCE_ID_SIZE
from datastreamer.protocol.retry import check_seconds
from datastreamer.transport.fork_guard import ForkGuard

RETRY_SECONDS: Final = 60.0
"""So long a server that is lost is waited for, unless the caller says otherwise."""
UNACKNOWLEDGED_BYTES: Final = 16 << 20
"""With so much underway a commit waits, unless the caller says otherwise."""

PASSING: Final = (
    ConnectFailed,
    ConnectionLost,
    LeaseLost,
    OperationTooSlow,
    NotWritten,
    SourceBusy,
)
"""What another connection may put right, of what ends one; for a source that had the lease."""


class Standing(ForkGuard):
    """Where a publisher stands. Raises `UsageError` for bytes underway that let nothing out."""

    _called = "publisher"

    def __init__(self, terms: SourceTerms, max_unacknowledged: int) -> None:
        super().__init__()
        check_number("max_unacknowledged", max_unacknowledged, 1)
        self._most = max_unacknowledged
        self._source = SourceConnection(terms)

    @property
    def epoch(self) -> int:
        """The lease's."""
        return self._source.epoch

    @property
    def next_entry(self) -> int:
        """Where the next operation begins."""
        return self._source.next_entry

    @property
    def total_entries(self) -> int:
        """How many entries are on disk, as the server last said."""
        return self._source.total_entries

    @property
    def first_unacknowledged(self) -> int | None:
        """Where the first operation begins that has no receipt yet; None: all have."""
        underway = self._source.underway
        return underway[0].first if underway else None

    @property
    def unacknowledged(self) -> int:
        """Operations that were committed and have no receipt yet."""
        return len(self._source.underway)


def terms_of(
    stream_type: int,
    token: bytes | str | None,
    epoch: int,
    take_over: bool,
    next_entry: int | None,
    lease: float | None,
) -> SourceTerms:
    """What a source asks for, with an id of its own. Raises `UsageError`."""
    check_number("stream_type", stream_type)
    check_number("epoch", epoch)
    if next_entry is not None:
        check_number("next_entry", next_entry)
    if lease is not None:
        check_seconds("lease", lease, zero=True)
        if lease * 1000 > U32_MAX:
            raise UsageError(f"lease is at most {U32_MAX // 1000} seconds, not {lease!r}")
    shown = token.encode() if isinstance(token, str) else token or b""
    return SourceTerms(
        stream_type,
        os.urandom(SOURCE_ID_SIZE),
        shown,
        ANY_EPOCH if take_over else epoch,
        round((lease or 0) * 1000),
        next_entry,
    )
