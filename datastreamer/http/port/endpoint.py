"""One HTTP port: its connections, their limits, and its shutdown.

Owns the connections, shared fairly among addresses: when the port is full, the oldest connection of
the address that has the most is closed among those that wait for a request. Knows no paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Iterable, Iterator
from typing import Final

import trio

from datastreamer.http.port.connection import HttpConnection, Respond
from datastreamer.http.port.messages import (
    AnswerCut,
    BodyOutput,
    HttpAnswer,
    HttpProblem,
    HttpRequest,
)
from datastreamer.metrics.counters import HttpCounts
from datastreamer.server.admission.fair_slots import FairSlots
from datastreamer.server.ticks import until_tick
from datastreamer.transport.listeners import address_of, host_of, is_local, peer_of
from datastreamer.transport.refusal_log import RefusalLog
from datastreamer.transport.server_stream import Transport
from datastreamer.transport.tcp_info import tcp_info
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import transport_over

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5
# Connections beyond the limits that are answered at a time; others are closed at once.
_MOST_REFUSED: Final = 32
_WRITE_SECONDS: Final = 60.0
# Looks at each connection within the write timeout; connections looked at before other tasks run.
_LOOKS: Final = 4
_LOOKS_A_TURN: Final = 64
_NOT_TLS: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpEndpoint:
    """Answers on one port. `most` and `most_followers` bound its connections."""

    def __init__(
        self,
        respond: Respond,
        counts: HttpCounts,
        *,
        most: int,
        most_followers: int = 0,
        write_timeout: float | None = None,
        tls: ServerTLS | None = None,
    ) -> None:
        """A client is disconnected if it acknowledges no bytes for `write_timeout` seconds (None:
        60) while bytes wait for it."""
        self.counts = counts
        self._respond = respond
        self._most = most
        self._most_followers = most_followers
        self._write_timeout = write_timeout or _WRITE_SECONDS
        self._tls = tls
        self._refusals = RefusalLog(_log)
        # Connections that wait for a request, and those whose request is answered.
        self._slots: FairSlots[trio.CancelScope] = FairSlots(most)
        self._answering: set[trio.CancelScope] = set()
        self._connections: dict[HttpConnection, socket.socket] = {}
        self._accepting = trio.CancelScope()
        self._ended = trio.Event()

    async def run(
        self,
        listeners: Iterable[socket.socket],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and answer until cancelled, or until `finish` is done; closes the listeners."""
        ours = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in listeners]
        async with trio.open_nursery() as stalling:
            stalling.start_soon(self._reset_stalled)
            async with trio.open_nursery() as nursery:
                with self._accepting:
                    task_status.started()
                    await trio.serve_listeners(self._accept, ours, handler_nursery=nursery)
                for listener in ours:
                    await listener.aclose()
            stalling.cancel_scope.cancel()

    async def finish(self, grace: float) -> None:
        """Stop accepting, let answers that are under way end within `grace` seconds, and let
        followers reconnect elsewhere."""
        self._accepting.cancel()
        for connection in list(self._connections):
            connection.finish()
        with trio.move_on_after(grace):
            while self._connections:
                self._ended = trio.Event()
                await self._ended.wait()

    async def _accept(self, stream: trio.SocketStream) -> None:
        name: object = ()
        with contextlib.suppress(OSError):
            name = stream.socket.getpeername()
        made = socket.socket(fileno=stream.socket.detach())
        transport = transport_over(
            made, peer_of(made, name or "gone"), self._tls, self._refusals, _NOT_TLS
        )
        await self.serve(transport, made, host_of(name or ("gone",)))

    async def _reset_stalled(self) -> None:
        """Reset connections whose clients receive nothing of what waits for them, forever. Where
        the system has no information on connections, there is no such limit."""
        seen: dict[HttpConnection, tuple[int, float]] = {}
        while True:
            await until_tick(self._write_timeout / _LOOKS)
            before, seen = seen, {}
            for at, (connection, made) in enumerate(list(self._connections.items()), 1):
                if at % _LOOKS_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
                info, now = tcp_info(made), trio.current_time()
                if info is None or not info.outstanding:
                    continue
                acknowledged, since = before.get(connection, (-1, now))
                if info.acknowledged != acknowledged:
                    since = now
                if now - since >= self._write_timeout:
                    words = "%s: it has received nothing for %g s"
                    _log.debug(words, connection.transport.peer, self._write_timeout)
                    connection.transport.reset()
                else:
                    seen[connection] = info.acknowledged, since

    async def serve(self, transport: Transport, made: socket.socket, host: str) -> None:
        """Serve one connection of `host`, over the socket `made`, until it ends. Its failures
        affect no other."""
        scope = trio.CancelScope()
        displaced = self._slots.add(scope, host)
        if displaced is None and len(self._slots) + len(self._answering) > self._most:
            displaced = self._slots.displace()
        on_loopback = is_local(host_of(made.getsockname()))
        connection = HttpConnection(transport, host, self.counts, on_loopback=on_loopback)
        self._connections[connection] = made
        self.counts.connections += 1

        async def respond(request: HttpRequest) -> HttpAnswer:
            self._slots.discard(scope, host)
            self._answering.add(scope)
            answer = await self._respond(dataclasses.replace(request, follower=self._follower))
            return self._following(answer) if answer.follows else answer

        def answered() -> None:
            self._answering.discard(scope)
            self._slots.discard(scope, host)
            self._slots.add(scope, host)

        try:
            if displaced is scope:
                # Every other connection is answered.
                if len(self._connections) <= self._most + _MOST_REFUSED:
                    await connection.refuse(_full("connections"))
                return
            if displaced is not None:
                displaced.cancel()
            with scope:
                await connection.run(respond, answered)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except AnswerCut as error:
            _log.debug("%s: an HTTP answer was cut: %r", transport.peer, error)
        except Exception:  # noqa: BLE001 - other connections continue
            _log.exception("%s: an HTTP answer failed", transport.peer)
        finally:
            del self._connections[connection]
            self.counts.connections -= 1
            self._answering.discard(scope)
            self._slots.discard(scope, host)
            self._ended.set()
            with trio.CancelScope(shield=True):
                await transport.close()

    @contextlib.contextmanager
    def _follower(self) -> Iterator[None]:
        """Count a follower within the block. Raises `HttpProblem` if there are too many."""
        if self.counts.followers >= self._most_followers:
            raise _full("followers")
        self.counts.followers += 1
        try:
            yield
        finally:
            self.counts.followers -= 1

    def _following(self, answer: HttpAnswer) -> HttpAnswer:
        """`answer`, whose client is counted while it is sent."""
        body = answer.body
        assert not isinstance(body, bytes)
        if self.counts.followers >= self._most_followers:
            return dataclasses.replace(_full("followers").answer(), route=answer.route)

        async def follow(output: BodyOutput) -> None:
            self.counts.followers += 1
            try:
                await body(output)
            finally:
                self.counts.followers -= 1

        return dataclasses.replace(answer, body=follow)


def _full(what: str) -> HttpProblem:
    return HttpProblem(
        503,
        f"the server has as many {what} over HTTP as it accepts; try again later",
        [("Retry-After", str(_RETRY_SECONDS))],
    )


def shown(listeners: Iterable[socket.socket], tls: ServerTLS | None, path: str) -> str:
    """The URLs of listeners, for the log."""
    scheme = "http" if tls is None else "https"
    return ", ".join(f"{scheme}://{address_of(each.getsockname())}{path}" for each in listeners)
