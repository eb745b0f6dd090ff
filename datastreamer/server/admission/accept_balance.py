"""Balance between the processes that share a listener: which one accepts the next client.

Owns a small block of shared memory: how many clients each process has, how many more it may
accept, how many with the reserved slots and, if clients are limited by address, how many of each
address. Each process writes its own numbers and reads all; a number that is seen late costs a
little balance, or admits one client too many, so there is no lock. Knows no sockets.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from collections.abc import Iterator

import trio

from datastreamer.metrics.writer_numbers import shared_memory

# Layout: a random salt of 8 bytes; the number of processes and of hash slots of each. Then three
# numbers for each process, the address hashes of each, and the counts of these.
_SALT = 8
_HEAD = _SALT + 8
_FIELDS = 3
_NUMBER = 4
_HASH = 8
# An address is in one of this many hash slots from the one that its hash selects. There are four
# times as many slots as clients, so that all of these are hardly ever occupied; if they are, the
# other processes do not see the address.
_WINDOW = 16
_PLACES_A_CLIENT = 4
_MOST_PLACES = 1 << 18
# A process that has more clients than another leaves the next to it, for 20 pauses of 1 ms.
_PAUSE = 0.001
_PATIENCE = 20
# A full process leaves it to the others, which may be busy, for this many pauses.
_LONG_PATIENCE = 1_000


def shared_block(workers: int, clients: int = 0) -> int:
    """A descriptor of the memory for `workers` processes, none of which accepts clients yet; each
    has room for the addresses of `clients` clients."""
    places = min(_MOST_PLACES, clients * _PLACES_A_CLIENT + _WINDOW) if clients else 0
    size = _HEAD + workers * (_FIELDS * _NUMBER + places * (_HASH + _NUMBER))
    fd = shared_memory("datastreamer-turns", size)
    numbers = (workers.to_bytes(4, sys.byteorder), places.to_bytes(4, sys.byteorder))
    os.pwrite(fd, b"".join((os.urandom(_SALT), *numbers)), 0)
    return fd


class AcceptBalance:
    """The block at descriptor `fd`, as process number `at` sees it; `close` unmaps it."""

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
        """This process has `clients` clients and accepts `room` more, or `beyond` more with its
        reserved slots."""
        self._numbers[self._at] = clients
        self._numbers[self._at + 1] = room
        self._numbers[self._at + 2] = beyond

    def leave(self) -> None:
        """This process accepts no clients, and has none."""
        self.note(0, 0)
        for place in range(self._from, self._from + self._places):
            if self._counts[place]:
                self._hashes[place] = self._counts[place] = 0

    # Addresses.

    def note_address(self, address: str, count: int) -> None:
        """This process has `count` clients of this address."""
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
        """The number of clients of this address in the other processes."""
        return sum(self._of_others(address)) if self._places else 0

    def _of_others(self, address: str) -> Iterator[int]:
        key, first = self._find(address)
        for begin in range(0, self._workers * self._places, self._places):
            if begin != self._from:
                window = self._hashes[begin + first : begin + first + _WINDOW].tolist()
                if key in window:
                    yield self._counts[begin + first + window.index(key)]

    def _find(self, address: str) -> tuple[int, int]:
        """The hash of an address, and the first hash slot where it may be."""
        packed = hashlib.blake2b(address.encode(), digest_size=_HASH, salt=self._salt).digest()
        key = int.from_bytes(packed, "big") or 1
        return key, key % (self._places - _WINDOW + 1)

    # Turns.

    async def wait(self) -> None:
        """Return when it is this process's turn to accept, or the others have not accepted for
        long."""
        waited = 0
        while waited < self._patience():
            await trio.sleep(_PAUSE)
            waited += 1

    def _patience(self) -> int:
        """How many pauses to leave to the other processes; 0: it is this process's turn."""
        numbers, at = self._numbers, self._at
        # If no process has a free slot, reserved slots count.
        for field in (1, 2):
            least = -1
            for other in range(0, len(numbers), _FIELDS):
                if other != at and numbers[other + field] and not -1 < least <= numbers[other]:
                    least = numbers[other]
            if numbers[at + field]:
                # An eighth more is balanced enough, and accepts a crowd faster.
                even = least < 0 or numbers[at] <= least + least // 8
                return 0 if even else _PATIENCE
            if least >= 0:
                return _LONG_PATIENCE
        return 0

    def close(self) -> None:
        for view in (self._numbers, self._hashes, self._counts):
            view.release()
        self._map.close()
