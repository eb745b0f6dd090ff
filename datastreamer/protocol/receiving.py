"""The receive buffers of a connection, which batches of entries may keep.

Owns where the next bytes go, and when a new buffer is needed. Must not know what the bytes mean.
"""

from __future__ import annotations

from typing import Final

# Sizes for a connection that only queries; for one that streams, whose two buffers alternate and
# should fit a processor's cache; and for one that receives large answers.
_SMALL_BUFFER: Final = 32 << 10
STREAM_BUFFER: Final = 512 << 10
LARGE_BUFFER: Final = 1 << 20
# Full buffers, held by batches, that are checked for reuse.
_KEPT_BUFFERS: Final = 3


class Receiving:
    """Bytes `_start` to `_end` of `_buffer` are unread; the next packet has at least `_need`. Code
    that hands out memory of the buffer sets `_lent`."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self._ended = False
        self._buffer = bytearray(_SMALL_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._need = 1
        self._lent = False
        self._size = _SMALL_BUFFER
        self._kept: list[bytearray] = []

    def receive_buffer(self) -> memoryview:
        """Where to put the next bytes; release it before the next call."""
        if self._start == self._end and not self._lent:
            self._start = self._end = 0
        room = len(self._buffer) - self._end
        if room < self._size >> 2 or room < self._need - (self._end - self._start):
            self._switch_buffer()
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes are in the receive buffer; 0 means that the server closed its side."""
        if count:
            self._end += count
            self.received_bytes += count
        else:
            self._ended = True

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes that were received elsewhere; empty: the server closed its side."""
        if not data:
            self.received(0)
        rest = memoryview(data)
        while rest:
            with self.receive_buffer() as room:
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
            rest = rest[count:]
            self.received(count)

    def _switch_buffer(self) -> None:
        """Continue in a buffer with room, and move the unread bytes to its beginning."""
        old, unread = self._buffer, self._buffer[self._start : self._end]
        # More is unread than one packet needs if much is fed before events are read.
        wanted = self._need if len(unread) < self._need else 2 * len(unread)
        size = max(self._size, wanted + (self._size >> 2))
        self._view.release()
        self._kept.append(old)
        for number, kept in enumerate(self._kept):
            if len(kept) >= size and _is_free(kept):
                self._buffer = self._kept.pop(number)
                break
        else:
            self._buffer = bytearray(size)
        del self._kept[:-_KEPT_BUFFERS]
        self._buffer[: len(unread)] = unread
        self._view = memoryview(self._buffer)
        self._start, self._end = 0, len(unread)
        self._lent = False

    def expect_pieces(self, size: int) -> None:
        """Use buffers of at least this size from now on."""
        self._size = max(self._size, size)

    def _lacks(self, size: int) -> bool:
        """Whether the packet of `size` bytes is incomplete; if so, wait for the rest."""
        if self._end - self._start >= size:
            return False
        self._need = size
        return True

    def _take(self, size: int) -> None:
        self._start += size
        self._need = 1


def _is_free(buffer: bytearray) -> bool:
    """Whether no batch or view uses the buffer: only then can it be resized."""
    try:
        last = buffer.pop()
    except BufferError:
        return False
    buffer.append(last)
    return True
