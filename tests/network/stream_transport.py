"""A server's connection over a Trio stream, such as one in memory."""

from __future__ import annotations

import trio

from datastreamer.transport.server_stream import RECEIVE_SIZE, Buffer


class StreamTransport:
    """Any half-closable Trio stream."""

    by_reference = certified = holds_back = False

    def __init__(self, stream: trio.abc.HalfCloseableStream, peer: str = "stream") -> None:
        self._stream = stream
        self._closing = False
        self.peer = peer

    @property
    def socket_fd(self) -> int | None:
        return None

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(RECEIVE_SIZE))

    async def send(self, data: Buffer) -> None:
        if self._closing:
            raise trio.ClosedResourceError("the connection was reset")
        await self._stream.send_all(data)

    def send_now(self, data: Buffer) -> int:
        return 0

    async def wait_writable(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    def send_file(self, file: int, offset: int, count: int) -> int:
        raise RuntimeError("a file cannot be sent without a socket")

    async def end_sending(self) -> None:
        await self._stream.send_eof()

    def reset(self) -> None:
        self._closing = True

    async def close(self) -> None:
        await trio.aclose_forcefully(self._stream)
