"""The handle of an operation that was committed without waiting for the disk.

Owns the number of its commit. Knows nothing of when syncs happen; `durability.py` does.
"""

from __future__ import annotations

from typing import Protocol


class Waiting(Protocol):
    """What knows which commits are on disk: `Durability`."""

    def reached(self, number: int) -> bool: ...
    def wait_for(self, number: int, timeout: float | None) -> bool: ...


class PendingCommit:
    """An operation that was committed without waiting for the disk."""

    __slots__ = ("_durability", "_number")

    def __init__(self, durability: Waiting, number: int) -> None:
        self._durability = durability
        self._number = number

    def done(self) -> bool:
        """Whether it is on disk. Raises `CommitInDoubt` if it may never be."""
        return self._durability.reached(self._number)

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when it is on disk, or False after `timeout` seconds.

        Requests a sync, which all that wait share. Raises `CommitInDoubt`, `EntriesLost`.
        """
        return self._durability.wait_for(self._number, timeout)
