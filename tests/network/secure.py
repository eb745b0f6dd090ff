"""Certificates, and a client's side of TLS that is exact about how a connection ends."""

from __future__ import annotations

import contextlib
import datetime
import functools
import ssl
from collections.abc import Callable
from pathlib import Path

import trio
import trustme

from datastreamer.transport.tls import client_tls

HOST = "127.0.0.1"


class Authority:
    """A CA, and files with what it issues."""

    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self.file = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(
        self, name: str, *identities: str, first_day: int | None = None, last_day: int | None = None
    ) -> tuple[Path, Path]:
        """Files of a certificate and its key; days are counted from today."""

        def day(number: int | None) -> datetime.datetime | None:
            now = datetime.datetime.now(datetime.UTC)
            return None if number is None else now + datetime.timedelta(days=number)

        made = self._ca.issue_cert(
            *(identities or (HOST,)), not_before=day(first_day), not_after=day(last_day)
        )
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        return cert, key

    def context(self, pair: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """A client that trusts this CA."""
        return client_tls(self.file, *(pair or ()))


class TLSStream(trio.abc.HalfCloseableStream):
    """A client's side, exact about ends: one without TLS's own is a broken connection."""

    def __init__(self, stream: trio.SocketStream, context: ssl.SSLContext, name: str) -> None:
        self.socket = stream.socket
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)

    async def _do(self, call: Callable[[], bytes | None]) -> bytes:
        while True:
            try:
                outcome = call()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._stream.receive_some()
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                with contextlib.suppress(trio.BrokenResourceError):
                    await self._flush()
                raise trio.BrokenResourceError from error
            else:
                await self._flush()
                return outcome or b""

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self._stream.send_all(data)

    async def shake_hands(self) -> None:
        await self._do(self._tls.do_handshake)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self._tls.write(data)
            await self._flush()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._do(functools.partial(self._tls.read, max_bytes or 65536))

    async def send_eof(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        await self._flush()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def dial(
    address: tuple[str, int],
    context: ssl.SSLContext,
    name: str = HOST,
    receive_buffer: int | None = None,
) -> TLSStream:
    """A client's connection after its handshake."""
    made = trio.socket.socket()
    if receive_buffer is not None:
        made.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_buffer)
    await made.connect(address)
    stream = TLSStream(trio.SocketStream(made), context, name)
    try:
        await stream.shake_hands()
    except BaseException:
        await stream.aclose()
        raise
    return stream
