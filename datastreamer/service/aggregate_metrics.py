"""Metrics of several serving processes, gathered and answered with by the one above them.

Owns a thread with a loop for the endpoint (`scrape.py`), since the process above may have none.
Knows the processes only as the one who asks them all.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable

import trio

from datastreamer.metrics.exposition import MetricsSnapshot
from datastreamer.server.metrics_http import serve_metrics

_log = logging.getLogger(__name__)


class GatheredMetrics:
    """Answers on copies of `listeners`, from when this is made until `close`.

    `ask(limit)` gives what all processes tell together; it may block. `unready` is that of
    `serve_metrics`.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        ask: Callable[[int], MetricsSnapshot],
        unready: Callable[[], str],
    ) -> None:
        self._copies = [listener.dup() for listener in listeners]
        self._ask = ask
        self._unready = unready
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        async def gather(*, limit: int) -> MetricsSnapshot:
            return await trio.to_thread.run_sync(self._ask, limit, abandon_on_cancel=True)

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            with self._scope:
                await serve_metrics(self._copies, gather, self._unready)

        try:
            trio.run(main)
        except Exception:  # noqa: BLE001 - clients are served all the same
            _log.exception("metrics are not answered with any more")
        finally:
            self._ready.set()

    def close(self) -> None:
        """Answer nobody any more."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    def abandon(self) -> None:
        """In the child of a fork: give up what is the parent's."""
        for listener in self._copies:
            listener.close()
