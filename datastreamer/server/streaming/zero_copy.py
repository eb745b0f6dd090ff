"""Bytes of the file that the kernel was only pointed to, and that the peer may not have yet.

What is changed there before it has them is what it gets. Owns the bounds of such bytes; knows no
protocol.
"""

from __future__ import annotations

import fcntl
import struct
import termios

from datastreamer.transport.server_stream import Transport


class ZeroCopySends:
    """Of one connection: nothing before an entry, nothing behind a file offset; of this streaming,
    or of an earlier one that the kernel may still be busy with."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._from = 0
        self._upto = 0

    def begin(self, start: int) -> None:
        """Entries from `start` on are sent from now on."""
        if not self._unacknowledged():
            self._from, self._upto = start, 0
        self._from = min(self._from, start)

    def sent(self, at: int) -> None:
        """The kernel was pointed to what stands before file offset `at`."""
        self._upto = max(self._upto, at)

    @property
    def any(self) -> bool:
        """Whether there may be such bytes, as far as is known without asking the system."""
        return self._upto > 0

    def note_received(self) -> None:
        """Forget those that the peer has confirmed, if these are all."""
        if self._upto and not self._unacknowledged():
            self._upto = 0

    def concerned(
        self, start_offset: int, stop: int | None, end: int, at: int, *, late: bool
    ) -> bool:
        """Whether a change may show in them: of the entries before `stop` (None: all go) from
        file offset `start_offset` to `end`, where all before `at` was sent.

        With `late` it was made some time ago, and the peer may have confirmed such bytes since.
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
        """An upper bound for the bytes that the kernel was pointed to and the peer has not
        confirmed."""
        fd = self._transport.socket_fd
        if fd is None or not self._transport.by_reference:
            return 0
        packed = fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0")
        queued = int(struct.unpack("i", packed)[0])
        # File offsets count the padding between pages, the socket does not.
        return queued and queued + (1 << 20) * (1 + queued // (1 << 20))
