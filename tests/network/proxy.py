"""Connections that go wrong, on purpose and to the byte: a proxy between client and server.

A `Fault` says what happens to the bytes that a server sends on one connection. `relay`
puts it on a pair of trio's memory streams, `FaultyServer` on a loopback socket.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import trio

from tests.network.stub import Stub


class End(enum.Enum):
    """How a connection ends once as many bytes have passed as may."""

    CLOSE = "closed in good order"
    RESET = "torn down"
    HALF_OPEN = "nothing more comes, without an end"


@dataclass(frozen=True)
class Fault:
    """After `passes` bytes of the server's the connection ends so; `piece` bytes at a time.

    `delay` seconds before each piece, where the clock is the test's own.
    """

    passes: int
    end: End = End.CLOSE
    piece: int = 65536
    delay: float = 0.0


NONE = Fault(1 << 40)


MemoryStream: TypeAlias = "trio.StapledStream[Any, Any]"


async def _broken() -> None:
    raise trio.BrokenResourceError


async def serve_faulty(stub: Stub, stream: MemoryStream, fault: Fault, other: MemoryStream) -> None:
    """Run `stub` on a memory stream under a fault; `other` is the client's end of it."""
    left = fault.passes
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        if not left:
            await stream.receive_some(65536)
        while not stub.closed and left:
            sent = stub.receive(await stream.receive_some(65536))
            passing = sent[:left]
            left -= len(passing)
            for at in range(0, len(passing), fault.piece):
                if fault.delay:
                    await trio.sleep(fault.delay)
                await stream.send_all(passing[at : at + fault.piece])
        if fault.end is End.HALF_OPEN and not stub.closed:
            await trio.sleep_forever()
        if fault.end is End.RESET:
            # What was sent and not taken is lost as well.
            other.receive_stream.receive_some_hook = _broken
        await stream.aclose()


class FaultyServer:
    """Listens on loopback: connection n gets stub and fault n of the plan, in a thread.

    After the last of the plan no client is answered any more, but connections are accepted; or, if
    it `ends`, refused.
    """

    def __init__(self, *plan: tuple[Callable[[], Stub], Fault], ends: bool = False) -> None:
        self.plan = plan
        self.ends = ends
        self.accepted = 0
        self.failure: Exception | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ours, self._theirs = socket.socketpair()
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        for make, fault in self.plan:
            if self._wait(self._listener):
                return
            connection, _ = self._listener.accept()
            self.accepted += 1
            thread = threading.Thread(
                target=self._guarded, args=(connection, make(), fault), daemon=True
            )
            self._threads.append(thread)
            thread.start()
        if self.ends:
            self._listener.close()

    def _wait(self, source: socket.socket) -> bool:
        """Whether this server ends, or else `source` has something."""
        ready, _, _ = select.select([source, self._theirs], [], [])
        return self._theirs in ready

    def _guarded(self, connection: socket.socket, stub: Stub, fault: Fault) -> None:
        with connection:
            try:
                self._serve(connection, stub, fault)
            except OSError:
                pass
            except Exception as failure:  # noqa: BLE001 - raised in the test's own thread
                self.failure = failure

    def _serve(self, connection: socket.socket, stub: Stub, fault: Fault) -> None:
        left = fault.passes
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not stub.closed:
            if self._wait(connection):
                return
            sent = stub.receive(connection.recv(65536))[:left]
            left -= len(sent)
            for at in range(0, len(sent), fault.piece):
                connection.sendall(sent[at : at + fault.piece])
            if not left:
                break
        if stub.closed:
            return
        if fault.end is End.HALF_OPEN:
            while not self._wait(connection) and connection.recv(65536):
                pass
        if fault.end is End.RESET:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ours.close()
        for thread in (self._thread, *self._threads):
            thread.join(10)
            assert not thread.is_alive()
        self._theirs.close()
        self._listener.close()
        if self.failure is not None:
            raise self.failure
