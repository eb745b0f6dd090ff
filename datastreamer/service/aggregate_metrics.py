"""Metrics of several serving processes, collected and exposed by their parent.

Owns a thread with an event loop for the endpoint (`http/serving.py`), since the parent may have
none.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable

import trio

from datastreamer.http.serving import serve_metrics
from datastreamer.metrics.exposition import MetricsSnapshot
from datastreamer.transport.trio_thread import TrioThread

_log = logging.getLogger(__name__)


class GatheredMetrics:
    """Answers on copies of `listeners`, from its construction until `close`.

    `ask(limit)` returns the merged snapshot of all processes; it may block. `unready` is that of
    `serve_metrics`.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        ask: Callable[[int], MetricsSnapshot],
        unready: Callable[[], str],
    ) -> None:
        self._copies = [listener.dup() for listener in listeners]

        async def gather(*, limit: int) -> MetricsSnapshot:
            return await trio.to_thread.run_sync(ask, limit, abandon_on_cancel=True)

        async def main(started: Callable[[], None]) -> None:
            started()
            try:
                await serve_metrics(self._copies, gather, unready)
            except Exception:  # noqa: BLE001 - clients are served without metrics
                _log.exception("the metrics endpoint has failed")

        self._thread = TrioThread("metrics", main)

    def close(self) -> None:
        """Stop answering."""
        self._thread.close()

    def abandon(self) -> None:
        """In the child of a fork: close copies of the parent's descriptors."""
        for listener in self._copies:
            listener.close()
