"""A client that asks a server what was changed in its stream since an epoch."""

from __future__ import annotations

from collections.abc import Sequence

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import BadFromEntry, ConnectionLost
from datastreamer.protocol import exchanges
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import CapabilitiesQuery, KnownHistory
from datastreamer.protocol.exchanges import Exchange, Streaming
from datastreamer.protocol.following import Reports
from datastreamer.protocol.messages import Capabilities
from datastreamer.storage.header.records import NO_ID, Change


class HistoryClient(BlockingClient):
    """A client that also knows the extensions for copies of a stream."""

    def history(self) -> KnownHistory | None:
        """The stream's history as it is now; None if the server does not report it."""
        if not self.capabilities().changes:
            return None
        query = CapabilitiesQuery()
        found = self._driver.run(self._engine.ask(exchanges.ask, query, Capabilities))
        return None if found.stream_id == NO_ID else KnownHistory(found.stream_id, found.epoch)

    def changes(self, since: KnownHistory, total: int) -> Sequence[Change] | None:
        """What changed in a stream of `total` entries since that state; None if the server does
        not know all of it. Raises `ConnectionLost` if it was truncated meanwhile."""
        try:
            return self._driver.run(self._engine.ask(_changes, since, total))
        except BadFromEntry as error:
            raise ConnectionLost(f"{self.peer}: {error}") from error


def _changes(
    connection: ClientConnection, known: KnownHistory, total: int
) -> Exchange[list[Change] | None]:
    streaming, found = Streaming(total, commits=True, known=known), list[Change]()
    yield from streaming.begin(connection)
    begun = streaming.begun
    complete = begun is not None and begun.reports is Reports.ALL
    # The last change is always reported.
    while complete and begun and (found[-1].epoch if found else known.epoch) < begun.epoch:
        if (yield from streaming.advance()) is None:
            return None
        found += [
            Change(it.epoch, it.first, None if it.entry is None else it.first + 1)
            for it in streaming.changes
        ]
        streaming.changes.clear()
    yield from streaming.end(None)
    return found if complete else None
