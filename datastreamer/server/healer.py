"""Restores pages that the server found damaged, from servers of the same stream.

Decides when servers are asked: at once for a page that was just found, and again after a while if
no server could restore it. `storage/pages/page_states.py` knows which pages are damaged, and
`storage/pages/restore_open.py` restores one. The stream has to be open for writing here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from datastreamer.errors import DamagedPage, DatastreamerError
from datastreamer.metrics.counters import Counts
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.storage.pages.restore import HealedPages, Peer

_log = logging.getLogger(__name__)

# Pages that could not be restored are tried again after this time, or when another one is found.
_AGAIN_SECONDS: Final = 60.0


class Healer:
    """Restores the damaged pages of one server's stream; without `peers` it restores none."""

    def __init__(self, peers: Sequence[Peer], counts: Counts) -> None:
        self.peers = peers
        self._counts = counts
        self._found = trio.Event()
        # Why a page was not restored, as it was logged.
        self._refused: dict[int, str] = {}

    def wake(self) -> None:
        """A page was found damaged."""
        self._found.set()

    async def run(self, broadcast: Broadcast) -> None:
        """Restore what is found damaged, forever. If cancelled, a restoration in progress ends
        in its thread."""
        if not self.peers:
            return
        pages = broadcast.pages
        while True:
            await self._found.wait()
            self._found = trio.Event()
            for error in pages.damaged:
                await self._heal(broadcast, error)
            left = {error.page for error in pages.damaged}
            self._refused = {page: why for page, why in self._refused.items() if page in left}
            if left:
                with trio.move_on_after(_AGAIN_SECONDS):
                    await self._found.wait()
                self._found.set()

    async def _heal(self, broadcast: Broadcast, error: DamagedPage) -> None:
        stream, page = broadcast.stream, error.page
        call = partial(stream.parts.pages.heal, page, self.peers)
        try:
            healed: HealedPages | None = await trio.to_thread.run_sync(call, abandon_on_cancel=True)
        except DatastreamerError as failure:
            self._say(error, str(failure))
            return
        finally:
            for peer in self.peers:
                peer.close()
        if healed is not None and not healed.source:
            self._say(error, healed.why)
            return
        # None: the page is whole again, or was never proved to be damaged.
        if healed is not None:
            self._counts.healed_pages += healed.end_page - healed.page
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(broadcast.pages.recompare, page)

    def _say(self, error: DamagedPage, why: str) -> None:
        if self._refused.get(error.page) != why:
            self._refused[error.page] = why
            pages = HealedPages(error.page, error.page + 1, error.first, error.end, "", why)
            _log.error("%s: %s was not restored: %s", error.path, pages.described(), why)
