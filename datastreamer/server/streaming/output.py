"""What is sent to one client: counted, and whether some of it waits for room in the socket.

Owns the two counters. The session, its answers and its sender use it one after the other. Knows
bytes, not entries.
"""

from __future__ import annotations

from typing import Protocol

from datastreamer.transport.server_stream import Buffer, Transport


class ByteCounts(Protocol):
    bytes_sent: int


class ClientOutput:
    """Sends to the client of `transport`. After a cancellation or failure of a method that waits
    the connection is unusable."""

    def __init__(self, transport: Transport, counts: ByteCounts) -> None:
        self.sent = 0
        """Bytes that the kernel accepted, without those of the broadcast."""
        self.blocked = False
        """Whether bytes wait for room in the socket."""
        self._transport = transport
        self._counts = counts

    async def send(self, data: Buffer) -> None:
        sent = self.send_now(data)
        # Through TLS all may be taken, and a part of the ciphertext wait for room.
        if sent < len(data) or self._transport.holds_back:
            self.blocked = True
            await self._transport.send(memoryview(data)[sent:])
            self.blocked = False
            self._count(len(data) - sent)

    def send_now(self, data: Buffer) -> int:
        """Send as much of `data` as possible without waiting; returns the number of bytes."""
        return self._count(self._transport.send_now(data))

    def send_file(self, file: int, offset: int, count: int) -> int:
        return self._count(self._transport.send_file(file, offset, count))

    async def wait_writable(self) -> None:
        """Return when more may be sent."""
        self.blocked = True
        await self._transport.wait_writable()
        self.blocked = False

    def _count(self, sent: int) -> int:
        self.sent += sent
        self._counts.bytes_sent += sent
        return sent
