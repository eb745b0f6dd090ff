"""What reading a part of a stream over several connections needs, with Trio or with threads:
how the part is cut into pieces, and whether all servers tell one story.

Owns no connection. Must not import trio.
"""

from __future__ import annotations

from datastreamer.errors import HistoryChanged
from datastreamer.format import HEADER_PAGE_SIZE, Header
from datastreamer.position import Identity
from datastreamer.protocol.messages import Capabilities

# A piece is about so large: what a connection reads without a thought for the others.
PIECE_BYTES = 4 << 20
# So many pieces for each connection are read ahead of the one that is handed out.
AHEAD = 2
# Of a piece, so many batches wait to be handed out.
WAITING = 2


def bounds_of_pieces(
    header: Header, start: int, stop: int | None, connections: int
) -> list[tuple[int, int]]:
    """The pieces from `start` to `stop` (None: the stream's end), in order."""
    stop = max(start, header.total_entries) if stop is None else stop
    average = (header.total_length - HEADER_PAGE_SIZE) // max(1, header.total_entries)
    # No piece so large that a connection has nothing to do.
    size = max(1, min(PIECE_BYTES // max(1, average), -(-(stop - start) // connections)))
    return [(number, min(number + size, stop)) for number in range(start, stop, size)]


def part_held(number: int, stop: int, total: int) -> int:
    """Where to stop at a server that holds `total` entries: those that it lacks are read from
    another, and not waited for."""
    return max(number, min(stop, total))


class Story:
    """Which stream the servers serve, and in which history, as far as they tell."""

    def __init__(self) -> None:
        self._stream: Identity | None = None
        self._histories: dict[int, tuple[bytes, int]] = {}

    @property
    def tellers(self) -> list[int]:
        """The servers that can tell whether entries were taken back or changed."""
        return list(self._histories)

    def recognize(self, at: int, peer: str, capabilities: Capabilities, header: Header) -> None:
        """Server number `at` says this; `HistoryChanged` where it is not what was said before."""
        found = Identity.of(header)
        self._stream = self._stream or found
        if found != self._stream:
            what = f"another stream ({found})"
        else:
            history = (capabilities.stream_id, capabilities.epoch)
            same = self._histories.setdefault(at, history) if capabilities.revision else history
            if same == history:
                return
            what = "another history"
        raise HistoryChanged(
            f"{peer} serves {what} than the one that is being read",
            next_entry=0,
            total_entries=header.total_entries,
            first_differing=None,
        )
