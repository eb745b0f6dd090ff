"""Which of the processes behind one listener takes the next client, and whose they have.

Owns a small block of memory that they share: how many clients each has, how many more it may
have, how many with the places reserved for known clients and, where clients are limited by
address, how many of each address. Each writes its own numbers and reads everybody's; one that is
seen late costs a little evenness, or lets one client more in, so there is no lock. Knows no
sockets.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator

import trio

# A random salt, 8 bytes; then how many processes there are, and how many places for addresses
# each has. Then each one's three numbers, each one's hashes of addresses, and their counts.
_SALT = 8
_HEAD = _SALT + 8
_FIELDS = 3
_NUMBER = 4
_HASH = 8
# An address stands in one of so many places from where its hash points to. There are four
# times as many in all as clients, so these are as good as never taken; where they are the
# others do not hear of it.
_WINDOW = 16
_PLACES_A_CLIENT = 4
_MOST_PLACES = 1 << 18
# One that has more clients than another leaves the next to it, for so long.
_PAUSE = 0.001
_PATIENCE = 20
# One that may have no more leaves it to who may, who may be busy, before it refuses.
_LONG_PATIENCE = 1_000


def shared_block(workers: int, clients: int = 0) -> int:
    """A descriptor of the memory for so many processes, none of which takes clients yet; each
    tells of the addresses of so many clients."""
    places = min(_MOST_PLACES, clients * _PLACES_A_CLIENT + _WINDOW) if clients else 0
    size = _HEAD + workers * (_FIELDS * _NUMBER + places * (_HASH + _NUMBER))
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("datastreamer-turns", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    numbers = (workers.to_bytes(4, sys.byteorder), places.to_bytes(4, sys.byteorder))
    os.pwrite(fd, b"".join((os.urandom(_SALT), *numbers)), 0)
    return fd


class AcceptBalance:
    """The block behind `fd`, as number `at` of the processes sees it; `close` unmaps it."""

    def __init__(self, fd: int, at: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        whole = memoryview(self._map)
        self._salt = bytes(whole[:_SALT])
        workers, self._places = whole[_SALT:_HEAD].cast("I")
        hashes = _HEAD + workers * _FIELDS * _NUMBER
        counts = hashes + workers * self._places * _HASH
        self._numbers = whole[_HEAD:hashes].cast("I")
        self._hashes = whole[hashes:counts].cast("Q")
        self._counts = whole[counts:].cast("I")
        self._at = at * _FIELDS
        self._from = at * self._places
        self._workers = workers

    def note(self, clients: int, room: int, beyond: int = 0) -> None:
        """This process has so many clients, and may have so many more; `beyond` with its
        reserved places."""
        self._numbers[self._at] = clients
        self._numbers[self._at + 1] = room
        self._numbers[self._at + 2] = beyond

    def leave(self) -> None:
        """This process takes no clients, and has none."""
        self.note(0, 0)
        for place in range(self._from, self._from + self._places):
            if self._counts[place]:
                self._hashes[place] = self._counts[place] = 0

    # Addresses.

    def note_address(self, address: str, count: int) -> None:
        """This process has so many clients of this address."""
        if not self._places:
            return
        key, first = self._find(address)
        first += self._from
        window = self._hashes[first : first + _WINDOW].tolist()
        place = window.index(key) if key in window else window.index(0) if 0 in window else -1
        if place >= 0:
            self._counts[first + place] = count
            self._hashes[first + place] = key if count else 0

    def elsewhere(self, address: str) -> int:
        """How many clients of this address the other processes have."""
        return sum(self._of_others(address)) if self._places else 0

    def _of_others(self, address: str) -> Iterator[int]:
        key, first = self._find(address)
        for begin in range(0, self._workers * self._places, self._places):
            if begin != self._from:
                window = self._hashes[begin + first : begin + first + _WINDOW].tolist()
                if key in window:
                    yield self._counts[begin + first + window.index(key)]

    def _find(self, address: str) -> tuple[int, int]:
        """The hash that stands for an address, and the first place where it may stand."""
        packed = hashlib.blake2b(address.encode(), digest_size=_HASH, salt=self._salt).digest()
        key = int.from_bytes(packed, "big") or 1
        return key, key % (self._places - _WINDOW + 1)

    # Turns.

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
        # Where nobody has room for everybody, reserved places count.
        for field in (1, 2):
            least = -1
            for other in range(0, len(numbers), _FIELDS):
                if other != at and numbers[other + field] and not -1 < least <= numbers[other]:
                    least = numbers[other]
            if numbers[at + field]:
                # An eighth more is even enough, and lets a crowd in faster.
                even = least < 0 or numbers[at] <= least + least // 8
                return 0 if even else _PATIENCE
            if least >= 0:
                return _LONG_PATIENCE
        return 0

    def close(self) -> None:
        for view in (self._numbers, self._hashes, self._counts):
            view.release()
        self._map.close()
