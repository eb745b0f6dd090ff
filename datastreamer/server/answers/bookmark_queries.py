"""Look-ups of bookmarks that do not make other clients wait.

Owns which look-ups run in a thread, that a result is of the stream as it is, and when the view of
the index that look-ups share is released. Knows no client.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial

import trio

from datastreamer.errors import DamagedEntry, UnknownBookmark
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.bookmarks._at_hand import LookUpsAtHand, NotAtHandError

# A look-up that has to scan more than this many bytes of the stream runs in a thread.
_INLINE_SCAN = 1 << 20
# Look-ups in less time than this have not waited for a disk.
_QUICK_SECONDS = 0.000_05
# The longest time that a view of the index is shared while the event loop has no pause.
_SHARED_SECONDS = 0.001


class BookmarkQueries(trio.abc.Instrument):
    """The look-ups in the stream of one broadcast.

    Those at hand share a view of the index, which is released before the event loop waits, and
    after a millisecond, so that the index can reuse its pages.
    """

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self.shared: LookUpsAtHand | None = None
        """What `at_hand` returned last, until it is released."""
        self._began = 0.0
        self._instrumenting = False

    async def find(self, key: bytes) -> int | None:
        """The newest entry with this key. A look-up that is long or may read the disk runs in a
        thread, and is repeated if the stream was changed meanwhile."""
        return await self._broadcast.turns.steadily(partial(self._find, key))

    async def _find(self, key: bytes) -> int | None:
        stream, cold = self._stream, self._broadcast.cold
        try:
            if stream.bookmarks.unread() > _INLINE_SCAN:
                return await cold.run(self._scan, key)
            if not cold.index_at_hand:
                return await cold.run(self._look_up, key)
            with contextlib.suppress(NotAtHandError, DamagedEntry):
                return cold.look_up(self._bookmark_at_hand, key)
            # It needs the disk, or the index has to be repaired first.
            return await cold.run(stream.bookmark, key)
        except UnknownBookmark:
            return None

    def at_hand(self, state: object) -> LookUpsAtHand:
        """For look-ups before the caller waits for anything, at the `state` of the stream's reader.
        Raises `NotAtHandError` if they need the disk, a repair of the index or a scan of
        the stream."""
        shared = self.shared
        if shared is not None:
            if shared.hold_at(state):
                return shared
            self._release()
        if not self._broadcast.cold.index_at_hand:
            raise NotAtHandError
        self._began = time.perf_counter()
        self.shared = shared = self._stream.bookmarks.at_hand(_INLINE_SCAN)
        if not self._instrumenting:
            self._instrumenting = True
            trio.lowlevel.add_instrument(self)
        return shared

    def before_io_wait(self, timeout: float) -> None:
        """The event loop looks for events, for as long as `timeout` seconds."""
        if self.shared is None:
            return
        if timeout > 0 or time.perf_counter() - self._began > _SHARED_SECONDS:
            self._release()

    def close(self) -> None:
        """Release what is shared; for the event loop that called `at_hand`."""
        self._release()
        if self._instrumenting:
            self._instrumenting = False
            with contextlib.suppress(KeyError):  # the event loop removes one that failed
                trio.lowlevel.remove_instrument(self)

    def _release(self) -> None:
        shared, self.shared = self.shared, None
        if shared is not None:
            shared.end()
            if time.perf_counter() - self._began > _QUICK_SECONDS:
                self._broadcast.cold.looked_up_slowly()

    def _scan(self, key: bytes) -> int:
        """A look-up that reads entries which are not indexed yet."""
        pages, unindexed = self._broadcast.pages, self._broadcast.doubt_unindexed()
        # (Those that are fetched are compared then.)
        pages.compare(unindexed[max(0, pages.floor - unindexed.start) :])
        return self._stream.bookmark(key)

    def _look_up(self, key: bytes) -> int:
        return self._broadcast.cold.look_up(self._stream.bookmark, key)

    def _bookmark_at_hand(self, key: bytes) -> int | None:
        number = self.at_hand(self._stream.reader.state).newest(key)
        if number is None or (
            self._broadcast.is_resident(number) and self._stream.is_bookmark(number, key)
        ):
            return number
        raise NotAtHandError
