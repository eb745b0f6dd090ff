"""A server's TLS connections under Trio: handshakes, and the transport that sessions use.

Owns the ciphertext between OpenSSL and the socket, and how a TLS connection begins and ends.
`tls.py` has the certificates and the meaning of errors.

OpenSSL is used directly: Trio's `SSLStream` does not send the alert with the reason of a refusal,
and keeps all bytes that are being sent in memory twice.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import ssl

import trio

from datastreamer.errors import BadCertificate
from datastreamer.format import RESULT_INVALID_COMMAND
from datastreamer.protocol import messages
from datastreamer.transport.refusal_log import RefusalLog
from datastreamer.transport.server_stream import RECEIVE_SIZE, Buffer, SocketTransport, Transport
from datastreamer.transport.tls import ServerTLS, client_fault, names_of, why

_log = logging.getLogger(__name__)

# Time limit from the connection to the end of the handshake.
HANDSHAKE_SECONDS = 10.0
# Time limit for sending the TLS close to a client that reads nothing.
_FAREWELL_SECONDS = 1.0
# The first byte of a TLS client; a command of the protocol begins with a zero.
_HANDSHAKE_RECORD = b"\x16"
# Bytes encrypted at a time: the largest TLS record.
_RECORD_BYTES = 16 * 1024
_NOT_TLS = messages.encode_result(
    RESULT_INVALID_COMMAND, "This server requires TLS: connect to tcps://HOST:PORT"
)


def transport_over(
    connection: socket.socket,
    peer: str,
    tls: ServerTLS | None,
    refusals: RefusalLog,
    not_tls: bytes = _NOT_TLS,
) -> Transport:
    """The transport of an accepted connection. Unix sockets do not use TLS. `not_tls` is sent to a
    client that does not use TLS."""
    if tls is None or connection.family == socket.AF_UNIX:
        return SocketTransport(connection, peer)
    return TLSTransport(connection, peer, tls, refusals, not_tls)


class TLSTransport:
    """A connection with TLS. The first `receive` does the handshake.

    If that fails, the client gets an alert, the log has the reason, and `receive` returns the end
    of the stream.
    """

    by_reference = False

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        tls: ServerTLS,
        refusals: RefusalLog,
        not_tls: bytes = _NOT_TLS,
    ) -> None:
        self.peer = peer
        self._not_tls = not_tls
        self.certified = False
        self._refusals = refusals
        self._socket = SocketTransport(connection, peer)
        self._tls = tls
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # None before the handshake, and after our end of TLS.
        self._object: ssl.SSLObject | None = None
        self._begun = False
        self.holds_back = False
        # Ciphertext to send before any other.
        self._unsent = memoryview(b"")

    @property
    def socket_fd(self) -> int | None:
        return None

    def peer_names(self) -> list[str]:
        """The names in the client's certificate, in lower case; empty without one."""
        certificate = None if self._object is None else self._object.getpeercert()
        return names_of(certificate) if certificate else []

    async def receive(self) -> bytes:
        if not self._begun:
            self._begun = True
            if not await self._begin():
                return b""
        tls = self._object
        if tls is None:
            # Input after our TLS close is not decrypted.
            return await self._socket.receive()
        while (data := self._decrypted(tls)) is None:
            await self._take_in()
        return data

    def _decrypted(self, tls: ssl.SSLObject) -> bytes | None:
        """Some bytes of the peer, empty at their end; None before more ciphertext is there."""
        try:
            return tls.read(RECEIVE_SIZE)
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            return b""
        except ssl.SSLError as error:
            self._object = None
            with contextlib.suppress(trio.BrokenResourceError):
                self._flush_now()  # the alert that says why
            raise trio.BrokenResourceError(f"TLS: {why(error)}") from error

    async def _take_in(self) -> None:
        data = await self._socket.receive()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def send(self, data: Buffer) -> None:
        view = memoryview(data)
        while view:
            await self._flush()
            view = view[self._encrypt(view[:_RECORD_BYTES]) :]
        await self._flush()

    def send_now(self, data: Buffer) -> int:
        view, sent = memoryview(data), 0
        while sent < len(view) and self._flush_now():
            sent += self._encrypt(view[sent : sent + _RECORD_BYTES])
        self.holds_back = not self._flush_now()
        return sent

    def _encrypt(self, data: memoryview) -> int:
        if self._object is None:
            raise trio.ClosedResourceError("the connection has ended")
        try:
            return self._object.write(data)
        except ssl.SSLError as error:
            raise trio.BrokenResourceError(f"TLS: {why(error)}") from error

    async def wait_writable(self) -> None:
        await self._flush()

    def send_file(self, file: int, offset: int, count: int) -> int:
        raise RuntimeError("a file is not sent through TLS")

    def _flush_now(self) -> bool:
        """Send ciphertext without waiting; whether all of it was sent."""
        while True:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
                if not self._unsent:
                    return True
            self._unsent = self._unsent[self._socket.send_now(self._unsent) :]
            if self._unsent:
                return False

    async def _flush(self) -> None:
        while not self._flush_now():
            await self._socket.wait_writable()
        self.holds_back = False

    # Handshake.

    async def _begin(self) -> bool:
        """Do the handshake; whether it succeeded."""
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                first = await self._socket.receive()
                if not first:
                    return False
                if first[:1] != _HANDSHAKE_RECORD:
                    await self._socket.send(self._not_tls)
                    refused = "it does not use TLS"
                else:
                    self._incoming.write(first)
                    refused = await self._shake_hands()
        except trio.TooSlowError:
            refused = f"no TLS handshake within {HANDSHAKE_SECONDS:g} s"
        except trio.BrokenResourceError as error:
            refused = client_fault(error.__cause__ or error)
        if refused:
            words, now = f"refused: {refused}", trio.current_time()
            self._refusals.note(f"TLS: {refused}", self.peer, words, now)
        return not refused

    async def _shake_hands(self) -> str:
        """Why the handshake failed; "" if it succeeded."""
        tls = self._tls.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._take_in()
            except ssl.SSLError as error:
                # Send the alert; further input is read, because a reset would destroy the alert.
                await self._flush()
                return client_fault(error)
            else:
                await self._flush()
                self._object = tls
                self.certified = tls.getpeercert(True) is not None
                return ""

    # Close.

    def _say_farewell(self) -> None:
        """Add the TLS close after the bytes that are still to be sent."""
        tls, self._object = self._object, None
        if tls is not None:
            # It raises because the peer's own close has not arrived, which is not waited for.
            with contextlib.suppress(ssl.SSLError):
                tls.unwrap()

    async def end_sending(self) -> None:
        self._say_farewell()
        with contextlib.suppress(trio.BrokenResourceError):
            with trio.move_on_after(_FAREWELL_SECONDS):
                await self._flush()
        await self._socket.end_sending()

    def reset(self) -> None:
        self._object = None
        self._socket.reset()

    async def close(self) -> None:
        self._say_farewell()
        with contextlib.suppress(trio.BrokenResourceError):
            self._flush_now()
        await self._socket.close()


async def reload_on_hangup(
    tls: ServerTLS, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Read certificates and keys again at each SIGHUP, until cancelled. In the main thread.

    If they cannot be used, that is logged, and those read before stay in use.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        task_status.started()
        async for _ in hangups:
            reload_and_log(tls)


def reload_and_log(tls: ServerTLS) -> bool:
    """Read certificates and keys again and log the result; whether they are in use now."""
    try:
        tls.reload()
    except BadCertificate as error:
        _log.error("the TLS files that were read before stay in use: %s", error)
        return False
    _log.info("the TLS files were read again")
    return True
