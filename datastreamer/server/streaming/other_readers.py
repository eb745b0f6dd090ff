"""What readers that are no clients of this protocol need of a server: reports of changes.

Owns the report. `server.py` makes it, before the first byte of a change is written.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class EntryChange(NamedTuple):
    """The entries from `start` up to `stop`, at file offsets `offset` to `end`, are about to be
    updated, or, if `stop` is None, truncated with all that follow. With `late` another process has
    done so already."""

    start: int
    offset: int
    stop: int | None
    end: int
    late: bool


class OtherReader(Protocol):
    """A reader of the stream. Its methods do not wait and do not fail."""

    def changed(self, change: EntryChange) -> None: ...

    def lost(self) -> None:
        """The stream's file was removed or replaced, and the stream that was read is closed; or it
        is not known which entries were changed."""
