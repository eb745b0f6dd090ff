"""Look-ups of bookmarks that do not make other clients wait.

Owns which look-ups run in a thread, and that a result is of the stream as it is. Knows no client.
"""

from __future__ import annotations

import contextlib
import time

import trio

from datastreamer.errors import DamagedFile, UnknownBookmark
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.bookmarks.at_hand import LookUpsAtHand, NotAtHandError

# A look-up that has to scan more than this many bytes of the stream runs in a thread.
_INLINE_SCAN = 1 << 20
# Look-ups that take less time have not waited for a disk.
_QUICK_SECONDS = 0.000_05


class BookmarkQueries:
    """The look-ups in the stream of one broadcast."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._stream = broadcast.stream
        self._began = 0.0

    async def find(self, key: bytes) -> int | None:
        """The newest entry with this key. A look-up that is long or may read the disk runs in a
        thread, and is repeated if the stream was changed meanwhile."""
        stream, broadcast = self._stream, self._broadcast
        while True:
            epoch = stream.epoch
            number: int | None = None
            try:
                with contextlib.suppress(UnknownBookmark):
                    if stream.bookmarks.unread() > _INLINE_SCAN:
                        number = await trio.to_thread.run_sync(self._scan, key)
                    elif not broadcast.cold.index_at_hand:
                        number = await broadcast.cold.run(self._look_up, key)
                    else:
                        with contextlib.suppress(NotAtHandError):
                            return broadcast.cold.look_up(self._bookmark_at_hand, key)
                        # It needs the disk, or the index has to be repaired first.
                        number = await broadcast.cold.run(stream.bookmark, key)
            except DamagedFile:
                if not broadcast.outdated() and stream.epoch == epoch:
                    raise
                epoch = -1
            await broadcast.settled()
            if stream.epoch == epoch:
                return number

    def begin_at_hand(self) -> LookUpsAtHand:
        """For look-ups without a wait, up to `end_at_hand`. Raises `NotAtHandError` if they need
        the disk, a repair of the index or a scan of the stream, or if that is being changed."""
        stream, broadcast = self._stream, self._broadcast
        stream.refresh_open_file()
        if broadcast.changing or not broadcast.cold.index_at_hand:
            raise NotAtHandError
        self._began = time.perf_counter()
        return stream.bookmarks.at_hand(_INLINE_SCAN)

    def end_at_hand(self, look_ups: LookUpsAtHand) -> None:
        """Release what `begin_at_hand` returned."""
        look_ups.end()
        if time.perf_counter() - self._began > _QUICK_SECONDS:
            self._broadcast.cold.looked_up_slowly()

    def _scan(self, key: bytes) -> int:
        """A look-up that reads entries which are not indexed yet."""
        self._broadcast.cold.checks.compare(self._broadcast.doubt_unindexed())
        return self._stream.bookmark(key)

    def _look_up(self, key: bytes) -> int:
        return self._broadcast.cold.look_up(self._stream.bookmark, key)

    def _bookmark_at_hand(self, key: bytes) -> int | None:
        return self._stream.find_bookmark(key, is_resident=self._broadcast.is_resident)
