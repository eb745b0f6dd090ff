"""A bounded set of connections, shared fairly among addresses.

Owns which connection has to leave when the set is full. Knows neither sockets nor why a
connection is in the set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairSlots(Generic[T]):
    """At most `size` members. A new member is always accepted: when the set is full, the oldest
    member of the address with the most members leaves. So a flood from one address displaces
    its own connections, and no connection of an address that has fewer.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_address: dict[str, dict[T, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        """All members, the oldest of each address first."""
        return iter([member for members in self._by_address.values() for member in members])

    def add(self, member: T, address: str) -> T | None:
        """Add `member`; return the member that has left for it, if any."""
        self._by_address.setdefault(address, {})[member] = None
        self._count += 1
        return None if self._count <= self._size else self.displace()

    def displace(self) -> T:
        """Remove the oldest member of the address with the most members, and return it. There must
        be one."""
        crowded = max(self._by_address, key=lambda each: len(self._by_address[each]))
        oldest = next(iter(self._by_address[crowded]))
        self.discard(oldest, crowded)
        return oldest

    def discard(self, member: T, address: str) -> None:
        """Remove `member`, which came from `address`, if it is in the set."""
        members = self._by_address.get(address, {})
        if member in members:
            del members[member]
            self._count -= 1
            if not members:
                del self._by_address[address]
