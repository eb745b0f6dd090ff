"""Damage that the server meets for a client: what is logged and counted, and the client's refusal.

Owns that a page is compared if entries of it cannot be read, so that the metric shows it and the
healer restores it. Knows no connection.
"""

from __future__ import annotations

import logging

from datastreamer.errors import DamagedEntry, DamagedPage, EvictedEntry, StreamFileError
from datastreamer.format import RESULT_ARCHIVED, RESULT_DAMAGED, page_of
from datastreamer.protocol.server import Refuse
from datastreamer.server.streaming.broadcast import Broadcast

_log = logging.getLogger(__name__)


async def noted(broadcast: Broadcast, error: StreamFileError) -> StreamFileError:
    """`error`, or the damage of the page that is its cause. Other clients are sent what they were
    sent before of a page that was verified: its entries up to the damage."""
    if isinstance(error, DamagedPage):
        broadcast.pages.found(error)
        return error
    pages = broadcast.pages
    found: DamagedPage | None = None
    if isinstance(error, DamagedEntry):
        found = await broadcast.cold.run(pages.examine, page_of(error.offset))
    if found is None:
        return error
    pages.found(found)
    return found


async def refusal(broadcast: Broadcast, error: StreamFileError, request: object) -> Refuse:
    """The refusal of a client's request that met damage; the connection can be used."""
    error = await noted(broadcast, error)
    # The damage of a page is logged once, not for each request.
    level = logging.DEBUG if isinstance(error, DamagedPage) else logging.ERROR
    _log.log(level, "a request for %s is refused: %s", request, error)
    number = RESULT_ARCHIVED if isinstance(error, EvictedEntry) else RESULT_DAMAGED
    return Refuse(number, close=False, why=error.what)
