"""The metrics of all serving processes: exposed by their parent, and for each of them, which asks
its parent, which asks them all.

Owns both ends of the socket between them, and a thread with an event loop for the parent's
endpoint, since the parent may have none. A request is the number of clients to list (u32), an
answer a `MetricsSnapshot` as JSON with its length (u32) first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable

import trio

from datastreamer.metrics.exposition import MetricsSnapshot
from datastreamer.service.control_protocol import NUMBER
from datastreamer.transport.trio_thread import TrioThread

_log = logging.getLogger(__name__)

Snapshot = Callable[[int], MetricsSnapshot]


def answer_in_thread(link: socket.socket, snapshot: Snapshot) -> None:
    """Answer one process until it ends; closes `link`. `snapshot(limit)` may block."""

    def answer() -> None:
        with link, contextlib.suppress(OSError):
            while len(asked := link.recv(NUMBER.size, socket.MSG_WAITALL)) == NUMBER.size:
                found = json.dumps(snapshot(*NUMBER.unpack(asked))).encode()
                link.sendall(NUMBER.pack(len(found)) + found)

    threading.Thread(target=answer, name="metrics for a serving process", daemon=True).start()


class ParentMetrics:
    """The other end: asks the parent, one request at a time."""

    def __init__(self, link: trio.SocketStream) -> None:
        self._link = link
        self._turn = trio.Lock()

    async def gather(self, *, limit: int) -> MetricsSnapshot:
        """The metrics of all processes. Raises `trio.BrokenResourceError` if the parent has
        ended."""
        # A half-read answer would be taken for the next one.
        async with self._turn:
            with trio.CancelScope(shield=True):
                await self._link.send_all(NUMBER.pack(limit))
                (size,) = NUMBER.unpack(await self._read(NUMBER.size))
                answer = await self._read(size)
        found: MetricsSnapshot = json.loads(answer)
        return found

    async def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = await self._link.receive_some(size)
            if not part:
                raise trio.BrokenResourceError("the parent process has ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class GatheredMetrics:
    """Answers on copies of `listeners`, from its construction until `close`.

    `ask(limit)` returns the merged snapshot of all processes; it may block. `unready` is that of
    `serve_metrics`.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        ask: Snapshot,
        unready: Callable[[], str],
    ) -> None:
        from datastreamer.http.serving import serve_metrics

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
