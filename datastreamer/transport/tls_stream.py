"""A server's TLS connections under Trio: handshakes, and the transport that sessions use.

Owns the ciphertext between OpenSSL and the socket, and how a TLS connection begins and
ends. Which certificates are shown, and what an error means, stands in `tls.py`.

OpenSSL is driven directly: trio's `SSLStream` does not send the alert that tells a client
why it is refused, and holds all of what is being sent in memory twice.
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

# From the connection to the end of the handshake.
HANDSHAKE_SECONDS = 10.0
# So long a client that reads nothing is waited for to take the farewell.
_FAREWELL_SECONDS = 1.0
# The first byte of a client that speaks TLS; a command of ours begins with a zero.
_HANDSHAKE_RECORD = b"\x16"
# What is encrypted before the socket is asked to take it: TLS's largest record.
_RECORD_BYTES = 16 * 1024


def transport_over(
    connection: socket.socket, peer: str, tls: ServerTLS | None, refusals: RefusalLog
) -> Transport:
    """What a session uses for an accepted connection. Unix sockets are without TLS."""
    if tls is None or connection.family == socket.AF_UNIX:
        return SocketTransport(connection, peer)
    return TLSTransport(connection, peer, tls, refusals)


class TLSTransport:
    """A connection with TLS. The handshake is the first `receive`'s.

    Where none comes about the client is told as far as it understands, the log says why,
    and `receive` gives the end.
    """

    def __init__(
        self, connection: socket.socket, peer: str, tls: ServerTLS, refusals: RefusalLog
    ) -> None:
        self.peer = peer
        self.certified = False
        self._refusals = refusals
        self._socket = SocketTransport(connection, peer)
        self._tls = tls
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # None before the handshake, and after our end of TLS.
        self._object: ssl.SSLObject | None = None
        self._begun = False
        # Ciphertext that the socket is to take before any other.
        self._unsent = memoryview(b"")

    @property
    def socket_fd(self) -> int | None:
        return None

    @property
    def by_reference(self) -> bool:
        return False

    def peer_names(self) -> list[str]:
        """Whom the client's certificate is for, in lower case; nobody where it shows none."""
        certificate = None if self._object is None else self._object.getpeercert()
        return names_of(certificate) if certificate else []

    async def receive(self) -> bytes:
        if not self._begun:
            self._begun = True
            if not await self._begin():
                return b""
        tls = self._object
        if tls is None:
            # Nobody looks into what comes behind our end.
            return await self._socket.receive()
        while True:
            try:
                return tls.read(RECEIVE_SIZE)
            except ssl.SSLWantReadError:
                await self._take_in()
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
            if self._object is None:
                raise trio.ClosedResourceError("the connection has ended")
            try:
                sent = self._object.write(view[:_RECORD_BYTES])
            except ssl.SSLError as error:
                raise trio.BrokenResourceError(f"TLS: {why(error)}") from error
            view = view[sent:]
        await self._flush()

    def send_now(self, data: Buffer) -> int:
        return 0

    async def wait_writable(self) -> None:
        await self._flush()

    def send_file(self, file: int, offset: int, count: int) -> int:
        raise RuntimeError("a file is not sent through TLS")

    def _flush_now(self) -> bool:
        """Whether the socket took all ciphertext that there is."""
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

    # The beginning.

    async def _begin(self) -> bool:
        """Whether there is a TLS connection now."""
        try:
            with trio.fail_after(HANDSHAKE_SECONDS):
                first = await self._socket.receive()
                if not first:
                    return False
                if first[:1] != _HANDSHAKE_RECORD:
                    told = messages.encode_result(RESULT_INVALID_COMMAND, "This server wants TLS")
                    await self._socket.send(told)
                    refused = "it does not speak TLS"
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
        """What was wrong with it; "" if nothing was."""
        tls = self._tls.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._take_in()
            except ssl.SSLError as error:
                # The alert that says why; what the client has still to say runs dry, or it
                # would be lost.
                await self._flush()
                return client_fault(error)
            else:
                await self._flush()
                self._object = tls
                self.certified = tls.getpeercert(True) is not None
                return ""

    # The end.

    def _say_farewell(self) -> None:
        """Put the end of TLS behind what is still to be sent."""
        tls, self._object = self._object, None
        if tls is not None:
            # It asks for the peer's own end behind ours, which nobody waits for.
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

    Where they are of no use that is logged, and those before go on.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as hangups:
        task_status.started()
        async for _ in hangups:
            reload_and_log(tls)


def reload_and_log(tls: ServerTLS) -> bool:
    """Read certificates and keys again; whether they are in use now. The log says it too."""
    try:
        tls.reload()
    except BadCertificate as error:
        _log.error("the TLS files that were read before stay in use: %s", error)
        return False
    _log.info("the TLS files were read again")
    return True
