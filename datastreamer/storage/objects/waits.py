"""Waits for the store of an archive, which may not answer for long.

Owns what a thread does before and while it waits: nothing, or what its caller says, so that no
lock, event loop or shared thread waits for the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, Final

# Interval between looks.
_LOOK_SECONDS: Final = 0.05


class NotAtHand(Exception):
    """What is read has to be fetched from the archive first. Internal."""


class _Thread(threading.local):
    look: Callable[[], object] | None = None


_thread: Final = _Thread()


class interrupted_by:  # noqa: N801 - a block, as contextlib.suppress
    """In the block this thread calls `look()` before it waits for the store, and again and again
    while it waits; what that raises ends the wait. Pages that were asked for are fetched
    nevertheless."""

    __slots__ = ("_before", "_look")

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self._before: Callable[[], object] | None = None

    def __enter__(self) -> None:
        self._before, _thread.look = _thread.look, self._look

    def __exit__(self, *_: object) -> None:
        _thread.look = self._before


def at_hand_only() -> interrupted_by:
    """A block in which what would wait for the store raises `NotAtHand`."""
    return interrupted_by(_refuse)


def _refuse() -> None:
    raise NotAtHand


def look() -> None:
    """Call before a wait for the store, and while it lasts."""
    if _thread.look is not None:
        _thread.look()


def pause(seconds: float) -> None:
    """Wait before the store is asked again."""
    until = time.monotonic() + seconds
    while _thread.look is not None and (left := until - time.monotonic()) > _LOOK_SECONDS:
        _thread.look()
        time.sleep(min(left, _LOOK_SECONDS))
    time.sleep(max(0.0, until - time.monotonic()))


def until_done(future: Future[Any]) -> None:
    """Wait for what is fetched, as long as no look ends that."""
    while not future.done():
        look()
        wait([future], None if _thread.look is None else _LOOK_SECONDS)


@contextmanager
def held(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock with which a thread may wait for the store."""
    if not lock.acquire(blocking=False):
        look()
        while not lock.acquire(timeout=-1 if _thread.look is None else _LOOK_SECONDS):
            look()
    try:
        yield
    finally:
        lock.release()
