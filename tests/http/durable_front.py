"""Streams for the conformance suite of Durable Streams, which creates one for each case.

The suite writes what it reads, and compares bodies with it. So this front writes: a PUT makes a
stream and serves it, a POST appends, one entry for each message. Every GET and HEAD is
answered by the stream's own HTTP port: status, headers, offsets and events are its own. Only the
entries in a body are replaced by the messages that they are of, and their type by that of the PUT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import h11
import trio

from datastreamer.http.answers.durable import offset_of
from datastreamer.http.answers.reading import received
from datastreamer.storage.stream import DataStream
from tests.http.serving import serving
from tests.network.fixtures import append

PATH: Final = "/v1/streams/default"
MOST: Final = 1 << 19
"""Bytes in an entry; a longer message is several."""
Headers = list[tuple[str, str]]


@dataclass
class Served:
    """A stream that a case has made."""

    kind: str
    port: int = 0
    stream: Any = None
    gone: trio.Event = field(default_factory=trio.Event)

    @property
    def json(self) -> bool:
        return self.kind.partition(";")[0].strip().lower() == "application/json"

    def append(self, body: bytes) -> None:
        messages = [body[at : at + MOST] for at in range(0, len(body), MOST)]
        if body and self.json:
            found = json.loads(body)
            found = found if isinstance(found, list) else [found]
            messages = [json.dumps(each).encode() for each in found]
        if messages:
            append(self.stream, *[(1, each) for each in messages])

    def body(self, entries: bytes) -> bytes:
        """The messages of entries."""
        messages = [bytes.fromhex(each["data"][2:]) for each in json.loads(entries)]
        return b"[%b]" % b",".join(messages) if self.json else b"".join(messages)

    def event_line(self, line: bytes) -> Iterator[bytes]:
        """The lines that take the place of a line of an event."""
        if not line.startswith(b"data:["):
            yield line
            return
        body = self.body(line.removeprefix(b"data:"))
        for each in [body] if self.json else body.replace(b"\r\n", b"\n").split(b"\n"):
            for part in each.split(b"\r"):
                yield b"data:%b\n" % part.removesuffix(b"\n")


class Front:
    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._served: dict[str, Served] = {}
        self._made = 0

    async def serve(self, connection: trio.SocketStream) -> None:
        """Answer one request."""
        parser = h11.Connection(h11.SERVER)
        body, request = b"", None
        async with connection:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        parser.receive_data(await connection.receive_some(65536))
                    elif isinstance(event, h11.Request):
                        request = event
                    elif isinstance(event, h11.Data):
                        body += event.data
                    else:
                        return
                assert request is not None
                await self._answer(connection, request, body)

    async def _answer(self, to: trio.SocketStream, request: h11.Request, body: bytes) -> None:
        path, _, query = request.target.decode().partition("?")
        method, served = request.method.decode(), self._served.get(path)
        headers = [(name.decode(), value.decode("latin-1")) for name, value in request.headers]
        if method in ("GET", "HEAD", "OPTIONS"):
            # Of a path that no case has made, a stream says that there is none.
            name, served = (PATH, served) if served else (f"{PATH}-not", self._served["/"])
            await self._ask(to, served, f"{method} {name}?{query} HTTP/1.1", headers)
            return
        status = 404
        if method == "PUT":
            status = 200 if served else 201
            if served is None:
                kind = dict(headers).get("content-type", "application/octet-stream")
                served = await self._nursery.start(self.run, path, Served(kind))
                served.append(body)
        elif method == "POST" and served is not None:
            served.append(body)
            status = 204
        elif method == "DELETE" and served is not None:
            self._served.pop(path).gone.set()
            status = 204
        head = f"HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: 0\r\n"
        if served is not None:
            reading = received(served.stream, served.stream.total_entries)
            head += f"Content-Type: {served.kind}\r\nStream-Next-Offset: {offset_of(reading)}\r\n"
        await to.send_all(f"{head}\r\n".encode())

    async def run(self, path: str, served: Served, task_status: trio.TaskStatus[Served]) -> None:
        self._made += 1
        file = self._folder / f"{self._made}.bin"
        with DataStream.create(file, sync="os", index="memory") as served.stream:
            async with serving(served.stream, cors=("*",), patience=math.inf) as web:
                served.port = web.port
                self._served[path] = served
                task_status.started(served)
                await served.gone.wait()

    async def _ask(
        self, to: trio.SocketStream, served: Served, line: str, headers: Headers
    ) -> None:
        """Answer with what the stream's HTTP port answers."""
        left = {"host", "connection", "accept-encoding"}
        kept = [f"{name}: {value}" for name, value in headers if name.lower() not in left]
        parser = h11.Connection(h11.CLIENT)
        own = [tuple(each.split(": ", 1)) for each in kept] + [("host", "localhost")]
        method, target, _ = line.split(" ")
        async with await trio.open_tcp_stream("127.0.0.1", served.port) as port:
            asked = h11.Request(method=method, target=target, headers=own)
            await port.send_all(parser.send(asked) or b"")
            await port.send_all(parser.send(h11.EndOfMessage()) or b"")
            found: h11.Response | None = None
            body = b""
            while not isinstance(event := parser.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    parser.receive_data(await port.receive_some(65536))
                elif isinstance(event, h11.Response):
                    found = event
                    if self._kind(found) == b"text/event-stream" and method == "GET":
                        await to.send_all(self._head(served, found))
                elif isinstance(event, h11.Data):
                    body += event.data
                    if found is not None and self._kind(found) == b"text/event-stream":
                        *lines, body = body.split(b"\n")
                        whole = (served.event_line(line + b"\n") for line in lines)
                        await to.send_all(b"".join(part for each in whole for part in each))
                else:
                    return
            assert found is not None
            if self._kind(found) != b"text/event-stream":
                if self._kind(found) == b"application/json" and body:
                    body = served.body(body)
                await to.send_all(self._head(served, found) + body)

    @staticmethod
    def _kind(answer: h11.Response) -> bytes:
        return dict(answer.headers).get(b"content-type", b"")

    def _head(self, served: Served, answer: h11.Response) -> bytes:
        """The same status and headers; the body has another length: it ends the connection."""
        lines = [b"HTTP/1.1 %d -" % answer.status_code, b"Connection: close"]
        for name, value in answer.headers:
            entries = name == b"content-type" and value == b"application/json"
            if name not in (b"content-length", b"transfer-encoding", b"connection"):
                lines.append(name + b": " + (served.kind.encode() if entries else value))
        return b"".join(line + b"\r\n" for line in lines) + b"\r\n"


async def serve_front(folder: Path, *, task_status: trio.TaskStatus[int]) -> None:
    """Serve until cancelled; reports the port."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        front = Front(folder, nursery)
        await nursery.start(front.run, "/", Served("application/json"))
        task_status.started(listener.socket.getsockname()[1])
        await trio.serve_listeners(front.serve, [listener], handler_nursery=nursery)
