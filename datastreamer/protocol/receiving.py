"""The bytes of one connection on their way in, in buffers that runs of entries may keep.

Owns the buffers: where the next bytes go, and when to go on in another one. Must not know what
the bytes say.
"""

from __future__ import annotations

from typing import Final

# Buffers: of a connection that only asks, of one that streams - two of them are used in turn,
# and should stay in a processor's own cache - and of one that is given large answers.
_SMALL_BUFFER: Final = 32 << 10
STREAM_BUFFER: Final = 512 << 10
LARGE_BUFFER: Final = 1 << 20
# How many buffers, still held by batches when they were full, are looked at again.
_KEPT_BUFFERS: Final = 3


class Receiving:
    """Bytes `_start` to `_end` of `_buffer` are not taken yet; nothing can be made of fewer than
    `_need`. Who hands out memory of the buffer says that it is `_lent`."""

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
        """Where the next bytes go; to be let go of before the next call."""
        if self._start == self._end and not self._lent:
            self._start = self._end = 0
        room = len(self._buffer) - self._end
        if room < self._size >> 2 or room < self._need - (self._end - self._start):
            self._turn_over()
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes were put into the receive buffer; 0 says that the server ended."""
        if count:
            self._end += count
            self.received_bytes += count
        else:
            self._ended = True

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes that somebody else has read, by copying; empty: the server ended."""
        if not data:
            self.received(0)
        rest = memoryview(data)
        while rest:
            with self.receive_buffer() as room:
                count = min(len(room), len(rest))
                room[:count] = rest[:count]
            rest = rest[count:]
            self.received(count)

    def _turn_over(self) -> None:
        """Go on in a buffer with room, the unread bytes at its beginning."""
        old, unread = self._buffer, self._buffer[self._start : self._end]
        # More unread than one packet needs: somebody feeds much without taking events.
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

    def _expect(self, size: int) -> None:
        """Buffers are of `size` from now on, at least."""
        self._size = max(self._size, size)

    def _lacks(self, size: int) -> bool:
        """Whether the packet of `size` bytes is not all there; if so, waits for it."""
        if self._end - self._start >= size:
            return False
        self._need = size
        return True

    def _take(self, size: int) -> None:
        self._start += size
        self._need = 1


def _is_free(buffer: bytearray) -> bool:
    """Whether no batch or view holds the buffer any more: only then can it be resized."""
    try:
        last = buffer.pop()
    except BufferError:
        return False
    buffer.append(last)
    return True
