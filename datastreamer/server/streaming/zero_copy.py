"""File bytes that were sent with sendfile and that the peer may not have received yet.

The kernel holds references to the page cache: an update of these bytes before the peer has them
changes what it receives. Owns the bounds of such bytes; knows no protocol.
"""

from __future__ import annotations

import fcntl
import struct
import termios

from datastreamer.transport.server_stream import Transport


class ZeroCopySends:
    """The range of one connection: from an entry to a file offset. Covers an earlier stream of the
    same connection as long as the kernel still has bytes of it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._from = 0
        self._upto = 0

    def begin(self, start: int) -> None:
        """A stream from entry `start` begins."""
        if not self._unacknowledged():
            self._from, self._upto = start, 0
        self._from = min(self._from, start)

    def sent(self, at: int) -> None:
        """Bytes up to file offset `at` were passed to sendfile."""
        self._upto = max(self._upto, at)

    @property
    def any(self) -> bool:
        """Whether there may be such bytes; does not ask the kernel."""
        return self._upto > 0

    def note_received(self) -> None:
        """Forget the range if the peer has acknowledged all of it."""
        if self._upto and not self._unacknowledged():
            self._upto = 0

    def affected(
        self, start_offset: int, stop: int | None, end: int, at: int, *, late: bool
    ) -> bool:
        """Whether a change may reach the peer through them: an update of entries before `stop`
        (None: a truncation), from file offset `start_offset` to `end`, when all bytes before `at`
        have been sent.

        With `late` the change was made some time ago, and the peer may have acknowledged such
        bytes since.
        """
        if self._upto <= start_offset:
            return False
        if late:
            return stop is None or self._from < stop
        unsent = self._unacknowledged()
        if not unsent or stop is None:
            return unsent > 0
        return self._from < stop and min(at, self._upto) - unsent < end

    def _unacknowledged(self) -> int:
        """An upper bound of the bytes passed to sendfile that the peer has not acknowledged."""
        fd = self._transport.socket_fd
        if fd is None or not self._transport.by_reference:
            return 0
        packed = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0")
        queued = int(struct.unpack("i", packed)[0])
        # File offsets count the padding between pages, the socket does not.
        return queued and queued + (1 << 20) * (1 + queued // (1 << 20))
