"""Shared by the keeper's tests: a history, a gate for its thread, checks of an index."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import UnknownBookmark
from datastreamer.storage.bookmarks import registry
from datastreamer.storage.disk.access import Access
from tests.storage.made import BOOKMARK, Item, bookmarks_of, scan_file

PATIENCE = 30.0


def operation(*keys: bytes, size: int = 200_000) -> list[Item]:
    """Bookmarks, each followed by an event of about a fifth of a page."""
    return [item for key in keys for item in ((BOOKMARK, key), (1, key * (size // len(key))))]


HISTORY = [
    operation(b"old", b"twice"),
    operation(*(b"%d" % n for n in range(15))),
    operation(b"twice", b"last"),
]


class Gate:
    """Holds the keepers' threads before each transaction, while they hold no lock."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.tickets = threading.Semaphore(0)
        self.open = False

    def pass_by(self, thread: threading.Thread | None) -> None:
        if self.open or threading.current_thread() is not thread:
            return
        self.arrived.release()
        assert self.tickets.acquire(timeout=PATIENCE)

    def wait_for_arrival(self) -> None:
        assert self.arrived.acquire(timeout=PATIENCE)

    def pass_one(self) -> None:
        self.tickets.release()
        self.wait_for_arrival()

    def pass_all(self) -> None:
        self.open = True
        self.tickets.release(1000)


def index_of(path: Path) -> Path:
    return path.with_name(path.name + ".index")


def known_of(path: Path) -> dict[bytes, int]:
    return bookmarks_of(scan_file(path))


def check(stream: DataStream, known: dict[bytes, int]) -> None:
    assert {key: stream.bookmark(key) for key in known} == known
    with pytest.raises(UnknownBookmark):
        stream.bookmark(b"unknown")


def check_index(path: Path, known: dict[bytes, int]) -> None:
    """Check the index itself, without the keeper."""
    index = registry.index_opener("lmdb")(str(path), False, Access.private())
    try:
        assert {key: index.newest(key) for key in known} == known
        assert len(index) == len(known)
    finally:
        index.close()
