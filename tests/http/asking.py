"""An HTTP client that sends bytes, and ports to ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from datastreamer.transport.listeners import metrics_listeners


async def ask(port: int, request: str | bytes, *more: str) -> tuple[int, dict[str, str], bytes]:
    """What a request is answered with: code, headers, body. `more` are header lines."""
    if isinstance(request, str):
        lines = (f"GET {request} HTTP/1.1", "Host: localhost", "Connection: close", *more)
        request = "".join(f"{line}\r\n" for line in (*lines, "")).encode()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(request)
        answer = b"".join([part async for part in stream])
    code, headers, body = parsed_answer(answer)
    if not request.startswith(b"HEAD") and "Content-Length" in headers:
        assert int(headers["Content-Length"]) == len(body)
    return code, headers, body


def parsed_answer(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Code, headers and body of an answer; a body in chunks has to be whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = {name.title(): text for name, text in (line.split(": ", 1) for line in rest)}
    if headers.get("Transfer-Encoding") == "chunked":
        body = joined(body)
    return int(first.split()[1]), headers, body


def joined(body: bytes) -> bytes:
    """The content of all chunks of a body, which is complete."""
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        part, end, body = body[:length], body[length : length + 2], body[length + 2 :]
        assert (len(part), end) == (length, b"\r\n")
        if not length:
            assert body == b""
            return b"".join(parts)
        parts.append(part)


@asynccontextmanager
async def answering(serving: Callable[..., Any]) -> AsyncIterator[int]:
    """Gives the port that `serving`, a part of `serve_metrics`, answers on."""
    listeners = metrics_listeners(None, 0)
    port = listeners[0].getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serving, listeners=listeners))
        yield port
        nursery.cancel_scope.cancel()
