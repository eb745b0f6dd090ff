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
    code, headers, body = parsed_answer(answer, has_body=not request.startswith(b"HEAD"))
    if not request.startswith(b"HEAD") and "Content-Length" in headers:
        assert int(headers["Content-Length"]) == len(body)
    return code, headers, body


def parsed_answer(answer: bytes, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
    """Code, headers and body of an answer; a body in chunks has to be whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = {name.title(): text for name, text in (line.split(": ", 1) for line in rest)}
    if has_body and headers.get("Transfer-Encoding") == "chunked":
        body = joined(body)
    return int(first.split()[1]), headers, body


def joined(body: bytes) -> bytes:
    """The content of all chunks of a body, which is complete."""
    parts, at = [], 0
    while True:
        begin = body.index(b"\r\n", at) + 2
        length = int(body[at : begin - 2], 16)
        at = begin + length + 2
        part = body[begin : begin + length]
        assert (len(part), body[at - 2 : at]) == (length, b"\r\n")
        if not length:
            assert at == len(body)
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
