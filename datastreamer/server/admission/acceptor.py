"""Accepts connections: how fast, which process accepts the next one, and errors of `accept`.

`gate.py` decides which connections get a slot. Knows no session.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Iterable

import trio

from datastreamer.server.admission.accept_balance import AcceptBalance
from datastreamer.server.admission.gate import ConnectionSlot, Gate, Pace
from datastreamer.transport.listeners import host_of, peer_of

_log = logging.getLogger(__name__)

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Errors of accept that mean that the listener is unusable.
_NO_LISTENER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP)
_ACCEPT_PAUSE = 0.1
# Connections accepted in a row before other tasks run.
_ACCEPTED_TOGETHER = 16


class Acceptor:
    """Calls `serve` with each accepted connection and its slot, which is over if the connection is
    to be closed. Refuses all connections while `has_stream()` is false. `rate` is the maximum
    number of connections per second."""

    def __init__(
        self,
        gate: Gate,
        rate: float | None,
        balance: AcceptBalance | None,
        serve: Callable[[socket.socket, ConnectionSlot], object],
        has_stream: Callable[[], bool],
    ) -> None:
        self._gate = gate
        self._balance = balance
        self._serve = serve
        self._has_stream = has_stream
        self._pace = None if rate is None else Pace(rate, trio.current_time())

    async def run(self, listeners: Iterable[socket.socket]) -> None:
        """Accept until cancelled. Raises `OSError` if a listener is unusable."""
        self._gate.note_room()
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener)
        finally:
            self._gate.close()

    async def _accept(self, listener: socket.socket) -> None:
        short_of_descriptors = False
        together = 0
        while True:
            if self._balance is not None:
                await trio.lowlevel.wait_readable(listener)
                await self._balance.wait()
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                together = 0
                await trio.lowlevel.wait_readable(listener)
                continue
            except OSError as error:
                if error.errno in _NO_LISTENER:
                    raise
                if error.errno in _OUT_OF_DESCRIPTORS:
                    if not short_of_descriptors:
                        _log.error("cannot accept connections: %s; raise the limit", error.strerror)
                    short_of_descriptors = True
                    await trio.sleep(_ACCEPT_PAUSE)
                await trio.lowlevel.checkpoint()
                continue
            short_of_descriptors = False
            now = trio.current_time()
            slot = None
            if self._has_stream():
                slot = self._gate.admit(host_of(address), peer_of(connection, address), now)
            else:
                self._gate.refuse_without_stream()
            if slot is None:
                connection.close()
            else:
                self._serve(connection, slot)
            together += 1
            if self._pace is not None:
                await trio.sleep(self._pace.step(now))
            elif together % _ACCEPTED_TOGETHER == 0:
                await trio.lowlevel.checkpoint()
