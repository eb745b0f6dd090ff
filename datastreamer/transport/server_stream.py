"""The byte stream of a server's connection, and that of a plain socket.

Owns the descriptor. Knows no protocol; `tls_stream.py` has TLS. A lost connection raises
`trio.BrokenResourceError` or `trio.ClosedResourceError`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from typing import Protocol

import trio

from datastreamer.transport.listeners import address_of, tune

Buffer = bytes | bytearray | memoryview

RECEIVE_SIZE = 64 * 1024
# Bytes read from a file at a time if sendfile cannot be used.
_FILE_BYTES = 128 * 1024
# Receives in a row before other tasks run.
_RECEIVES_A_TURN = 16
_RESET = struct.pack("ii", 1, 0)


class Transport(Protocol):
    """One connection, half closable. One task receives, one sends."""

    peer: str

    @property
    def socket_fd(self) -> int | None:
        """The descriptor for sends that never wait; None without a plain socket."""

    @property
    def by_reference(self) -> bool:
        """Whether `send_file` passes references to the file's pages: the peer receives a change
        that is made before it has the bytes."""

    @property
    def holds_back(self) -> bool:
        """Whether bytes that were accepted are sent by the next `send` or `wait_writable` only."""

    @property
    def certified(self) -> bool:
        """Whether the peer has presented a certificate that is accepted."""

    async def receive(self) -> bytes:
        """Receive some bytes; empty at the end of the peer's stream."""

    async def send(self, data: Buffer) -> None:
        """Send all of `data`. After a cancellation or failure the connection is unusable."""

    def send_now(self, data: Buffer) -> int:
        """Send as much of `data` as possible without waiting; returns the number of bytes."""

    async def wait_writable(self) -> None:
        """Return when `send_now` or `send_file` may send more."""

    def send_file(self, file: int, offset: int, count: int) -> int:
        """As `send_now`, from a file. Only with a `socket_fd`.

        Raises `EOFError` if the file ends at `offset`.
        """

    async def end_sending(self) -> None:
        """Close the sending side."""

    def reset(self) -> None:
        """Close the connection and drop bytes that are not sent yet."""

    async def close(self) -> None: ...


class SocketTransport:
    """A connected TCP or Unix socket, used directly.

    Trio's socket methods pass through the scheduler at every call; here only calls that have to
    wait do.
    """

    certified = holds_back = False

    def __init__(self, connection: socket.socket, peer: str | None = None) -> None:
        tune(connection)
        self._socket = connection
        self._fd = connection.fileno()
        self._unpaused = 0
        # Bytes of a Unix socket are in the peer's queue at once and a reset does not remove them: a
        # reference to a page would show what is written after a truncation.
        self.by_reference = sys.platform == "linux" and connection.family != socket.AF_UNIX
        if peer is None:
            with contextlib.suppress(OSError):
                peer = address_of(connection.getpeername())
        self.peer = peer or "gone"

    @property
    def socket_fd(self) -> int | None:
        return self._fd if self._fd >= 0 else None

    async def receive(self) -> bytes:
        try:
            data = self._received()
            self._unpaused += 1
            if data is not None and self._unpaused >= _RECEIVES_A_TURN:
                self._unpaused = 0
                await trio.lowlevel.checkpoint()
            while data is None:
                self._unpaused = 0
                await trio.lowlevel.wait_readable(self._socket)
                data = self._received()
        except (OSError, ValueError) as error:
            raise _broken(error) from error
        return data

    def _received(self) -> bytes | None:
        try:
            return self._socket.recv(RECEIVE_SIZE)
        except BlockingIOError:
            return None

    async def send(self, data: Buffer) -> None:
        view = memoryview(data)
        while view:
            sent = self.send_now(view)
            view = view[sent:]
            if view:
                await self.wait_writable()

    def send_now(self, data: Buffer) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _broken(error) from error

    def send_file(self, file: int, offset: int, count: int) -> int:
        try:
            if self.by_reference:
                sent = os.sendfile(self._fd, file, offset, count)
                at_end = not sent
            else:
                data = os.pread(file, min(count, _FILE_BYTES), offset)
                sent, at_end = self.send_now(data), not data
            if count and at_end:
                raise EOFError(f"the file ends at byte {offset}")
            return sent
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _broken(error) from error

    async def wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._socket)
        except (OSError, ValueError) as error:
            raise _broken(error) from error

    async def end_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close_now()

    async def close(self) -> None:
        self._close_now()
        await trio.lowlevel.checkpoint()

    def _close_now(self) -> None:
        if self._fd >= 0:
            self._fd = -1
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


def _broken(error: OSError | ValueError) -> trio.BrokenResourceError:
    return trio.BrokenResourceError(str(error))
