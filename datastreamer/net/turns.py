"""Which of the processes behind one listener takes the next client.

Owns a small block of memory that they share: how many clients each has, and how many more
it may have. Each writes its own two numbers and reads everybody's; one that is seen late
costs a little evenness and nothing else, so there is no lock. Knows no sockets.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import trio

_FIELDS = 2
_NUMBER = 4
# One that has more clients than another leaves the next to it, for so long.
_PAUSE = 0.001
_PATIENCE = 20
# One that may have no more leaves it to who may, who may be busy, before it refuses.
_LONG_PATIENCE = 1_000


def shared_block(workers: int) -> int:
    """A descriptor of the memory for so many processes, none of which takes clients yet."""
    size = workers * _FIELDS * _NUMBER
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("datastreamer-turns", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class Turns:
    """The block behind `fd`, as number `at` of the processes sees it; `close` unmaps it."""

    def __init__(self, fd: int, at: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._numbers = memoryview(self._map).cast("I")
        self._at = at * _FIELDS

    def note(self, clients: int, room: int) -> None:
        """This process has so many clients, and may have so many more."""
        self._numbers[self._at] = clients
        self._numbers[self._at + 1] = room

    def leave(self) -> None:
        """This process takes no clients."""
        self.note(0, 0)

    async def wait(self) -> None:
        """Return when it is this process's turn to accept, or the others have not done it
        for long."""
        waited = 0
        while waited < self._patience():
            await trio.sleep(_PAUSE)
            waited += 1

    def _patience(self) -> int:
        """How often others are let past at most; 0: it is this process's turn."""
        numbers, at = self._numbers, self._at
        least = -1
        for other in range(0, len(numbers), _FIELDS):
            if other != at and numbers[other + 1] and not -1 < least <= numbers[other]:
                least = numbers[other]
        if least < 0:
            return 0
        if not numbers[at + 1]:
            return _LONG_PATIENCE
        # An eighth more is even enough, and lets a crowd in faster.
        return _PATIENCE if numbers[at] > least + least // 8 else 0

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
