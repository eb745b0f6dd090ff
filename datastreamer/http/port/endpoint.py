"""One HTTP port: its connections, their limits, and its shutdown.

Owns the connections, shared fairly among addresses: when the port is full, the oldest connection of
the address that has the most is closed, unless it follows the stream. Knows no paths.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable
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
from datastreamer.server.admission.fair_slots import FairSlots
from datastreamer.transport.listeners import address_of, host_of, peer_of
from datastreamer.transport.refusal_log import RefusalLog
from datastreamer.transport.server_stream import Transport
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import transport_over

_log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 5
_NOT_TLS: Final = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpEndpoint:
    """Answers on one port. `most` and `most_followers` bound its connections."""

    def __init__(
        self,
        respond: Respond,
        *,
        most: int,
        most_followers: int = 0,
        write_timeout: float | None = None,
        tls: ServerTLS | None = None,
    ) -> None:
        self._respond = respond
        self._most = most
        self._most_followers = most_followers
        self._write_timeout = write_timeout
        self._tls = tls
        self._refusals = RefusalLog(_log)
        self._slots: FairSlots[trio.CancelScope] = FairSlots(most)
        self._followers = 0
        self._connections: dict[HttpConnection, None] = {}
        self._accepting = trio.CancelScope()
        self._ended = trio.Event()

    async def run(
        self,
        listeners: Iterable[socket.socket],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept and answer until cancelled, or until `finish` is done; closes the listeners."""
        ours = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in listeners]
        async with trio.open_nursery() as nursery:
            with self._accepting:
                task_status.started()
                await trio.serve_listeners(self._accept, ours, handler_nursery=nursery)
            for listener in ours:
                await listener.aclose()

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
        await self.serve(transport, host_of(name or ("gone",)))

    async def serve(self, transport: Transport, host: str) -> None:
        """Serve one connection of `host` until it ends. Its failures affect no other."""
        scope = trio.CancelScope()
        displaced = self._slots.add(scope, host)
        if displaced is None and len(self._slots) + self._followers > self._most:
            displaced = self._slots.displace()
        connection = HttpConnection(transport, host, self._write_timeout)
        self._connections[connection] = None

        async def respond(request: HttpRequest) -> HttpAnswer:
            answer = await self._answer(request)
            if answer.follows:
                return self._following(answer, scope, host)
            return answer

        try:
            if displaced is scope:
                # Every other connection follows the stream.
                await connection.refuse(_full("connections"))
                return
            if displaced is not None:
                displaced.cancel()
            with scope:
                await connection.run(respond)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except (trio.TooSlowError, AnswerCut) as error:
            _log.debug("%s: an HTTP answer was cut: %r", transport.peer, error)
            if isinstance(error, trio.TooSlowError):
                transport.reset()
        except Exception:  # noqa: BLE001 - other connections continue
            _log.exception("%s: an HTTP answer failed", transport.peer)
        finally:
            del self._connections[connection]
            self._slots.discard(scope, host)
            self._ended.set()
            with trio.CancelScope(shield=True):
                await transport.close()

    async def _answer(self, request: HttpRequest) -> HttpAnswer:
        try:
            return await self._respond(request)
        except HttpProblem as problem:
            return problem.answer()
        except Exception:  # noqa: BLE001 - the client is answered, and others continue
            _log.exception("a request for %s failed", request.path)
            return HttpProblem(500, "the server failed to answer; its log has the reason").answer()

    def _following(self, answer: HttpAnswer, scope: trio.CancelScope, host: str) -> HttpAnswer:
        """`answer`, whose connection is not closed for another while it is sent."""
        body = answer.body
        assert not isinstance(body, bytes)
        if self._followers >= self._most_followers:
            return _full("followers").answer()

        async def follow(output: BodyOutput) -> None:
            self._slots.discard(scope, host)
            self._followers += 1
            try:
                await body(output)
            finally:
                self._followers -= 1
                displaced = self._slots.add(scope, host)
                if displaced is not None:
                    displaced.cancel()

        return HttpAnswer(answer.status, answer.kind, follow, answer.headers)


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
