"""One HTTP/1.1 connection: requests in, answers out, one after the other.

Owns the parser (h11), the time limits of a request and of a client that reads nothing, and how a
connection ends. Knows no paths.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import h11
import trio

from datastreamer.http.port.messages import HttpAnswer, HttpProblem, HttpRequest, ensure_reads
from datastreamer.metrics.counters import HttpCounts
from datastreamer.transport.server_stream import Buffer, Transport

MOST_HEADERS: Final = 16 * 1024
_REQUEST_SECONDS: Final = 10.0
_KEEP_ALIVE_SECONDS: Final = 60.0
# If a part of a request is not read, the system resets the connection on close.
_LINGER_SECONDS: Final = 1.0
_RECEIVED_AHEAD: Final = 64 * 1024
# Copied to be sent with its frame in one call.
_JOINED_BYTES: Final = 64 * 1024

# What h11 quotes of a request in its errors, as Python writes it.
_QUOTED: Final = re.compile(r""":? (bytearray\()?b['"].*""", re.DOTALL)

# Headers of every answer; an answer's own ones replace them.
_SECURITY: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)

Respond = Callable[[HttpRequest], Awaitable[HttpAnswer]]


class _Piece:
    """Bytes of a body that are sent by another part."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


class HttpConnection:
    """The connection of one client. `host` is its host, as limits count it."""

    def __init__(
        self, transport: Transport, host: str, counts: HttpCounts, *, on_loopback: bool
    ) -> None:
        self.transport = transport
        self.counts = counts
        self.finishing = False
        self._host = host
        self._on_loopback = on_loopback
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        self._after_piece: list[bytes] = []
        # Waits for a request, which may never arrive.
        self._waiting = trio.CancelScope()
        self._on_finish: list[Callable[[], None]] = []
        self._begun = False
        # Of the request that is answered; empty if none was understood.
        self._method = b""

    async def run(self, respond: Respond, answered: Callable[[], None]) -> None:
        """Answer requests until the connection ends; `answered` is called after each answer. Raises
        `trio.BrokenResourceError`, and what a body raises: the answer is incomplete then."""
        while not self.finishing:
            close = False
            try:
                request = await self._next_request()
                if request is None:
                    break
                answer = await respond(request)
            except HttpProblem as problem:
                # The rest of what the client sends is not understood.
                answer, close = problem.answer(), True
            await self._send_answer(answer, close=close or self.finishing)
            answered()
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                break
            self._h11.start_next_cycle()
            # Many requests may have arrived at once.
            await trio.lowlevel.checkpoint()
        await self._end()

    async def refuse(self, problem: HttpProblem) -> None:
        """Answer without reading a request, and end the connection."""
        await self._send_answer(problem.answer(), close=True)
        await self._end()

    async def _end(self) -> None:
        await self.transport.end_sending()
        with trio.move_on_after(_LINGER_SECONDS):
            while await self.transport.receive():
                pass

    def finish(self) -> None:
        """End the connection after the answer that is under way."""
        self.finishing = True
        self._waiting.cancel()
        for wake in self._on_finish:
            wake()

    def on_finish(self, wake: Callable[[], None]) -> None:
        self._on_finish.append(wake)

    # Requests.

    async def _next_request(self) -> HttpRequest | None:
        """The next request; None if there is none. Raises `HttpProblem`."""
        self._method = b""
        idle = self._begun and not self._h11.trailing_data[0]
        waited = _KEEP_ALIVE_SECONDS if idle else _REQUEST_SECONDS
        self._waiting = trio.CancelScope(deadline=trio.current_time() + waited)
        request: HttpRequest | None = None
        with self._waiting:
            while True:
                try:
                    event: Any = self._h11.next_event()
                except h11.RemoteProtocolError as error:
                    raise _problem(error, self._h11.trailing_data[0]) from None
                if event is h11.NEED_DATA:
                    data = await self.transport.receive()
                    if not self._h11.trailing_data[0]:
                        self._waiting.deadline = trio.current_time() + _REQUEST_SECONDS
                    self._h11.receive_data(data)
                elif isinstance(event, h11.Request):
                    self._begun, self._method = True, event.method
                    request = self._request(event)
                elif isinstance(event, h11.EndOfMessage) and request is not None:
                    return request
                else:
                    return None
        if self._h11.trailing_data[0] and not self.finishing:
            raise HttpProblem(
                408, f"the request did not arrive within {_REQUEST_SECONDS:g} s; send it again"
            )
        return None

    def _request(self, event: h11.Request) -> HttpRequest:
        """Raises `HttpProblem` for another version, too many headers, a body, and a target that is
        not a path; for a body of a method that writes, the method is what is wrong."""
        if not event.http_version.startswith(b"1."):
            raise HttpProblem(505, "this port speaks HTTP/1.1; send the request in that version")
        headers = [(name, value) for name, value in event.headers]
        # h11 counts only what it cannot parse yet.
        size = len(event.method) + len(event.target)
        if size + sum(len(name) + len(value) for name, value in headers) > MOST_HEADERS:
            raise _too_long()
        for name, value in headers:
            if name == b"transfer-encoding" or (name == b"content-length" and int(value)):
                ensure_reads(event.method.decode("ascii"))
                raise HttpProblem(413, "requests have no body here; send the request without one")
        try:
            path, query = _path_and_query(event.target.decode("ascii"))
        except ValueError:
            raise HttpProblem(400, "the target of the request is not a path; send /...") from None
        return HttpRequest(
            event.method.decode("ascii"),
            path,
            query,
            headers,
            self.transport.peer,
            self._host,
            self._on_loopback,
            until_gone=self.until_gone,
        )

    async def until_gone(self) -> None:
        """Return when the client has ended its side. What it sends meanwhile is its next request;
        a client that sends much is not read on."""
        while len(self._h11.trailing_data[0]) < _RECEIVED_AHEAD:
            data = await self.transport.receive()
            if not data:
                return
            self._h11.receive_data(data)
        await trio.sleep_forever()

    # Answers.

    async def _send_answer(self, answer: HttpAnswer, *, close: bool) -> None:
        self.counts.requests[answer.route, str(answer.status)] += 1
        headers = [("Content-Type", answer.kind)] if answer.kind else []
        headers += answer.headers
        own = {name for name, _ in answer.headers}
        headers += [each for each in _SECURITY if each[0] not in own]
        body = answer.body
        if isinstance(body, bytes) and answer.status not in (204, 304):
            headers.append(("Content-Length", str(len(body))))
        if close:
            headers.append(("Connection", "close"))
        reason = HTTPStatus(answer.status).phrase
        head = self._h11.send(
            h11.Response(status_code=answer.status, headers=headers, reason=reason)
        )
        assert head is not None
        if isinstance(body, bytes):
            if body and self._method != b"HEAD" and answer.status not in (204, 304):
                if len(body) > _JOINED_BYTES:
                    await self._send_raw(head)
                    head = b""
                    await self.send(body)
                else:
                    head += self._h11.send(h11.Data(data=body)) or b""
            head += self._h11.send(h11.EndOfMessage()) or b""
            await self._send_raw(head)
            return
        await self._send_raw(head)
        if self._method != b"HEAD":
            self._on_finish = []
            await body(self)
        if self._h11.our_state is h11.SEND_BODY:
            await self.end()

    async def send(self, data: Buffer) -> None:
        """Send a piece of a body."""
        if len(data):
            # h11 passes on what it is given; its types say bytes.
            parts: Any = self._h11.send_with_data_passthrough(h11.Data(data=data))  # type: ignore[arg-type]
            if len(data) <= _JOINED_BYTES:
                parts = [b"".join(parts)]
            for part in parts:
                await self._send_raw(part)
        await trio.lowlevel.checkpoint()

    async def begin_piece(self, size: int) -> None:
        piece = _Piece(size)
        parts: Any = self._h11.send_with_data_passthrough(h11.Data(data=piece))  # type: ignore[arg-type]
        at = parts.index(piece)
        self._after_piece = parts[at + 1 :]
        for part in parts[:at]:
            await self._send_raw(part)

    async def end_piece(self) -> None:
        for part in self._after_piece:
            await self._send_raw(part)

    async def end(self) -> None:
        await self._send_raw(self._h11.send(h11.EndOfMessage()) or b"")
        if self._h11.our_state is h11.MUST_CLOSE:
            # Now: a part may wait until the client has received all, which it delays until then.
            await self.transport.end_sending()

    @property
    def in_chunks(self) -> bool:
        return self._h11.their_http_version != b"1.0"

    async def send_rest(self, data: Buffer) -> None:
        await self._send_raw(data)

    async def _send_raw(self, data: Buffer) -> None:
        await self.transport.send(data)
        self.counts.bytes_sent += len(data)


def _path_and_query(target: str) -> tuple[str, str]:
    """Those of a path or URL. Raises `ValueError` for anything else."""
    if target.startswith("/"):
        # `urlsplit` takes what follows two slashes for a host.
        path, _, query = target.partition("?")
        return path, query
    url = urlsplit(target)
    if url.scheme not in ("http", "https"):
        raise ValueError(target)
    return url.path or "/", url.query


def _problem(error: h11.RemoteProtocolError, received: bytes) -> HttpProblem:
    if error.error_status_hint == 431:
        return _too_long()
    what = _QUOTED.sub("", str(error))
    if received[:2] == b"\x16\x03":
        what = "it is TLS, which this port does not use"
    elif received[:7] == bytes(7):
        what = "it is a command of the stream's own protocol, which has another port"
    return HttpProblem(error.error_status_hint, f"not a request of HTTP/1.1: {what}")


def _too_long() -> HttpProblem:
    return HttpProblem(431, f"the request has more than {MOST_HEADERS} bytes; send fewer headers")
